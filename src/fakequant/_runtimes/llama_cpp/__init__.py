"""llama.cpp: runs GGUF files, with weights in the blocks of ggml."""
