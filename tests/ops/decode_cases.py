"""Calls of ``sparse_decode`` of all shapes, and what they must give."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hf_sparsekv.ops.sparse_decode.config import Config, config
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode

RATIO = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # that of results


@dataclass
class Case:
    """Shapes of one call, and what else is asked of it."""

    batch: int = 2
    heads: int = 2
    group: int = 4
    dk: int = 64
    dv: int = 64
    block_size: int = 16
    cap: int = 7  # blocks a row
    chosen: int = 3  # blocks, or a third of their tokens
    sinks: int = 4
    ring: int = 13
    softcap: float | None = None
    learned_sink: bool = False
    splits: int | None = None
    latents: bool = False  # values are the beginning of their keys
    span: int | None = None  # blocks whose mean stands for their unselected tokens

    def make(self, place, granularity: str) -> tuple[list, dict]:
        """Arguments: shared blocks in any order with holes, and NaN in every token that may not be read."""
        num_blocks = self.cap + 2
        width = self.dk if self.latents else self.dk + self.dv
        flags = place.randint(0, 4, num_blocks, self.block_size, dtype=torch.uint8)
        flags[flags == 2] = 1  # 0 padding, 1 selectable, 3 sink
        readable = (flags & 1 > 0) if granularity == "all" else flags == 1
        kv = place.randn(num_blocks, self.heads, self.block_size, width)
        kv = torch.where(readable[:, None, :, None], kv, torch.nan)
        block_table = torch.stack([place.randperm(num_blocks)[: self.cap] for _ in range(self.batch)])
        block_table = block_table.masked_fill(place.rand(self.batch, self.cap) < 0.2, -1)

        recent_valid = place.rand(self.batch, self.sinks + self.ring) > 0.3
        recent_kv = place.randn(self.batch, self.heads, self.sinks + self.ring, width)
        recent_kv = torch.where(recent_valid[:, None, :, None], recent_kv, torch.nan)
        if granularity == "all":
            recent_kv[:, :, : self.sinks] = torch.nan

        args = [place.randn(self.batch, self.heads * self.group, self.dk), kv, flags, block_table]
        args += [self._ids(place, granularity, flags, block_table), recent_kv, recent_valid]
        named = {
            "granularity": granularity,
            "value_dim": self.dv,
            "sinks": self.sinks,
            "scale": self.dk**-0.5,
            "softcap": self.softcap,
            "sink_logits": place.randn(self.heads * self.group) if self.learned_sink else None,
        }
        if self.span is not None and granularity == "token":
            named |= self._means(place, flags, block_table, width)
        return args, named

    def _means(self, place, flags, block_table, width) -> dict:
        """Means in the last block of each span; NaN in those before it."""
        means = place.nan(self.cap + 2, self.heads, width)
        for row in block_table.tolist():
            for first in range(0, self.cap, self.span):
                there = [block for block in row[first : first + self.span] if block >= 0]
                if there:
                    means[there[-1]] = place.randn(self.heads, width)
        fill = (flags == 1).sum(-1, dtype=torch.int32)
        return {"means": means, "fill": fill, "mean_tokens": self.span * self.block_size}

    def _ids(self, place, granularity, flags, block_table):
        """Ascending ids with -1 at the end, of another number in each row; tokens only where they are selectable."""
        rows = []
        for i in range(self.batch * self.heads):
            if granularity == "block":
                found, n = place.randperm(self.cap)[: self.chosen], self.chosen
            else:
                physical_id = block_table[i // self.heads]
                usable = (flags[physical_id.clamp_min(0).long()] == 1) & (physical_id >= 0)[:, None]
                found = usable.flatten().nonzero().flatten()
                n = self.chosen * self.block_size // 3
                found = found[place.randperm(len(found)).long()][:n]
            found = found[: max(0, len(found) - i)].sort().values.int()
            rows.append(torch.nn.functional.pad(found, (0, n - len(found)), value=-1))
        return None if granularity == "all" else torch.stack(rows).view(self.batch, self.heads, n)


def in_pages(place, args, named):
    """The same attention with some blocks in device pages, in any order, and the others read from ``kv``."""
    q, kv, flags, block_table, ids, recent_kv, recent_valid = args
    num_blocks, heads, size, width = kv.shape
    page_of = place.randperm(num_blocks * heads).view(num_blocks, heads) * 2  # every other page holds nothing
    pages = place.nan(2 * num_blocks * heads, size, width)
    pages[page_of.flatten().long()] = kv.flatten(0, 1)
    at_home = place.rand(num_blocks, heads) < 0.4
    kv = torch.where(at_home[..., None, None], kv, torch.nan)
    pages[page_of[at_home].long()] = torch.nan
    physical_id = torch.arange(num_blocks, device=kv.device, dtype=torch.int32)[:, None]
    page_id_of = torch.where(at_home, -(physical_id + 2), page_of)
    block = ids if named["granularity"] == "block" else ids // size
    physical_id = block_table[:, None].expand(-1, heads, -1).gather(-1, block.clamp_min(0).long()).clamp_min(0)
    head = torch.arange(heads, device=kv.device)[None, :, None]
    page_ids = torch.where(ids < 0, -1, page_id_of[physical_id.long(), head])
    named = dict(named, pages=pages)
    if "means" in named:
        named["columns"] = ids
    if named["granularity"] == "block":
        named["page_ids"] = page_ids
    else:
        ids = torch.where(ids < 0, -1, page_ids * size + ids % size)
    return [q, kv, flags, block_table, ids, recent_kv, recent_valid], named


def on_cpu(given):
    """The tensors of a list or by name on the CPU, all else as it is."""
    if isinstance(given, dict):
        return dict(zip(given, on_cpu(given.values())))
    return [t.cpu() if isinstance(t, torch.Tensor) else t for t in given]


def expect(args, named):
    """The reference's result and count, computed on the CPU."""
    attended = torch.full((args[5].shape[:2]), 1000, dtype=torch.int64)
    return reference(*on_cpu(args), **on_cpu(named), attended=attended), attended


