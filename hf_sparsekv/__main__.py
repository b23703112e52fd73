"""``python -m hf_sparsekv`` is the ``hf-sparsekv`` command."""

from .cli.app import main

main()
