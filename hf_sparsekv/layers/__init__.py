"""A layer of a sparse cache: its bookkeeping, sliding windows, prefixes."""
