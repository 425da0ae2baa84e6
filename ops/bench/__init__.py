"""Measures the fused operators: `shardzoo bench kernels`."""
