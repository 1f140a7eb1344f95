"""Adversarial data, bit-exact assertions and timing, for our tests and for yours. NumPy only."""
