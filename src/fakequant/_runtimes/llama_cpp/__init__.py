"""llama.cpp: runs GGUF files, whose weights are blocks of codes."""
