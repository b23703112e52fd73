"""Progressive selection in the operator benchmark: over the tensors of a :class:`Layer`, as many tokens as are wanted.

The keys there are random, so that nearly all of them would be taken; each selection is cut off at as many tokens
instead. What a selection of so many tokens costs does not depend on why it ended.
"""

from __future__ import annotations

import torch

from hf_sparsekv.ops._dispatch import use_triton
from hf_sparsekv.ops.selection.mass_select import mass_select
from hf_sparsekv.ops.selection.mass_select.reference import take
from hf_sparsekv.ops.selection.token_score import token_score
from hf_sparsekv.ops.selection.token_score.reference import token_score as scored
from hf_sparsekv.tuning.layer_step import Layer
from hf_sparsekv.tuning.timing import captured

from ..report import Report
from .check import attention, near_enough, poison, same

TOKENS = (2048, 4096, 8192)  # that a selection takes
PARTS = ("score", "select", "attend")
CHUNK = 4096  # scores of a program of the kernels that tell their bins


class WalkLayer:
    """A layer's progressive steps.

    Args:
        layer: whose tensors.
        tokens: that every row and KV head attends to.
    """

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.tokens = layer, tokens
        shape = (*layer.q.shape[:2], layer.block_table.shape[1] * layer.shape.config.block_size)
        self.scores = torch.empty(shape, dtype=torch.float32, device=layer.q.device)
        self.score()
        self.select()

    def _score(self, operator, **given) -> torch.Tensor:
        layer = self.layer
        labels = layer.codes, layer.qparams, layer.channels, layer.rows, layer.block_table
        return operator(layer.q, *labels, None, "none", sinks=layer.sinks, **given)

    def score(self) -> None:
        self._score(token_score, out=self.scores)

    def select(self, config: int | None = None) -> None:
        layer = self.layer
        self.found = mass_select(
            self.scores,
            layer.q,
            layer.channels,
            layer.recent_kv,
            layer.rows,
            sinks=layer.sinks,
            scale=layer.shape.dim**-0.5,
            threshold=0.95,
            min_tokens=self.tokens,
            max_tokens=self.tokens,
            **({"config": config} if config and use_triton(self.scores) else {}),
        )

    def attend(self) -> None:
        self.layer.decode(self.found.ids, "token", self.found.count)

    def step(self) -> None:
        """Score, select and attend."""
        self.layer.append()
        for part in PARTS:
            getattr(self, part)()

    def check(self) -> None:
        """Raise an AssertionError if the step's result is not that of the references."""
        layer = self.layer
        poison(layer)
        self.scores.fill_(float("nan"))
        self.found = self.found._replace(ids=torch.zeros_like(self.found.ids))
        self.step()
        near_enough(layer, "token_score", self.scores, self._score(scored))
        self.select(config=CHUNK)  # with its bins
        limits = {"threshold": 0.95, "min_tokens": self.tokens, "max_tokens": self.tokens}
        taken, count, *_ = take(self.found.bins, **limits)
        for config in (CHUNK, None):
            self.select(config=config)
            same("number of tokens", self.found.count, count)
            ids, n = self.found.ids, self.found.ids.shape[2]
            there = torch.arange(n, device=ids.device) < count[..., None]
            marked = torch.zeros(*ids.shape[:2], n + 1, dtype=torch.bool, device=ids.device)
            marked.scatter_(-1, torch.where(there, ids, n).long(), True)
            if config is None:  # shares on the border of two bins may be rounded to either
                moved = (marked[..., :-1] ^ taken).sum(-1)
                assert (moved <= 0.02 * count + 2).all(), "other tokens"
            else:
                same("tokens", marked[..., :-1], taken)
        self.found = self.found._replace(ids=ids.masked_fill(~there, -1))
        near_enough(layer, "sparse_decode", layer.out, attention(layer, self.found.ids, "token", layer.shape.batch))


def measure_walks(layers: list[Layer], report: Report) -> None:
    """Figures of selections of several lengths, and of their parts alone."""
    shape = layers[0].shape
    stored = shape.full_blocks * shape.config.block_size
    for tokens in (tokens for tokens in TOKENS if tokens <= stored):
        with report.measuring(shape.batch, shape.context, f"progressive:tokens={tokens}"):
            walks = [WalkLayer(layer, tokens) for layer in layers]
            walks[0].check()
            for part in ("step", *PARTS):
                ways = [getattr(walk, part) for walk in walks]
                time = captured(lambda i, ways=ways: ways[i](), len(ways))
                report.add("attention_us" if part == "step" else f"{part}_us", time.samples, "us")
