"""Calls of ``sparse_decode`` of all shapes, and what they must give."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hf_sparsekv.ops.attention.sparse_decode.config import Config, config
from hf_sparsekv.ops.attention.sparse_decode.reference import sparse_decode as reference
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.storage.quantise.reference import quantise

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

    rows: tuple[tuple[int, int], ...] | None = None  # length and sealed tokens of each, instead of random ones

    def make(self, place, granularity: str) -> tuple[list, dict]:
        """Arguments: rows of random lengths, the first with a full table; NaN in every token that may not be read.

        Rows may share a block at the same place. Entries behind the sealed blocks are none, or blocks full of NaN.
        """
        width = self.dk if self.latents else self.dk + self.dv
        rows = self._rows(place)
        sealed = rows[:, 1:]
        num_blocks = 2 * self.cap + 2
        order = place.randperm(num_blocks)
        if self.cap:  # the last block is read
            order[(order == num_blocks - 1).nonzero()[0, 0]] = order[self.cap - 1].clone()
            order[self.cap - 1] = num_blocks - 1
        shared, garbage = order[: 2 * self.cap].view(2, self.cap), order[2 * self.cap :]
        first = torch.arange(self.cap, device=place.device)
        which = place.randint(0, 2, self.batch, self.cap).long()
        if self.cap:
            which[0, -1] = 0
        block_table = shared[which, first]
        holes = place.rand(self.batch, self.cap) < 0.2
        if self.cap:
            holes[0, -1] = False
        behind = first * self.block_size >= sealed
        block_table = torch.where(behind, garbage[place.randint(0, 2, self.batch, self.cap).long()], block_table)
        block_table = block_table.masked_fill(holes, -1)

        kv = place.randn(num_blocks, self.heads, self.block_size, width)
        kv[garbage.long()] = torch.nan
        if granularity != "all":
            token = first[:, None] * self.block_size + torch.arange(self.block_size, device=place.device)
            hidden = (token < self.sinks)[:, None, :, None]
            for some in shared.long():
                kv[some] = torch.where(hidden, torch.nan, kv[some])
        recent_kv = place.randn(self.batch, self.heads, self.sinks + self.ring, width)
        recent_kv = torch.where(valid_entries(rows, self.sinks, self.ring)[:, None, :, None], recent_kv, torch.nan)
        if granularity == "all":
            recent_kv[:, :, : self.sinks] = torch.nan

        args = [place.randn(self.batch, self.heads * self.group, self.dk), kv, rows, block_table]
        args += [self._ids(place, granularity, rows, block_table), recent_kv]
        named = {
            "granularity": granularity,
            "value_dim": self.dv,
            "sinks": self.sinks,
            "scale": self.dk**-0.5,
            "softcap": self.softcap,
            "sink_logits": place.randn(self.heads * self.group) if self.learned_sink else None,
        }
        if self.span is not None and granularity == "token":
            named |= self._means(place, rows, block_table, width)
        return args, named

    def _rows(self, place):
        if self.rows is not None:
            return torch.tensor(self.rows, dtype=torch.int32, device=place.device)
        blocks = place.randint(0, self.cap + 1, self.batch)
        blocks[0] = self.cap
        recent = place.randint(0, self.ring + 1, self.batch)
        recent[0] = recent[0].clamp_min(1)
        sealed = blocks * self.block_size
        return torch.stack((sealed + recent, sealed), dim=-1)

    def _means(self, place, rows, block_table, width) -> dict:
        """Means in the last sealed block of each span; NaN in all others."""
        means = place.nan(2 * self.cap + 2, self.heads, width)
        for row, (_, sealed) in zip(block_table.tolist(), rows.tolist()):
            blocks = sealed // self.block_size
            for first in range(0, blocks, self.span):
                last = row[min(first + self.span, blocks) - 1]
                if last >= 0:
                    means[last] = place.randn(self.heads, width)
        return {"means": means, "mean_tokens": self.span * self.block_size}

    def _ids(self, place, granularity, rows, block_table):
        """Ascending ids with -1 at the end, of another number in each row; tokens only where they are selectable."""
        lists = []
        for i in range(self.batch * self.heads):
            row = i // self.heads
            if granularity == "block":
                found, n = place.randperm(self.cap)[: self.chosen], self.chosen
            else:
                token = torch.arange(self.cap * self.block_size, device=place.device)
                usable = (token >= self.sinks) & (token < rows[row, 1])
                usable &= (block_table[row] >= 0).repeat_interleave(self.block_size)
                found = usable.nonzero().flatten()
                n = self.chosen * self.block_size // 3
                found = found[place.randperm(len(found)).long()][:n]
            found = found[: max(0, len(found) - i)].sort().values.int()
            lists.append(torch.nn.functional.pad(found, (0, n - len(found)), value=-1))
        return None if granularity == "all" else torch.stack(lists).view(self.batch, self.heads, n)


def valid_entries(rows, sinks: int, ring: int):
    """Entries of a recent buffer that hold a token, bool ``[batch, sinks + ring]``: token by token."""
    valid = torch.zeros(len(rows), sinks + ring, dtype=torch.bool)
    for row, (length, sealed) in zip(valid, rows.tolist()):
        assert 0 <= sealed <= length <= sealed + ring
        row[: min(sinks, sealed)] = True
        for token in range(sealed, length):
            row[sinks + token % ring] = True
    return valid.to(rows.device)


def near_tokens(args, named):
    """Tokens of the recent buffer that each row attends to, ``[batch, 1]``."""
    rows, sinks = args[2], named["sinks"]
    skip = sinks if named["granularity"] == "all" else 0
    return valid_entries(rows, sinks, args[5].shape[2] - sinks)[:, skip:].sum(-1, keepdim=True)


def in_pages(place, args, named):
    """The same attention with some blocks in device pages, in any order, and the others read from ``kv``."""
    q, kv, rows, block_table, ids, recent_kv = args
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
    return [q, kv, rows, block_table, ids, recent_kv], named


def in_codes(args, named):
    """The same attention with codes of the stored blocks; NaN among them stays NaN."""
    codes, scales = quantise(args[1], args[0].shape[-1])
    return [args[0], codes, *args[2:]], dict(named, scales=scales)


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


def config_of(args, named, splits: int | None = None, **changes) -> Config:
    """Triton's configuration for this call, with ``changes``; those that are None are none, but for ``clusters``.

    ``splits``: programs to aim at for each row and KV head, if all have equally much.
    """
    usual = config(args[0], args[1], args[5], named["value_dim"], named["granularity"])
    clusters = changes.pop("clusters", False)
    if splits is not None:
        head_tiles = -(-args[0].shape[1] // args[1].shape[1] // usual.heads)
        changes["programs"] = splits * args[0].shape[0] * args[1].shape[1] * head_tiles
    changes = {name: value for name, value in changes.items() if value is not None}
    return replace(usual, clusters=clusters, **changes)


def check(place, case: Case, granularity: str, coded: bool = False, **changes) -> None:
    """The kernel, its configuration with ``changes``, against the reference: result, denominators and counts."""
    args, named = case.make(place, granularity)
    if coded:
        args, named = in_codes(args, named)
    want_lse, want_attended = torch.full(args[0].shape[:2], torch.nan), torch.full(args[5].shape[:2], 1000)
    expected = reference(*on_cpu(args), **on_cpu(named), lse=want_lse, attended=want_attended)
    attended = torch.full_like(want_attended, 1000, device=place.device)
    out = place.nan(case.batch, case.heads * case.group, case.dv)
    lse = place.nan(case.batch, case.heads * case.group, dtype=torch.float32)
    from_host = torch.zeros_like(attended)
    given = {"attended": attended, "from_host": from_host, "lse": lse, "out": out}
    with poisoned():
        used = config_of(args, named, splits=case.splits, **changes)
        assert sparse_decode(*args, **named, **given, config=used) is out
    assert torch.equal(from_host.cpu(), want_attended - 1000 - near_tokens(args, named).cpu())
    place.close(out, expected, ratio=RATIO.get(place.dtype))
    place.close(lse, want_lse)
    assert torch.equal(attended.cpu(), want_attended)
