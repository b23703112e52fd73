"""Which kernels Triton would compile while answers grow, without a GPU and without compiling any.

``python tests/ops/specialisations.py`` calls each operator as the steps of one cache do, over rows that come and go,
lengths, drafts and offsets, and prints as JSON, for each kernel and its compile-time constants, how many different
kernels Triton would make of the other arguments: of a number that is 1, or divisible by 16; of a pointer that is
aligned to 16 bytes; of a number that needs 64 bits. More than one means that somebody waits for a compiler in the
middle of an answer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product

import torch
import triton
from compile_kernels import Chip
from triton.runtime.jit import JITFunction

from hf_sparsekv.kv.block_table import table_width
from hf_sparsekv.ops.attention.block_attention.triton import block_attention
from hf_sparsekv.ops.attention.latent_rope.triton import latent_rope
from hf_sparsekv.ops.attention.new_tokens.triton import new_tokens
from hf_sparsekv.ops.attention.prompt_attention.triton import prompt_attention
from hf_sparsekv.ops.attention.qk_rope.triton import qk_rope
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.layers.add_norm.triton import add_norm
from hf_sparsekv.ops.layers.experts import Gate, Mxfp4
from hf_sparsekv.ops.layers.experts.prompts import between, unpack
from hf_sparsekv.ops.layers.experts.triton import experts
from hf_sparsekv.ops.layers.gated.triton import gated
from hf_sparsekv.ops.layers.gated_delta_step.triton import gated_delta_step
from hf_sparsekv.ops.layers.mamba2_step.triton import mamba2_step
from hf_sparsekv.ops.layers.quantised_linear.reference import QuantisedWeight
from hf_sparsekv.ops.layers.quantised_linear.triton import quantised_linear
from hf_sparsekv.ops.layers.route.triton import route
from hf_sparsekv.ops.layers.small_linear.triton import small_linear
from hf_sparsekv.ops.selection.block_score.triton import block_score
from hf_sparsekv.ops.selection.mass_select.triton import mass_select
from hf_sparsekv.ops.selection.prompt_choice.triton import prompt_choice
from hf_sparsekv.ops.selection.prompt_mass.triton import prompt_mass
from hf_sparsekv.ops.selection.query_predict.triton import query_predict
from hf_sparsekv.ops.selection.query_ring.triton import push
from hf_sparsekv.ops.selection.token_score.triton import token_score
from hf_sparsekv.ops.selection.topk_select.triton import block_select, token_select
from hf_sparsekv.ops.storage.append.triton import append
from hf_sparsekv.ops.storage.begin_step.triton import begin_step
from hf_sparsekv.ops.storage.block_copy.triton import block_copy, gather_blocks
from hf_sparsekv.ops.storage.device_tokens import TokenSlots
from hf_sparsekv.ops.storage.device_tokens.triton import bring_tokens, locate_tokens, young_tokens
from hf_sparsekv.ops.storage.pack.triton import pack
from hf_sparsekv.ops.storage.place_tokens.triton import place_tokens
from hf_sparsekv.ops.storage.quantise.triton import quantise
from hf_sparsekv.ops.storage.residency import PageState
from hf_sparsekv.ops.storage.residency.triton import residency
from hf_sparsekv.ops.storage.seal import Index
from hf_sparsekv.ops.storage.seal.triton import seal, seal_range

KIND, INT = torch.bfloat16, torch.int32
# Rows of the batch, or queries of a pass over drafts; full blocks of the longest row. Odd, 1, multiples of 16.
ROWS, BLOCKS = (1, 2, 3, 16, 17), (1, 2, 15, 16, 33, 48, 101, 300)
STEPS = list(product(ROWS, BLOCKS))
SINKS, RING = 4, 64 + 16


class Model:
    """Shapes of one cache: blocks of ``size`` tokens of ``heads`` KV heads, ``group`` query heads each."""

    def __init__(self, heads: int, group: int, dk: int, dv: int, latents: bool = False, size: int = 16) -> None:
        self.heads, self.group, self.dk, self.dv, self.size = heads, group, dk, dv, size
        self.width, self.latents = dk if latents else dk + dv, latents
        self.q_heads = heads * group

    def q(self, rows: int, drafts: bool) -> torch.Tensor:
        """Queries ``[rows, Hq, Dk]`` as attention has them: of one token of each row, or several of one row."""
        if drafts:
            return torch.empty(1, rows, self.q_heads, self.dk, dtype=KIND)[0]
        return torch.empty(rows, 1, self.q_heads, self.dk, dtype=KIND).transpose(1, 2)[:, :, 0]

    def new(self, rows: int, dim: int, tokens: int = 1) -> torch.Tensor:
        """New keys ``[rows, H, tokens, dim]``, as attention hands them over."""
        return torch.empty(rows, tokens, self.heads, dim, dtype=KIND).transpose(1, 2)

    def recent(self, rows: int, drafts: bool) -> torch.Tensor:
        held = torch.empty(1 if drafts else rows, self.heads, SINKS + RING, self.width, dtype=KIND)
        return held.expand(rows, -1, -1, -1)

    def table(self, rows: int, blocks: int, drafts: bool) -> torch.Tensor:
        held = torch.empty(1 if drafts else rows, table_width(blocks), dtype=INT)
        return held.expand(rows, -1)[:, :blocks]

    def stored(self, *shape: int, dtype: torch.dtype = KIND) -> torch.Tensor:
        return torch.empty(64, self.heads, *shape, dtype=dtype)

    def scales(self, size: int, split: int) -> torch.Tensor:
        return self.stored(2 * split + size, dtype=torch.float16)


MODELS = (Model(8, 4, 128, 128), Model(1, 40, 576, 512, latents=True), Model(2, 3, 80, 80))


def rows_of(rows: int, at: int) -> torch.Tensor:
    """Lengths ``[rows, 2]``, which a pass over drafts takes out of a longer list, anywhere."""
    return torch.empty(at + rows, 2, dtype=INT)[at:]


def scores(model: Model) -> None:
    """Scores of blocks and tokens, and the best of them; what is chosen by mass."""
    r = 32 if model.dk % 32 == 0 else 20
    bounds = model.stored(2, model.dk)
    for (rows, blocks), drafts, at in product(STEPS, (False, True), (0, 1)):
        q, table, lengths = model.q(rows, drafts), model.table(rows, blocks, drafts), rows_of(rows, at)
        for fill in (True, False):
            found = block_score(q, bounds, lengths, table, "max", tokens=16, sinks=SINKS, fill=fill)
        block_score(q, bounds, lengths, table, "mean", tokens=16, sinks=SINKS)
        chosen = block_select(found, 8, rows=lengths, block_size=16)
        channels = torch.empty(rows, model.heads, r, dtype=INT)
        labels = model.stored(16, r // 2, dtype=torch.uint8), model.stored(16, 2, dtype=torch.float16), channels
        named = {"sinks": SINKS, "norms": torch.empty(rows, model.heads, 2, r)}
        token_score(q, *labels, lengths, table, chosen, "mean", **named)
        found = token_score(q, *labels, lengths, table, None, "mean", **named, fill=False)
        token_select(found, None, 100, 16, rows=lengths)
        found = token_score(q, *labels, lengths, table, None, "none", **named, fill=False)
        near = model.recent(rows, drafts)
        named = {"scale": 0.1, "threshold": 0.9, "min_tokens": 8, "totals": torch.empty(64, dtype=torch.int64)}
        selected = mass_select(found, q, channels, near, lengths, sinks=SINKS, **named)
        attend(model, rows, blocks, drafts, selected.ids, selected.count)
        held = torch.empty(rows, model.heads, table.shape[1] * 16 + 16 * rows, dtype=INT)
        out = held[..., : found.shape[-1]], torch.empty(rows, model.heads, dtype=INT)
        mass_select(found, q, channels, near, lengths, sinks=SINKS, **named, stored=lengths[:, 0].clone(), out=out)
        attend(model, rows, blocks, drafts, *out)


def long_rows(model: Model) -> None:
    """Selections from rows that no program holds."""
    for rows, n, k in product(ROWS, (1040, 1100, 1601, 2047), (100, 600)):
        table, lengths = torch.empty(rows, table_width(n), dtype=INT)[:, :n], rows_of(rows, 1)
        labels = model.stored(16, 16, dtype=torch.uint8), model.stored(16, 2, dtype=torch.float16)
        channels, norms = torch.empty(rows, model.heads, 32, dtype=INT), torch.empty(rows, model.heads, 2, 32)
        named = {"sinks": 4, "norms": norms, "fill": False}
        found = token_score(model.q(rows, False), *labels, channels, lengths, table, None, "mean", **named)
        token_select(found, None, k if k == 100 else 10_000, 16, rows=lengths)


def attend(model: Model, rows: int, blocks: int, drafts: bool, ids: torch.Tensor, used: torch.Tensor | None) -> None:
    lengths = rows_of(rows, blocks % 2)
    args = model.q(rows, drafts), model.stored(16, model.width), lengths, model.table(rows, blocks, drafts)
    named = {"value_dim": model.dv, "sinks": SINKS, "scale": 0.1}
    sparse_decode(*args, ids, model.recent(rows, drafts), granularity="token", used=used, **named)


def attention(model: Model) -> None:
    """Attention to tokens, blocks and everything, with means, pages and drafts."""
    for (rows, blocks), drafts in product(STEPS, (False, True)):
        for n in (1, 16, 17, 100):
            attend(model, rows, blocks, drafts, torch.empty(rows, model.heads, 112, dtype=INT)[..., :n], None)
        ids = torch.empty(rows, model.heads, 100, dtype=INT)
        lengths = rows_of(rows, blocks % 2)
        args = model.q(rows, drafts), model.stored(16, model.width), lengths, model.table(rows, blocks, drafts)
        near = model.recent(rows, drafts)
        attended = torch.empty(rows, model.heads, dtype=torch.int64)
        named = {"value_dim": model.dv, "sinks": SINKS, "scale": 0.1, "attended": attended}
        means = {"means": torch.empty(64, model.heads, model.width, dtype=KIND), "mean_tokens": 64}
        pages = torch.empty(40, 16, model.width, dtype=KIND)
        sparse_decode(*args, None, near, granularity="all", **named)
        sparse_decode(*args, ids[..., :8], near, granularity="block", **named)
        sparse_decode(*args, ids, near, granularity="token", **named, **means)
        sparse_decode(*args, ids, near, granularity="token", **named, **means, pages=pages, columns=ids)


def recent_tokens(model: Model) -> None:
    """New tokens and queries, and full blocks of the ring."""
    for rows, tokens, at in product(ROWS, (1, 2, 5, 16), (0, 1)):
        near, n = model.recent(rows, False), rows if tokens == 1 else 1
        valid = torch.empty(n, 40 + at, dtype=torch.bool)[:, -1:]
        past = rows_of(n, at)[:, 0] if at else torch.empty(n, dtype=INT)
        k, v = model.new(n, model.dv if model.latents else model.dk, tokens), model.new(n, 64, tokens)
        near = near[:n] if not model.latents else model.recent(n, False)
        v = v if model.latents else model.new(n, model.dv, tokens)
        for some in (None, valid):
            append(k, v, some, near, past, SINKS)
            q = torch.empty(n, tokens, model.q_heads, model.dk, dtype=KIND).transpose(1, 2)
            counts = (torch.empty(n, dtype=INT) for _ in range(3))
            push(q, some, past, torch.empty(n, model.q_heads, 17, model.dk, dtype=KIND), *counts)
        table = model.table(rows, 33, False)
        index = Index(model.dk, bounds=torch.empty(64, 1, model.heads, 2, model.dk, dtype=KIND))
        seal(near if tokens == 1 else model.recent(rows, False), rows_of(rows, at), rows_of(rows, 1 - at), SINKS, table,
             model.stored(16, model.width), index)  # fmt: skip
    for rows in (*ROWS, 70):
        held = [torch.empty(rows, 2, dtype=INT) for _ in range(2)]
        begin_step(held[0], torch.empty(rows, dtype=INT), held[1], None, block_size=16, recent=64)
        ring = torch.empty(rows, model.q_heads, 17, model.dk, dtype=KIND)
        query_predict(ring, torch.empty(rows, dtype=INT), torch.empty(rows, dtype=INT), 16, 1e-2)
        quantise(torch.empty(rows, model.heads, 16, model.width, dtype=KIND), model.dk // 2)


def pages(model: Model) -> None:
    """Operators that bring and find blocks and tokens on the device."""
    width = model.width
    for (rows, blocks), drafts in product(STEPS, (False, True)):
        kv, table = model.stored(16, width), model.table(rows, blocks, drafts)
        for n in (1, 16, 17, 100):
            ids = torch.empty(rows, model.heads, 112, dtype=INT)[..., :n]
            slots = torch.empty(1 if drafts else rows, model.heads, 16 * table_width(blocks), dtype=INT)
            lanes = torch.empty(len(slots), 2, dtype=INT)
            total, now = 16 * 40, torch.empty(len(slots), model.heads, dtype=INT)
            columns, stamps = torch.empty(2, model.heads, total, dtype=INT)
            held = TokenSlots(torch.empty(model.heads, total, width, dtype=KIND), columns, stamps, slots, now, lanes)
            used = torch.empty(rows, model.heads, dtype=INT)
            for some in (None, used):
                bring_tokens(ids, kv, table[: len(slots)], held, used=some)
                every = slots.expand(rows, -1, -1), lanes.expand(rows, -1).contiguous()
                locate_tokens(ids, *every, table, total, 16, used=some)
            if not drafts:
                young_tokens(stamps[None], now[None], lanes, 12)
        ids = torch.empty(rows, model.heads, 8, dtype=INT)
        at = torch.empty(rows, model.heads, 100, dtype=INT)
        place_tokens(at, ids, ids, 16)
        state = PageState.empty(300, "cpu")
        state.set_table(0, torch.empty(64, model.heads, dtype=INT))
        _, copies, count = residency(ids, table, state, 0, 1)
        block_copy(kv, torch.empty(300, 16, width, dtype=KIND), copies, count)
        codes, scales = model.stored(16, width, dtype=torch.int8), model.scales(16, model.dk)
        named = {"scales": scales, "split": model.dk}
        block_copy(codes, torch.empty(300, 16, width, dtype=KIND), copies, count, **named)
        at = torch.empty(rows, model.heads, 100, dtype=INT)
        lists = [torch.empty_like(at) for _ in range(3)]
        pack(at, kv, table, *lists[:2], torch.empty(rows, model.heads, 100, width, dtype=KIND), lists[2])


def prompts(model: Model) -> None:
    """Prompts in pieces of any length: what is sealed of them, and read back for the next piece."""
    width, split = model.width, model.dk - 64 if model.latents else model.dk
    kv, codes = model.stored(16, width), model.stored(16, width, dtype=torch.int8)
    index = Index(model.dk, bounds=torch.empty(64, 1, model.heads, 2, model.dk, dtype=KIND), means=kv[:, :, 0], span=16)
    for rows, past, new in product((1, 2, 3, 17), (0, 5, 16, 250, 1000), (1, 16, 17, 333, 2048)):
        table = torch.empty(rows, table_width(300), dtype=INT)
        k, v = model.new(rows, split, new), model.new(rows, width - split, new)
        first, end = past // 16, (past + new) // 16
        if first < end:
            staged = torch.empty(end - first, rows, model.heads, 16, width, dtype=KIND)
            for to in (kv, staged):
                seal_range(model.recent(rows, False), k, v, past, first, end, SINKS, table, to, index)
        if first:
            scales = model.scales(16, split)
            out = torch.empty(rows, model.heads, first + new // 16 + 1, 16, width, dtype=KIND)
            gather_blocks(kv, table[:, :first], out)
            gather_blocks(codes, table[:, 1 : first + 1], out, scales=scales, split=split)


def routed(x: torch.Tensor) -> None:
    """The experts of ``x [tokens, D]``."""
    chosen = torch.zeros(len(x), 4, dtype=torch.long), torch.empty(len(x), 4)
    d = x.shape[1]
    experts(x, *chosen, torch.empty(8, 512, d, dtype=KIND), torch.empty(8, d, 256, dtype=KIND), Gate())


def experts_of_prompts(model: Model) -> None:
    """Many tokens: those of an expert together, and around torch's grouped products."""
    d = 512
    codes = Mxfp4(torch.empty(8, 512, d // 2, dtype=torch.uint8), torch.empty(8, 512, d // 32, dtype=torch.uint8))
    for tokens in (9, 16, 17, 33, 48):
        routed(torch.empty(tokens, d, dtype=KIND))
    for tokens in (257, 1024, 1111):
        pairs, expert = torch.empty(4 * tokens, 512, dtype=KIND), torch.zeros(4 * tokens, dtype=torch.long)
        between(pairs, expert, None, Gate())
        unpack(codes, pairs)


def small_layers(model: Model) -> None:
    """Norms, positions, linear layers and experts: one token of each row, or several drafts of one."""
    d, some = 512, model.dk // 16 * 16
    weight, up = torch.empty(d, dtype=KIND), torch.empty(1536, d, dtype=KIND)
    for rows, tokens in product(ROWS, (1, 2, 5, 16)):
        rows = rows if tokens == 1 else 1
        x = torch.empty(rows, tokens, d, dtype=KIND)
        add_norm(x, x, weight, 1e-6)
        gated(x, x, "silu")
        if rows * tokens <= 8:
            small_linear(x, up)
            small_linear(x, up, None, "silu")
        if rows * tokens == 1:
            for scales in ((1536, 1), (12, 4)):
                quantised_linear(x, QuantisedWeight(torch.empty(1536, d, dtype=torch.int8), torch.empty(scales)))
        q, k = (torch.empty(rows, tokens, n, model.dk, dtype=KIND) for n in (model.q_heads, model.heads))
        for n in {1, rows}:
            cos = torch.empty(n, tokens, some, dtype=KIND)
            qk_rope(q, k, cos, cos)
            if model.latents:
                cos, compressed = torch.empty(n, tokens, 64, dtype=KIND), torch.empty(rows, tokens, 576, dtype=KIND)
                latent_rope(q[..., :256].contiguous(), compressed, cos, cos, weight, 1e-6, False)
        past = torch.empty(rows, model.q_heads, tokens, model.dk)
        new_tokens(q.transpose(1, 2), *[k.transpose(1, 2)] * 2, past, past[..., 0], 0.1)
        if rows * tokens <= 6:
            x = x.view(-1, d)
            routed(x)
            named = {"groups": 4, "top_groups": 2, "normalise": True, "scale": 1.0}
            route(x, torch.empty(64, d, dtype=KIND), torch.empty(64, dtype=KIND), 4, **named)
        if tokens == 1:
            # As of joined projections, whose width is a multiple of 16.
            of_heads = torch.empty(rows, 576, dtype=KIND).split((16, 16, 256, 256, 16, 16), dim=1)
            conv = torch.empty(rows, 288, 4, dtype=KIND), torch.empty(288, 4, dtype=KIND)
            weights = *torch.empty(2, 16, dtype=KIND), torch.empty(16, dtype=KIND)
            for valid in (None, torch.empty(rows, dtype=torch.bool)):
                gated_delta_step(
                    *(t.view(rows, 1, -1) for t in of_heads), *conv, torch.empty(rows, 16, 16, 16), *weights, 1e-6, 1.0,
                    valid,
                )  # fmt: skip
                mixed, gate, dt = torch.empty(rows, 192 + 128 + 8, dtype=KIND).split((192, 128, 8), dim=1)
                parts = torch.empty(rows, 192, 4, dtype=KIND), torch.empty(192, 4, dtype=KIND), None
                each = *torch.empty(3, 8, dtype=KIND), torch.empty(128, dtype=KIND)
                mamba2_step(mixed, gate, dt, *parts, torch.empty(rows, 8, 16, 32), *each, 1e-6, 1, valid)


def sparse_prompts(model: Model) -> None:
    """Pieces of prompts of any lengths, after pasts of any lengths; rows that begin with padding."""
    dim = min(model.dk, 256)
    for rows, past, padded in product((257, 1024, 1111), (0, 1, 640, 4999), (False, True)):
        q = torch.empty(1, rows, model.q_heads, dim, dtype=KIND).transpose(1, 2)
        k, v = (torch.empty(1, past + rows, model.heads, dim, dtype=KIND).transpose(1, 2) for _ in range(2))
        start = torch.empty(1, dtype=INT) if padded else None
        for lo in (0, 128):
            some = q[:, :, lo:]
            made = prompt_mass(
                some, k, torch.empty(1, model.heads, past + rows, dim, dtype=KIND), 0.1, past + lo, start
            )
            wanted = torch.empty(1, model.q_heads)
            lists = prompt_choice(*made, wanted, past + lo, some.shape[2], 999, start)
            prompt_choice(*made, wanted, past + lo, some.shape[2], 999, start, wanted > 0, lists)
            block_attention(some, k, v, *lists[:2], 0.1, past + lo, start)


def exact_prompts(model: Model) -> None:
    """Likewise; masks of columns are slices of longer ones."""
    dim = min(model.dk, 256)
    for batch, rows, past in product((1, 2), (2, 257, 1024, 1111), (0, 1, 640, 4999)):
        q = torch.empty(batch, rows, model.q_heads, dim, dtype=KIND).transpose(1, 2)
        k, v = (torch.empty(batch, model.heads, past + rows, dim, dtype=KIND) for _ in range(2))
        sinks = torch.empty(model.q_heads, dtype=KIND)
        for columns in (None, torch.ones(batch, past + rows + 7, dtype=torch.bool)[:, 7:]):
            for window in (None, 1, 128, 1000):
                prompt_attention(q, k, v, 0.1, columns, window, sinks=sinks)
            prompt_attention(q, k, v, 0.1, columns, chunk=512, origin=torch.zeros(batch, dtype=INT))


def main() -> None:
    triton.runtime.driver.set_active(Chip(90))
    made: defaultdict[str, defaultdict[str, dict]] = defaultdict(lambda: defaultdict(dict))

    def note(self, *args, grid, warmup, **named):
        *_, binder = self.device_caches[0]
        _, kinds, options = binder(*args, **named, debug=False)
        fixed, other = {"options": options}, {}
        for parameter, kind in zip(self.params, kinds):
            # Whether there is a tensor at all is decided when a kernel is compiled: by what is asked, not by how much.
            decided = parameter.is_constexpr or kind == ("constexpr", None)
            (fixed if decided else other)[parameter.name] = str(kind)
        made[self.fn.__name__][str(fixed)][str(other)] = other

    JITFunction.run = note
    for story in (
        scores,
        attention,
        recent_tokens,
        pages,
        prompts,
        sparse_prompts,
        exact_prompts,
        small_layers,
        experts_of_prompts,
        long_rows,
    ):
        for model in MODELS[: 1 if story is long_rows else None]:
            made.clear()
            story(model)
            for name, kinds in made.items():
                report(f"{story.__name__} {model.heads} x {model.dk}", name, kinds)


def report(story: str, name: str, kinds: dict[str, dict]) -> None:
    """One line a kernel: how many there would be of the same constants, at most, and which arguments differ there."""
    worst = list(max(kinds.values(), key=len).values())
    differ = {key: sorted({one[key] for one in worst}) for key in worst[0]}
    differ = {key: found for key, found in differ.items() if len(found) > 1}
    print(json.dumps({"story": story, "kernel": name, "kinds": len(worst), "differ": differ}))


if __name__ == "__main__":
    main()
