"""Predictive selection on a second device; nothing else knows of it."""
