"""The forward passes that ``fused.fuse`` gives to the modules of a model.

Each class here is mixed into the class of one module. ``super().forward`` is transformers' own and runs whenever
``is_usable`` is False. ``Arch`` has the differences between architectures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache_name import given_cache, without_cache
from ..ops.attention.latent_rope import latent_rope
from ..ops.attention.qk_rope import qk_rope
from ..ops.layers.add_norm import add_norm
from ..ops.layers.gated import gated
from ..ops.layers.quantised_linear import MAX_ROWS, QuantisedWeight, quantised_linear
from ..ops.layers.quantised_linear import serves as serves_quantised
from ..ops.layers.route import MAX_TOKENS as MAX_ROUTED_TOKENS
from ..ops.layers.route import route
from ..ops.layers.small_linear import serves, small_linear
from .joined_linear import JoinedLinear, is_observed, local
from .quantised_weight import Kept, found

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_READY = "_sparsekv_ready"
_OF_ATTENTION = ("position_embeddings", "position_ids")  # arguments that layers with a state do not get
_WHOLE = "_sparsekv_whole"


@dataclass(frozen=True)
class Arch:
    """Structure of an architecture's layers.

    Args:
        prefix: prefix of its class names.
        unit_offset: norms multiply by ``1 + weight``.
        sandwich: norms follow attention and MLP too (Gemma).
        qk_norm: queries and keys are normalised.
        rounds_once: norms multiply by their weight before they round (gpt-oss).
        sliding: source of attention's window: an attribute of the ``"module"``, of the ``"config"``, or none.
        softcap: attention takes a softcap.
        sinks: attention takes learned sinks, and rotary factors are of one half of a head (gpt-oss).
        joined: the checkpoint itself joins the projections (Phi-3).
        latent: attention caches latents (MLA). ``"fused"``: as DeepSeek-V3's does. ``"linears"``: in another way, so
            that only its linear layers are changed.
        router: a mixture of experts, with the router of DeepSeek-V3 (``"sigmoid"``), Qwen3-MoE (``"softmax"``), gpt-oss
            (``"softmax_chosen"``) or another one (``"other"``).
        gated: projected with the queries of each head is a gate of its output.
        delta: the projections of layers of the gated delta rule.
        only: of some models these classes alone are fused, named without the prefix, and all linear layers by
            themselves.
        mamba: the class of Mamba 2 layers among them.
    """

    prefix: str
    unit_offset: bool = False
    sandwich: bool = False
    rounds_once: bool = False
    qk_norm: bool = False
    sliding: str = ""
    softcap: bool = False
    sinks: bool = False
    joined: bool = False
    latent: str = ""
    router: str = ""
    gated: bool = False
    delta: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    mamba: str = ""


@dataclass
class State:
    """State of a fused module, in its ``_fused`` attribute.

    Args:
        arch: its model's architecture; ``None`` for a linear layer.
        original: its class before fusing.
        activation: activation of an MLP.
        act: the module that computes the activation, in a tuple as ``following``.
        joined: an attention's or MLP's projections, if they are joined.
        small_batch: our kernel multiplies few rows with the joined projections.
        following: the norm after a layer, in a tuple because a plain attribute would become a submodule.
        kept: scales of a quantised linear layer.
        own: the forward pass that a sharded layer had.
    """

    arch: Arch | None
    original: type
    activation: str = ""
    act: tuple[object, ...] = ()
    joined: JoinedLinear | None = None
    small_batch: bool = False
    following: tuple[nn.Module, ...] = ()
    kept: Kept = field(default_factory=Kept)
    own: Callable[..., Tensor] | None = None


def accelerated(t: Tensor) -> bool:
    """Whether fused kernels run on the device of ``t``."""
    return t.is_cuda


def is_usable(x: Tensor, *others: Tensor) -> bool:
    """Whether a fused forward pass may run on ``x``, given the other tensors that it reads."""
    return (
        accelerated(x)
        and x.dtype in _DTYPES
        and all(t.dtype == x.dtype and t.device == x.device for t in others)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
    )


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _hand_over(t: Tensor, norm: nn.Module, normed: Tensor) -> None:
    """Attach to ``t`` the result of ``norm``. It is stored on the tensor itself, so threads cannot mix it up."""
    setattr(t, _READY, (norm, normed, _version(t)))


def _taken(t: Tensor, norm: nn.Module) -> Tensor | None:
    """The result that was attached for ``norm``, unless ``t`` has been written to since."""
    if torch.compiler.is_compiling():
        return None
    ready = t.__dict__.pop(_READY, None)
    return ready[1] if ready is not None and ready[0] is norm and ready[2] == _version(t) else None


def _add(residual: Tensor, x: Tensor, post: nn.Module | None, following: nn.Module | None) -> Tensor:
    """``residual`` plus ``x``, which ``post`` normalises first; the norm that follows is computed along with it."""
    if post is not None and not _is_own(post):
        x, post = post(x), None
    if not isinstance(following, FusedNorm) or x.shape != residual.shape:  # the last one, or it was replaced
        return residual + (x if post is None else post(x))
    if not is_usable(residual, x, *(norm.weight for norm in (post, following) if norm is not None)):
        return residual + (x if post is None else post(x))
    arch = following._fused.arch
    post_weight, post_eps = (None, 0.0) if post is None else (post.weight, _eps(post))
    total, normed = add_norm(
        x, residual, following.weight, _eps(following), arch.unit_offset, post_weight, post_eps, arch.rounds_once
    )
    _hand_over(total, following, normed)
    return total


def _eps(norm: nn.Module) -> float:
    return norm.eps if norm._fused.arch.unit_offset else norm.variance_epsilon


def _is_own(norm: nn.Module) -> bool:
    """Whether a kernel may compute this norm: it has not been replaced and has no hooks."""
    return isinstance(norm, FusedNorm) and "forward" not in norm.__dict__ and not is_observed(norm)


def act_of(module: nn.Module) -> object:
    """The module or function that computes the activation of an MLP."""
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def _activates(module: nn.Module) -> bool:
    """Whether the activation is still the one a kernel computes: it has not been replaced and has no hooks."""
    act = act_of(module)
    return act is module._fused.act[0] and not (isinstance(act, nn.Module) and is_observed(act))


class FusedNorm:
    """One kernel; or none, if the preceding sum has computed the norm already."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        ready = _taken(hidden_states, self)
        if ready is not None:
            return ready
        if not is_usable(hidden_states, self.weight):
            return super().forward(hidden_states)
        arch = self._fused.arch
        named = {"unit_offset": arch.unit_offset, "rounds_once": arch.rounds_once}
        return add_norm(hidden_states, None, self.weight, _eps(self), **named)[1]


