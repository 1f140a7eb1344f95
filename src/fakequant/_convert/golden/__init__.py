"""Models that hold integer codes and compute with them exactly: what `fakequant.convert` makes."""
