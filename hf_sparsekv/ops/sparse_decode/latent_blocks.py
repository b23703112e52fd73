"""Attention over cached latents, whole blocks of them: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import release, wait
from .latent_rows import load_queries, load_rows, no_rows, store_part, take_rows
from .reference import SELECTABLE as _SELECTABLE
from .reference import VALID as _VALID

SELECTABLE = tl.constexpr(_SELECTABLE)
VALID = tl.constexpr(_VALID)


@triton.jit
def _seek(i, end, p_slots, p_ids, p_places, CHOSEN: tl.constexpr, PLACED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Slot and place of the block of column ``i``; -1 from ``end`` on or where there is none."""
    there = i < end
    block = i // BLOCK_SIZE
    if PLACED:
        place = tl.load(p_places + block, mask=there, other=-1)
    if CHOSEN:
        block = tl.load(p_ids + block, mask=there, other=-1)
        there = there & (block >= 0)
    slot = tl.load(p_slots + block, mask=there, other=-1)
    if not PLACED:
        place = slot
    return slot, place


@triton.jit
def _open(
    i,
    n,
    near,
    skip,
    slot,
    place,
    p_kv,
    p_flags,
    p_frames,
    p_near,
    p_near_valid,
    kv_slot,
    kv_token,
    flags_slot,
    frames_frame,
    frames_token,
    near_token,
    CHOSEN: tl.constexpr,
    PLACED: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
):
    """Where the rows of the tile at column ``i`` begin, what is between them, which to attend, which are in ``kv``."""
    o_n = tl.arange(0, BN)
    is_near = i >= n
    first = i % BLOCK_SIZE  # of the tile in its block
    there = (slot >= 0) & (place != -1)
    p_rows = p_kv + slot.to(tl.int64) * kv_slot + first * kv_token
    in_kv = there
    if PLACED:
        in_kv = there & (place < 0)
        p_host = p_kv + (-(place + 2)).to(tl.int64) * kv_slot + first * kv_token
        p_frame = p_frames + place.to(tl.int64) * frames_frame + first * frames_token
        p_rows = tl.where(place < 0, p_host, p_frame)
    i_near = i - n + skip
    p_rows = tl.where(is_near, p_near + i_near.to(tl.int64) * near_token, p_rows)
    step = kv_token
    if STEP == 0:
        if PLACED:
            step = tl.where(place < 0, kv_token, frames_token)
        step = tl.where(is_near, near_token, step)
    p_mark = tl.where(is_near, p_near_valid + i_near, p_flags + slot.to(tl.int64) * flags_slot + first)
    b_mark = tl.load(p_mark + o_n, mask=there | (is_near & (i_near + o_n < near)), other=0)  # [BN]
    m_n = b_mark == SELECTABLE if CHOSEN else (b_mark & VALID) > 0  # valid entries of the near buffer are 1
    return p_rows, step, m_n, in_kv


