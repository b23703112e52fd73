"""Progressive walks in the operator benchmark: over the tensors of a :class:`Layer`, as far as is wanted.

The keys there are random, so that no walk would stop early; each is cut off by ``max_blocks`` instead, and the first
round reads as many. What a walk of so many blocks costs does not depend on why it stopped.

Besides ``attention_us``, the whole step, and ``<part>_us``, a part over and over, there is what one more kernel costs
behind others, each with a dependent launch as in a step (a memory copy has none). The first of them begins the walk::

    launch_us           begin, begin           less begin: what no kernel of its own goes below
    verify_us           begin, verify          less begin
    verify_idle_us      begin, verify, verify  less begin, verify: a round after the walk has ended
    verify_in_step_us   begin, attend, verify  less begin, attend
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparsekv.ops._dispatch import use_triton
from hf_sparsekv.ops._overlap import begin, overlap
from hf_sparsekv.ops.block_rank import block_rank
from hf_sparsekv.ops.block_rank.reference import block_rank as ranked
from hf_sparsekv.ops.block_score import block_score
from hf_sparsekv.ops.progressive import ROUNDS, Walk, WalkState, progressive_decode, reference
from hf_sparsekv.ops.seal import key_metadata
from hf_sparsekv.policies.progressive import SLOPES
from hf_sparsekv.tuning.layer_step import PIECE, Layer
from hf_sparsekv.tuning.timing import Time, captured

from ..report import Report
from .check import near_enough, same

BLOCKS = (32, 64, 128)  # that walks take
MARGINS = {  # what the last of these costs behind the others
    "launch_us": ("begin", "begin"),
    "verify_us": ("begin", "verify"),
    "verify_idle_us": ("begin", "verify", "verify"),
    "verify_in_step_us": ("begin", "attend", "verify"),
}


@triton.jit
def _begin_kernel(p_from, p_to, size, BN: tl.constexpr, PDL: tl.constexpr):
    """Copy ``size`` limits; one program."""
    begin(PDL)
    o_n = tl.arange(0, BN)
    b_limit = tl.load(p_from + o_n, mask=o_n < size)  # [BN]
    tl.store(p_to + o_n, b_limit, mask=o_n < size)


def _begin(first: Tensor, limits: Tensor) -> None:
    """``limits.copy_(first)`` by a kernel that is launched as those of a step are."""
    if not use_triton(limits):
        limits.copy_(first)
        return
    size = limits.numel()
    _begin_kernel[(1,)](first, limits, size, BN=triton.next_power_of_2(size), num_warps=1, **overlap(limits))


class WalkLayer:
    """A layer's progressive steps.

    Args:
        layer: whose tensors.
        blocks: that every walk takes.
    """

    def __init__(self, layer: Layer, blocks: int) -> None:
        s, self.layer, self.blocks = layer.shape, layer, blocks
        self.state = WalkState.empty(s.batch, s.heads, layer.q.device)
        self.bounds = torch.empty_like(layer.bounds)
        usable, piece = layer.flags == 1, max(1, PIECE // layer.kv[0].numel())
        for lo in range(0, len(layer.kv), piece):
            at = slice(lo, lo + piece)
            self.bounds[at] = key_metadata(layer.kv[at, ..., : s.dim], usable[at], 1, "cuboid_mean")[:, 0]
        self.head_scores = torch.empty(*layer.q.shape[:2], layer.block_table.shape[1], device=layer.q.device)
        self.state.limits[1] = blocks
        self.first = self.state.limits.clone()
        self.score()
        self.rank()
        self.made = self.walk()
        self.made.expect()

    def walk(self) -> Walk:
        """The walk that a step makes."""
        layer, s = self.layer, self.layer.shape
        return Walk(
            layer.q,
            layer.kv,
            layer.flags,
            layer.block_table,
            self.ids,
            self.tokens,
            layer.recent_kv,
            layer.recent_valid,
            self.state,
            value_dim=s.values,
            scale=s.dim**-0.5,
            threshold=1.0,
            max_blocks=self.blocks,
            estimate="scores",
            logits=self.head_scores,
            logit_scale=SLOPES["cuboid_mean"] * s.dim**-0.5,
            attended=layer.attended,
        )

    def score(self) -> None:
        layer = self.layer
        given = (layer.q, self.bounds, layer.fill, layer.block_table, "max", "cuboid_mean")
        block_score(*given, out=layer.block_scores, each=self.head_scores)

    def rank(self) -> None:
        layer = self.layer
        self.ids, self.tokens = block_rank(layer.block_scores, layer.fill, layer.block_table)

    def step(self, rounds: int = ROUNDS) -> None:
        """Rank, walk and attend."""
        self.layer.append()
        self.score()
        self.rank()
        progressive_decode(self.walk(), rounds=rounds, out=self.layer.out)

    def attend(self, **options: int) -> None:
        self.made.attend(near=True, limits=self.first, **options)

    def begin(self) -> None:
        """As a walk begins: what the verifier alone has to be given."""
        _begin(self.first, self.state.limits)

    def expect(self, **options: int) -> None:
        self.made.expect(**options)

    def verify(self, **options: int) -> None:
        self.made.verify(last=False, certain=False, **options)

    def merge(self) -> None:
        self.made.merge(self.layer.out)

    def check(self) -> None:
        """Raise an AssertionError if the step's result is not that of the references."""
        layer = self.layer
        layer.poison()
        self.step()
        expected = ranked(layer.block_scores, layer.fill, layer.block_table)
        same("block_rank", self.ids, expected[0])
        same("tokens of the ranked blocks", self.tokens, expected[1])
        got = layer.out.clone()
        used, walk = self.state.used.clone(), self.walk()
        same("blocks used", used, torch.full_like(used, self.blocks))
        walk.operators, walk.state, walk.attended = reference, self.state.clone(), None
        walk.state.limits.copy_(self.first)
        near_enough(layer, "progressive", got, progressive_decode(walk))


def measure_walks(layers: list[Layer], report: Report) -> None:
    """Figures of walks of several lengths, and of their parts alone."""
    shape = layers[0].shape
    for blocks in (blocks for blocks in BLOCKS if blocks <= shape.full_blocks):
        variant = f"progressive:blocks={blocks}"
        with report.measuring(shape.batch, shape.context, variant):
            walks = [WalkLayer(layer, blocks) for layer in layers]
            walks[0].check()
            for walk in walks:
                walk.step()

            def time(*parts: str, walks=walks, **options) -> Time:
                def run(i: int) -> None:
                    for part in parts:
                        getattr(walks[i], part)(**options)

                return captured(run, len(walks))

            report.add("attention_us", time("step").samples, "us")
            for part in ("score", "rank", "expect", "attend", "merge"):
                report.add(f"{part}_us", time(part).samples, "us")
            for metric, parts in MARGINS.items():
                report.add(metric, (time(*parts) - time(*parts[:-1])).samples, "us")
            report.rename(f"{variant}:rounds=2")
            report.add("attention_us", time("step", rounds=2).samples, "us")
