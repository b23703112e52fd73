"""Predictions ahead of the query: label channels, and the query itself."""
