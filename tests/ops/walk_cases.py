"""Calls of progressive attention of all shapes, and what they must give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_sparsekv.ops.progressive import Walk, WalkState
from hf_sparsekv.ops.sparse_decode.reference import values_of

UNREADABLE = math.nan


@dataclass
class Case:
    """Shapes of one call, and what else is asked of it."""

    batch: int = 2
    heads: int = 2
    group: int = 4
    dk: int = 64
    dv: int = 64
    block_size: int = 16
    n: int = 23  # blocks a row
    sinks: int = 4
    ring: int = 29
    spread: float = 2.0  # of the logits: how peaked the attention is
    threshold: float = 0.9
    group_reduce: str = "all"
    min_blocks: int = 1
    max_blocks: int | None = None
    estimate: str = "scores"
    softcap: float | None = None
    learned_sink: bool = False
    paged: bool = False
    first: int = 3  # blocks of the first round
    latents: bool = False  # values are the beginning of their keys

    def make(self, place) -> dict:
        """Arguments by name: rows share blocks, some are missing or hold padding; NaN in all that may not be read."""
        num_blocks, width = self.n + 2, self.dk + (0 if self.latents else self.dv)
        flags = place.randint(0, 8, num_blocks, self.block_size, dtype=torch.uint8).clamp_max(1)
        flags[0] = 3
        fill = (flags == 1).sum(-1, dtype=torch.int32)
        kv = place.randn(num_blocks, self.heads, self.block_size, width)
        kv[..., : self.dk] *= self.spread
        kv = torch.where((flags == 1)[:, None, :, None], kv, UNREADABLE)
        block_table = torch.stack([place.randperm(num_blocks)[: self.n] for _ in range(self.batch)])
        block_table = block_table.masked_fill(place.rand(self.batch, self.n) < 0.1, -1)
        recent_valid = place.rand(self.batch, self.sinks + self.ring) > 0.3
        recent_kv = place.randn(self.batch, self.heads, self.sinks + self.ring, width)
        recent_kv = torch.where(recent_valid[:, None, :, None], recent_kv, UNREADABLE)
        q = place.randn(self.batch, self.heads * self.group, self.dk)
        ids, tokens = self.rank(place, fill, block_table)
        given = {
            "q": q,
            "kv": kv,
            "flags": flags,
            "block_table": block_table,
            "ids": ids,
            "tokens": tokens,
            "recent_kv": recent_kv,
            "recent_valid": recent_valid,
            "value_dim": self.dv,
            "scale": self.dk**-0.5,
            "threshold": self.threshold,
            "group_reduce": self.group_reduce,
            "min_blocks": self.min_blocks,
            "max_blocks": self.max_blocks,
            "softcap": self.softcap,
            "sink_logits": place.randn(self.heads * self.group) if self.learned_sink else None,
            "estimate": self.estimate,
            "logits": None if self.estimate == "as_min" else self.logits(place, q, kv, flags, block_table),
            "logit_scale": 2.0,
        }
        if self.paged:
            given |= self.in_pages(place, kv, block_table, ids)
        return given

    def rank(self, place, fill, block_table):
        """Random orders of the blocks that have tokens."""
        ids = torch.full((self.batch, self.heads, self.n), -1, dtype=torch.int32, device=place.device)
        tokens = torch.zeros_like(ids)
        for row in range(self.batch):
            at = block_table[row].clamp_min(0).long()
            live = ((block_table[row] >= 0) & (fill[at] > 0)).nonzero().flatten()
            for head in range(self.heads):
                mixed = live[place.randperm(len(live)).long()]
                ids[row, head, : len(live)] = mixed.int()
                tokens[row, head, : len(live)] = fill[block_table[row, mixed].long()]
        return ids, tokens

    def logits(self, place, q, kv, flags, block_table):
        """Halves of the largest logit of each block, and a little more or noise; anything where there is none."""
        keys = torch.where((flags == 1)[:, None, :, None], kv[..., : self.dk].float(), 0.0)
        q = q.float().view(self.batch, self.heads, self.group, self.dk)
        logits = torch.einsum("bhgd,bnhtd->bhgnt", q, keys[block_table.clamp_min(0).long()]) * self.dk**-0.5
        usable = (flags == 1)[block_table.clamp_min(0).long()][:, None, None]
        best = logits.masked_fill(~usable, -1e4).amax(-1)
        best = self.softcap * torch.tanh(best / self.softcap) if self.softcap else best
        best = best + (0.2 if self.estimate == "bound" else place.randn(*best.shape).float())
        return best.flatten(1, 2).contiguous() / 2

    def in_pages(self, place, kv, block_table, ids):
        """Some blocks in pages in any order, the others by the place of their physical block."""
        count = kv.shape[0] * self.heads
        page_of = (place.randperm(count) * 2).view(kv.shape[0], self.heads)
        pages = place.nan(2 * count, self.block_size, kv.shape[-1])
        pages[page_of.flatten().long()] = kv.flatten(0, 1)
        home = place.rand(kv.shape[0], self.heads) < 0.4
        physical_id = block_table[:, None].expand(-1, self.heads, -1).gather(-1, ids.clamp_min(0).long())
        head = torch.arange(self.heads, device=kv.device)[None, :, None]
        at = physical_id.clamp_min(0).long(), head
        page_ids = torch.where(home[at], -(physical_id + 2), page_of[at])
        kv = torch.where(home[..., None, None], kv, UNREADABLE)
        return {"pages": pages, "page_ids": torch.where(ids < 0, -1, page_ids).int(), "kv": kv}

    def state(self, place) -> WalkState:
        state = WalkState.empty(self.batch, self.heads, place.device, chosen=9)
        state.limits[1] = self.first
        return state

    def walk(self, place, given: dict, **changes) -> Walk:
        batch, heads = self.batch, self.heads
        counts = {
            name: torch.zeros(batch, heads, dtype=torch.int64, device=given["q"].device)
            for name in ("attended", "from_host")
        }
        return Walk(**{**given, "state": self.state(place), **counts, **changes})


def on_cpu(given: dict) -> dict:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def algorithm_1(case: Case, given: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PSA's Algorithm 1, a block at a time: the output, the blocks used, and the share at which each head stopped."""
    g = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in on_cpu(given).items()
    }
    batch, heads, group, dk = case.batch, case.heads, case.group, case.dk
    out = torch.zeros(batch, heads * group, case.dv, dtype=torch.float64)
    used = torch.zeros(batch, heads, dtype=torch.int32)
    mass = torch.ones(batch, heads)

    def attention(q, k, v):  # O and AS
        logits = k @ q * g["scale"]
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        weight = logits.exp()
        return weight @ v / weight.sum(), weight.sum()

    for row in range(batch):
        for head in range(heads):
            order = [b for b in g["ids"][row, head].tolist() if b >= 0]
            counts = dict(zip(order, g["tokens"][row, head].tolist()))
            queries = g["q"][row, head * group : (head + 1) * group]
            o_acc, as_acc, as_min = [], [], [math.inf] * group
            for i, q in enumerate(queries):
                seen = g["recent_kv"][row, head][g["recent_valid"][row]]
                o, as_ = (
                    attention(q, seen[:, :dk], values_of(seen, dk, case.dv))
                    if len(seen)
                    else (torch.zeros(case.dv), 0.0)
                )
                if case.learned_sink:
                    sink = g["sink_logits"][head * group + i].exp()
                    o, as_ = o * as_ / (as_ + sink), as_ + sink
                o_acc.append(o)
                as_acc.append(as_)
            left, sum_min = sum(counts.values()), math.inf
            ratios: list[list[float]] = []
            for b in order if case.max_blocks is None else order[: case.max_blocks]:
                physical_id = g["block_table"][row, b]
                tokens = (g["flags"][physical_id] == 1).nonzero().flatten()
                kv = g["kv"][physical_id, head, tokens]
                if case.paged and (at := int(g["page_ids"][row, head, g["ids"][row, head].tolist().index(b)])) >= 0:
                    kv = g["pages"][at, tokens]
                used[row, head] += 1
                left -= counts[b]
                each = [attention(q, kv[:, :dk], values_of(kv, dk, case.dv)) for q in queries]
                sum_min = min(sum_min, sum(as_ for _, as_ in each) / counts[b])
                for i, (o, as_) in enumerate(each):
                    o_acc[i] = (as_acc[i] * o_acc[i] + as_ * o) / (as_acc[i] + as_)
                    as_acc[i] = as_acc[i] + as_
                    as_min[i] = min(as_min[i], as_ / counts[b])
                if case.estimate == "as_min":
                    over, summed = [as_min[i] * left for i in range(group)], sum_min * left
                else:
                    logit = g["logits"][row, head * group : (head + 1) * group] * 2
                    expected = {j: [counts[j] * float(logit[i, j].exp()) for i in range(group)] for j in order}
                    rest = order[order.index(b) + 1 :]
                    over = [sum(expected[j][i] for j in rest) for i in range(group)]
                    summed = sum(over)
                    if case.estimate == "scores":
                        own = [float(as_) / expected[b][i] for i, (_, as_) in enumerate(each)]
                        ratios.append([*own, float(sum(as_ for _, as_ in each)) / sum(expected[b])])
                        *means, mean = (sum(column) / len(ratios) for column in zip(*ratios))
                        over, summed = [m * o for m, o in zip(means, over)], mean * summed
                if case.group_reduce == "sum":
                    shares = [sum(as_acc) / (sum(as_acc) + summed)]
                else:
                    shares = [as_acc[i] / (as_acc[i] + over[i]) for i in range(group)]
                mass[row, head] = float(min(shares))
                if mass[row, head] > case.threshold and used[row, head] >= case.min_blocks:
                    break
            out[row, head * group : (head + 1) * group] = torch.stack(o_acc)
    return out, used, mass
