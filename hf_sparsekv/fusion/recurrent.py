"""The forward passes that ``fuse`` gives to layers with a state: a decode step is one kernel between projections."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.layers.gated_delta_step import gated_delta_step
from ..ops.layers.mamba2_step import mamba2_step
from .joined_linear import is_observed
from .layers import is_usable

_OF_PACKED = ("cu_seq_lens_q", "seq_idx")  # arguments of prompts without padding between them


# Names that the gated norms use whose code the kernels replace: the norm before its gate, or after.
_NORM = "dtype float32 mean pow rsqrt to torch variance_epsilon weight "
NORM_BEFORE = frozenset((_NORM + "ACT2FN activation").split())
NORM_AFTER = frozenset((_NORM + "functional nn silu").split())
_IN_GROUPS = frozenset(("group_size", "shape", "view"))


@cache
def _names(kind: Any) -> frozenset[str]:
    """The names that the forward pass of a class uses."""
    return frozenset(inspect.unwrap(kind.forward).__code__.co_names)


def _code(module: Any) -> frozenset[str]:
    """The names that the forward pass of a module's class uses."""
    kind: Any = type(module)
    return _names(kind)


def conv_weight(conv: nn.Conv1d) -> Tensor:
    """``[C, K]`` of a convolution of each channel."""
    return conv.weight.squeeze(1)


def held_states(layer: Any, x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """The states of a cache's layer that a kernel may write: of the convolution, and the recurrent one, float32.

    Args:
        x: the layer's input. The states must fit it.
        shape: of a row's recurrent state.
    """
    if not getattr(layer, "has_previous_state", {0: False})[0] or layer.record_past:
        return None
    conv, state = layer.conv_states[0], layer.recurrent_states[0]
    if conv is None or state is None or state.dtype != torch.float32:
        return None
    if not (conv[:1].is_contiguous() and state[:1].is_contiguous()) or conv.dtype != x.dtype:
        return None
    fits = state.shape[1:] == shape and all(t.device == x.device and len(t) == len(x) for t in (conv, state))
    return (conv, state) if fits else None


def came(cache: Any, index: int) -> None:
    """A step has come to layer ``index``: caches of ours count passes by the question."""
    cache.has_previous_state(index, state_idx=0)


def stored(cache: Any, index: int) -> None:
    """A step has written the states of layer ``index``."""
    if (passes := getattr(cache, "linear_passes", None)) is not None:
        passes.stored(index)


def _is_plain(module: nn.Module) -> bool:
    """Whether a kernel may compute what this module does: it has not been replaced and has no hooks."""
    return "forward" not in module.__dict__ and not hasattr(module, "_hf_hook") and not is_observed(module)


class _Step:
    """A decode step over a cache's states takes :meth:`_step`; everything else the original's forward pass."""

    def forward(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        states = None
        if cache_params is not None and hidden_states.shape[1] == 1 and attention_mask is None:
            packed = any(kwargs.get(name) is not None for name in _OF_PACKED)
            if not packed and self._is_known(hidden_states):
                states = held_states(cache_params.layers[self.layer_idx], hidden_states, self._state_shape)
        if states is None:
            return super().forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        came(cache_params, self.layer_idx)
        out = self._step(hidden_states[:, 0], *states)
        stored(cache_params, self.layer_idx)
        return self.out_proj(out[:, None])


class FusedGatedDelta(_Step):
    """Gated delta rule (Qwen3-Next, Qwen3.5): a token of each row is one kernel between the projections."""

    def _is_known(self: Any, x: Tensor) -> bool:
        """The kernel computes what the layer would of ``x``."""
        conv, norm = self.conv1d, self.norm
        return (
            is_usable(x, conv.weight, norm.weight)
            and self.activation == norm.activation == "silu"
            and conv.bias is None
            and conv.weight.is_contiguous()
            and _code(norm) == NORM_BEFORE
            and _is_plain(conv)
            and _is_plain(norm)
        )

    def _step(self: Any, x: Tensor, conv_state: Tensor, state: Tensor) -> Tensor:
        return gated_delta_step(
            *self._projected(x),
            conv_state,
            conv_weight(self.conv1d),
            state,
            self.A_log,
            self.dt_bias,
            self.norm.weight,
            self.norm.variance_epsilon,
        )

    @property
    def _state_shape(self: Any) -> tuple[int, ...]:
        return self.num_v_heads, self.head_k_dim, self.head_v_dim

    def _projected(self: Any, x: Tensor) -> list[Tensor]:
        """``q, k, v, z, a, b``, ``[batch, Hk, ..]`` each: views of the projections."""
        names, joined, heads = self._fused.arch.delta, self._fused.joined, self.num_k_heads
        parts = joined(self, x) if joined is not None else [getattr(self, name)(x) for name in names]
        values = self.num_v_heads // heads * self.head_v_dim
        if len(names) == 2:  # the projections are by key head
            mixed, gates = (part.view(len(x), heads, -1) for part in parts)
            q, k, v, z = mixed.split((self.head_k_dim, self.head_k_dim, values, values), dim=-1)
            b, a = gates.chunk(2, dim=-1)
            return [q, k, v, z, a, b]
        mixed, z, b, a = parts
        mixed = mixed.split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        return [part.view(len(x), heads, -1) for part in (*mixed, z, a, b)]


class FusedMamba2(_Step):
    """Mamba 2 (Nemotron-H, Bamba, Granite 4): a token of each row is three kernels between the projections."""

    def _is_known(self: Any, x: Tensor) -> bool:
        """The kernels compute what the layer would of ``x``."""
        conv, norm = self.conv1d, self.norm
        biases = () if conv.bias is None else (conv.bias,)
        return (
            is_usable(x, conv.weight, norm.weight, *biases)
            and self.activation in ("silu", "swish")
            and conv.weight.is_contiguous()
            and _code(norm) - _IN_GROUPS == NORM_AFTER
            and _is_plain(conv)
            and _is_plain(norm)
        )

    def _step(self: Any, x: Tensor, conv_state: Tensor, state: Tensor) -> Tensor:
        gate, mixed, dt = self.in_proj(x).split((self.intermediate_size, self.conv_dim, self.num_heads), dim=-1)
        return mamba2_step(
            mixed,
            gate,
            dt,
            conv_state,
            conv_weight(self.conv1d),
            self.conv1d.bias,
            state,
            self.A_log,
            self.D,
            self.dt_bias,
            self.norm.weight,
            self.norm.variance_epsilon,
            self.intermediate_size // getattr(self.norm, "group_size", self.intermediate_size),
        )

    @property
    def _state_shape(self: Any) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.ssm_state_size
