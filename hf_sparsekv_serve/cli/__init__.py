"""The command ``hf-sparsekv serve``."""
