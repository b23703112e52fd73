"""The attention of one layer: whole steps, single operators, baselines."""