@triton.jit
def blocks_kernel(
    p_q,
    p_kv,
    p_flags,
    p_slots,
    p_ids,
    p_frames,
    p_places,
    p_near,
    p_near_valid,
    p_acc,
    p_lse,
    p_count,
    p_from_host,
    p_used,
    n,
    near,
    skip,
    scale,
    softcap,
    q_batch,
    q_head,
    q_dim,
    kv_slot,
    kv_head,
    kv_token,
    flags_slot,
    slots_batch,
    ids_batch,
    ids_head,
    frames_frame,
    frames_token,
    places_batch,
    places_head,
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    from_host_batch,
    from_host_head,
    used_batch,
    used_head,
    CHOSEN: tl.constexpr,
    PLACED: tl.constexpr,
    HAS_USED: tl.constexpr,
    COUNT_HOST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of the blocks of one row and KV head, with ``BH`` of its query heads.

    A tile lies within a block; a part is every ``parts``-th tile, so that the parts stay equal where only the first
    blocks of a list are used. Where a tile begins is found while those before it are computed: the slot two tiles
    ahead, flags one. Triton's pipeline loads a tile to shared memory two tiles ahead with three ``STAGES``; with two it
    begins when the product before has ended. ``STEP`` is the distance of two rows where it is the same everywhere, or
    0: what is known here takes no registers.
    """
    wait(PDL)
    TILES: tl.constexpr = (GROUP + BH - 1) // BH
    # Programs that read the same rows are neighbours: the second one finds them in the L2 cache.
    i_row, i_first, i_part = tl.program_id(0) // TILES, tl.program_id(0) % TILES * BH, tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    p_query = p_q + i_batch * q_batch + i_head * GROUP * q_head
    b_qc, b_qr = load_queries(p_query, i_first, q_head, q_dim, NATIVE, False, GROUP, DK, DV, BH, BC, BR)
    b_max, b_sum, b_acc = no_rows(BH, BC)
    b_count, b_host = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)
    o_n = tl.arange(0, BN)

    p_slots += i_batch * slots_batch
    if CHOSEN:
        p_ids += i_batch * ids_batch + i_head * ids_head
    if PLACED:
        p_places += i_batch * places_batch + i_head * places_head
    p_kv += i_head * kv_head
    p_near += i_batch * near_batch + i_head * near_head
    p_near_valid += i_batch * near_valid_batch
    if HAS_USED:
        n = tl.minimum(n, tl.load(p_used + i_batch * used_batch + i_head * used_head) * BLOCK_SIZE)
    first, stride = i_part * BN, tl.num_programs(1) * BN
    slot, place = _seek(first, n, p_slots, p_ids, p_places, CHOSEN, PLACED, BLOCK_SIZE)
    p_rows, step, m_n, in_kv = _open(
        first,
        n,
        near,
        skip,
        slot,
        place,
        p_kv,
        p_flags,
        p_frames,
        p_near,
        p_near_valid,
        kv_slot,
        kv_token,
        flags_slot,
        frames_frame,
        frames_token,
        near_token,
        CHOSEN,
        PLACED,
        STEP,
        BLOCK_SIZE,
        BN,
    )
    slot, place = _seek(first + stride, n, p_slots, p_ids, p_places, CHOSEN, PLACED, BLOCK_SIZE)
    for i in tl.range(first, n + near - skip, stride, num_stages=STAGES):
        b_count += m_n.to(tl.int32)
        if COUNT_HOST:
            b_host += (m_n & in_kv).to(tl.int32)
        m_now = m_n
        b_c, b_r = load_rows(p_rows + o_n * (STEP if STEP else step), m_n, DK, DV, BC, BR)
        p_rows, step, m_n, in_kv = _open(
            i + stride,
            n,
            near,
            skip,
            slot,
            place,
            p_kv,
            p_flags,
            p_frames,
            p_near,
            p_near_valid,
            kv_slot,
            kv_token,
            flags_slot,
            frames_frame,
            frames_token,
            near_token,
            CHOSEN,
            PLACED,
            STEP,
            BLOCK_SIZE,
            BN,
        )
        slot, place = _seek(i + 2 * stride, n, p_slots, p_ids, p_places, CHOSEN, PLACED, BLOCK_SIZE)
        b_max, b_sum, b_acc = take_rows(
            b_qc, b_qr, b_max, b_sum, b_acc, b_c, b_r, m_now, scale, softcap, SOFTCAP, NATIVE
        )

    release(PDL)
    if COUNT_HOST:
        n_host = tl.sum(b_host, 0)
        p_host = p_from_host + i_batch * from_host_batch + i_head * from_host_head
        tl.atomic_add(p_host, n_host.to(tl.int64), mask=(n_host > 0) & (i_first == 0), sem="relaxed")
    i_out = i_row.to(tl.int64) * tl.num_programs(1) + i_part
    p_acc += i_out * GROUP * DV
    store_part(p_acc, p_lse + i_out * GROUP, i_first, b_max, b_sum, b_acc, GROUP, DV, BH, BC)
    tl.store(p_count + i_out, tl.sum(b_count, 0).to(tl.float32), mask=i_first == 0)
