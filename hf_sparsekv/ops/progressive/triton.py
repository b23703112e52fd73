"""Progressive attention: the kernels behind ``attend``, ``verify`` and ``merge``; each as its reference."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import overlap
from ..sparse_decode.triton import sparse_decode
from .attend_kernel import attend_kernel
from .expect_kernel import expect_kernel, verify_expected_kernel
from .masses import masses as find_masses
from .merge_kernel import merge_kernel
from .reference import NO_LIMIT
from .state import BINS, MASS_ONE, TOTALS, WalkState

# As for the sparse decode kernel's chosen blocks, whose tiles and loads these are (``sparse_decode.triton``).
PROGRAMS, WARPS = 1056, 2
LATER = 264  # programs of later rounds, which most often find nothing to do. Not tuned yet.
TILE_BYTES = 16384  # of K at once
MASSES = 4096  # masses that the verifier holds at a time. Not tuned yet.
# Measured on an H200 (``bench operator --sweep verify verify_long expect``), 8 and 64 rows of 512 blocks, 8 of 2,048.
AHEAD, AHEAD_LONG = 256, 512  # with expectations: blocks that it holds at a time, of rows up to LONG blocks and beyond
LONG = 1024
VERIFY_WARPS = 16  # at most
WARP_MASSES = 256  # masses that each of its warps takes at least
EXPECT_WARPS, EXPECT_WARPS_LONG = 8, 16  # of rows up to LONG blocks and beyond
MERGED, STAGES = (128, 16), 3  # blocks and channels that a merging program holds at a time, and how often. Not tuned.


def attend(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    block_table: Tensor,
    ids: Tensor,
    recent_kv: Tensor,
    recent_valid: Tensor,
    limits: Tensor,
    acc: Tensor | None,
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
) -> None:
    """As ``reference.attend``; ``programs``, ``warps`` and ``tile`` (tokens) replace the constants."""
    if acc is None:
        find_masses(
            q,
            kv,
            flags,
            block_table,
            ids,
            recent_kv,
            recent_valid,
            limits,
            lse,
            near=near,
            scale=scale,
            softcap=softcap,
            pages=pages,
            page_ids=page_ids,
            from_host=from_host,
            programs=programs,
            warps=warps,
            tile=tile,
        )
        return
    batch, heads, n = ids.shape
    size, dk, value_dim = kv.shape[2], q.shape[-1], acc.shape[-1]
    rows, group, parts = batch * heads, q.shape[1] // heads, lse.shape[2] - n
    paged = pages is not None
    named = {"recent_kv": recent_kv, "recent_valid": recent_valid, "pages": pages, "page_ids": page_ids}
    require_dense_rows(kv=kv, flags=flags, block_table=block_table, ids=ids, **named)
    if not (acc.is_contiguous() and lse.is_contiguous() and limits.is_contiguous()):
        raise ValueError("acc, lse and limits must be contiguous")
    wide = triton.next_power_of_2(max(dk, value_dim, 16))
    item = q.element_size() if q.dtype == kv.dtype else 4  # mixed: float32 inside
    tile = min(size, tile or max(16, min(128, TILE_BYTES // (wide * item))))
    first = rows * parts if near else 0
    programs = min(programs or (PROGRAMS if near else LATER), rows * n)  # that read blocks
    if not first + programs:
        return
    with torch.cuda.device_of(q):
        attend_kernel[(first + programs,)](
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
            acc,
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
            NATIVE=q.dtype == kv.dtype == recent_kv.dtype and q.dtype != torch.float32,
            BLOCK_SIZE=size,
            HEADS=heads,
            GROUP=group,
            DK=dk,
            DV=value_dim,
            BG=max(16, triton.next_power_of_2(group)),
            BK=max(16, triton.next_power_of_2(dk)),
            BV=max(16, triton.next_power_of_2(value_dim)),
            BN=tile,
            BR=triton.next_power_of_2(rows),
            num_warps=warps or WARPS,
            **overlap(q),
        )


def expect(
    logits: Tensor,
    ids: Tensor,
    tokens: Tensor,
    *,
    logit_scale: float = 1.0,
    group_reduce: str = "all",
    masses: int = MASSES,
    warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.expect``; ``masses`` and ``warps`` replace the constants."""
    batch, heads, n = ids.shape
    group = logits.shape[1] // heads
    expected, behind = (logits.new_empty(batch, heads, n, group) for _ in range(2))
    live = tokens.new_empty(batch, heads)
    if not n:
        return expected, behind, live.zero_()
    require_dense_rows(logits=logits)
    if not (ids.is_contiguous() and tokens.is_contiguous()):
        raise ValueError("ids and tokens must be contiguous")
    add = group_reduce == "sum"
    wide = triton.next_power_of_2(group) if add else 1
    with torch.cuda.device_of(logits):
        expect_kernel[(batch * heads, 1 if add else group)](
            logits,
            ids,
            tokens,
            expected,
            behind,
            live,
            n,
            float(logit_scale),
            *logits.stride()[:2],
            SUM=add,
            HEADS=heads,
            GROUP=group,
            BG=wide,
            BN=max(16, min(triton.next_power_of_2(n), masses // wide)),
            num_warps=warps or (EXPECT_WARPS if n <= LONG else EXPECT_WARPS_LONG),
            **overlap(logits),
        )
    return expected, behind, live


def verify(
    lse: Tensor,
    tokens: Tensor,
    state: WalkState,
    *,
    parts: int,
    threshold: float,
    group_reduce: str = "all",
    min_blocks: int = 1,
    max_blocks: int | None = None,
    last: bool = True,
    certain: bool = True,
    sink_logits: Tensor | None = None,
    estimate: str = "scores",
    expected: Tensor,
    behind: Tensor,
    live: Tensor,
    masses: int = MASSES,
    ahead: int | None = None,
    warps: int | None = None,
) -> None:
    """As ``reference.verify`` with ``estimate="scores"``; ``masses``, ``ahead`` and ``warps`` replace the constants."""
    if estimate != "scores":
        raise ValueError(f"only estimate='scores' has a kernel, got {estimate!r}")
    batch, heads, n = tokens.shape
    group = lse.shape[-1]
    if not all(t.is_contiguous() for t in (lse, expected, behind, live)):
        raise ValueError("lse, expected, behind and live must be contiguous")
    wide = triton.next_power_of_2(group)
    ahead = ahead or (AHEAD if n <= LONG else AHEAD_LONG)
    at_once = max(16, min(triton.next_power_of_2(max(parts + n, 1)), masses // wide, ahead))
    with torch.cuda.device_of(lse):
        verify_expected_kernel[(batch * heads,)](
            lse,
            state.limits,
            state.used,
            state.mass,
            sink_logits,
            expected,
            behind,
            live,
            n,
            parts,
            batch * heads,
            float(threshold),
            min_blocks,
            n if max_blocks is None else min(n, max_blocks),
            LAST=last,
            CERTAIN=certain,
            SUM=group_reduce == "sum",
            HAS_SINK=sink_logits is not None,
            HEADS=heads,
            GROUP=group,
            BG=wide,
            BN=at_once,
            num_warps=warps or max(1, min(VERIFY_WARPS, at_once * wide // WARP_MASSES)),
            **overlap(lse),
        )


def attend_used(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    block_table: Tensor,
    ids: Tensor,
    recent_kv: Tensor,
    recent_valid: Tensor,
    state: WalkState,
    out: Tensor,
    **named,
) -> None:
    """As ``reference.attend_used``."""
    args = (q, kv, flags, block_table, ids, recent_kv, recent_valid)
    sparse_decode(*args, granularity="block", value_dim=out.shape[-1], sinks=0, used=state.used, out=out, **named)


def merge(
    acc: Tensor | None,
    lse: Tensor,
    ids: Tensor,
    tokens: Tensor,
    recent_valid: Tensor,
    state: WalkState,
    out: Tensor | None,
    *,
    threshold: float,
    max_blocks: int | None = None,
    sink_logits: Tensor | None = None,
    attended: Tensor | None = None,
    merged: tuple[int, int] = MERGED,
) -> None:
    """As ``reference.merge``; ``merged`` replaces the constants."""
    batch, heads, n = tokens.shape
    group, value_dim = lse.shape[3], 1 if acc is None else acc.shape[-1]
    require_dense_rows(recent_valid=recent_valid, out=out)
    if not (
        (acc is None or acc.is_contiguous()) and lse.is_contiguous() and tokens.is_contiguous() and ids.is_contiguous()
    ):
        raise ValueError("acc, lse, ids and tokens must be contiguous")
    channels = min(merged[1], triton.next_power_of_2(value_dim))
    room = 0 if state.chosen is None else state.chosen.shape[-1]
    grid = (batch * heads, 1, 1) if acc is None else (batch * heads, group, triton.cdiv(value_dim, channels))
    with torch.cuda.device_of(lse):
        merge_kernel[grid](
            acc,
            lse,
            ids,
            tokens,
            recent_valid.view(torch.uint8),
            state.limits,
            state.used,
            state.mass,
            state.totals,
            state.chosen,
            sink_logits,
            attended,
            out,
            n,
            lse.shape[2] - n,
            recent_valid.shape[1],
            batch * heads,
            room,
            float(threshold),
            max_blocks or NO_LIMIT,
            recent_valid.stride(0),
            *((0, 0) if attended is None else attended.stride()),
            *((0, 0) if out is None else out.stride()[:2]),
            HAS_ACC=acc is not None,
            HAS_SINK=sink_logits is not None,
            HAS_ATTENDED=attended is not None,
            HAS_CHOSEN=state.chosen is not None,
            MASS_ONE=MASS_ONE,
            FIRST_BIN=len(TOTALS),
            BINS=BINS,
            HEADS=heads,
            GROUP=group,
            DV=value_dim,
            BV=channels,
            BS=merged[0],
            STAGES=STAGES,
            **overlap(lse),
        )
