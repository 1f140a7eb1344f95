"""ExecuTorch with XNNPACK, its backend for CPUs."""
