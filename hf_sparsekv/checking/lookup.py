"""Drafts from the text itself: what came after its last tokens when they were there before (prompt lookup decoding).

It sees tokens only.
"""

from __future__ import annotations

from torch import Tensor

TOKENS = 3  # of the text's end that are looked for: fewer are found more often, and are wrong more often


def found_before(ids: Tensor, most: int) -> Tensor | None:
    """Up to ``most`` tokens ``[1, k]`` that came after the last tokens of ``ids [1, n]`` when they were there last.

    None: they were not there before. Waits for the device.
    """
    if most < 1 or ids.shape[1] <= TOKENS:
        return None
    there = (ids[0].unfold(0, TOKENS, 1)[:-1] == ids[0, -TOKENS:]).all(1).nonzero()
    if not len(there):
        return None
    after = int(there[-1]) + TOKENS
    return ids[:, after : after + most]
