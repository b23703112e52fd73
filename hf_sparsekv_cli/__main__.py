"""``python -m hf_sparsekv_cli``: the ``hf-sparsekv`` command."""

from . import main

main()
