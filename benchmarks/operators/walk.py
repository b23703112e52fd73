"""Selections by need in the operator benchmark: over the tensors of a :class:`Layer`, as many tokens as are wanted.

The keys there are random, so that nearly all of them would be taken; each selection is cut off at as many tokens
instead. The time to select so many tokens does not depend on why the selection ended.
"""

from __future__ import annotations

import torch

from hf_sparsekv.ops._dispatch import use_triton
from hf_sparsekv.ops.selection.mass_select import mass_select
from hf_sparsekv.ops.selection.token_score import token_score
from hf_sparsekv.tuning.layer_step import Layer


class WalkLayer:
    """A layer's selections by need.

    Args:
        layer: whose tensors.
        tokens: that every row and KV head attends to.
    """

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.tokens = layer, tokens
        shape = (*layer.q.shape[:2], layer.block_table.shape[1] * layer.shape.config.block_size)
        self.scores = torch.empty(shape, dtype=torch.float32, device=layer.q.device)
        labels = layer.codes, layer.qparams, layer.channels, layer.rows, layer.block_table
        token_score(layer.q, *labels, None, "none", sinks=layer.sinks, norms=layer.norms, out=self.scores)
        self.select()

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
