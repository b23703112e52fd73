"""Masses of the blocks of a round over latents: the launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import overlap
from ..sparse_decode.config import is_native
from .mass_kernel import mass_kernel

# Not measured yet.
PROGRAMS, WARPS = 264, 4  # two on each processor of an H200, which their shared memory allows
TILE, HEADS = 64, 32  # tokens and query heads at once
EXACT = 16  # both of them in float32, without tensor cores


def masses(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    block_table: Tensor,
    ids: Tensor,
    recent_kv: Tensor,
    recent_valid: Tensor,
    limits: Tensor,
    lse: Tensor,
    *,
    near: bool,
    scale: float,
    softcap: float | None = None,
    pages: Tensor | None = None,
    page_ids: Tensor | None = None,
    from_host: Tensor | None = None,
    programs: int | None = None,
    warps: int | None = None,
    tile: int | None = None,
    at_once: int | None = None,
) -> None:
    """As ``reference.attend`` without ``acc``.

    ``programs``, ``warps``, ``tile`` (tokens) and ``at_once`` (query heads) replace the constants.
    """
    batch, heads, n = ids.shape
    size, dk = kv.shape[2], q.shape[-1]
    rows, group, parts = batch * heads, q.shape[1] // heads, lse.shape[2] - n
    paged = pages is not None
    named = {"recent_kv": recent_kv, "recent_valid": recent_valid, "pages": pages, "page_ids": page_ids}
    require_dense_rows(kv=kv, flags=flags, block_table=block_table, ids=ids, **named)
    if not (lse.is_contiguous() and limits.is_contiguous()):
        raise ValueError("lse and limits must be contiguous")
    native = is_native(q, kv, recent_kv)
    tile = min(size, tile or (TILE if native else EXACT))
    at_once = max(16, min(at_once or (HEADS if native else EXACT), triton.next_power_of_2(group)))
    first = rows * parts if near else 0
    programs = min(programs or PROGRAMS, first + rows * n)
    if not programs:
        return
    low = 1 << ((dk - 1).bit_length() - 1)  # a row is taken in two parts, each close to a power of two
    steps = {t.stride(-2) for t in (kv, recent_kv, pages) if t is not None}  # distance of two tokens' rows
    with torch.cuda.device_of(q):
        mass_kernel[(programs, triton.cdiv(group, at_once))](
            q,
            kv,
            flags,
            block_table,
            ids,
            pages,
            page_ids,
            recent_kv,
            recent_valid.view(torch.uint8),  # a bool is one bit to Triton
            limits,
            lse,
            from_host,
            n,
            recent_kv.shape[2],
            rows,
            parts,
            first,
            float(scale),
            None if softcap is None else float(softcap),
            *q.stride(),
            *kv.stride()[:3],
            flags.stride(0),
            block_table.stride(0),
            *ids.stride()[:2],
            *(pages.stride()[:2] if paged else (0, 0)),
            *(page_ids.stride()[:2] if paged else (0, 0)),
            *recent_kv.stride()[:3],
            recent_valid.stride(0),
            *((0, 0) if from_host is None else from_host.stride()),
            PLACED=paged,
            COUNT_HOST=from_host is not None,
            NATIVE=native,
            STEP=steps.pop() if len(steps) == 1 else 0,
            BLOCK_SIZE=size,
            HEADS=heads,
            GROUP=group,
            DK=dk,
            DV=low,
            BH=at_once,
            BC=max(16, low),
            BR=max(16, triton.next_power_of_2(dk - low)),
            BN=tile,
            BW=triton.next_power_of_2(rows),
            num_warps=warps or WARPS,
            **overlap(q),
        )
