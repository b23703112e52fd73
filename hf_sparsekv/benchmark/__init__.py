"""Benchmarks, and the rows that they leave."""
