"""Adversarial data, bit-exact assertions and timing, for tests of fakequant and of other code. Needs only NumPy."""
