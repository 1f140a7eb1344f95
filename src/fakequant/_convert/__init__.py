"""Turning a prepared model into the golden model, and saving it: `convert`, `save_converted`, `load_converted`."""
