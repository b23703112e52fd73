"""``fuse(model)``: replace the small layers of a model by a few kernels, and join its parallel projections.

In a captured decode step of an 8B model, norms, rotary embedding, activations and sums take as long as a good part of
its matrix products. Fused, they are four kernels a layer, with few rows three. With ``linears``, seven matrix products
become four:

    fusion = fuse(model)
    ...
    fusion.undo()

Only this model changes: the class of each fused module becomes a subclass of its original one, which ``undo`` restores.
No function, class or module of transformers is modified. The fused code runs on CUDA without gradients and rounds where
transformers rounds. In all other cases the original runs.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ..ops.layers.add_norm import MAX_WIDTH
from ..ops.layers.quantised_linear import serves as serves_quantised
from ..ops.layers.small_linear import small_linear
from ..ranks import tensor_parallel
from . import layers as fused_layers
from .joined_linear import JoinedLinear, has_plain_weights, is_plain, is_share, quantised
from .layers import (
    Arch,
    FusedAttention,
    FusedLatentAttention,
    FusedLayer,
    FusedLinear,
    FusedMLP,
    FusedNorm,
    FusedQuantised,
    FusedRouter,
    State,
)
from .quantised_weight import Kept, found
from .recurrent import FusedGatedDelta, FusedMamba2

__all__ = ["Fusion", "fuse", "why_not"]

_GATED: Any = {"qk_norm": True, "unit_offset": True, "gated": True}
_FOUR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
# model_type -> structure of its layers
ARCHS = {
    "llama": Arch("Llama"),
    "mistral": Arch("Mistral", sliding="config"),
    "qwen2": Arch("Qwen2", sliding="module"),
    "qwen3": Arch("Qwen3", sliding="module", qk_norm=True),
    "phi3": Arch("Phi3", sliding="config", joined=True),
    "gemma2": Arch("Gemma2", sliding="module", softcap=True, unit_offset=True, sandwich=True),
    "gemma3": Arch("Gemma3", sliding="module", qk_norm=True, unit_offset=True, sandwich=True),
    "qwen3_5": Arch("Qwen3_5", **_GATED, delta=_FOUR),
    "qwen3_5_moe": Arch("Qwen3_5Moe", **_GATED, delta=_FOUR, router="other"),
    "qwen3_next": Arch("Qwen3Next", **_GATED, delta=("in_proj_qkvz", "in_proj_ba"), router="other"),
    "deepseek_v2": Arch("DeepseekV2", latent="linears", router="other"),
    "deepseek_v3": Arch("DeepseekV3", latent="fused", router="sigmoid"),
    "qwen3_moe": Arch("Qwen3Moe", sliding="module", qk_norm=True, router="softmax"),
    "gpt_oss": Arch("GptOss", sliding="module", rounds_once=True, sinks=True, router="softmax_chosen"),
    "glm4_moe_lite": Arch("Glm4MoeLite", latent="fused", router="sigmoid"),
    "youtu": Arch("Youtu", latent="fused"),
    "bamba": Arch("Bamba", only=("RMSNorm", "Mixer"), mamba="Mixer"),
    "granitemoehybrid": Arch("GraniteMoeHybrid", only=("RMSNorm", "MambaLayer"), mamba="MambaLayer"),
    "nemotron_h": Arch("NemotronH", only=("RMSNorm", "Mamba2Mixer"), mamba="Mamba2Mixer"),
    "lfm2": Arch("Lfm2", only=("RMSNorm",)),
    "lfm2_moe": Arch("Lfm2Moe", only=("RMSNorm",)),
}
_BY_MODULE = {f"transformers.models.{name}.modeling_{name}": arch for name, arch in ARCHS.items()}
_KINDS = {
    "RMSNorm": FusedNorm,
    "MLP": FusedMLP,
    "Attention": FusedAttention,
    "GatedDeltaNet": FusedGatedDelta,
    "Mamba2": FusedMamba2,
    "DecoderLayer": FusedLayer,
    "TopkRouter": FusedRouter,
    "TopKRouter": FusedRouter,
}
_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}
_PARALLEL = {"Attention": ("q_proj", "k_proj", "v_proj"), "MLP": ("gate_proj", "up_proj")}
_SINGLE = {
    "Attention": ("o_proj", "qkv_proj", "q_b_proj"),
    "MLP": ("down_proj", "gate_up_proj"),
    "GatedDeltaNet": ("out_proj",),
    "Mamba2": ("in_proj", "out_proj"),
}
# How a tensor parallel model's layers are spread.
_STYLES = dict.fromkeys(sum(_PARALLEL.values(), ()), "colwise") | {"o_proj": "rowwise", "down_proj": "rowwise"}
_JOINED = {"Attention": "qkv", "MLP": "gate_up", "GatedDeltaNet": "delta"}  # their names in counts
_APART = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")  # projections of latent attention that are not joined
# All projections of attention and MLPs that a step multiplies with. (MLA's expand_kv is not used in a step.)
_QUANTISED = tuple(dict.fromkeys(sum((*_PARALLEL.values(), *_SINGLE.values()), _APART)))
_LATENT = (
    "shape qk_head_dim q_lora_rank q_proj q_b_proj q_a_layernorm q_a_proj view transpose torch split qk_nope_head_dim "
    "qk_rope_head_dim kv_a_proj_with_mqa kv_lora_rank kv_a_layernorm config rope_interleave layer_idx update cat "
    "apply_rotary_pos_emb_interleave apply_rotary_pos_emb ALL_ATTENTION_FUNCTIONS get_interface _attn_implementation "
    "eager_attention_forward training attention_dropout scaling reshape contiguous o_proj expand_kv"
)
_INTERLEAVED = "shape unsqueeze torch cat"
_DELTAS = {  # by how many projections there are
    4: "in_proj_qkv in_proj_z in_proj_b in_proj_a reshape",
    2: "in_proj_qkvz in_proj_ba fix_query_key_value_ordering cat reshape",
}
_DELTA = (
    "A_log F activation apply_mask_to_padding_states bias causal_conv1d_fn causal_conv1d_update conv1d "
    "conv_kernel_size conv_states dt_bias exp float has_previous_state head_k_dim head_v_dim key_dim layer_idx layers "
    "norm num_k_heads num_v_heads out_proj pop record_past recurrent_states repeat_interleave shape sigmoid softplus "
    "split squeeze torch torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule transpose update_conv_state "
    "update_recurrent_state value_dim weight "
)
_MAMBA = (
    "A_log D activation apply_mask_to_padding_states bias causal_conv1d_fn causal_conv1d_update chunk_size conv1d "
    "conv_dim conv_kernel_size conv_states dt_bias dtype exp expand float has_previous_state head_dim in_proj "
    "intermediate_size layer_idx layers mamba2_chunk_scan mamba2_selective_state_update "
    "mamba2_split_conv1d_scan_combined n_groups norm num_heads out_proj record_past recurrent_states reshape shape "
    "split squeeze ssm_state_size time_step_limit to torch training transpose update_conv_state "
    "update_recurrent_state variance_epsilon view weight"
)
_ROUTERS = {
    "sigmoid": "view hidden_dim F linear type torch float32 weight sigmoid e_score_correction_bias num_group "
    "num_experts topk sum topk_group zeros_like scatter_ unsqueeze expand reshape masked_fill bool float top_k gather "
    "norm_topk_prob routed_scaling_factor",
    "softmax": "reshape hidden_dim F linear weight torch nn functional softmax float topk top_k norm_topk_prob sum to "
    "dtype",
    "softmax_chosen": "F linear weight bias torch topk top_k nn functional softmax dtype",
}


def _names(arch: Arch) -> dict[str, set[str]]:
    """The names that each original function uses. If a transformers version uses other names, its code has changed."""
    joined = arch.joined
    attention = (
        "ALL_ATTENTION_FUNCTIONS _attn_implementation apply_rotary_pos_emb attention_dropout config contiguous "
        "eager_attention_forward get_interface head_dim layer_idx o_proj reshape scaling shape training transpose "
        "update view "
    )
    attention += "qkv_proj num_attention_heads num_key_value_heads " if joined else "q_proj k_proj v_proj "
    attention += {"module": "sliding_window ", "config": "getattr ", "": ""}[arch.sliding]
    attention += "q_norm k_norm " * arch.qk_norm + "attn_logit_softcapping " * arch.softcap
    attention += "torch chunk sigmoid " * arch.gated
    layer = "input_layernorm self_attn post_attention_layernorm mlp " + "block_type linear_attn " * bool(arch.delta)
    layer += "isinstance tuple " * (arch.router == "other" and bool(arch.delta))
    layer += "pre_feedforward_layernorm post_feedforward_layernorm " * arch.sandwich
    layer += "resid_attn_dropout resid_mlp_dropout " * joined
    norm = "dtype to torch float32 pow mean rsqrt variance_epsilon weight"
    if arch.unit_offset:
        norm = "_norm float weight type_as"
    mlp = "gate_up_proj chunk activation_fn down_proj" if joined else "gate_proj up_proj act_fn down_proj"
    attention += "sinks " * arch.sinks
    rope = "unsqueeze rotate_half shape torch cat" if joined or arch.gated else "unsqueeze rotate_half"
    given = {"RMSNorm": norm, "DecoderLayer": layer}
    if arch.sinks:
        rope, given["_apply_rotary_emb"] = "unsqueeze _apply_rotary_emb", "torch chunk cat"
    else:
        given["MLP"] = mlp
    if not arch.latent:
        given |= {"Attention": attention, "apply_rotary_pos_emb": rope}
    if arch.latent == "fused":
        given |= {"Attention": _LATENT, "apply_rotary_pos_emb": rope, "apply_rotary_pos_emb_interleave": _INTERLEAVED}
    if arch.delta:
        given |= {"GatedDeltaNet": _DELTA + _DELTAS[len(arch.delta)]}
    if arch.only:
        given = {name: _MAMBA if name == arch.mamba else norm for name in arch.only}
    if arch.router in _ROUTERS:
        given["TopkRouter" if arch.router == "sigmoid" else "TopKRouter"] = _ROUTERS[arch.router]
    return {name: set(words.split()) for name, words in given.items()}


def _changed(arch: Arch, module: str) -> str | None:
    """The first function of a modeling file that differs from the one that the fused code replaces."""
    file = sys.modules[module]
    for kind, names in _names(arch).items():
        if kind.islower():
            name, found = kind, file.__dict__.get(kind)
            if isinstance(found, nn.Module):  # so the package "kernels" makes a function replaceable
                continue
        else:
            name = arch.prefix + kind
            found = getattr(file.__dict__.get(name), "forward", None)
        code = None if found is None else getattr(inspect.unwrap(found), "__code__", None)
        if code is None or set(code.co_names) != names:
            return name
    return None


def _found(model: nn.Module) -> Iterator[tuple[nn.Module, str, Arch]]:
    """Modules of supported classes, with kind and architecture; in a model of several parts only the supported ones."""
    for module in model.modules():
        kind = type(module)
        arch = _BY_MODULE.get(kind.__module__)
        if arch is not None and kind.__name__.startswith(arch.prefix):
            name = kind.__name__.removeprefix(arch.prefix)
            if arch.only:
                name = "" if name not in arch.only else "Mamba2" if name == arch.mamba else name
            if name == "MLP" and not hasattr(module, "down_proj"):
                continue  # gpt-oss' name of a mixture of experts
            if name in _KINDS and (_KINDS[name] is not FusedRouter or arch.router in _ROUTERS):
                yield module, name, arch


def why_not(model: nn.Module) -> str | None:
    """The reason why ``fuse`` would not change ``model``; ``None`` if it would."""
    found = list(_found(model))
    if not any(kind == "DecoderLayer" or arch.only for _, kind, arch in found):
        return f"it has no layers of a supported architecture ({', '.join(ARCHS)})"
    if any(isinstance(module, tuple(_KINDS.values())) for module, _, _ in found):
        return "it is fused already"
    if tensor_parallel(model) and (reason := _spread_otherwise(model, {arch for _, _, arch in found})):
        return reason
    for file, arch in {(type(module).__module__, arch) for module, _, arch in found}:
        changed = _changed(arch, file)
        if changed:
            return f"{changed} of transformers {transformers.__version__} is not the one that is known"
    for module, kind, _ in found:
        if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
            return (
                "another tool has replaced the forward pass of its layers (offloaded or spread over several devices?)"
            )
        if any(p.is_meta for p in module.parameters()):
            return "some of its weights are not loaded"
        if hasattr(module, "parametrizations"):
            return "its norms or layers are parametrised"
        if kind == "RMSNorm" and module.weight.shape[-1] > MAX_WIDTH:
            return f"its rows are wider than {MAX_WIDTH}"
    return None


def _spread_otherwise(model: nn.Module, archs: set[Arch]) -> str | None:
    """Why a tensor parallel model is not fused: its layers are not spread by columns first, and then by rows."""
    if any(arch.latent or arch.router or arch.joined or arch.delta or arch.only for arch in archs):
        return "it is tensor parallel, with latents, experts, states or joined projections"
    plan: Any = model.tp_plan
    for name, _ in model.named_modules():
        style = _STYLES.get(name.rpartition(".")[2])
        if style is not None and plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)) != style:
            return f"it is tensor parallel by a plan of its own ({name} is not {style})"
    return None


@cache
def _fused_class(original: type, kind: type) -> type:
    """``original`` with the forward pass of ``kind``. The name is kept, because transformers tests names in places."""
    body = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (kind, original), body)


@dataclass
class Fusion:
    """The changes that ``fuse`` made to a model.

    Args:
        counts: fused modules of each kind; ``qkv``, ``gate_up`` and ``delta`` count joined projections, ``linear`` the
            layers that ``small_batch`` has changed, and ``quantised`` those of 4 or 8 bits.
        skipped: unchanged layers, and the reasons.
        quantised: number of linear layers in an unsupported quantised format, which are unchanged, by its name.
    """

    counts: dict[str, int]
    skipped: list[str]
    quantised: dict[str, int] = field(default_factory=dict)
    _modules: list[nn.Module] = field(repr=False, default_factory=list)

    def undo(self) -> None:
        """Restore every module's class, and separate memory for its weights. May be called again."""
        for module in reversed(self._modules):
            state: State | None = module.__dict__.get("_fused")
            if state is None:
                continue  # recorded twice, or interrupted before it was changed
            module.__class__ = state.original
            if state.own is not None:
                module.forward = state.own
            if state.joined is not None:
                state.joined.part(module)
            del module._fused  # at the end, or a second call after an interrupt would leave this one half undone
        self._modules.clear()


