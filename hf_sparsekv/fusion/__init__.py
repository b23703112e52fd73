"""Fusion of a model's small layers into few kernels."""
