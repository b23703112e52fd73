"""Which attention a layer's prompt gets: exact, or sparse where that was asked for and can be had.

:mod:`.prompt` stores a prompt's tokens, whatever attention they got.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig

from ..attention.handle import Step
from ..attention.indices import exact_of
from ..attention.sparse_prompt import LAST, WIDEST, WIDEST_FLOAT32, PromptAudit, sparse_attention
from ..types import AttentionParams

LEAST = 1024  # new tokens; fewer are exact, as launches would cost more than they save. Not measured yet


def least_new(config: SparseConfig) -> int:
    """New tokens of the shortest piece of a prompt that is sparse."""
    return max(LAST + 1, min(config.prefill_below, LEAST))


def attention_of(
    step: Step, config: SparseConfig, index: int, audit: PromptAudit, query: Tensor, params: AttentionParams
) -> Callable[..., Tensor]:
    """Attention of ``query [batch, Hq, q, Dk]`` to all that layer ``index`` holds, as :func:`.exact.exact_attention`.

    Raises:
        ValueError: ``config`` asks for sparse prompts, and the model cannot have them.
    """
    exact = exact_of(step)
    if config.prefill is None:
        return exact
    _check(step, query)
    exactly = (
        index < config.dense_layers
        or step.length < config.prefill_below
        or query.shape[2] < least_new(config)
        or (params.sliding_window is not None and params.sliding_window < step.length)
        or too_precise(query)
        or _learns(step, query, params.sink_logits)
    )
    return exact if exactly else partial(_sparse_or_exact, step, config.prefill, config.prefill_below, audit)


def _check(step: Step, query: Tensor) -> None:
    """Raise for a model whose prompts are never sparse: that would not be what was asked for."""
    why = None
    if step.indices is not None:
        why = "chooses tokens by an indexer of its own"
    elif query.shape[3] > WIDEST or (step.absorbed is None and step.v.shape[3] > WIDEST):
        why = f"has heads of more than {WIDEST} channels"
    if why is not None:
        raise ValueError(f"prefill=... is not for this model, which {why}: leave prefill out")


def too_precise(query: Tensor) -> bool:
    """The operators would round it, or their kernels would be slower than exact attention."""
    wide = query.is_cuda and query.shape[3] > WIDEST_FLOAT32
    return query.dtype == torch.float64 or (query.dtype == torch.float32 and wide)


def _learns(step: Step, query: Tensor, sinks: Tensor | None) -> bool:
    """A gradient has to reach what attends or is attended to, or what expands latents: the operators pass none on."""
    if not torch.is_grad_enabled():
        return False
    tensors = [query, step.k, step.v, sinks]
    if step.absorbed is not None:
        module: Any = step.absorbed.module
        tensors += module.kv_b_proj.parameters()
    return any(tensor.requires_grad for tensor in tensors if tensor is not None)


def _sparse_or_exact(
    step: Step,
    mass: float,
    below: int,
    audit: PromptAudit,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    *,
    columns: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Sparse attention, or exact attention under masks that are more than padding in front."""
    start = None if columns is None else step.under_way.starts(columns)
    if mask is not None or dropout or (columns is not None and start is None):
        return exact_of(step)(query, key, value, params, columns=columns, mask=mask, dropout=dropout)
    audit.passes += 1
    attend = partial(_attend, mass, below, audit, start, query.shape[1])
    if step.absorbed is None:
        return attend(query, key, value, params)
    return step.absorbed.attention(query, key, value, params, columns=columns, attend=attend)


def _attend(
    mass: float,
    below: int,
    audit: PromptAudit,
    start: Tensor | None,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    *,
    first: tuple[int, int] = (0, 0),
    **masks: object,
) -> Tensor:
    """Sparse attention of some rows and heads.

    Args:
        start: of all rows.
        first: which row and query head of the layer's are the first ones here.
        masks: what ``start`` says already.
    """
    row, head = first
    if start is not None and len(start) > len(query):
        start = start[row : row + len(query)].clone()  # its own address, aligned
    return sparse_attention(
        query.detach(),
        key.detach(),
        value.detach(),
        params,
        mass,
        audit,
        start=start,
        below=below,
        first_head=head,
        heads=heads,
    )
