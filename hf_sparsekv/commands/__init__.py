"""The subcommands of ``hf-sparsekv``, one module each, and what they share (options, loading, output)."""
