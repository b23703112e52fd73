"""Filled caches in files."""
