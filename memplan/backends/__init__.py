"""The hands of the measuring witness: one seam, a device behind each implementation. torch is imported on use."""
