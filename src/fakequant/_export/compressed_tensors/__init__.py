"""The compressed-tensors exporter: safetensors folders that transformers, vLLM and SGLang load."""
