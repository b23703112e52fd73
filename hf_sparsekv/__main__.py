"""``python -m hf_sparsekv`` is the ``hf-sparsekv`` command."""

from hf_sparsekv_cli import main

main()
