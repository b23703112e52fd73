"""Calls of the operators of storage: shapes that their kernels have to get right."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from operator_calls import Operator, column, equal, lengths, shuffled, some
from selection_operators import label_norms

from hf_sparsekv.ops.storage.pack.reference import pack as pack_reference
from hf_sparsekv.ops.storage.quantise.reference import quantise as quantise_reference
from hf_sparsekv.ops.storage.seal import Index


def append(place, batch, heads, new, dk, dv, sinks, ring, past, masked):
    """Keys and values as transformers hands them over: ``[batch, q, H, D]`` transposed."""
    k, v = (place.randn(batch, new, heads, dim).transpose(1, 2) for dim in (dk, dv))
    recent_kv = place.nan(batch, heads, sinks + ring, dk + dv)
    return k, v, some(place, batch, masked), recent_kv, lengths(place, batch, past), sinks


def begin_step(place, batch, masked, skip):
    """Rows of which some have a block due; those that get no token have, too, where they are not to rest."""
    size, recent = 16, 40
    sealed = size * place.randint(0, 5, batch)
    length = sealed + recent + size - 1 - place.randint(0, 2, batch) * place.randint(0, 50, batch)
    after = torch.stack((length, sealed), 1)
    after[-1:] = 0
    past, now = place.nan(batch, dtype=torch.int32), place.nan(batch, 2, dtype=torch.int32)
    valid = some(place, batch, masked)
    return after.int(), past, now, valid if valid is None else valid[:, 0], size, recent, skip


def place_tokens(place, batch, heads, k, n, block_size):
    """Some blocks are in host memory, which a negative page id says; half of the tokens are none."""
    at = place.randint(0, n * block_size, batch, heads, k).masked_fill(place.rand(batch, heads, k) < 0.5, -1)
    blocks = shuffled(place, batch * heads, n + 9, n).view(batch, heads, n)
    pages = place.randint(0, 1000, batch, heads, n)
    pages = torch.where(place.rand(batch, heads, n) < 0.4, -(pages + 2), pages)
    return at, blocks, pages, block_size


def quantise(place, shape, split, wild=False, bias=0.0):
    """Rows of very different sizes, among them zeros; with one channel that has a bias; or what has no good scale."""
    size = 10.0 ** (6 * place.rand(*shape[:-1], 2) - 4)
    size = size.repeat_interleave(torch.tensor((split, shape[-1] - split), device=place.device), -1)
    kv = (place.randn(*shape) * size).to(place.dtype)
    kv[..., 3] += bias
    if wild:
        for row, one in enumerate((0.0, math.nan, math.inf, -math.inf, 6e4, 1e-7)):
            kv.view(-1, shape[-1])[row, row % shape[-1]] = one
            kv.view(-1, shape[-1])[-1 - row] = one
    return kv, split


@dataclass
class Seal:
    """Shapes of one call. ``sealed``: blocks that each row has sealed before."""

    batch: int = 2
    heads: int = 2
    dk: int = 64
    dv: int = 64
    block_size: int = 16
    sinks: int = 4
    channels: int = 16
    sealed: tuple[int, ...] = (6, 0)
    due: tuple[bool, ...] | None = None  # rows whose next block is sealed; None: all
    rests: tuple[int, ...] = ()  # rows that attend to nothing
    there: bool = True  # the last row has a physical block for it
    bounds: bool = True
    keeps: bool = True
    span: int | None = None  # blocks of a mean's span
    coded: bool = False  # keys and values become codes


def seal(place, case: Seal) -> tuple:
    """Rings of which some are full, physical blocks full of what must not stay, NaN where nobody may read."""
    size, capacity = case.block_size, case.batch * (max(case.sealed) + 2) + 3
    ring, due = 3 * size, column(place, *(case.due or (True,) * case.batch))
    sealed = column(place, *case.sealed) * size
    held = place.randint(0, size, case.batch) + size * due  # tokens in the ring
    held[0] = ring
    rows = torch.stack((sealed + held, sealed), 1)
    after = torch.stack((sealed + held, sealed + size * due), 1)
    rows[list(case.rests)] = 0
    block_table = place.randperm(capacity)[: capacity - 3].view(case.batch, -1)
    if not case.there:
        block_table[-1, case.sealed[-1] :] = -1
    kept = (capacity, case.heads, size)
    index = {"key_dim": case.dk}
    if case.bounds:
        index["bounds"] = place.nan(capacity, case.heads, 2, case.dk)
    if case.channels:
        channels = shuffled(place, case.batch * case.heads, case.dk, case.channels)
        index["channels"] = channels.view(case.batch, case.heads, -1)
        index["norms"] = label_norms(place, case.batch, case.heads, case.channels)
        index["codes"] = place.nan(*kept, case.channels // 2, dtype=torch.uint8)
        index["qparams"] = place.nan(*kept, 2, dtype=torch.float16)
    width = case.dk + case.dv
    if case.span is not None:
        index |= {"means": place.nan(capacity, case.heads, width), "span": case.span}
        for row, n in enumerate(case.sealed):
            if n % case.span and n * size > case.sinks:  # another block's mean is not looked at
                index["means"][int(block_table[row, n - 1])] = place.randn(case.heads, width)
    entry = torch.arange(ring, device=place.device)
    filled = (entry - sealed[:, None]) % ring < held[:, None]
    recent_kv = place.nan(case.batch, case.heads, case.sinks + ring, width)
    recent_kv[:, :, case.sinks :] = torch.where(
        filled[:, None, :, None], place.randn(case.batch, case.heads, ring, width), math.nan
    )
    recent_kv[0, 0, case.sinks + int(sealed[0] + 1) % ring, : case.dk] = 0.5  # labels that are all the same: scale 0
    kv = place.nan(*kept, width if case.keeps else 0)
    if case.coded:
        kv = place.nan(*kv.shape, dtype=torch.int8)
        index["scales"] = place.nan(capacity, case.heads, 2 * case.dk + size, dtype=torch.float16)
        first = case.sinks + int(sealed[0]) % ring
        recent_kv[0, 0, first] = 0.0
        recent_kv[0, 0, first + 1, case.dk :] *= 1e-7
    return recent_kv, rows, after, case.sinks, block_table, kv, Index(**index)


@dataclass
class SealRange:
    """Shapes of one call: blocks ``first .. end - 1`` of rows of ``past`` tokens, and the new ones that follow."""

    past: int
    first: int
    end: int
    rows: int = 1
    heads: int = 2
    dk: int = 64
    dv: int = 64
    split: int | None = None  # width of ``k``, if it is not ``dk``
    block_size: int = 16
    sinks: int = 4
    channels: int = 16
    more: int = 5  # new tokens behind the last block
    staged: bool = False
    keeps: bool = True
    bounds: bool = True
    span: int | None = None


def seal_range(place, case: SealRange) -> tuple:
    """NaN in rings where these blocks have nothing, in new tokens that they do not take, and in all that is written."""
    size, width, split = case.block_size, case.dk + case.dv, case.split or case.dk
    start, end, ring = case.first * size, case.end * size, 3 * size
    usual = {name: getattr(case, name) for name in ("heads", "dk", "dv", "block_size", "channels")}
    usual |= {name: getattr(case, name) for name in ("sinks", "bounds", "span", "keeps")}
    recent_kv, *_, block_table, kv, index = seal(place, Seal(batch=case.rows, sealed=(case.end,) * case.rows, **usual))
    recent_kv.fill_(math.nan)
    for token in range(start, min(case.past, end)):
        recent_kv[:, :, case.sinks + token % ring] = place.randn(case.rows, case.heads, width)
    new = place.randn(case.rows, max(end - case.past, 0) + case.more, case.heads, width)
    new[:, : max(start - case.past, 0)] = math.nan
    new[:, max(end - case.past, 0) :] = math.nan
    k, v = (x.contiguous().transpose(1, 2) for x in new.split((split, width - split), -1))
    if index.means is not None:
        index.means.fill_(math.nan)
        if case.first % case.span and start > case.sinks:
            index.means[block_table[:, case.first - 1].long()] = place.randn(case.rows, case.heads, width)
    if case.staged:
        kv = place.nan(case.end - case.first, case.rows, case.heads, size, kv.shape[-1])
    return recent_kv, k, v, case.past, case.first, case.end, case.sinks, block_table, kv, index


def gather_blocks(place, rows, heads, size, width, n, room, coded=False):
    """Blocks in any order, rows that share some, and ids that are none: what is read for those means nothing."""
    kv = place.randn(7, heads, size, width)
    table = place.randint(0, 7, rows, n + 2)
    named = {}
    out = place.nan(rows, heads, room, size, width)
    if coded:
        kv, scales = quantise_reference(kv, width - 1)
        named = {"scales": scales, "split": width - 1}
    return kv, table[:, 1 : n + 1], out, *named.values()


def pack(place, batch, heads, room, size, blocks, width):
    """A second selection, some of whose tokens are those of the first; the last row and head choose none."""

    def choose():
        ids = torch.full((batch, heads, room), -1, dtype=torch.int32, device=place.device)
        for row, head in list(itertools.product(range(batch), range(heads)))[: max(1, batch * heads - 1)]:
            k = min(blocks * size, room // 2 + int(place.randint(0, room - room // 2 + 1, 1)))
            ids[row, head, :k] = place.randperm(blocks * size)[:k].sort().values
        return ids

    first, ids = choose(), choose()
    kv = place.randn(batch * blocks + 3, heads, size, width)
    block_table = place.randperm(batch * blocks + 3)[: batch * blocks].view(batch, blocks)
    order = torch.arange(room, device=place.device).int().expand_as(ids).contiguous()
    packed, page_ids = place.nan(batch, heads, room, width), place.nan(batch, heads, room, dtype=torch.int32)
    state, counters = (torch.full_like(ids, -1), order, packed, page_ids), torch.zeros(2, device=place.device).long()
    pack_reference(first, kv, block_table, *state)
    return ids, kv, block_table, *state, None, counters


SEALS = {
    "usual": Seal(),
    "further blocks": Seal(sealed=(1, 7)),
    "no power of two": Seal(batch=3, heads=3, dk=80, dv=48, channels=20, sealed=(0, 2, 5)),
    "first block": Seal(sealed=(0, 0)),
    "some rows": Seal(batch=4, sealed=(2, 0, 0, 5), due=(True, False, True, False)),
    "some rows rest": Seal(batch=4, sealed=(2, 3, 0, 5), rests=(0, 2)),
    "some rows, the first not": Seal(batch=3, heads=3, sealed=(1, 0, 4), due=(False, False, True)),
    "no row": Seal(due=(False, False), span=4),
    "no room": Seal(sealed=(2, 3), there=False),
    "blocks of 64": Seal(block_size=64, dk=128, dv=128, channels=32),
    "no labels": Seal(channels=0),
    "no bounds": Seal(bounds=False, block_size=32),
    "nothing kept": Seal(channels=0, bounds=False, sinks=0),
    "wide heads": Seal(batch=1, heads=1, dk=256, dv=256, channels=64, block_size=128, sealed=(0,)),
    "as by default": Seal(
        batch=4,
        heads=3,
        dk=128,
        dv=128,
        channels=32,
        block_size=64,
        bounds=False,
        sealed=(2, 0, 5, 1),
        due=(1, 1, 0, 1),
    ),
    "blocks of two tiles": Seal(dk=80, dv=48, channels=20, block_size=128, sinks=70, sealed=(0, 1)),
    "latents": Seal(heads=1, dk=576, dv=0, channels=128, block_size=64),
    "rows of no power of two": Seal(heads=1, dk=72, dv=0, channels=18),
    "all sinks": Seal(sinks=20, sealed=(0, 1)),
    "kept elsewhere": Seal(channels=0, bounds=False, keeps=False, sealed=(0, 3)),
    "codes": Seal(coded=True),
    "codes, some rows": Seal(coded=True, batch=3, heads=3, dk=80, dv=48, channels=20, sealed=(1, 0, 4), due=(0, 0, 1)),
    "codes alone": Seal(coded=True, channels=0, bounds=False, sinks=0, dk=33, dv=7, block_size=32),
}


AVERAGES = {
    "bounds of sinks": Seal(batch=3, heads=3, dk=80, block_size=64, sinks=20, sealed=(0, 2, 5), channels=0),
    "latents, no labels": Seal(heads=1, dk=576, dv=0, channels=0, block_size=32),
    "running mean, first of its span": Seal(channels=0, bounds=False, span=1),
    "running mean": Seal(batch=4, span=4, dk=80, dv=48, heads=3, sealed=(7, 4, 1, 2), due=(True, True, True, False)),
    "running mean behind sinks": Seal(batch=3, span=4, sinks=20, sealed=(0, 1, 2)),
    "running mean behind a span of sinks": Seal(span=2, sinks=40, sealed=(2, 3)),
    "running mean, latents": Seal(heads=1, dk=576, dv=0, channels=128, block_size=64, bounds=False, span=2),
    "running mean, kept elsewhere": Seal(channels=0, keeps=False, bounds=False, span=3, sealed=(0, 5)),
    "means, some rows": Seal(batch=3, heads=3, sealed=(1, 0, 4), due=(False, False, True), span=2),
}


RANGES = {
    "of a prompt": SealRange(0, 0, 5),
    "of a prompt, several rows": SealRange(0, 0, 5, rows=3, heads=3, dk=80, dv=48, channels=20),
    "behind whole blocks": SealRange(48, 3, 6),
    "border in a block": SealRange(57, 2, 7, rows=2),
    "of the ring alone": SealRange(90, 3, 5, more=1),
    "of the ring, all new ones later": SealRange(96, 4, 6, rows=2, more=2),
    "later blocks of a long piece": SealRange(20, 4, 9),
    "one block": SealRange(13, 0, 1, more=0),
    "to a buffer": SealRange(57, 2, 7, rows=2, staged=True),
    "kept elsewhere": SealRange(57, 2, 7, rows=2, keeps=False),
    "blocks of 64": SealRange(70, 1, 3, block_size=64, dk=128, dv=128, channels=32),
    "no labels, no bounds": SealRange(37, 1, 4, channels=0, bounds=False, sinks=0),
    "wide heads": SealRange(100, 0, 2, heads=1, dk=256, dv=256, channels=64, block_size=128),
    "latents": SealRange(70, 1, 3, heads=1, dk=96, dv=0, split=80, channels=24),
    "latents without a rotary part": SealRange(70, 1, 3, heads=1, dk=80, dv=0, split=80, channels=24),
    "wide latents": SealRange(70, 1, 3, heads=1, dk=576, dv=0, split=512, channels=128, block_size=64),
    "all sinks": SealRange(3, 0, 3, sinks=20, rows=2),
}


RANGES_OF_MEANS = {
    "running means": SealRange(0, 0, 9, span=4),
    "running means, from within a span": SealRange(57, 2, 11, rows=2, heads=3, dk=80, dv=48, channels=20, span=4),
    "running means, within one span": SealRange(57, 2, 3, span=4, staged=True),
    "running means behind sinks": SealRange(41, 1, 9, span=3, sinks=40, rows=2),
    "running means, latents": SealRange(70, 1, 4, heads=1, dk=96, dv=0, split=80, channels=24, bounds=False, span=2),
}


OPERATORS = [
    Operator(
        "begin_step",
        begin_step,
        # batch, rows that get no token, which rest
        {
            "all rows": (5, False, False),
            "some rows": (7, True, False),
            "the others rest": (7, True, True),
            "all rows, none rests": (1, False, True),
            "several programs": (70, True, True),
        },
        writes=("after", "past", "now"),
        ratio=equal,
    ),
    Operator(
        "place_tokens",
        place_tokens,
        # batch, heads, tokens, blocks, block_size
        {
            "usual": (2, 3, 70, 9, 16),
            "several tiles": (1, 2, 700, 5, 128),
            "one block": (3, 1, 5, 1, 64),
            "no tokens": (2, 2, 0, 3, 16),
        },
        small=(2, 2, 40, 5, 16),
        ratio=equal,
        views={"at": "rows", "block_ids": "rows", "page_ids": "inside"},
        far={"at": 0},
    ),
    Operator(
        "append",
        append,
        # batch, heads, new tokens, Dk, Dv, sinks, ring, most tokens before, rows that get none
        {
            "one token": (2, 2, 1, 64, 64, 4, 24, 7, False),
            "one token, last place": (1, 3, 1, 80, 80, 4, 24, 23, False),
            "one token, wraps to the first": (1, 2, 1, 96, 96, 4, 24, 48, True),
            "wraps in the middle": (3, 1, 5, 128, 64, 4, 24, 70, True),
            "several tiles": (2, 2, 37, 64, 96, 3, 40, 1_000_003, True),
            "fills the ring": (1, 2, 24, 256, 256, 0, 24, 17, True),
            "no sinks, length 0": (2, 1, 3, 40, 128, 0, 16, 0, False),
            "long sequence": (1, 1, 9, 64, 64, 4, 24, 2**31 - 8, False),
            "latents": (2, 1, 3, 512, 64, 4, 24, 22, True),
            "whole rows": (1, 1, 2, 576, 0, 4, 24, 5, False),
            "nothing new": (1, 1, 0, 64, 64, 4, 24, 3, True),
        },
        small=(2, 2, 3, 64, 64, 1, 9, 7, True),
        writes=("recent_kv", "past"),
        ratio=equal,
        views={"recent_kv": "inside", "valid": "inside", "k": "inside"},
        far={"k": 1, "recent_kv": 2},
    ),
    Operator(
        "quantise",
        quantise,
        {
            "blocks": ((3, 2, 16, 128), 64),
            "keys and values of other widths": ((5, 3, 8, 100), 72),
            "more tokens than a tile": ((2, 70, 20), 11),
            "a bias": ((3, 2, 16, 128), 64, False, 400.0),
            "wide": ((9, 576), 512),
            "one part": ((9, 48), 48),
            "no good scales": ((7, 3, 40), 24, True),
            "none": ((0, 2, 16, 64), 32),
        },
        small=((5, 3, 33), 17),
        views={"kv": "inside"},
        far={"kv": 0},
        ratio=equal,
    ),
    Operator(
        "seal",
        seal,
        {name: (case,) for name, case in SEALS.items()},
        small=(Seal(),),
        far={"recent_kv": 2, "kv": 0},
        writes=("recent_kv", "kv", "index"),
        ratio=equal,
    ),
    Operator(
        "seal.seal",
        seal,
        {name: (case,) for name, case in AVERAGES.items()},
        writes=("recent_kv", "kv", "index"),
    ),
    Operator(
        "seal.seal_range",
        seal_range,
        {name: (case,) for name, case in RANGES.items()},
        small=(SealRange(57, 2, 7, rows=2),),
        views={"k": "turned", "v": "turned"},
        far={"recent_kv": 2, "kv": 0, "k": 2, "v": 2},
        writes=("recent_kv", "kv", "index"),
        ratio=equal,
    ),
    Operator(
        "seal.seal_range.means",
        seal_range,
        {name: (case,) for name, case in RANGES_OF_MEANS.items()},
        writes=("recent_kv", "kv", "index"),
    ),
    Operator(
        "block_copy.gather_blocks",
        gather_blocks,
        {
            "usual": (1, 2, 16, 64, 5, 6),
            "several rows": (3, 2, 4, 8, 7, 7),
            "odd sizes": (2, 3, 5, 7, 3, 5),
            "single elements": (1, 1, 1, 1, 3, 3),
            "wide": (1, 1, 64, 576, 2, 3),
            "no block": (2, 2, 4, 8, 0, 2),
            "codes": (1, 2, 16, 64, 5, 6, True),
            "codes, odd sizes": (2, 3, 5, 7, 3, 5, True),
        },
        small=(2, 2, 4, 8, 3, 4),
        writes=("out",),
        ratio=equal,
        views={"block_table": "rows"},
    ),
    Operator(
        "pack",
        pack,
        # batch, heads, room, block size, blocks, width
        {
            "usual": (2, 2, 64, 16, 20, 128),
            "no power of two": (1, 3, 48, 16, 9, 80),
            "one token": (2, 1, 1, 16, 4, 32),
            "everything fits": (1, 2, 160, 32, 5, 64),
            "latents": (2, 1, 40, 16, 8, 576),
        },
        small=(2, 2, 24, 16, 3, 32),
        writes=("held", "order", "packed", "page_ids", "counters"),
        ratio=equal,
        far={"kv": 0},
    ),
]
