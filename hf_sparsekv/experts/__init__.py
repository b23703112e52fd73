"""Mixtures of experts in transformers' own way: an implementation by name, for every model that asks for one."""
