"""`fakequant demo`: from training in float to integers in ONNX Runtime, on handwritten digits, in a minute."""
