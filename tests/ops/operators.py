"""Every operator's calls: shapes that its kernel has to get right, how their tensors may lie, and what it writes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hf_sparsekv import ops
from hf_sparsekv.ops.layers.quantised_linear.reference import FP8, QuantisedWeight
from hf_sparsekv.ops.selection.token_score.config import config as label_config
from hf_sparsekv.ops.storage.pack.reference import pack as pack_reference
from hf_sparsekv.ops.storage.quantise.reference import quantise as quantise_reference
from hf_sparsekv.ops.storage.seal import Index

PAST = 2**31 + 4096  # elements


@dataclass
class Operator:
    """An operator and its calls.

    Args:
        of: its folder, its function if that is named otherwise, and what else tells its cases from others of it.
        make: arguments, in the order of the signature, from a place, a case and options.
        cases: by name.
        options: what each case is made with in addition, in all combinations.
        small: case and options for views and for tensors of more than 2 ** 31 elements.
        writes: arguments that it changes; compared as results are.
        ratio: of a place, one of ``hows`` and the options: most RMS of the difference over that of the reference, None
            for the place's and 0 for equal results.
        hows: of the arguments and the options: configurations of the kernel, each of which has to give the same.
        views: arguments that may be parts of larger tensors: ``rows`` of longer ones, anywhere ``inside`` of a larger
            tensor, ``turned`` (stored transposed), or in ``half`` precision beside a float32 query.
        far: the dimension of an argument whose entries may lie more than 2 ** 31 elements apart.
    """

    of: str
    make: Callable[..., tuple]
    cases: dict[str, tuple]
    options: tuple[tuple, ...] = ()
    small: tuple | None = None
    writes: tuple[str, ...] = ()
    ratio: Callable[..., float | None] = lambda place, how, *options: None
    hows: Callable[..., list] = lambda given, *options: [None]
    views: dict[str, str] = field(default_factory=dict)
    far: dict[str, int] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[Callable, Callable]:
        """The kernel's and the reference's."""
        folder, name = (*self.of.split("."), "")[:2]
        (group,) = (path.parent.name for path in Path(ops.__path__[0]).glob(f"*/{folder}"))
        parts = (f"hf_sparsekv.ops.{group}.{folder}.{part}" for part in ("triton", "reference"))
        modules = [importlib.import_module(part) for part in parts]
        return tuple(getattr(module, name or folder) for module in modules)

    def call(self, place, *case) -> dict:
        """Arguments by name."""
        return dict(zip(inspect.signature(self.functions[1]).parameters, self.make(place, *case)))

    def results(self, function: Callable, given: dict, **how) -> list[torch.Tensor]:
        """What ``function`` gives, and what it writes."""
        got = function(**given, **{name: value for name, value in how.items() if value is not None})
        got = [] if got is None else [got] if isinstance(got, torch.Tensor) else list(got)
        return got + [t for name in self.writes for t in tensors(given[name])]

    def expected(self, given: dict) -> list[torch.Tensor]:
        """The reference's results of copies on the CPU."""
        return self.results(self.functions[1], on_cpu(given))

    def check(self, place, given: dict, expected: list[torch.Tensor], *options) -> None:
        """The kernel gives and writes the same: numbers up to rounding, all else and NaN equally."""
        before = on_cpu({name: given[name] for name in self.writes})
        for how in self.hows(given, *options):
            ratio = self.ratio(place, how, *options)
            for name in self.writes:
                for t, old in zip(tensors(given[name]), tensors(before[name])):
                    t.copy_(old)
            got = self.results(self.functions[0], given, config=how)
            assert len(got) == len(expected)
            for one, other in zip(got, expected):
                if ratio == 0 or not other.dtype.is_floating_point:
                    torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
                else:
                    hidden = other.isnan()
                    assert torch.equal(one.isnan().cpu(), hidden)
                    place.close(one.cpu().masked_fill(hidden, 0), other.masked_fill(hidden, 0), ratio)


def tensors(given) -> list[torch.Tensor]:
    """One, those of an index, or none."""
    held = vars(given).values() if isinstance(given, Index) else [given]
    return [t for t in held if isinstance(t, torch.Tensor)]


