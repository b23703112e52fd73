"""Filled caches in files: ``cache.save(path)`` and ``SparseCache.load(path)``."""
