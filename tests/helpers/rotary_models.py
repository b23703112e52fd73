"""Tiny models with every kind of rotary factors, some of which depend on the longest position of a forward pass."""

from __future__ import annotations

import torch
import transformers as tf
from models import COMMON

SWITCH = 64  # tokens up to which LongRoPE takes its short factors
CONTEXT = 512
_SIZES = {**COMMON, "max_position_embeddings": CONTEXT}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": SWITCH,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1 + 0.7 * i for i in range(8)],
}
# As configurations give them, by the names of ROPE_INIT_FUNCTIONS.
KINDS: dict[str, dict] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": _LONG,
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": SWITCH,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def wide(net: torch.nn.Module) -> torch.nn.Module:
    """The same weights each time, wide enough that tokens depend on each other."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=generator)
    return net.eval()


def rotary_llama(kind: str, **changes) -> torch.nn.Module:
    """A Llama with rotary factors of this kind."""
    config = tf.LlamaConfig(**{**_SIZES, "rope_parameters": dict(KINDS[kind]), **changes})
    return wide(tf.LlamaForCausalLM(config))


def phi3() -> torch.nn.Module:
    """As Phi-3.5 and Phi-4-mini: LongRoPE, and a generate() that drops the cache at the switch."""
    sizes = {**_SIZES, "original_max_position_embeddings": SWITCH, "sliding_window": None}
    return wide(tf.Phi3ForCausalLM(tf.Phi3Config(**sizes, rope_parameters={**_LONG, "partial_rotary_factor": 1.0})))


def phimoe() -> torch.nn.Module:
    """As Phi-3.5-MoE: what it multiplies by depends on the pass, the factors do not."""
    scales = {"short_mscale": 1.1, "long_mscale": 1.6}
    sizes = {**_SIZES, "original_max_position_embeddings": SWITCH, "sliding_window": None, "num_local_experts": 4}
    return wide(tf.PhimoeForCausalLM(tf.PhimoeConfig(**sizes, rope_parameters={**_LONG, **scales})))


def by_layer_type(kind: str = "longrope") -> torch.nn.Module:
    """A Gemma 3 whose layers all attend to their whole past, with rotary factors for each type of layers."""
    rope = {"full_attention": dict(KINDS[kind]), "sliding_attention": dict(KINDS["default"])}
    config = tf.Gemma3TextConfig(**_SIZES, rope_parameters=rope, layer_types=["full_attention"] * 2)
    return wide(tf.Gemma3ForCausalLM(config))
