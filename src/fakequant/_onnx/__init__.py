"""From a converted model to ONNX: operators that export as one node each, and what they become."""
