"""How close sparse decoding comes to full attention on a real model: tasks, caches by name, records, reports.

Beside :mod:`hf_sparsekv` because caches and serving need nothing of it, nor of what its extra installs.
"""
