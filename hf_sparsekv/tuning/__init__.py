"""Measurements on the user's own GPU, for ``hf-sparsekv calibrate-device``."""
