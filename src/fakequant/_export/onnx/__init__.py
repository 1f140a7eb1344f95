"""ONNX export of converted models."""
