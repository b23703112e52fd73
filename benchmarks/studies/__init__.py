"""Studies of quality on small real models and the probe models."""