def _activation(mlp: nn.Module) -> str | None:
    return _ACTIVATIONS.get(type(fused_layers.act_of(mlp)).__name__)


def _computed_in(model: nn.Module) -> torch.dtype:
    """The dtype of a model's norms, and therefore of its layers' inputs."""
    return next((module.weight.dtype for module, kind, _ in _found(model) if kind == "RMSNorm"), torch.float32)


def _multiplies(layer: nn.Module, kept: Kept, dtype: torch.dtype) -> bool:
    """Whether our kernel multiplies one row of ``dtype`` with the quantised weight of ``layer``.

    ``kept`` gets its scales.
    """
    if "forward" in layer.__dict__ or hasattr(layer, "parametrizations") or hasattr(layer, "_hf_hook"):
        return False
    weight = found(layer, kept)
    if weight is None:
        return False
    row = torch.empty(1, weight.in_features, dtype=dtype, device=weight.codes.device)
    return serves_quantised(row, weight)


def _cannot_join(joined: JoinedLinear, owner: nn.Module, uses: Counter) -> str | None:
    """The reason why these projections are not joined; ``uses`` counts the uses of each parameter in the model."""
    reason = joined.why_not(owner)
    if reason is None and any(uses[id(p)] > 1 for p in joined.parameters(owner)):
        reason = "a projection's weight is shared"
    if reason is None and not all(fused_layers.accelerated(p) for p in joined.parameters(owner)):
        reason = "the projections are not on a CUDA device"
    return reason


