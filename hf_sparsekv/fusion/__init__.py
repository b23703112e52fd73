"""Small layers as few kernels."""
