"""Attention over cached KV, and its registration with transformers."""