def on_cpu(given):
    """Copies on the CPU of all tensors that something holds."""
    if isinstance(given, torch.Tensor):
        return given.cpu().clone()
    if isinstance(given, dict):
        return {name: on_cpu(value) for name, value in given.items()}
    if isinstance(given, QuantisedWeight):
        return QuantisedWeight(*map(on_cpu, given))
    return Index(**on_cpu(vars(given))) if isinstance(given, Index) else given


def view(t: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers, which lie as ``kind`` says among what nobody may read; see :class:`Operator`."""
    if kind == "half":
        return t.half()
    if kind == "turned":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    more = [3] * t.dim() if kind == "inside" else [0] * (t.dim() - 1) + [24]
    hole = math.nan if t.is_floating_point() else t.dtype == torch.bool or torch.iinfo(t.dtype).max // 3
    wide = torch.full([n + m for n, m in zip(t.shape, more)], hole, dtype=t.dtype, device=t.device)
    part = wide[tuple(slice(m - m // 3, m - m // 3 + n) for n, m in zip(t.shape, more))]
    return part.copy_(t)


def room_for(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """So many elements, which on a CPU take memory only where they are used, even if there is less in all."""
    if device != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    held = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    return torch.frombuffer(held, dtype=dtype)


def far(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Equal to ``t``; the last entry along ``dim`` lies more than ``2 ** 31`` elements behind the first."""
    step = (-(-PAST // (t.shape[dim] - 1)) + 63) // 64 * 64
    near = t.contiguous()
    strides = [step if i == dim else stride for i, stride in enumerate(near.stride())]
    room = room_for(PAST + (t.shape[dim] - 1) * step + near.numel(), t.dtype, t.device.type)
    return room.as_strided(t.shape, strides, PAST).copy_(t)


def column(place, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=place.device)


def shuffled(place, rows: int, n: int, k: int) -> torch.Tensor:
    """``k`` of ``n`` numbers in any order, ``[rows, k]``."""
    return torch.stack([place.randperm(n)[:k] for _ in range(rows)])


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


# ---------------------------------------------------------------------- small layers


def add_norm(place, shape, has_residual=True, has_post=False, offset=False):
    n, residual = shape[-1], place.randn(*shape) if has_residual else None
    return 3 * place.randn(*shape), residual, place.randn(n), 1e-6, offset, place.randn(n) if has_post else None, 1e-5


def gated(place, shape, activation="silu"):
    return 3 * place.randn(*shape), place.randn(*shape), activation


def angles(place, batch, tokens, width):
    angle = (6.3 * place.rand(batch, tokens, width // 2)).repeat(1, 1, 2)
    return angle.cos().to(place.dtype), angle.sin().to(place.dtype)


def qk_rope(place, batch, tokens, heads, k_heads, dim, width, cos_batch, has_norm, offset):
    cos, sin = angles(place, cos_batch, tokens, width)
    q, k = place.randn(batch, tokens, heads, dim), place.randn(batch, tokens, k_heads, dim)
    weights = (place.randn(dim), place.randn(dim)) if has_norm else (None, None)
    return q, k, cos, sin, *weights, 1e-6, 1e-5, offset


def latent_rope(place, batch, tokens, heads, nope, rope, rank, interleaved):
    cos, sin = angles(place, batch, tokens, rope)
    q, compressed = place.randn(batch, tokens, heads, nope + rope), place.randn(batch, tokens, rank + rope)
    return q, compressed, cos, sin, 1 + 0.2 * place.randn(rank), 1e-6, interleaved


def experts(place, tokens, count, k, d, inner, activation="silu"):
    index = shuffled(place, tokens, count, k) if tokens else place.randperm(0).view(0, k)
    gate_up, down = place.randn(count, 2 * inner, d) / d**0.5, place.randn(count, d, inner) / inner**0.5
    return 2 * place.randn(tokens, d), index.long(), place.rand(tokens, k), gate_up, down, activation


def quantised_linear(place, shape, n, scales, has_bias=False, kind="int8"):
    """``scales``: blocks of rows, and of inputs."""
    k = shape[-1]
    codes = place.randint(-127, 128, n, k).to(torch.int8) if kind == "int8" else (60 * place.randn(n, k)).to(FP8)
    weight = QuantisedWeight(codes, (0.5 + place.rand(*scales)) / (64 * k**0.5))
    # Tensor cores would round float32.
    x = place.randn(1, shape[-1]) if place.dtype == torch.float32 else place.randn(*shape)
    return x, weight, place.randn(n) if has_bias else None


def route(place, tokens, d, count, k, groups, top_groups, normalise):
    x, weight, bias = place.randn(tokens, d), place.randn(count, d) / d**0.5, place.rand(count) - 0.5
    return x, weight, bias, k, groups, top_groups, normalise, 1.8


# ---------------------------------------------------------------------- recent tokens and queries


def lengths(place, batch: int, most: int) -> torch.Tensor:
    """Tokens that each row has, int32 ``[batch]``: the first one's are ``most``; a column of a table."""
    table = torch.stack((place.randint(0, most + 1, batch), place.nan(batch, dtype=torch.int32)), 1)
    table[0, 0] = most
    return table[:, 0]


def some(place, batch: int, asked: bool) -> torch.Tensor | None:
    """Which rows count: neither the second nor the fifth; None for all."""
    return (torch.arange(batch, device=place.device) % 3 != 1)[:, None] if asked else None


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


def query_predict(place, batch, heads, slots, dim, window, position, pool=True, softmax=True):
    """Rows have all, none, two or all of the ring's queries, the last in slots of its own; the rest is NaN."""
    ring = queries(batch, heads, slots, dim).to(place.dtype).to(place.device)
    counts = [slots, 0, min(2, slots), slots][:batch]
    positions = [(position + 3 * row) % slots for row in range(batch)]
    for row, (count, at) in enumerate(zip(counts, positions)):
        ring[row] = ring[row].roll(at, dims=1)
        for age in range(count, slots):
            ring[row, :, (at - 1 - age) % slots] = math.nan
    return ring, column(place, *positions), column(place, *counts), window, 1e-2, pool, softmax


# ---------------------------------------------------------------------- sealing


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
    parts: int = 1
    channels: int = 16
    bits: int = 4
    norms: bool = True
    sealed: tuple[int, ...] = (6, 0)
    due: tuple[bool, ...] | None = None  # rows whose next block is sealed; None: all
    rests: tuple[int, ...] = ()  # rows that attend to nothing
    there: bool = True  # the last row has a physical block for it
    bounds: bool = True
    metadata: str = "min_max"
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
        sides = 1 if case.metadata == "mean" else 2
        index |= {"bounds": place.nan(capacity, case.parts, case.heads, sides, case.dk), "metadata": case.metadata}
    if case.channels:
        channels = shuffled(place, case.batch * case.heads, case.dk, case.channels)
        index["channels"] = channels.view(case.batch, case.heads, -1)
        if case.bits == 4:
            if case.norms:
                index["norms"] = label_norms(place, case.batch, case.heads, case.channels)
            index["codes"] = place.nan(*kept, case.channels // 2, dtype=torch.uint8)
            index["qparams"] = place.nan(*kept, 2, dtype=torch.float16)
        else:
            index["codes"] = place.nan(*kept, case.channels)
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
    parts: int = 1
    channels: int = 16
    bits: int = 4
    norms: bool = True
    more: int = 5  # new tokens behind the last block
    staged: bool = False
    keeps: bool = True
    bounds: bool = True
    metadata: str = "min_max"
    span: int | None = None


def seal_range(place, case: SealRange) -> tuple:
    """NaN in rings where these blocks have nothing, in new tokens that they do not take, and in all that is written."""
    size, width, split = case.block_size, case.dk + case.dv, case.split or case.dk
    start, end, ring = case.first * size, case.end * size, 3 * size
    usual = {name: getattr(case, name) for name in ("heads", "dk", "dv", "block_size", "parts", "channels", "bits")}
    usual |= {name: getattr(case, name) for name in ("norms", "sinks", "bounds", "metadata", "span", "keeps")}
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


# ---------------------------------------------------------------------- scores and choices


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
    """What is in entries that nobody may look at: a kernel that took NaN for ``-inf`` alone would pass."""
    hole = torch.full((num_blocks, 1, 1, 1), math.nan, device=place.device)
    hole[::2] = 50.0
    return hole


def block_score(place, batch, heads, group, dk, n, reduce="mean", metadata="min_max", tokens=16):
    """Of ragged rows; NaN or garbage where nobody looks."""
    rows, block_table, sinks, hidden = ragged(place, batch, n, tokens)
    num_blocks = len(hidden)
    ends = torch.stack((place.randn(num_blocks, heads, dk), place.randn(num_blocks, heads, dk)), 2)
    ends = torch.cat((ends.amax(2, keepdim=True), ends.amin(2, keepdim=True)), 2)
    bounds = torch.where(hidden.all(1)[:, None, None, None], holes(place, num_blocks).to(place.dtype), ends)
    bounds = bounds[:, :, :1].contiguous() if metadata == "mean" else bounds
    out = place.nan(batch, heads * group if reduce == "none" else heads, n, dtype=torch.float32)
    each = place.nan(batch, heads * group, n, dtype=torch.float32)
    q = place.randn(batch, heads * group, dk)
    return q, bounds, rows, block_table, reduce, metadata, tokens, sinks, out, each


def token_score(place, batch, heads, group, dk, width, block_size, cap, chosen, reduce="mean", bits=4):
    """Blocks of ragged rows; NaN or garbage in the labels of tokens that cannot be selected."""
    relative = bits == "norms" or (bits == "tensor_cores" and cap % 2 > 0)
    bits = 16 if bits == 16 else 4
    rows, block_table, sinks, hidden = ragged(place, batch, cap, block_size)
    num_blocks, hidden = len(hidden), hidden[:, None, :, None]
    hole = holes(place, num_blocks)
    if bits == 4:
        codes = place.randint(0, 256, num_blocks, heads, block_size, width // 2, dtype=torch.uint8)
        qparams = torch.where(hidden, hole.half(), place.randn(num_blocks, heads, block_size, 2).half())
    else:
        codes = torch.where(hidden, hole.to(place.dtype), place.randn(num_blocks, heads, block_size, width))
        qparams = None
    ids = None
    channels = shuffled(place, batch * heads, dk, width).view(batch, heads, -1)
    norms = label_norms(place, batch, heads, width) if relative else None
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


def score_ratio(place, how, reduce, bits) -> float:
    """Tensor cores take queries in fixed point: 1.06e-4 is the most seen, of a mean over 20 heads on a GPU.

    The other kernel, which takes what they do not, rounds products of queries and spreads to the queries' dtype, if
    that is bf16.
    """
    rounded = bits in ("norms", "tensor_cores") and place.dtype == torch.bfloat16
    return 2e-4 if how.tensor_cores else 4e-3 if rounded else 4e-6


def label_hows(given, reduce, bits):
    """Two blocks a program of tensor cores, where these are meant and take the labels; or the plain kernel."""
    ids = given["block_ids"]
    labels = given["q"], given["codes"], given["qparams"], (given["block_table"] if ids is None else ids).shape[-1]
    return [replace(label_config(*labels, reduce == "mean", bits == "tensor_cores"), blocks=2)]


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
    "the last query": (3, 2, 1, 96, 0, 0),
    "the last query of a longer ring": (4, 2, 4, 64, 0, 0),
    "no rows": (0, 2, 9, 64, 8, 0),
}


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
    "parts": Seal(block_size=64, parts=4, dk=128, dv=128, channels=32),
    "many parts": Seal(block_size=32, parts=8, sealed=(0, 2)),
    "unquantised labels": Seal(bits=16, block_size=32),
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
    "cuboid": Seal(channels=0, metadata="cuboid_mean"),
    "cuboid of parts": Seal(batch=3, heads=3, dk=80, block_size=64, parts=4, sealed=(0, 2, 5), metadata="cuboid_mean"),
    "cuboid of sinks": Seal(sinks=20, parts=2, sealed=(0, 1), metadata="cuboid_mean"),
    "latents, parts": Seal(heads=1, dk=576, dv=0, channels=0, block_size=32, parts=2, metadata="cuboid_mean"),
    "mean": Seal(metadata="mean", block_size=32, dk=128),
    "mean of parts": Seal(metadata="mean", block_size=32, parts=2, sealed=(0, 9)),
    "running mean, first of its span": Seal(channels=0, bounds=False, span=1),
    "running mean": Seal(batch=4, span=4, dk=80, dv=48, heads=3, sealed=(7, 4, 1, 2), due=(True, True, True, False)),
    "running mean behind sinks": Seal(batch=3, span=4, sinks=20, sealed=(0, 1, 2), metadata="cuboid_mean"),
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
    "parts": SealRange(70, 1, 3, block_size=64, parts=4, dk=128, dv=128, channels=32),
    "unquantised labels": SealRange(37, 1, 4, bits=16, block_size=32),
    "no labels, no bounds": SealRange(37, 1, 4, channels=0, bounds=False, sinks=0),
    "wide heads": SealRange(100, 0, 2, heads=1, dk=256, dv=256, channels=64, block_size=128),
    "latents": SealRange(70, 1, 3, heads=1, dk=96, dv=0, split=80, channels=24),
    "wide latents": SealRange(70, 1, 3, heads=1, dk=576, dv=0, split=512, channels=128, block_size=64),
    "all sinks": SealRange(3, 0, 3, sinks=20, rows=2),
}
RANGES_OF_MEANS = {
    "cuboid": SealRange(57, 2, 7, rows=2, metadata="cuboid_mean"),
    "cuboid, latents": SealRange(70, 1, 3, heads=1, dk=96, dv=0, split=80, channels=24, metadata="cuboid_mean"),
    "mean": SealRange(57, 2, 7, metadata="mean", parts=2),
    "running means": SealRange(0, 0, 9, span=4),
    "running means, from within a span": SealRange(57, 2, 11, rows=2, heads=3, dk=80, dv=48, channels=20, span=4),
    "running means, within one span": SealRange(57, 2, 3, span=4, staged=True),
    "running means behind sinks": SealRange(41, 1, 9, span=3, sinks=40, rows=2),
    "running means, latents": SealRange(70, 1, 4, heads=1, dk=96, dv=0, split=80, channels=24, bounds=False, span=2),
}


def equal(place, *options) -> float:
    """As a ratio: no rounding explains a difference."""
    return 0


OPERATORS = [
    Operator(
        "add_norm",
        add_norm,
        {
            "norm alone": ((3, 1, 64), False),
            "norm alone, offset": ((2, 3, 96), False, False, True),
            "sum": ((2, 1, 4096),),
            "sum, odd width": ((2, 3, 100),),
            "norm, sum, norm": ((2, 2, 160), True, True, True),
            "norm, sum, norm without offset": ((5, 72), True, True),
            "a wide row": ((1, 1, 12288),),
            "no row": ((0, 1, 64),),
        },
        small=((2, 3, 64),),
        views={"x": "rows"},
    ),
    Operator(
        "gated",
        gated,
        {"long": ((2, 1, 3000),), "odd": ((7, 33),), "none": ((0, 1, 64),)},
        options=(("silu", "gelu_tanh"),),
        small=((2, 3, 300), "silu"),
        views={"gate": "rows", "up": "rows"},
    ),
    Operator(
        "qk_rope",
        qk_rope,
        # batch, tokens, query heads, key heads, head dim, rotary width, batch of cos, norm, Gemma's offset
        {
            "rope": (2, 3, 8, 2, 64, 64, 2, False, False),
            "norm": (1, 1, 8, 2, 128, 128, 1, True, False),
            "norm with offset, one position for all rows": (3, 2, 4, 1, 64, 64, 1, True, True),
            "part of the dimensions": (2, 3, 3, 3, 96, 48, 2, False, False),
            "part of the dimensions, norm": (1, 2, 5, 5, 80, 32, 1, True, False),
            "head dim 256": (1, 1, 2, 1, 256, 256, 1, True, True),
            "no token": (1, 0, 2, 1, 64, 64, 1, False, False),
        },
        small=(1, 2, 6, 5, 64, 64, 1, True, False),
        views={"q": "inside", "k": "inside"},
        far={"q": 2, "k": 2},
    ),
    Operator(
        "latent_rope",
        latent_rope,
        # batch, tokens, heads, dn, dr, r
        {"GLM": (1, 1, 20, 192, 64, 512), "odd": (3, 2, 5, 33, 6, 40), "none": (0, 1, 4, 12, 8, 16)},
        options=((True, False),),  # interleaved
        small=(1, 2, 6, 32, 16, 64, False),
        views={"compressed": "rows"},
        far={"q": 2},
    ),
    Operator(
        "experts",
        experts,
        # tokens, experts, of a token, D, I
        {
            "one token": (1, 8, 4, 256, 96),
            "three": (3, 5, 2, 100, 33),
            "six": (6, 4, 1, 64, 128),
            "six of eight": (2, 8, 6, 65, 600),
            "eight": (1, 9, 8, 40, 520),
            "odd": (2, 3, 3, 33, 7),
            "none": (0, 4, 2, 64, 64),
        },
        options=(("silu", "gelu_tanh"),),
        small=(2, 4, 3, 32, 24, "silu"),
        views={"x": "rows", "index": "turned", "weights": "turned"},
        far={"gate_up": 0, "down": 0},
    ),
    Operator(
        "quantised_linear",
        quantised_linear,
        # shape of x, rows of the weight, scales, bias; more rows: test_lookup_linear.py
        {
            "one row": ((1, 1, 4096), 64, (64, 1)),
            "one row, one scale, bias, nothing even": ((1, 700), 45, (1, 1), True),
            "one row, blocks": ((1, 1, 4352), 96, (3, 34)),
            "one row, blocks, bias, nothing even": ((1, 286), 100, (4, 3), True),
            "one row of the weight": ((1, 24), 1, (1, 1)),
            "no row": ((0, 1, 64), 32, (32, 1)),
        },
        options=(("int8", "fp8"),),
        small=((2, 96), 64, (64, 1), True, "int8"),
        views={"x": "rows"},
    ),
    Operator(
        "route",
        route,
        # tokens, D, experts, of a token, groups, of a token
        {
            "one token": (1, 256, 64, 4, 1, 1),
            "groups": (3, 100, 48, 6, 8, 4),
            "as many as there are": (2, 64, 32, 8, 8, 3),
            "all experts": (4, 33, 7, 7, 1, 1),
            "small groups": (2, 16, 4, 2, 4, 3),
        },
        options=((True, False),),  # normalised
        ratio=lambda place, *_: 2e-6,  # products of rounded inputs are the same, in float32
    ),
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
        options=((True, False), (True, False)),  # windows are averaged, softmax
        small=(3, 3, 6, 64, 4, 2, True, True),
        ratio=lambda place, *_: 2e-5 if place.dtype == torch.float32 else None,  # two ways of solving, in float32
        views={"ring": "inside"},
        far={"ring": 0},
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
        "block_score",
        block_score,
        BOUNDS,
        options=(("mean", "max", "none"), ("min_max", "cuboid_mean", "mean")),
        small=(2, 1, 6, 64, 20, "max", "min_max"),
        ratio=lambda place, *_: 4e-6,  # products of 16-bit numbers are exact in float32
        views={"q": "turned", "block_table": "rows", "bounds": "half"},
        far={"q": 1, "bounds": 0},
    ),
    Operator(
        "token_score",
        token_score,
        LABELS,
        options=(("mean", "max", "none"), ("tensor_cores", 4, 16, "norms")),
        small=(2, 1, 4, 64, 16, 16, 6, 4, "mean", 4),
        ratio=score_ratio,
        hows=label_hows,
        views={"q": "turned", "block_table": "rows", "block_ids": "rows"},
        far={"q": 1, "codes": 0, "qparams": 0},
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
BY_NAME = {operator.of: operator for operator in OPERATORS}
if len(BY_NAME) < len(OPERATORS):
    raise ValueError("two operators of one name: the cases of the first would not run")
