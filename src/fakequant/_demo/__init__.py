"""`fakequant demo`: from float training to integer inference in ONNX Runtime, on handwritten digits."""
