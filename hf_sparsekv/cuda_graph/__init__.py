"""Decode steps captured as CUDA graphs: ``optimize()``."""
