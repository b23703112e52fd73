"""What the host does for a prompt, and for a later piece of one: Python, torch operations, launches.

    python -m benchmarks.probes.host_prompt

A model of 36 small layers, any machine with Triton: attention and our kernels do nothing here, up to the launch itself,
so what is left is Python and what torch does around it. Prints milliseconds of one thread, the best of several times,
and torch operations and launches of ours a layer: of a prompt in a new cache, in one that was used and reset, and of a
piece behind others; beside a DynamicCache with sdpa.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TwoLevelConfig
from hf_sparsekv.attention import exact
from hf_sparsekv.cache_name import over
from hf_sparsekv.kv import pool, store
from hf_sparsekv.ops.append import triton as append
from hf_sparsekv.ops.block_copy import triton as block_copy
from hf_sparsekv.ops.seal import triton as seal

LAYERS, PROMPT, PIECE, PIECES, TIMES = 36, 512, 256, 20, 9

Cache = DynamicCache | OffloadedSparseCache
CACHES: dict[str, Callable[[], Cache]] = {
    "sdpa": DynamicCache,
    "device": lambda: OffloadedSparseCache(TwoLevelConfig(), None),
    "host memory": lambda: OffloadedSparseCache(TwoLevelConfig(), OffloadConfig()),
}


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def nothing(query: Tensor, key: Tensor, value: Tensor, *args, **named) -> Tensor:
    """As attention of a prompt gives it."""
    batch, heads, n, _ = query.shape
    return query.new_empty(batch, n, heads, value.shape[3]).transpose(1, 2)


@contextmanager
def only_host() -> Iterator[list[str]]:
    """Inside, attention computes nothing, and our kernels are not launched: gives their names instead."""
    launched: list[str] = []

    def launch(kernel, *args, **named) -> None:
        launched.append(kernel.__name__)

    with ExitStack() as stack:
        for module in (append, block_copy, seal):
            stack.enter_context(patch.object(module, "launch", launch))
        kernels = [(store, "append", append), (store, "seal_range", seal)]
        kernels += [(pool, "block_copy", block_copy), (pool, "gather_blocks", block_copy)]
        for user, name, module in kernels:
            stack.enter_context(patch.object(user, name, getattr(module, name)))
        stack.enter_context(patch.object(exact, "serves", lambda query, key, value: query.shape[2] > 1))
        stack.enter_context(patch.object(exact, "chunk_attention", nothing))
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", nothing))
        yield launched


@torch.no_grad()
def measured(model, begin: Callable[[], Cache], tokens: int) -> tuple[float, float, list[str]]:
    """Of a pass of ``tokens`` tokens into ``begin()``: ms, operations a layer, launches of all layers."""

    def run(cache: Cache) -> None:
        model(ids, **over(model, cache), use_cache=True, logits_to_keep=1)

    ids, best = torch.zeros(1, tokens, dtype=torch.long), float("inf")
    with only_host() as launched:
        for _ in range(TIMES):
            cache = begin()
            start = time.thread_time()
            run(cache)
            best = min(best, time.thread_time() - start)
        cache = begin()
        launched.clear()
        with Operations() as found:
            run(cache)
        return 1e3 * best, found.count / LAYERS, launched[:]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=LAYERS, head_dim=8, vocab_size=50, **size)).eval()
    print(f"{'cache':12} {'pass':24} {'ms':>7} {'operations':>11} {'launches':>9}  (a layer)")
    for name, make in CACHES.items():
        model.set_attn_implementation("sdpa" if name == "sdpa" else "sparsekv")
        used = make()

        def again(used=used) -> Cache:
            used.reset()
            return used

        def later(make=make) -> Cache:
            cache = make()
            for _ in range(PIECES - 1):
                model(torch.zeros(1, PIECE, dtype=torch.long), **over(model, cache), logits_to_keep=1)
            return cache

        passes = [(f"{PROMPT} tokens", make, PROMPT), (f"{PIECE} behind {PIECES - 1} x {PIECE}", later, PIECE)]
        if name != "sdpa":
            passes.insert(1, (f"{PROMPT} tokens, used cache", again, PROMPT))
        for what, begin, tokens in passes:
            ms, operations, launched = measured(model, begin, tokens)
            print(f"{name:12} {what:24} {ms:7.1f} {operations:11.1f} {len(launched) / LAYERS:9.1f}", flush=True)


if __name__ == "__main__":
    main()
