"""Write a new token into the ring of recent tokens on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import append as by_definition


def append(
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    recent_kv: Tensor,
    past: Tensor,
    sinks: int,
) -> None:
    """See :func:`.reference.append`; for one token of one row. Other calls go to the reference."""
    if valid is not None or k.shape[0] != 1 or k.shape[2] != 1 or past.shape != (1,):
        return by_definition(k, v, valid, recent_kv, past, sinks)
    at = sinks + int(past) % (recent_kv.shape[2] - sinks)
    recent_kv.narrow(2, at, 1).copy_(torch.cat((k, v), -1))
    return None