def fuse(model: nn.Module, linears: bool = True, small_batch: bool = True) -> Fusion | None:
    """Fuse the small layers of ``model`` in place; see the module docstring.

    Args:
        model: a transformers model with layers of an architecture in ``ARCHS``.
        linears: also join the query, key and value projections, and the gate and up projections. Their weights move,
            which needs memory for one layer's weights at a time. Quantised and LoRA layers are unchanged.
        small_batch: also multiply up to ``ops.layers.small_linear.MAX_ROWS`` rows by our own kernel. This covers
            the joined projections, the other projections of each layer and the output embedding. It also covers, one by
            one, the layers whose weights :mod:`.quantised_weight` supports.

    Returns:
        The changes, to undo them; ``None`` if the model cannot be fused, for the reason that ``why_not`` gives.
    """
    if why_not(model):
        return None
    fusion = Fusion({}, [])
    try:
        _fuse(model, linears, small_batch, fusion)
    except BaseException:  # an interrupt, or no memory for the joined weights: all of it or nothing
        fusion.undo()
        raise
    return fusion


def _fuse(model: nn.Module, linears: bool, small_batch: bool, fusion: Fusion) -> None:
    """Make the changes of :func:`fuse`, and record each in ``fusion`` before it is made."""
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))

    dtype = _computed_in(model)

    def note(module: nn.Module, state: State) -> None:
        fusion._modules.append(module)
        module._fused = state

    def give(module: nn.Module, kind: type, state: State) -> None:
        note(module, state)
        original: Any = type(module)
        module.__class__ = _fused_class(original, kind)

    def give_quantised(layer: nn.Module | None) -> None:
        if layer is not None and "_fused" not in layer.__dict__ and _multiplies(layer, kept := Kept(), dtype):
            give(layer, FusedQuantised, State(None, type(layer), kept=kept))
            counts["quantised"] += 1

    for module, kind, arch in list(_found(model)):
        state = State(arch, type(module), small_batch=small_batch)
        if kind == "MLP":
            state.activation, state.act = _activation(module) or "", (fused_layers.act_of(module),)
            if not state.activation:
                skipped[f"{kind}: unknown activation"] += 1
                continue
        if _KINDS[kind] is FusedRouter and not has_plain_weights(module):
            skipped[f"{kind}: its weights are quantised"] += 1
            continue
        latent, names = kind == "Attention" and arch.latent, _PARALLEL.get(kind)
        if kind == "GatedDeltaNet":
            names = arch.delta
        elif latent == "fused":
            names = ("q_proj" if module.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
        if linears and names and not arch.joined and latent != "linears":
            joined = JoinedLinear(names, small_linear if small_batch else F.linear)
            reason = _cannot_join(joined, module, uses)
            if reason is None:
                state.joined = joined
                note(module, state)
                joined.join(module)
                counts[_JOINED[kind]] += 1
            else:
                skipped[f"{kind}: {reason}"] += 1
        if small_batch:
            singles = _SINGLE.get(kind, ()) + (_APART if latent == "linears" else ())
            for layer in (getattr(module, name, None) for name in singles):
                if layer is not None and is_plain(layer):
                    give(layer, FusedLinear, State(None, nn.Linear))
                    counts["linear"] += 1
                elif layer is not None and is_share(layer, 1):
                    note(layer, State(None, nn.Linear, own=layer.forward))
                    layer.forward = fused_layers.summed(layer, layer.forward)
                    counts["linear"] += 1
            for layer in (getattr(module, name, None) for name in (*_QUANTISED, *arch.delta) if kind in _SINGLE):
                give_quantised(layer)
        if latent != "linears":
            give(module, FusedLatentAttention if latent else _KINDS[kind], state)
            counts[kind] += 1
    if small_batch and any(arch.only for _, _, arch in _found(model)):
        for layer in [one for one in model.modules() if is_plain(one) and "_fused" not in one.__dict__]:
            give(layer, FusedLinear, State(None, nn.Linear))
            counts["linear"] += 1
    head = model.get_output_embeddings() if small_batch and hasattr(model, "get_output_embeddings") else None
    if head is not None and is_plain(head) and "_fused" not in head.__dict__:
        give(head, FusedLinear, State(None, nn.Linear))
        counts["linear"] += 1
    give_quantised(head)
    _chain(model)
    if (counts["qkv"] or counts["gate_up"]) and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the old weights' memory; the next large tensor may not fit into its pieces
    fusion.counts, fusion.quantised = dict(counts), quantised(model, (FusedQuantised,))
    fusion.skipped = [f"{why} ({n} modules)" for why, n in skipped.items()]


def _chain(model: nn.Module) -> None:
    """Set the norm that follows each layer: the next layer's, or the final one."""
    for stack in model.modules():
        layers, last = getattr(stack, "layers", None), getattr(stack, "norm", None)
        if isinstance(layers, nn.ModuleList) and all(isinstance(layer, FusedLayer) for layer in layers):
            norms = [*(layer.input_layernorm for layer in layers), last][1:]
            for layer, norm in zip(layers, norms):
                if isinstance(norm, FusedNorm):
                    layer._fused.following = (norm,)
