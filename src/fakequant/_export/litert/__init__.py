"""Writes .tflite files for LiteRT."""
