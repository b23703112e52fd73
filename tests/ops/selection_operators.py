"""Calls of the operators of selection: shapes that their kernels have to get right."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from operator_calls import Operator, column, equal, lengths, shuffled, some

from hf_sparsekv.ops.selection.token_score.config import config as label_config


def wild_scores(place, n):
    """``[3, 4, n]``: many, few and no numbers among NaN of both signs and infinities; the last rows are all of one."""
    scores = place.randn(3, 4, n)
    negative = torch.tensor([-1], dtype=torch.int32).view(torch.float32).item()  # NaN whose bits are all ones
    kinds = torch.tensor([math.nan, -math.nan, negative, math.inf, -math.inf]).to(place.device)
    kinds[1:3] = torch.tensor([-0x400000, -1], dtype=torch.int32).view(torch.float32)
    mixed = kinds[place.randint(0, 5, 3, 4, n).long()]
    share = torch.tensor([0.1, 0.5, 0.95, 0.5]).to(place.device)[:, None]
    scores = torch.where(place.rand(3, 4, n) < share, mixed, scores)
    scores[1, 3] = kinds[:3].repeat(n)[:n]
    scores[2] = torch.tensor([[math.nan], [math.inf], [-math.inf], [kinds[2]]])
    return scores


def push(place, batch, heads, new, dim, ring, past, masked):
    q, valid = place.randn(batch, new, heads, dim).transpose(1, 2), some(place, batch, masked)
    past, first = lengths(place, batch, past), place.randint(0, 4, batch)
    count, position = (place.nan(batch, dtype=torch.int32) for _ in range(2))
    return q, valid, past, place.nan(batch, heads, ring, dim), first, count, position


def queries(*shape: int) -> torch.Tensor:
    """Slowly turning, as real ones are: each ``[..., physical_id, :]`` is mostly the one before."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for physical_id in range(1, shape[-2]):
        x[..., physical_id, :] = 0.8 * x[..., physical_id - 1, :] + 0.6 * x[..., physical_id, :]
    return x


def query_predict(place, batch, heads, slots, dim, window, position):
    """Rows have all, none, two or all of the ring's queries, the last in slots of its own; the rest is NaN."""
    ring = queries(batch, heads, slots, dim).to(place.dtype).to(place.device)
    counts = [slots, 0, min(2, slots), slots][:batch]
    positions = [(position + 3 * row) % slots for row in range(batch)]
    for row, (count, at) in enumerate(zip(counts, positions)):
        ring[row] = ring[row].roll(at, dims=1)
        for age in range(count, slots):
            ring[row, :, (at - 1 - age) % slots] = math.nan
    return ring, column(place, *positions), column(place, *counts), window, 1e-2


