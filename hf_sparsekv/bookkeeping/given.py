"""What ``generate()`` may be given together with a cache that holds tokens already.

Apart from the cache because it looks into ``generate()``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerationMode

from ..attention.masks import SECOND_PROMPT, check_columns
from ..cache_name import given_cache
from ..layers.complete import check_complete

# Up to transformers 5.20 chunks begin with the input's first token, whatever is cached.
_CHUNKS_GO_ON = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)
_READ = {"self", "input_ids", "generation_config", "generation_mode"}
_ANEW = ": call cache.reset() or make a new cache, or leave {option} out"


class GivenToGenerate:
    """``Cache._is_user_defined``, which ``generate()`` sets on a cache that it is given, before it reads anything.

    So its input is checked there, once a call. ``generate()`` skips as many first tokens of its input as the cache
    holds, by a count that may be negative: 50 tokens over 93 cached ones leave the last 7. A forward pass could tell
    only by its mask. From transformers 5.18 on a mask of ones is dropped before that.
    """

    def __get__(self, cache: Any, kind: type) -> Any:
        return self if cache is None else cache.__dict__.get("_given", False)

    def __set__(self, cache: Any, given: bool) -> None:
        call = _call_over(cache)
        if call is not None:
            check_input(cache, call)
        cache._given = given


def _call_over(cache: Any) -> Mapping[str, Any] | None:
    """The local variables of the ``generate()`` that is given ``cache``; None if there is none.

    (Their names are those of transformers 5.17 to 5.24. If a later release renamed them, tests would fail.)
    """
    frame = sys._getframe(2).f_back
    while frame is not None:
        if frame.f_code.co_name == "generate":
            there = frame.f_locals
            given = there.get("model_kwargs")
            if isinstance(given, dict) and given_cache(given) is cache and _READ.issubset(there):
                return there
        frame = frame.f_back
    return None


def _virtual_tokens(model: Any) -> int:
    """Tokens that PEFT's prompt tuning puts before the input of ``model``, whose inputs it prepares meanwhile."""
    wrapper = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    return getattr(getattr(wrapper, "active_peft_config", None), "num_virtual_tokens", None) or 0


def check_input(cache: Any, call: Mapping[str, Any]) -> None:
    """Raise unless a ``generate()`` over ``cache``, with these local variables, reads what is new in its input.

    Raises:
        ValueError: the input has no new tokens, or its mask has too few columns. Or transformers would read the whole
            of it again: with drafts; in chunks, up to 5.20. Or PEFT has put virtual tokens before the first input.
        RuntimeError: an earlier error left the cache incomplete.
    """
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return  # nothing is cached, or only states of linear attention, which have no length
    for layer in cache.sparse_layers:
        layer._check_complete()
    check_complete(cache.layers)
    cache.linear_passes.check(0, cache.layers, cache.model_config)
    held = int(cache.get_seq_length())
    if not held:
        return
    if virtual := _virtual_tokens(call["self"]):
        raise ValueError(
            f"this cache holds {held} tokens, {virtual} of them virtual tokens of PEFT's prompt tuning, which "
            "generate() would count as tokens of its input: call cache.reset() or make a new cache for each turn"
        )
    given, config = call["model_kwargs"], call["generation_config"]
    mask = given.get("attention_mask")
    embeds = None if config.is_assistant else given.get("inputs_embeds")
    tokens = (call["input_ids"] if embeds is None else embeds).shape[1]
    columns = getattr(config, "_mask_length", None) if mask is None else mask.shape[-1]
    # The whole text so far, or only what is new of it, with a longer mask.
    new = tokens - held if embeds is not None or columns == tokens else tokens
    if new <= 0:
        raise ValueError(
            f"the input has {tokens} tokens, but no new tokens: this cache holds {held} tokens, and generate() takes "
            "that many first tokens of its input for those" + SECOND_PROMPT
        )
    if columns is not None:
        check_columns(columns, held, new)
    if call["generation_mode"] == GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"this cache holds {held} tokens, and transformers' loop for prompt lookup and assistants would read the "
            "whole input again" + _ANEW.format(option="the drafts")
        )
    if config.prefill_chunk_size is not None and not _CHUNKS_GO_ON:
        raise ValueError(
            f"this cache holds {held} tokens, and chunks begin with the input's first token up to transformers 5.20"
            + _ANEW.format(option="prefill_chunk_size")
        )
