"""What is chosen before a step's own query is there: for an earlier one, or for one that is expected of it.

A folder because such a choice outlives what it was made in, or comes before it. That takes state, an order and flags
that no other method has.
"""