class FusedLinear:
    """A kernel for the few rows of a decode step; the operator leaves larger inputs to ``torch``."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_usable(x, self.weight):
            return super().forward(x)
        return small_linear(x, self.weight, self.bias)


def summed(layer: nn.Linear, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward pass of a layer whose inputs are sharded: our kernel for few rows, then the sum over all ranks.

    Args:
        own: transformers' forward pass of the layer, for all other inputs.
    """

    def forward(x: Tensor, *args, **kwargs) -> Tensor:
        held: Any = layer.weight
        weight = local(held)
        if args or kwargs or not is_usable(x, weight) or not serves(x) or is_observed(layer):
            return own(x, *args, **kwargs)
        out = small_linear(x, weight)
        dist.all_reduce(out, group=held.device_mesh.get_group())
        return out if layer.bias is None else out + local(layer.bias)

    return forward


class FusedQuantised:
    """A kernel that reads the codes of a quantised weight, for the few rows of a decode step.

    More than 16 rows (all but the shortest prompts) are left to the layer's own library. Inputs stay in 16 bits, even
    where the library rounds them to 8 (bitsandbytes' 8 bits, dynamic fp8). Their values are not inspected, so the host
    never waits for them, as it does for bitsandbytes' 8 bits with a threshold. Steps of such models can be captured.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self._weight(x)
        return super().forward(x) if weight is None else quantised_linear(x, weight, self.bias)

    def _weight(self, x: Tensor) -> QuantisedWeight | None:
        """The layer's current weight, if our kernel multiplies ``x`` with it."""
        if not is_usable(x) or x.numel() > MAX_ROWS * x.shape[-1]:
            return None
        weight = found(self, self._fused.kept)
        if weight is None or weight.codes.device != x.device or weight.in_features != x.shape[-1]:
            return None
        return weight if serves_quantised(x, weight) else None


