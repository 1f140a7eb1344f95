"""Where accuracy is lost: layer by layer, tensor by tensor, over training."""
