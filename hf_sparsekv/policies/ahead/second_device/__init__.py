"""Predictive selection on a second device: it keeps the blocks, chooses, and hands over what is chosen."""
