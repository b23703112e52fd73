"""Flags of stored tokens, a byte each: 0 padding, 1 selectable, 3 sink."""

VALID, SINK = 1, 2  # bits
SELECTABLE = 1  # the flag of a token that is valid and no sink: sinks are read from the recent buffer
