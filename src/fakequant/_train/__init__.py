"""Running and training a prepared model: `calibrate`, `Schedule` and `health`."""
