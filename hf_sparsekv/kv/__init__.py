"""Cached keys and values of one layer, in blocks."""
