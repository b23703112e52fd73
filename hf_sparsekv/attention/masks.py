"""The mask function registered beside the attention function.

Without it transformers would pass no mask at all, padding included (``masking_utils._preprocess_mask_arguments``).
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..untraced import untraced
from .compact_mask import CompactMask, rule_of

# Advice for a cache that holds more than the caller thinks.
SECOND_PROMPT = (
    ". For another prompt, or the same one after an error, call cache.reset() or make a new cache; to go on with a "
    "conversation, pass the whole of it and its mask, what is cached included"
)


_COLUMNS = "_sparsekv_columns"  # attribute of 4-D masks that were made here for causality and padding: see columns_of()
_WHOLE = "_sparsekv_whole"  # attribute of masks that hide nothing: reading the mask itself would wait for the GPU


def is_whole(mask: Tensor) -> bool:
    """Whether this mask of columns was made here, for a pass without padding."""
    return getattr(mask, _WHOLE, False)


def columns_of(mask: Tensor | None) -> Tensor | None:
    """The mask of columns that :func:`sparsekv_mask` has attached to a 4-D mask; any other mask as it is."""
    return getattr(mask, _COLUMNS, mask)


@untraced
def sparsekv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs,
) -> Tensor | None:
    """Mask of a forward pass, in the cheapest sufficient form.

    Returns:
        For plain causal attention over a growing cache: ``None`` where nothing is padding and causality is clear
        (one query, or no past), else the validity of the columns, bool ``[batch, kv_length]``. For windows and chunks
        of prompts ``None`` where they hide nothing, else a :class:`.compact_mask.CompactMask`. For all else (steps of
        sliding layers, overlays, static caches) the 4-D mask that sdpa gets.

    Raises:
        ValueError: the input is empty, or the model computes its attention itself. Or ``attention_mask`` has too few
            columns, often because a second prompt comes over a cache that holds the first.
    """
    if not _calls_interface(type(kwargs.get("config"))):
        raise ValueError(
            f"models of type {kwargs['config'].model_type!r} compute their attention themselves, without transformers' "
            "AttentionInterface: load them with attn_implementation='eager'. (A sparse cache works there, but dense)"
        )
    check_not_empty(batch_size, q_length, q_offset if isinstance(q_offset, int) else 0)
    plain = (
        mask_function is causal_mask_function
        and local_size is None
        and kv_offset == 0
        and isinstance(q_offset, int)
        and kv_length == q_offset + q_length
    )
    device = kwargs.get("device", "cpu")
    if not plain:
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        compact = _compact(*sizes, mask_function, attention_mask, device)
        if compact is not None:
            hides_none = compact.rule.columns is None and q_length == kv_length < (local_size or kv_length + 1)
            return None if hides_none and allow_is_causal_skip else compact
    whole = None
    if not (plain and allow_is_causal_skip):
        whole = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            local_size=local_size,
            **kwargs,
        )
    if not plain:
        return whole
    columns = _columns(batch_size, q_length, kv_length, q_offset, attention_mask, device)
    if whole is None:
        return columns
    setattr(whole, _COLUMNS, columns)  # a model with an indexer, which reads the mask
    return whole


def _compact(
    batch: int, q: int, n: int, q_offset: int, kv_offset: int, mask_function, attention_mask: Tensor | None, device
) -> CompactMask | None:
    """The mask of a prompt, or of a piece of it, by its rule. None: none, or queries are not the last columns."""
    if q == 1 or not isinstance(q_offset, int) or kv_offset + n != q_offset + q:
        return None
    columns = attention_mask
    if columns is not None:
        if columns.ndim != 2 or columns.shape[1] < kv_offset + n:
            return None
        columns = _of_rows(columns[:, kv_offset : kv_offset + n].bool(), batch)
        if bool(columns.all()):  # one synchronisation a forward, as sdpa's own mask has
            columns = None
    rule = rule_of(mask_function, kv_offset, columns)
    if rule is None:
        return None
    if rule.origin is not None:
        rule = replace(rule, origin=_of_rows(rule.origin[:, None], batch)[:, 0].contiguous())
    return CompactMask(rule, batch, q, n, torch.device(device))


def _of_rows(held: Tensor, batch: int) -> Tensor:
    """A mask may be one for all rows; kernels read one for each."""
    return held.expand(batch, -1).contiguous() if held.ndim == 2 and len(held) == 1 < batch else held


def _columns(
    batch: int, q_length: int, kv_length: int, q_offset: int, attention_mask: Tensor | None, device
) -> Tensor | None:
    """The mask of plain causal attention: None, or the validity of the columns, bool ``[batch, kv_length]``."""
    if attention_mask is not None:
        check_columns(attention_mask.shape[-1], q_offset, q_length)
        attention_mask = _of_rows(attention_mask[:, :kv_length].bool(), batch)
        # One synchronisation a forward, as sdpa's own mask has; it spares every layer the masked path.
        if not bool(attention_mask.all()):
            return attention_mask
    if q_length > 1 and q_offset > 0:
        # None would mean "causal from the first column" to sdpa.
        return whole_mask(batch, kv_length, device)
    return None


def whole_mask(batch: int, columns: int, device: torch.device | str) -> Tensor:
    """A mask of columns without padding: :func:`is_whole` knows it."""
    mask = torch.ones(batch, columns, dtype=torch.bool, device=device)
    setattr(mask, _WHOLE, True)
    return mask


def check_columns(columns: int, cached: int, new: int) -> None:
    """Raise for a mask of fewer columns than there are tokens, ``cached`` ones and ``new`` ones."""
    if columns >= cached + new:
        return
    if 0 < columns <= cached:  # how many tokens are new says nothing then: generate() got it wrong
        raise ValueError(
            f"attention_mask has {columns} columns, as for a text of {columns} tokens, but this cache holds "
            f"{cached} tokens already" + SECOND_PROMPT
        )
    raise ValueError(
        f"attention_mask has {columns} columns, but {cached} cached and {new} new tokens make "
        f"{cached + new}: pass the mask of all of them"
    )


def check_not_empty(batch: int, tokens: int, cached: int = 0) -> None:
    """Raise for an input without rows or columns, for which models raise an error about shapes.

    ``generate()`` skips as many first tokens as the cache holds (``cached``), whatever they are. So a second prompt
    that is no longer than that may become empty.
    """
    if not batch or not tokens:
        if batch and cached:
            raise ValueError(
                f"the input has no new tokens: this cache holds {cached} tokens, and generate() takes that many first "
                "tokens of its input for those" + SECOND_PROMPT
            )
        what = "tokens (zero columns)" if batch else "rows"
        raise ValueError(
            f"the input has no {what}: give the model at least one token a forward pass, for an empty prompt its "
            "begin-of-sequence token"
        )


@cache
def _calls_interface(config_class: type) -> bool:
    """False if the modeling code beside this configuration class is known to ignore registered attention functions.

    Or those of its models that attend to a past, which then support eager attention alone.
    """
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    if name == config_class.__module__ or module is None:
        return True
    models = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    models = [one for one in models if one.__module__ == name]
    others = not models or any(one._supports_sdpa or one._supports_flash_attn for one in models)
    try:
        source = inspect.getsource(module)
    except OSError:  # no source at hand
        return others
    # A model with an indexer gives its indices to registered functions only (HY 4, which knows no sdpa).
    return "ALL_ATTENTION_FUNCTIONS" in source and (others or "indices=sparse_indices" in source)


def new_columns(mask: Tensor | None, past: int, length: int) -> Tensor | None:
    """Validity of columns ``past .. length - 1``, bool ``[batch, q]``; ``None`` if the mask does not say.

    In a 4-D mask the last query sees a token, or it may belong to another text of a packed prompt, or lie outside of a
    band: then its own query sees it and others, or another query sees it. The query of a padding column sees nothing;
    or itself, or all columns, in masks that leave no query without a key. (So a text of one token counts as padding.)
    """
    if isinstance(mask, CompactMask):
        mask = mask.rule.columns
    if mask is None:
        return None
    if mask.ndim == 2:
        return mask[:, past:length].bool()
    last = shows(mask[:, :, -1, past:length]).any(1)
    own = shows(mask[..., past:length].diagonal(dim1=2, dim2=3)).any(1)
    if mask.shape[2] == 1 or not bool((own & ~last).any()):
        return last
    seen = shows(mask).any(1)  # [batch, queries, columns]
    some = ~seen.all(-1)  # [batch, queries]
    own = own & some & (seen.sum(-1) > 1)
    others = seen[..., past:length] & some[..., None]
    others.diagonal(dim1=1, dim2=2).fill_(False)
    return last | own | others.any(1)


def new_tokens(mask: Tensor | None, past: int, length: int, batch: int) -> Tensor | None:
    """Validity of columns ``past .. length - 1``, bool ``[batch, q]``; None if none is padding. Waits for the mask."""
    if mask is None or is_whole(mask):
        return None
    valid = new_columns(mask, past, length)
    return None if valid is None or bool(valid.all()) else valid.expand(batch, -1)  # one mask may serve all rows


def shows(mask: Tensor) -> Tensor:
    """Where a mask, bool or additive, lets a query attend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def seen_columns(mask: Tensor, past: int) -> Tensor:
    """Which of the first ``past`` columns a token's query sees in a 4-D mask ``[batch, heads, q, n]``.

    Returns:
        bool ``[batch, past]``.
    """
    mask = mask.materialise() if isinstance(mask, CompactMask) else mask  # of chunks, over a layer that keeps all
    new: Any = new_columns(mask, past, mask.shape[3])
    return (shows(mask[..., :past]).any(1) & new[:, :, None]).any(1)


def check_4d(mask: Tensor, queries: int, columns: int) -> Tensor:
    """A 4-D mask as attention over a cache takes it, ``[batch or 1, heads or 1, queries, columns]``.

    Raises:
        ValueError: it is neither bool nor additive, or of other queries or columns.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a 4-D attention_mask must be bool (True: attend) or additive floats, got {mask.dtype}: pass mask.bool()"
        )
    if mask.shape[2] == 1 < queries:
        mask = mask.expand(-1, -1, queries, -1)
    if mask.shape[2:] != (queries, columns):
        raise ValueError(
            f"a 4-D attention_mask of {list(mask.shape)} does not fit {queries} queries over {columns} cached and new "
            "columns: its last two dimensions must be these"
        )
    return mask
