"""The report: numbers, tables and figures of a prepared model in one file."""