def ragged(place, batch: int, cap: int, size: int) -> tuple:
    """Rows that share blocks, in any order, and have more or fewer of them, or none.

    Returns:
        rows int32 ``[batch, 2]``, the block table ``[batch, cap]`` with some holes, the number of sinks, and bool
        ``[cap + 4, size]``: tokens of physical blocks that nobody may look at. Entries of the table for blocks that
        are not sealed, or all sinks, name such blocks.
    """
    sinks = size + 3 if cap > 4 else min(3, size - 1)
    sealed = [max(0, cap - 1), cap, int(place.randint(cap // 2, cap + 1, 1)), 0, 0, min(1, cap)]
    sealed = size * column(place, *(sealed[row % 6] for row in range(batch)))
    length = sealed + place.randint(0, 3 * size + 1, batch)
    length[3:4] = 0
    length[4:5] = 3 * size  # the ring is full
    order = place.randperm(cap + 4)
    good, edge, spoilt = order[:cap], order[cap], order[cap + 1 :]
    hidden = torch.zeros(cap + 4, size, dtype=torch.bool, device=place.device)
    hidden[spoilt.long()], hidden[edge, : sinks % size] = True, True
    first = torch.arange(cap, device=place.device) * size
    table = good[shuffled(place, batch, cap, cap).long()]
    table = torch.where(first == sinks - sinks % size, edge, table)  # whose first tokens are sinks
    unread = (first >= sealed[:, None]) | (first + size <= sinks)
    table = torch.where(unread, spoilt[place.randint(0, 3, batch, cap).long()], table)
    table = table.masked_fill(place.rand(batch, cap) < 0.2, -1)
    return torch.stack((length, sealed), 1), table, sinks, hidden


def holes(place, num_blocks: int) -> torch.Tensor:
    """Contents of entries that nobody may read: a kernel that took NaN for ``-inf`` alone would pass."""
    hole = torch.full((num_blocks, 1, 1, 1), math.nan, device=place.device)
    hole[::2] = 50.0
    return hole


def block_score(place, batch, heads, group, dk, n, reduce="mean", tokens=16):
    """Ragged rows; NaN or garbage where nobody reads."""
    rows, block_table, sinks, hidden = ragged(place, batch, n, tokens)
    num_blocks = len(hidden)
    ends = torch.stack((place.randn(num_blocks, heads, dk), place.randn(num_blocks, heads, dk)), 2)
    ends = torch.cat((ends.amax(2, keepdim=True), ends.amin(2, keepdim=True)), 2)
    bounds = torch.where(hidden.all(1)[:, None, None, None], holes(place, num_blocks).to(place.dtype), ends)
    out = place.nan(batch, heads, n, dtype=torch.float32)
    q = place.randn(batch, heads * group, dk)
    return q, bounds, rows, block_table, reduce, tokens, sinks, out


def token_score(place, batch, heads, group, dk, width, block_size, cap, chosen, reduce="mean", tensor_cores=False):
    """Blocks of ragged rows; NaN or garbage in the labels of tokens that cannot be selected."""
    rows, block_table, sinks, hidden = ragged(place, batch, cap, block_size)
    num_blocks, hidden = len(hidden), hidden[:, None, :, None]
    hole = holes(place, num_blocks)
    codes = place.randint(0, 256, num_blocks, heads, block_size, width // 2, dtype=torch.uint8)
    qparams = torch.where(hidden, hole.half(), place.randn(num_blocks, heads, block_size, 2).half())
    ids = None
    channels = shuffled(place, batch * heads, dk, width).view(batch, heads, -1)
    norms = label_norms(place, batch, heads, width)
    if chosen is not None:
        ids = shuffled(place, batch * heads, cap, chosen).sort().values.view(batch, heads, chosen)
        ids[0, 0, chosen // 2 + 1 :] = -1
    n = (cap if ids is None else chosen) * block_size
    q = place.randn(batch, heads * group, dk)
    out = place.nan(batch, heads * group if reduce == "none" else heads, n, dtype=torch.float32)
    return q, codes, qparams, channels, rows, block_table, ids, reduce, sinks, norms, out


def label_norms(place, batch: int, heads: int, r: int) -> torch.Tensor:
    """Centres and spreads of label channels; a channel in eight has a large mean."""
    centre, spread = place.randn(batch, heads, r).float(), 0.2 + place.rand(batch, heads, r).float()
    centre[..., ::8] += 20.0
    return torch.stack((centre, spread), 2)


def score_ratio(place, how, reduce, tensor_cores) -> float:
    """Tensor cores take queries in fixed point: 1.06e-4 is the most seen, of a mean over 20 heads on a GPU.

    The other kernel, which takes what they do not, rounds products of queries and spreads to the queries' dtype, if
    that is bf16.
    """
    return 2e-4 if how.tensor_cores else 4e-3 if place.dtype == torch.bfloat16 else 4e-6


def label_hows(given, reduce, tensor_cores):
    """Two blocks a program of tensor cores, where these are meant and take the labels; or the plain kernel."""
    ids = given["block_ids"]
    labels = given["q"], given["codes"], given["qparams"], (given["block_table"] if ids is None else ids).shape[-1]
    return [replace(label_config(*labels, reduce == "mean", tensor_cores), blocks=2)]


# batch, KV heads, group, Dk, blocks a row
BOUNDS = {
    "one head": (1, 1, 1, 64, 5),
    "no power of two": (2, 3, 3, 80, 130),
    "group 2": (1, 2, 2, 96, 86),
    "group 4": (2, 2, 4, 128, 65),
    "group 7": (1, 1, 7, 128, 200),
    "group 16": (1, 2, 16, 64, 33),
    "wide heads": (2, 1, 4, 256, 37),
    "latents of 20 heads": (2, 1, 20, 576, 37),
    "latents of 128 heads": (1, 1, 128, 576, 70),
    "24 heads, wide and no power of two": (2, 1, 24, 300, 33),
    "40 heads": (1, 2, 40, 64, 40),
    "one block": (3, 1, 4, 128, 1),
    "no blocks": (2, 2, 4, 64, 0),
    "six rows": (6, 2, 4, 64, 40),
}


# batch, KV heads, group, Dk, label channels, block size, blocks a row, chosen blocks (None: all)
LABELS = {
    "one head": (1, 1, 1, 64, 16, 16, 5, 3),
    "no power of two": (2, 3, 3, 80, 20, 32, 9, 5),
    "group 2": (2, 2, 2, 96, 24, 64, 4, 3),
    "group 4, all blocks": (2, 2, 4, 128, 32, 64, 5, None),
    "group 7": (1, 1, 7, 128, 6, 16, 21, 11),
    "group 16": (1, 2, 16, 64, 64, 32, 6, 4),
    "wide heads": (1, 1, 4, 256, 64, 128, 3, 2),
    "latents of 20 heads": (1, 1, 20, 576, 128, 64, 4, 2),
    "latents of 128 heads": (2, 1, 128, 576, 128, 64, 3, 2),
    "latents' whole keys": (1, 1, 20, 576, 576, 16, 5, None),
    "latents' whole keys, 128 heads": (1, 1, 128, 576, 576, 16, 3, 2),
    "whole keys, 40 heads": (1, 1, 40, 288, 288, 16, 3, 2),
    "40 heads": (1, 2, 40, 80, 24, 32, 6, None),
    "small blocks, all": (2, 1, 3, 64, 2, 16, 13, None),
    "nothing chosen": (2, 1, 4, 64, 16, 16, 5, 0),
    "six rows": (6, 2, 4, 64, 16, 16, 9, 6),
    "six rows, all blocks": (6, 1, 4, 64, 16, 32, 6, None),
}


# batch, heads, physical blocks of the ring, head dim, window, position
RINGS = {
    "16 of 17 slots": (3, 2, 17, 64, 16, 5),
    "the whole ring in order": (1, 3, 17, 128, 16, 0),
    "one predecessor": (2, 1, 2, 64, 1, 1),
    "odd sizes": (2, 3, 9, 80, 5, 8),
    "window of 32": (1, 2, 33, 64, 32, 20),
    "wide heads": (1, 1, 5, 192, 4, 3),
    "latents": (2, 3, 17, 576, 16, 9),
    "four rows": (4, 2, 9, 64, 8, 4),
    "no rows": (0, 2, 9, 64, 8, 0),
}


OPERATORS = [
    Operator(
        "query_ring.push",
        push,
        # batch, query heads, new queries, D, ring, most tokens before, rows that get none
        {
            "one query": (2, 4, 1, 64, 17, 5, False),
            "a ring of one": (1, 9, 1, 80, 1, 12, False),
            "wraps": (3, 8, 5, 128, 9, 16, False),
            "some rows": (4, 3, 6, 40, 9, 20, True),
            "fills the ring": (2, 32, 17, 96, 17, 1_000_003, True),
            "the first tokens": (3, 2, 4, 16, 17, 0, True),
            "latents of 20 heads": (2, 20, 1, 576, 17, 33, True),
        },
        small=(2, 4, 2, 32, 5, 9, False),
        writes=("ring", "first", "count", "position"),
        ratio=equal,
        far={"q": 1, "ring": 1},
    ),
    Operator(
        "query_predict",
        query_predict,
        RINGS,
        small=(3, 3, 6, 64, 4, 2),
        ratio=lambda place, *_: 2e-5 if place.dtype == torch.float32 else None,  # two ways of solving, in float32
        views={"ring": "inside"},
        far={"ring": 0},
    ),
    Operator(
        "block_score",
        block_score,
        BOUNDS,
        options=(("mean", "max"),),
        small=(2, 1, 6, 64, 20, "max"),
        ratio=lambda place, *_: 4e-6,  # products of 16-bit numbers are exact in float32
        views={"q": "turned", "block_table": "rows", "bounds": "half"},
        far={"q": 1, "bounds": 0},
    ),
    Operator(
        "token_score",
        token_score,
        LABELS,
        options=(("mean", "max", "none"), (True, False)),
        small=(2, 1, 4, 64, 16, 16, 6, 4, "mean", False),
        ratio=score_ratio,
        hows=label_hows,
        views={"q": "turned", "block_table": "rows", "block_ids": "rows"},
        far={"q": 1, "codes": 0, "qparams": 0},
    ),
]
