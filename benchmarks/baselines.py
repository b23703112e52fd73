"""The measured variants: transformers' caches, the selections of ours, and the best dense attention of torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, DynamicCache, StaticCache

from hf_sparsekv import (
    OffloadConfig,
    PredictiveConfig,
    ProgressiveConfig,
    SparseCache,
    TokenConfig,
    optimize,
    unoptimize,
)
from hf_sparsekv.attention.mla import is_mla
from hf_sparsekv.fusion.fuse import fuse
from hf_sparsekv.offload.host_limit import host_memory_limit
from hf_sparsekv.policies.registry import called, methods
from hf_sparsekv_config.options import guess

from .shapes import cached_token, kv_bytes, text_config, windows


class NotRun(Exception):
    """A variant that this machine or this call leaves out, and why."""


@dataclass(frozen=True)
class Variant:
    """One way to decode.

    Args:
        name: as in the rows.
        about: for ``--list``.
        kind: ``dynamic``, ``static`` or ``offloaded`` (caches of transformers), ``sdpa`` (no cache), ``ours``.
        settings: of ours, fields of ``config``.
        config: of ours, its configuration's class.
        captured: of ours, decode steps are captured on a GPU.
        offload: of ours, full blocks in host memory.
        crossover: of ours, attend densely where that is known to be as quick, as users' caches do. Without it a
            selection is measured whether it pays or not.
        second: of ours, tokens are chosen on the next device (of a CPU: itself).
    """

    name: str
    about: str
    kind: str = "ours"
    settings: dict | None = None
    offload: bool = False
    crossover: bool = False
    config: type = TokenConfig
    captured: bool = True
    second: bool = False

    @property
    def ours(self) -> bool:
        return self.kind == "ours"

    def label(self, fused: bool) -> str:
        """Name of the rows."""
        fused = fused and self.kind in ("ours", "sdpa")
        return self.name + "+fused" * (fused and self.captured) + "+offload" * self.offload


_BUDGET = {"token_budget": 1024}
_TWO_LEVEL = {**_BUDGET, "num_blocks": 128, "level": "two_level", "tail": None}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("hf_dynamic", "DynamicCache and sdpa, eager", "dynamic"),
        Variant("hf_static", "StaticCache and sdpa, eager", "static"),
        Variant("hf_static_compile", "StaticCache, compiled by generate(): takes a minute to compile", "static"),
        Variant("hf_offloaded", "DynamicCache(offloading=True), eager", "offloaded"),
        Variant("sdpa_best", "the captured forward with torch's fastest dense attention", "sdpa"),
        Variant(
            "captured_dense",
            "our captured step, dense attention",
            settings={**_TWO_LEVEL, "token_budget": 1 << 22, "num_blocks": None, "tail": None},
        ),
        Variant("two_level", "blocks, then tokens within them", settings={**_TWO_LEVEL, "lag": False}),
        Variant("two_level:lag", "tokens within the previous step's blocks", settings={**_TWO_LEVEL, "lag": True}),
        Variant("block_only", "whole blocks", settings={"token_budget": 1024, "level": "block", "lag": False}),
        Variant("token_only", "labels of every token", settings={"token_budget": 1024, "level": "token"}),
        Variant(
            "token_only:no_tail",
            "labels of every token, and nothing for what is not chosen",
            settings={"token_budget": 1024, "level": "token", "tail": None},
        ),
        *(
            Variant(f"mass:{mass}", f"labels of every token, {mass:.0%} of each head's mass", settings={"mass": mass})
            for mass in (0.8, 0.85, 0.9, 0.95)
        ),
        *(
            Variant(
                f"progressive:{threshold}{how}",
                f"tokens until {threshold:.0%} of the mass is covered{', not captured' * bool(how)}",
                settings={"mass": threshold},
                config=ProgressiveConfig,
                captured=not how,
            )
            for how in ("", ":eager")
            for threshold in (0.9, 0.95, 0.98)
        ),
        Variant(
            "predictive",
            "tokens chosen for a query of the layer before: its input",
            settings=_BUDGET,
            config=PredictiveConfig,
        ),
        Variant(
            "predictive:assembled",
            "tokens chosen for a query predicted by earlier steps",
            settings={**_BUDGET, "predictor": "assembled"},
            config=PredictiveConfig,
        ),
        *(
            Variant(
                f"predictive:mass:{mass}",
                f"the default predictor, {mass:.0%} of each head's mass",
                settings={"mass": mass},
                config=PredictiveConfig,
            )
            for mass in (0.8, 0.85, 0.9, 0.95)
        ),
        Variant(
            "predictive:no_tail",
            "the default predictor, and nothing for what is not chosen",
            settings={**_BUDGET, "tail": None},
            config=PredictiveConfig,
        ),
        *(
            Variant(
                f"predictive:second{how}",
                f"tokens chosen a step before on a second GPU{', not captured' * bool(how)}",
                settings=_BUDGET,
                config=PredictiveConfig,
                captured=not how,
                second=True,
            )
            for how in ("", ":eager")
        ),
    )
}

for _method in methods().values():  # any other method with its defaults
    if _method.config not in {variant.config for variant in VARIANTS.values()}:
        VARIANTS[_method.name] = Variant(_method.name, _method.about, settings={}, config=_method.config)
for _name, _method in called().items():
    for _preset, _settings in _method.config.PRESETS.items():
        VARIANTS[f"{_name}:{_preset}"] = Variant(
            f"{_name}:{_preset}",
            f"the preset {_preset!r}",
            settings=dict(_settings),
            config=_method.config,
            captured="estimate" not in _settings,  # earlier estimates look for the end of a walk in plain torch
        )


def find(text: str, offload: bool = False, crossover: bool = False) -> Variant:
    """``two_level:lag+offload`` -> the variant.

    Raises:
        ValueError: there is no such variant.
    """
    name, plus, where = text.partition("+")
    if name not in VARIANTS or (plus and where != "offload"):
        raise ValueError(
            f"there is no variant {text!r}{guess(name, VARIANTS)}; known: {', '.join(VARIANTS)}, ours also with "
            "+offload"
        )
    variant = VARIANTS[name]
    if plus and not variant.ours:
        raise ValueError(f"{name} cannot be offloaded")
    return replace(variant, offload=variant.ours and (offload or bool(plus)), crossover=variant.ours and crossover)


def check(variant: Variant, model, batch: int, context: int, host_bytes: int | None = None) -> None:
    """Whether this machine can run a variant.

    Raises:
        NotRun: it cannot.
    """
    on_gpu = model.device.type == "cuda"
    if variant.name == "hf_offloaded":
        if not on_gpu:
            raise NotRun("transformers' offloaded cache needs a CUDA device: it moves layers on CUDA streams")
        need = kv_bytes(text_config(model), batch, context, model.dtype.itemsize)
        limit = host_bytes or int(0.8 * host_memory_limit())
        if need > limit:
            raise NotRun(f"{need / 1e9:.1f} GB of keys and values, {limit / 1e9:.1f} GB of host memory to use")
    if variant.name == "hf_static_compile" and not on_gpu:
        raise NotRun("generate() compiles on accelerators only: hf_static is the same uncompiled")
    if variant.kind == "sdpa" and not on_gpu:
        raise NotRun("only a CUDA device captures")
    if variant.second and variant.offload:
        raise NotRun("blocks do not go to host memory while a second device follows them")
    if variant.second and on_gpu and torch.cuda.device_count() < 2:
        raise NotRun("a second GPU chooses the tokens, and torch finds one only")


def prepare(model, variant: Variant, fused: bool, capture: bool = True) -> None:
    """Give the model the attention that a variant needs; ours on a GPU is captured, with fused layers if asked for."""
    if not variant.ours:
        unoptimize(model)
        model.set_attn_implementation("sdpa")
        return
    model.set_attn_implementation("sparsekv")
    if capture and variant.captured and model.device.type == "cuda":
        optimize(model, fused=fused)
    elif not variant.captured:
        unoptimize(model)


def make_cache(
    model,
    variant: Variant,
    length: int | None,
    host_bytes: int | None = None,
    device_pool: int | float | None = None,
    budget: int | None = None,
    kv_dtype: str | None = None,
):
    """An empty cache for ``length`` tokens per row; None: one that grows.

    Args:
        host_bytes, device_pool, kv_dtype: of ours, offloaded: see ``OffloadConfig``.
        budget: of ours, tokens that a step selects; None: what the variant says.
    """
    if variant.kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    if not variant.ours:
        return DynamicCache(config=model.config, offloading=variant.kind == "offloaded")
    offload = None
    if variant.offload:
        offload = OffloadConfig(max_host_bytes=host_bytes, device_pool=device_pool, kv_dtype=kv_dtype)
    dense_below = "auto" if variant.crossover else None
    settings = {"max_length": length, "dense_below": dense_below, **variant.settings}
    if budget is not None and "token_budget" in settings and variant.name != "captured_dense":
        settings["token_budget"] = budget
    if variant.second:
        settings["cache_rank"] = str(next_device(model.device))
    settings = variant.config(**settings)
    return SparseCache(settings, offload=offload, model_config=model.config)


def next_device(device: torch.device) -> torch.device:
    """The GPU after this one; of a CPU itself."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", (device.index + 1) % torch.cuda.device_count())


