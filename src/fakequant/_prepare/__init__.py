"""Adding quantizers to a model: `prepare`, `unprepare` and `summary`."""
