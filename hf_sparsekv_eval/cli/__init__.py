"""The commands of ``hf-sparsekv`` that evaluate: ``eval`` and ``lm-eval``."""
