"""transformers: runs folders of compressed-tensors, with dequantized weights."""
