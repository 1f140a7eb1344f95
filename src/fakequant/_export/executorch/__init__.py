"""Export of converted models to ExecuTorch with XNNPACK."""