def second_gpu(cache) -> torch.device | None:
    """The GPU that chooses for a cache, if it is another one than the model's."""
    peer = getattr(getattr(cache, "shared", None), "peer", None)
    return None if peer is None or peer.device.type != "cuda" else peer.device


def chose_dense(cache) -> bool:
    """Whether the crossover made steps of a cache of ours dense."""
    return cache.stats().crossover_calls > 0


def forget_compiled(model) -> None:
    """Drop what generate() has compiled for this model, and the memory of its graphs."""
    model.__dict__.pop("_compiled_call", None)
    torch.compiler.reset()


# ---------------------------------------------------------------------- the best dense attention of torch


class DenseForward:
    """A decode step over contiguous keys and values: ``context`` random tokens and the new one, no mask.

    Keys and values have sdpa's layout, and nothing is appended beyond the last column. The variant bounds dense
    attention in a captured step.
    """

    def __init__(self, model, batch: int, context: int) -> None:
        config = text_config(model)
        self.model, self.held = model, []
        for size in windows(config):
            length = context + 1 if size is None else min(context + 1, size)
            heads, *dims = cached_token(config)
            like = {"dtype": model.dtype, "device": model.device}
            self.held.append([torch.randn(batch, heads, length, dim, **like) for dim in dims])
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.position = torch.full((batch, 1), context, device=model.device)
        AttentionInterface.register("benchmark_dense", self.attend)
        unoptimize(model)
        model.set_attn_implementation("benchmark_dense")

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        """An attention function of transformers: ``query [batch, Hq, 1, D]``."""
        k, v = self.held[module.layer_idx]
        if is_mla(module):  # expands all latents in each step, as with any cache of transformers
            k, v = module.expand_kv(k, v)
        k[:, :, -1:], v[:, :, -1:] = key, value
        out = F.scaled_dot_product_attention(query, k, v, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def __call__(self):
        return self.model(input_ids=self.ids, position_ids=self.position, use_cache=False)

    def close(self) -> None:
        """The registered function outlives this one."""
        self.held.clear()
        self.model.set_attn_implementation("sparsekv")


@torch.no_grad()
def captured_sdpa_ms(model, batch: int, context: int, fused: bool, timed: Callable) -> list[float]:
    """Milliseconds of the same forward captured with the fastest dense attention: what sparse decoding has to beat."""
    forward = DenseForward(model, batch, context)
    fusion = fuse(model) if fused else None
    found: dict[str, list[float]] = {}
    refused = []
    try:
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            with sdpa_kernel(backend):
                try:
                    with torch.cuda.stream(stream):
                        forward()
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:  # not for these heads
                    refused.append(f"{backend.name}: {str(error).splitlines()[0]}")
                    continue
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    forward()
            found[backend.name] = timed(graph.replay)
            del graph
    finally:
        if fusion is not None:
            fusion.undo()
        forward.close()
    if not found:
        raise RuntimeError(f"no dense attention runs: {'; '.join(refused)}")
    return min(found.values(), key=statistics.median)
