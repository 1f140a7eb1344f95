"""The report: an HTML page with tables and figures of a prepared model."""
