"""``python -m hf_sparsekv`` is the ``hf-sparsekv`` command."""

from .cli import main

main()
