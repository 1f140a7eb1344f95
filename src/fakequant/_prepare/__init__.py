"""Whole models: prepare, calibrate, train."""
