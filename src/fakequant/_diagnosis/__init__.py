"""Tools that find where accuracy is lost: by layer, by tensor, and over training."""
