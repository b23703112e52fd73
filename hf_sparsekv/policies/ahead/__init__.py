"""Selections made before a step's own query: for an earlier query, or for an expected one.

Such a selection outlives its step or precedes it. It needs state, an order and flags that no other method has.
"""