class FusedMLP:
    """Few rows: one kernel up to the down projection. More rows: one kernel between the projections."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_usable(x) or not _activates(self):
            return super().forward(x)
        state = self._fused
        stacked = self._stacked() if serves(x) else None
        if stacked is not None and is_usable(x, stacked[0]):
            return self.down_proj(small_linear(x, *stacked, state.activation))
        if state.arch.joined:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        elif state.joined is not None:
            gate, up = state.joined(self, x)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(gated(gate, up, state.activation))

    def _stacked(self) -> tuple[Tensor, Tensor | None] | None:
        """Stacked weights and biases of gate and up projection, if our kernel multiplies with both."""
        state = self._fused
        if not state.arch.joined:
            return state.joined.stacked(self) if state.small_batch and state.joined is not None else None
        layer = self.gate_up_proj
        return (layer.weight, layer.bias) if isinstance(layer, FusedLinear) and not is_observed(layer) else None


class FusedRouter:
    """Two kernels for the few tokens of a decode step."""

    weight: Tensor
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim)
        if x.shape[0] > MAX_ROUTED_TOKENS or not is_usable(x, self.weight):
            return super().forward(hidden_states)
        if self._fused.arch.router == "softmax_chosen":
            return route(x, self.weight, self.bias, self.top_k, scores="softmax_chosen")
        if self._fused.arch.router == "softmax":
            return route(x, self.weight, None, self.top_k, normalise=self.norm_topk_prob, scores="softmax")
        return route(
            x,
            self.weight,
            self.e_score_correction_bias,
            self.top_k,
            groups=self.num_group,
            top_groups=self.topk_group,
            normalise=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
        )


def _whole(factors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotary factors of both halves of a head, given those of one. Made once a pass, and kept on the tensors."""
    found = []
    for half in factors:
        ready = half.__dict__.get(_WHOLE)
        if ready is None or ready[1] != _version(half):
            ready = torch.cat((half, half), dim=-1), _version(half)
            setattr(half, _WHOLE, ready)
        found.append(ready[0])
    return found[0], found[1]


