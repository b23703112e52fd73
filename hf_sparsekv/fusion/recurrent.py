"""The forward passes that ``fuse`` gives to layers with a state: a decode step is one kernel between projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.layers.gated_delta_step import gated_delta_step
from .joined_linear import is_observed
from .layers import is_usable

_OF_PACKED = ("cu_seq_lens_q", "seq_idx")  # arguments of prompts without padding between them


def conv_weight(conv: nn.Conv1d) -> Tensor:
    """``[C, K]`` of a convolution of each channel."""
    return conv.weight.squeeze(1)


def held_states(layer: Any) -> tuple[Tensor, Tensor] | None:
    """The states of a cache's layer that a kernel may write: of the convolution, and the recurrent one, float32."""
    if not getattr(layer, "has_previous_state", {0: False})[0] or layer.record_past:
        return None
    conv, state = layer.conv_states[0], layer.recurrent_states[0]
    if conv is None or state is None or state.dtype != torch.float32:
        return None
    if not (conv[:1].is_contiguous() and state[:1].is_contiguous()):
        return None
    return conv, state


def _is_plain(module: nn.Module) -> bool:
    """Whether a kernel may compute what this module does: it has not been replaced and has no hooks."""
    return "forward" not in module.__dict__ and not hasattr(module, "_hf_hook") and not is_observed(module)


class FusedGatedDelta:
    """Gated delta rule (Qwen3-Next, Qwen3.5): a token of each row is one kernel between the projections."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states = None
        if cache_params is not None and hidden_states.shape[1] == 1 and attention_mask is None:
            states = self._states(hidden_states, cache_params, kwargs)
        if states is None:
            return super().forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        cache_params.has_previous_state(self.layer_idx, state_idx=0)  # caches of ours count passes by it
        conv_state, state = states
        out = gated_delta_step(
            *self._projected(hidden_states),
            conv_state,
            conv_weight(self.conv1d),
            state,
            self.A_log,
            self.dt_bias,
            self.norm.weight,
            self.norm.variance_epsilon,
        )
        passes = getattr(cache_params, "linear_passes", None)
        if passes is not None:
            passes.stored(self.layer_idx)
        return self.out_proj(out[:, None])

    def _states(self, x: Tensor, cache: Any, given: dict) -> tuple[Tensor, Tensor] | None:
        """The layer's states, if the kernel may run on ``x``."""
        weights = self.conv1d.weight, self.norm.weight
        if any(given.get(name) is not None for name in _OF_PACKED) or not is_usable(x, *weights):
            return None
        if self.activation != "silu" or self.norm.activation != "silu" or self.conv1d.bias is not None:
            return None
        if not all(map(_is_plain, (self.conv1d, self.norm))) or not self.conv1d.weight.is_contiguous():
            return None
        states = held_states(cache.layers[self.layer_idx])
        if states is None or states[0].dtype != x.dtype or states[1].shape[1:] != self._state_shape:
            return None
        return states if all(t.device == x.device and len(t) == len(x) for t in states) else None

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        return self.num_v_heads, self.head_k_dim, self.head_v_dim

    def _projected(self, x: Tensor) -> list[Tensor]:
        """``q, k, v, z, a, b``, ``[batch, Hk, ..]`` each: views of the projections."""
        names, joined, heads = self._fused.arch.delta, self._fused.joined, self.num_k_heads
        parts = joined(self, x[:, 0]) if joined is not None else [getattr(self, name)(x[:, 0]) for name in names]
        values = self.num_v_heads // heads * self.head_v_dim
        if len(names) == 2:  # the projections are by key head
            mixed, gates = (part.view(len(x), heads, -1) for part in parts)
            q, k, v, z = mixed.split((self.head_k_dim, self.head_k_dim, values, values), dim=-1)
            b, a = gates.chunk(2, dim=-1)
            return [q, k, v, z, a, b]
        mixed, z, b, a = parts
        mixed = mixed.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        return [part.view(len(x), heads, -1) for part in (*mixed, z, a, b)]
