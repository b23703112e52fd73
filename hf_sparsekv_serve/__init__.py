"""The server around an engine: OpenAI's API, ranks of tensor parallel models, and replicas under Ray.

Beside :mod:`hf_sparsekv` because caches and the engine need none of it, nor of what its extras install. Importing it
imports nothing: Ray's own processes need :mod:`.ray` without torch.
"""
