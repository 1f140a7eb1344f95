"""Running and training a prepared model: `calibrate`, `Schedule`, `distill` and `health`."""
