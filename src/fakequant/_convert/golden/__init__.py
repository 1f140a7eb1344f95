"""The golden model: layers and quantizers that store integer codes and compute with them exactly."""
