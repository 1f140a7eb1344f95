"""LiteRT, the runtime of .tflite files, with XNNPACK."""
