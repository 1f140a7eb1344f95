"""Exporters: one folder per file format, and what they share."""