class FusedAttention:
    """One kernel between the projections and the cache: query and key norms and rotary embedding."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs,  # the cache among them, by the name that the original declares
    ):
        if position_embeddings is None or not is_usable(hidden_states, *position_embeddings):
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        arch = self._fused.arch
        if arch.sinks:
            position_embeddings = _whole(position_embeddings)
        shape = hidden_states.shape[:-1]
        q, k, v = self._projected(hidden_states)
        k, v = (t.view(*shape, -1, self.head_dim) for t in (k, v))  # [batch, q, H, D]
        q, *gate = q.view(*shape, -1, self.head_dim * (1 + arch.gated)).split(self.head_dim, dim=-1)
        norms = ()
        if arch.qk_norm:
            norms = (self.q_norm, self.k_norm)
            if not all(_is_own(norm) and is_usable(q, norm.weight) for norm in norms):
                q, k, norms = self.q_norm(q), self.k_norm(k), ()
        weights, eps = [norm.weight for norm in norms], [_eps(norm) for norm in norms]
        q, k = qk_rope(q, k, *position_embeddings, *(weights or (None, None)), *(eps or (0.0, 0.0)), arch.unit_offset)
        v = v.transpose(1, 2)

        cache, kwargs = given_cache(kwargs), without_cache(kwargs)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        extra = {}
        if arch.sliding:
            extra["sliding_window"] = getattr(self if arch.sliding == "module" else self.config, "sliding_window", None)
        if arch.softcap:
            extra["softcap"] = self.attn_logit_softcapping
        if arch.sinks:
            extra["s_aux"] = self.sinks
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sys.modules[type(self).__module__].eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **extra, **kwargs
        )  # out: [batch, q, H, D]
        out = out.reshape(*shape, -1).contiguous()
        if arch.gated:
            out = out * torch.sigmoid(gate[0].reshape(*shape, -1))
        return self.o_proj(out), weights

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[batch, q, H * D]`` each; queries with their gates, head by head."""
        state = self._fused
        if state.arch.joined:
            keys = self.num_key_value_heads * self.head_dim
            return self.qkv_proj(x).split([self.config.num_attention_heads * self.head_dim, keys, keys], dim=-1)
        if state.joined is not None:
            return state.joined(self, x)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class FusedLatentAttention:
    """MLA: one kernel between the projections and the cache: the latent's norm, and rotary embedding."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs,  # the cache among them, by the name that the original declares
    ):
        norm = self.kv_a_layernorm
        if (
            position_embeddings is None
            or not _is_own(norm)
            or not is_usable(hidden_states, *position_embeddings, norm.weight)
        ):
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        shape = hidden_states.shape[:-1]
        q, compressed = self._projected(hidden_states)
        q, latent, rotary = latent_rope(
            q.view(*shape, -1, self.qk_head_dim),
            compressed,
            *position_embeddings,
            norm.weight,
            _eps(norm),
            bool(self.config.rope_interleave),
        )
        cache, kwargs = given_cache(kwargs), without_cache(kwargs)
        if cache is not None:
            latent, rotary = cache.update(latent, rotary, self.layer_idx)
        key, value = self.expand_kv(latent, rotary)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sys.modules[type(self).__module__].eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(self, q, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1).contiguous()), weights

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``[batch, q, H * (dn + dr)]``, and latents with rotary parts ``[batch, q, r + dr]``."""
        joined = self._fused.joined
        if self.q_lora_rank is None:
            return joined(self, x) if joined is not None else (self.q_proj(x), self.kv_a_proj_with_mqa(x))
        first, compressed = joined(self, x) if joined is not None else (self.q_a_proj(x), self.kv_a_proj_with_mqa(x))
        return self.q_b_proj(self.q_a_layernorm(first)), compressed


class FusedLayer:
    """Each sum with the residual stream is one kernel with the norms around it."""

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        # Positional arguments: not as transformers calls it. Training: some layers drop out.
        if args or self.training or not is_usable(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)
        # The attention may be transformers' own, which has no defaults for these.
        for name in ("position_embeddings", "attention_mask"):
            kwargs.setdefault(name, None)
        sandwich = self._fused.arch.sandwich
        after_attention = self.post_attention_layernorm if sandwich else None
        before_mlp = self.pre_feedforward_layernorm if sandwich else self.post_attention_layernorm
        after_mlp = self.post_feedforward_layernorm if sandwich else None
        following = self._fused.following[0] if self._fused.following else None

        normed = self.input_layernorm(hidden_states)
        if getattr(self, "block_type", "") == "linear_attention":
            state = kwargs.pop("past_key_values", None)
            kwargs = {name: value for name, value in kwargs.items() if name not in _OF_ATTENTION}
            x = self.linear_attn(hidden_states=normed, cache_params=state, **kwargs)
        else:
            x, _ = self.self_attn(hidden_states=normed, **kwargs)
        total = _add(hidden_states, x, after_attention, before_mlp)
        out = self.mlp(before_mlp(total))
        return _add(total, out[0] if isinstance(out, tuple) else out, after_mlp, following)
