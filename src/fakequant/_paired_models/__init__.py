"""A float model and a quantized one that run on the same data, so that their layers can be compared call by call."""
