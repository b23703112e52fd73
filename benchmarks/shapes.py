"""Model shapes to measure: configurations of known models, filled with random weights, or models by name or path."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.cache_utils import get_layer_types_and_kwargs

from hf_sparsekv.cli.loading import load_config, pretrained
from hf_sparsekv.tuning.random_model import random_model as random_model
from hf_sparsekv.tuning.shapes import SHAPES, known_shape


def parse_shape(text: str) -> tuple[int, int]:
    """``8x32k`` -> ``(8, 32768)``: rows and tokens.

    Raises:
        ArgumentTypeError: it is no shape.
    """
    if not (match := re.fullmatch(r"(\d+)x(\d+k?)", text.lower())) or not int(match[1]):
        raise ArgumentTypeError(f"{text!r} is no shape; write BATCHxLENGTH, for example 8x32k")
    return int(match[1]), parse_tokens(match[2])


def parse_tokens(text: str) -> int:
    """``32k`` -> 32768.

    Raises:
        ArgumentTypeError: it is no number of tokens.
    """
    if not (match := re.fullmatch(r"(\d+)(k?)", text.lower())):
        raise ArgumentTypeError(f"{text!r} is no length; write for example 512 or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_context(text: str) -> int:
    """As :func:`parse_tokens`, at least one.

    Raises:
        ArgumentTypeError: it is no number of tokens, or 0.
    """
    if not (tokens := parse_tokens(text)):
        raise ArgumentTypeError(f"{text!r} is no length; write for example 512 or 32k")
    return tokens


def text_config(model) -> PreTrainedConfig:
    """The configuration of the decoder (of a model, or given as one)."""
    return getattr(model, "config", model).get_text_config(decoder=True)


def head_dim(config: PreTrainedConfig) -> int:
    """Channels of a head: some configurations leave them to the reader."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def latent_dims(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Numbers of a latent and of its rotary part, if these are what the model caches (MLA)."""
    rank = getattr(config, "kv_lora_rank", None)
    return (rank, config.qk_rope_head_dim) if rank else None


def cached_token(config: PreTrainedConfig) -> tuple[int, int, int]:
    """KV heads of a cached token, and the widths of its key and value (or of its latent and rotary part)."""
    return (1, *latent_dims(config)) if latent_dims(config) else (config.num_key_value_heads, *[head_dim(config)] * 2)


def query_dim(config: PreTrainedConfig) -> int:
    """Channels of a query as a cache sees it."""
    return sum(latent_dims(config)) if latent_dims(config) else head_dim(config)


def windows(config: PreTrainedConfig) -> list[int | None]:
    """For each layer the tokens that it attends to at most, None for all.

    Raises:
        ValueError: the model has layers that keep something other than keys and values.
    """
    kinds, options = get_layer_types_and_kwargs(config)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layers of kind {', '.join(unknown)} cannot be filled with keys and values")
    if isinstance(options, dict):  # of all layers; later releases than transformers 5.17 give each layer its own
        options = [options] * len(kinds)
    return [own["sliding_window"] if kind == "sliding_attention" else None for kind, own in zip(kinds, options)]


def parse_model(text: str) -> str:
    """A known shape's name however it is spelled (``Qwen3_8B``), any other name as it is."""
    shape = None if "/" in text or Path(text).exists() else known_shape(text)
    return shape or text


def known_config(name: str, layers: int | None = None) -> PreTrainedConfig:
    """Configuration of the decoder of a known shape, or of a model by name or path; of its first ``layers`` only.

    Raises:
        CommandError: there is no such model, or the hub does not answer.
    """
    config = text_config(SHAPES[name]() if name in SHAPES else load_config(name, SHAPES))
    if layers is not None:
        config.num_hidden_layers = layers
        for kinds in ("layer_types", "mlp_layer_types"):
            if getattr(config, kinds, None):
                setattr(config, kinds, getattr(config, kinds)[:layers])
    return config


def case_name(name: str) -> str:
    """A model's name in the rows: the last part of a path."""
    return name if name in SHAPES else Path(name).name.lower()


def real_model(name: str, dtype: torch.dtype | None, device: torch.device) -> torch.nn.Module:
    """A model by name or path, with its weights; ``dtype=None`` is the checkpoint's.

    Raises:
        CommandError: there is no such model, or the hub does not answer.
    """
    model = pretrained(AutoModelForCausalLM, name, SHAPES, dtype=dtype or "auto", attn_implementation="sparsekv")
    # A checkpoint's settings for sampling and stopping are dropped: they would change a measurement.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(device).eval()


def weight_bytes(model, batch: int = 1) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table that is not the output layer, too.

    A mixture of experts counts the experts that ``batch`` rows choose, if each takes any of them alike. With E experts,
    k a row, they are ``E (1 - (1 - k / E) ** batch)``.
    """
    total = sum(p.nbytes for p in model.parameters())
    config = text_config(model)
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        held = [p for p in module.parameters(recurse=False) if p.ndim >= 3 and p.shape[0] == experts]
        if held:
            unread = (1 - config.num_experts_per_tok / experts) ** batch
            total -= int(unread * sum(p.nbytes for p in held))
    return total if config.tie_word_embeddings else total - model.get_input_embeddings().weight.nbytes


def kv_bytes(config: PreTrainedConfig, batch: int, context: int, itemsize: int = 2) -> int:
    """Bytes of keys and values (or latents) that a dense step reads."""
    heads, key, value = cached_token(config)
    token = heads * (key + value) * itemsize
    return batch * token * sum(context if size is None else min(size, context) for size in windows(config))


POOL_SIZES = "0.25kv (share of all keys and values), 0.3 (of the free memory), 8e9 (bytes)"


def parse_pool(text: str) -> str:
    """For argparse: ``0.25kv`` (share of all keys and values), ``0.3`` (share of the free memory), ``8e9`` (bytes)."""
    try:
        pool_size(text, 1 << 40)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None  # keeps the message
    return text


def pool_size(text: str | None, kv: int) -> int | float | None:
    """The value of ``OffloadConfig(device_pool=...)`` for a cache of ``kv`` bytes.

    Raises:
        ValueError: the text says no size.
    """
    if text is None:
        return None
    lower = text.lower()
    try:
        value = float(lower.removesuffix("kv"))
    except ValueError:
        value = -1.0
    if value < 0:
        raise ValueError(
            f"a device pool is a share of the KV (0.25kv), of free memory (0.3) or bytes (8e9), got {text!r}"
        )
    if lower.endswith("kv"):
        return int(value * kv)
    return value if 0 < value < 1 else int(value)
