"""Exact mode: sparse steps draft tokens, one dense pass verifies them, and full attention's text comes out."""
