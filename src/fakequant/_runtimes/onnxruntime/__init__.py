"""ONNX Runtime on x86 CPUs."""
