"""The GGUF exporter: files with the blocks of ggml, which llama.cpp and programs built on it load."""