@contextmanager
def poisoned():
    """``torch.empty`` holds NaN: what a kernel leaves unwritten and the next one reads shows."""
    empty = torch.empty
    torch.empty = lambda *shape, **named: empty(*shape, **named).fill_(torch.nan)
    try:
        yield
    finally:
        torch.empty = empty


def config_of(args, named, **changes) -> Config:
    """The kernel's configuration for this call, with ``changes``; those that are None are none."""
    usual = config(args[0], args[1], args[5], named["value_dim"], named["granularity"])
    return replace(usual, **{name: value for name, value in changes.items() if value is not None})


def check(place, case: Case, granularity: str, **changes) -> None:
    """The kernel, its configuration with ``changes``, against the reference: result, denominators and counts."""
    args, named = case.make(place, granularity)
    want_lse, want_attended = torch.full(args[0].shape[:2], torch.nan), torch.full(args[5].shape[:2], 1000)
    expected = reference(*on_cpu(args), **on_cpu(named), lse=want_lse, attended=want_attended)
    attended = torch.full_like(want_attended, 1000, device=place.device)
    out = place.nan(case.batch, case.heads * case.group, case.dv)
    lse = place.nan(case.batch, case.heads * case.group, dtype=torch.float32)
    from_host = torch.zeros_like(attended)
    given = {"attended": attended, "from_host": from_host, "lse": lse, "out": out}
    with poisoned():
        used = config_of(args, named, parts=case.splits, **changes)
        assert sparse_decode(*args, **named, **given, config=used) is out
    skip = case.sinks if granularity == "all" else 0
    assert torch.equal(from_host.cpu(), want_attended - 1000 - args[6][:, None, skip:].cpu().sum(-1))
    place.close(out, expected, ratio=RATIO.get(place.dtype))
    place.close(lse, want_lse)
    assert torch.equal(attended.cpu(), want_attended)
