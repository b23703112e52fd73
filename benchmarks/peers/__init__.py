"""Other ways to make a KV cache smaller, on the same prompts: kvpress, quantised caches, Quest's blocks, ours.

``prompts`` writes them, ``run_kvpress`` and ``run_ours`` answer them, each in its own environment, ``report`` shows
the rows. How to run all of it: docs/compared.md.
"""
