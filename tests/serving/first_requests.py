"""Which kernels an engine's first requests would wait for, without a GPU and without compiling any.

``python tests/serving/first_requests.py CASE ...`` opens an engine of each case, sends it requests, and prints as JSON
the kernels that Triton would compile for them: launches of requests that differ from all of the engine's start in what
a kernel is compiled for. Operators launch their kernels, which do nothing, and give what their definitions do.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest import mock

import torch
import triton
from caches import SMALL
from captured import imitated
from compile_kernels import Chip
from engines import greedy, ids_of
from inside import forget_kernels, kernels_loaded
from models import build
from triton import knobs
from triton.runtime.jit import JITFunction

from hf_sparsekv import Engine, OffloadConfig, ServingConfig, TokenConfig, ops
from hf_sparsekv.attention import mla, sparse_prompt
from hf_sparsekv.fusion import layers
from hf_sparsekv.fusion.fuse import fuse
from hf_sparsekv.kv.block_writer import BlockWriter
from hf_sparsekv.kv.pool import BlockPool
from hf_sparsekv.ops import _dispatch, _prompts
from hf_sparsekv.serving import first_prompt

LATENTS = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "kv_lora_rank": 32}
SPARSE = {"prefill": 0.4, "prefill_below": 600}
ATTENTION = "block_attention_kernel"
HOST, CODES = ({"offload": OffloadConfig(kv_dtype=kind)} for kind in (None, "int8"))
# name -> model and its changes, what the cache's configuration changes, other arguments of the engine
CASES: dict[str, tuple[tuple[str, dict], dict, dict]] = {
    "sparse": (("llama", {}), SPARSE, {}),
    "sparse-offloaded": (("llama", {}), SPARSE, HOST),
    "sparse-one-kv-head": (("llama-mqa", {}), SPARSE, {}),
    "sparse-latents": (("glm4-moe-lite", LATENTS), SPARSE, {}),
    "exact": (("llama", {}), {}, {}),
    "exact-offloaded": (("llama", {}), {}, HOST),
    "exact-in-8-bits": (("llama", {}), {}, CODES),
    "exact-mode": (("llama", {}), {}, {"exact": True}),
    "sparse-fused": (("llama", {}), SPARSE, {"fused": True}),
}


def launched() -> tuple[list[tuple[str, str]], Callable]:
    """A list of the kernels, and what each is compiled for, that Triton has not compiled; and a hook that fills it."""
    found: list[tuple[str, str]] = []

    def hook(*, key, fn, **_) -> bool:
        found.append((fn.name.rpartition(".")[2], str(key)))
        return not torch.cuda.is_available()  # then nothing is compiled

    return found, hook


@contextmanager
def hooked(hook: Callable) -> Iterator[None]:
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def forget_compiled() -> None:
    """Have everything compiled again: earlier tests may have needed the same kernels."""
    forget_kernels()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{ops.__name__}."):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()


def _defined(launch: Callable, reference: Callable) -> Callable:
    @wraps(reference)
    def call(*args, **named):
        launch(*args, **named)
        return reference(*args, **named)

    return call


@contextmanager
def imitated_gpu() -> Iterator[None]:
    """Inside, operators launch their kernels in host memory."""
    triton.runtime.driver.set_active(Chip(90))
    with ExitStack() as stack:
        for folder in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
            package = importlib.import_module(folder.name) if folder.ispkg else None
            for name in getattr(package, "__all__", ()):
                if hasattr(call := getattr(package, name), "kernel"):
                    module = importlib.import_module(f"{folder.name}.triton")
                    made = _defined(getattr(module, name), call.__wrapped__)
                    stack.enter_context(mock.patch.object(module, name, made))
        stack.enter_context(mock.patch.object(layers, "accelerated", lambda t: True))
        for module in (_dispatch, first_prompt):
            stack.enter_context(mock.patch.object(module, "use_triton", lambda t: True))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda t, *_: True))
        stack.enter_context(mock.patch.object(BlockPool, "direct", property(lambda pool: pool.host is not None)))
        stack.enter_context(mock.patch.object(BlockWriter, "copy_stream", None))
        yield


def requests() -> Iterator[tuple[list[int], int]]:
    """Prompts in one piece and in several, one with another's first blocks, and one calibrated with its answer."""
    yield ids_of(700, 1), 4
    yield ids_of(1900, 2), 40
    yield ids_of(1900, 2)[:900] + ids_of(700, 3), 4
    yield ids_of(1300, 4), 4
    yield ids_of(7, 5), 60


def waited_for(case: str) -> Counter[str]:
    """The kernels that requests of a case launch first, and how many kinds of each; NVRTC's; captures of steps."""
    (name, changes), config, others = CASES[case]
    serving = ServingConfig(max_rows=2, max_length=2048, chunk=768, exact=others.get("exact", False))
    forget_compiled()
    found, hook = launched()
    changes = {"max_position_embeddings": 2048, **changes}
    if torch.cuda.is_available():
        net = build(name, "sparsekv", **changes).to("cuda", torch.bfloat16)
    else:
        net, runner = imitated(name, lambda: build(name, "sparsekv", **changes).bfloat16())
        runner.fusion = fuse(net) if "fused" in others else None
    cache = TokenConfig(**SMALL, **config)
    with hooked(hook), Engine(net, None, cache, others.get("offload"), serving) as engine:
        start, loaded, captures = len(found), kernels_loaded(), engine.stats().captures
        handles = [engine.submit(ids, greedy(tokens)) for ids, tokens in requests()]
        assert sum(handle.result(60).cached_tokens for handle in handles) > 0
        loaded, captures = kernels_loaded() - loaded, engine.stats().captures - captures
    before, later = set(found[:start]), set(found[start:])
    names = {kernel for kernel, _ in {*before, *later}}
    assert (ATTENTION in names) == ("prefill" in config)
    assert "add_norm_kernel" in names or "fused" not in others
    return Counter(kernel for kernel, _ in later - before) + Counter({"NVRTC": loaded, "captures": captures})


@contextmanager
def short() -> Iterator[None]:
    """Inside, kernels change at lengths that are short enough for tests, as do the parts of pieces."""
    sizes = (_prompts, "LONG", 1024), (first_prompt, "LONG", 1024), (sparse_prompt, "_BYTES", 1 << 18)
    with ExitStack() as stack:
        for module, name, value in (*sizes, (mla, "_PIECE", 1 << 19)):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def main(cases: list[str]) -> None:
    with imitated_gpu(), short():
        print(json.dumps({case: waited_for(case) for case in cases}))


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
