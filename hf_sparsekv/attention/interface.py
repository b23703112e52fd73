"""The attention function registered with transformers as ``sparsekv``."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..types import AttentionParams
from ..untraced import untraced
from .compact_mask import CompactMask
from .exact import exact_attention
from .handle import KVHandle
from .indices import index_mask
from .masks import sparsekv_mask, whole_mask
from .mla import Absorbed

NAME = "sparsekv"


@untraced
def sparsekv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention over one of our caches; over anything else, what sdpa does.

    Args:
        module: the model's attention module.
        query: ``[batch, Hq, q, Dk]``.
        key, value: handles from one of our caches (of latents in MLA models), or tensors ``[batch, H, n, D]``.
        attention_mask: what :func:`~hf_sparsekv.attention.masks.sparsekv_mask` returned, or a 4-D mask.

    Returns:
        ``[batch, q, Hq, Dv]``, and None: weights are never made.

    Raises:
        ValueError: attention weights were asked for, or a position bias came with one of our caches.
    """
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError(
            "attn_implementation='sparsekv' never computes attention weights: drop output_attentions=True, or load "
            "the model with attn_implementation='eager'"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale, softcap, s_aux, sliding_window)
    if isinstance(key, KVHandle):
        if not isinstance(value, KVHandle) or value.step is not key.step:
            raise ValueError(
                f"{type(module).__name__} attends to other values than those that it has cached with these keys "
                "(differential attention, for one), which sparse caches cannot serve: leave past_key_values out, or "
                "use a DynamicCache"
            )
        if position_bias is not None:
            raise ValueError("sparse caches do not support attention with a position bias: use a DynamicCache")
        if attention_mask is None and query.shape[2] > 1:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if not causal:  # BERT's, without is_decoder=True: no mask means that all see all, as in sdpa
                attention_mask = query.new_ones((), dtype=torch.bool).expand(1, 1, query.shape[2], key.shape[2])
        mine, mask = _by_columns(params, attention_mask)
        step: Any = key.step
        step.indices = kwargs.get("indices", kwargs.get("block_indices"))
        if step.absorbed is not None and step.absorbed.module is not module:  # latents that another layer has stored
            step.absorbed = Absorbed(module)
            if query.shape[2] > 1:
                step.absorbed.refresh(step.k)
        out, key, value = step.layer.owner.attend(module, step, query, mask, mine, dropout)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
        # The layer turned out to be one of transformers' own (sliding): key and value are its tensors.
    return _stock(module, query, key, value, attention_mask, dropout, params, position_bias, is_causal, **kwargs)


def _by_columns(params: AttentionParams, mask: Tensor | None) -> tuple[AttentionParams, Tensor | None]:
    """What layers of ours take for a window's mask that is never made: the window, and which columns are tokens."""
    if not isinstance(mask, CompactMask) or mask.rule.chunk is not None:
        return params, mask
    rule = mask.rule
    window = rule.within(params.sliding_window, mask.shape[3]).window
    columns = whole_mask(mask.shape[0], mask.shape[3], mask.device) if rule.columns is None else rule.columns
    return replace(params, sliding_window=window), columns


def _stock(module, query, key, value, mask, dropout, params, position_bias, is_causal, **kwargs) -> tuple[Tensor, None]:
    """Other caches, sliding layers, assistants, no cache at all."""
    if (indices := kwargs.pop("indices", None)) is not None:  # a model with an indexer leaves them to us
        mask = index_mask(indices, mask, key.shape[2])
    if (blocks := kwargs.pop("block_indices", None)) is not None:
        own = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None] & (torch.arange(key.shape[2], device=query.device) <= own[:, None])
        at = kwargs.get("position_ids", own[None]).expand(len(query), -1)
        mask = module.indexer.build_block_mask(blocks, mask, key.shape[2], query.dtype, query.device, at)
    columns = mask if mask is not None and mask.ndim == 2 else None
    if isinstance(mask, CompactMask) and position_bias is not None:
        mask = mask.materialise()
    compact = columns is not None or isinstance(mask, CompactMask)
    if not compact and params.softcap is None and params.sink_logits is None:
        out = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=params.scale,
            is_causal=is_causal,
            position_bias=position_bias,
            **kwargs,
        )
        return out
    if position_bias is not None:
        raise ValueError("attn_implementation='sparsekv' cannot combine a position bias with softcap, sinks or padding")
    if mask is None and is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if mask is None and not is_causal:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    # A sliding layer's window is in its mask already; without a mask everything lies within the window.
    params = AttentionParams(params.scale, params.softcap, params.sink_logits)
    out = exact_attention(
        query, key, value, params, columns=columns, mask=None if columns is not None else mask, dropout=dropout
    )
    return out.transpose(1, 2).contiguous(), None


_PAGED = (
    "generate_batch() (continuous batching) keeps all keys and values in a paged cache of transformers' own, in whose "
    "place no sparse cache can be: call model.set_attn_implementation('sdpa') before it, or generate() with a sparse "
    "cache, which takes batches, too"
)


def refuse_paged(*args, **kwargs) -> None:
    """Raise in the place of attention over transformers' paged cache, which ``generate_batch()`` asks for.

    There it becomes the ``error`` of each request, and a line in the log; a warning says it, too. (Later releases
    than transformers 5.17, 5.23 for one, refuse by themselves what they do not know.)
    """
    warnings.warn(_PAGED, stacklevel=2)  # or the caller would see nothing but requests without tokens
    raise ValueError(_PAGED)


def register() -> None:
    """Make ``attn_implementation="sparsekv"`` known to transformers, and why it has no paged form. Changes nothing
    else."""
    AttentionInterface.register(NAME, sparsekv_attention)
    AttentionInterface.register(f"paged|{NAME}", refuse_paged)
    AttentionMaskInterface.register(NAME, sparsekv_mask)
