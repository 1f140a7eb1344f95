"""Adversarial data and bit-exact assertions, for our tests and for yours. NumPy only."""
