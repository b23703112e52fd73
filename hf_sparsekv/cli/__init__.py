"""The commands of ``hf-sparsekv``."""
