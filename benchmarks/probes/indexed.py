"""A step of DeepSeek-V3.2's attention, whose indexer chooses: transformers (sdpa), ours on the device, ours offloaded.

    python -m benchmarks.probes.indexed [--shapes 1x32k 1x128k 8x32k] [--layers 2] [--keep 0.9] [--eager] [--ours]

Random weights of the published sizes, but for few layers, dense MLPs and a small vocabulary. The context is random. The
indexer runs, and a stated pattern takes the place of its choice. Of its 2,048 tokens the next step chooses a share
``--keep`` again, and draws the others uniformly. Milliseconds are medians of whole steps. They, the bytes over the link
and the hit rate are of steps after the first ten. "Rows" have joined one by one, as in an engine. Transformers 5.17
caches keys and values of all heads, later releases latents.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache

from hf_sparsekv import CacheStats, OffloadConfig, SparseCache, TokenConfig, optimize, restore_mla, unoptimize
from hf_sparsekv.attention.mla import Absorbed, is_mla
from hf_sparsekv.cache_name import over
from hf_sparsekv.row_batch import RowBatch

from ..shapes import parse_shape

STEPS, WARM = 30, 10


class Pattern:
    """What all indexers choose, int32 ``[batch, 1, k]``, instead of what they have scored."""

    def __init__(self, model: nn.Module, keep: float) -> None:
        self.keep, self.topk = keep, model.config.index_topk
        for module in model.modules():
            if (indexer := getattr(module, "indexer", None)) is not None:
                indexer.forward = self._instead_of(indexer.forward)

    def _instead_of(self, own):
        def forward(*args, **kwargs) -> Tensor:
            found = own(*args, **kwargs)
            return self.chosen if found.shape[1] == 1 else found

        return forward

    def begin(self, batch: int, context: int, device: torch.device) -> None:
        self.context = context
        self.chosen = torch.stack([torch.randperm(context, device=device)[: self.topk] for _ in range(batch)]).int()[
            :, None
        ]

    def advance(self) -> None:
        """The next step chooses others in the place of some."""
        fresh = round((1 - self.keep) * self.topk)
        for chosen in self.chosen[:, 0]:
            unused = torch.ones(self.context, dtype=torch.bool, device=chosen.device)
            unused[chosen.long()] = False
            others = unused.nonzero()[:, 0]
            others = others[torch.randperm(len(others), device=chosen.device)[:fresh]]
            chosen[torch.randperm(self.topk, device=chosen.device)[: len(others)]] = others.int()


def full_config(layers: int) -> DeepseekV32Config:
    """The published sizes, but for what attention does not depend on."""
    return DeepseekV32Config(num_hidden_layers=layers, first_k_dense_replace=layers, vocab_size=8192, eos_token_id=None)


def stock_cache(model: nn.Module, batch: int, context: int) -> DynamicCache:
    """Transformers' own, filled."""
    like, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 2, dtype=torch.long, device=model.device), **over(model, like))
    for layer, other in zip(cache.layers, like.layers):
        shapes = [(batch, t.shape[1], context, t.shape[3]) for t in (other.keys, other.values)]
        layer.update(*(torch.randn(shape, dtype=model.dtype, device=model.device) for shape in shapes))
        layer.update_indexer(_index_keys(model, batch, context))
    return cache


def _index_keys(model: nn.Module, batch: int, context: int) -> Tensor:
    return torch.randn(batch, context, model.config.index_head_dim, dtype=model.dtype, device=model.device)


def our_cache(model: nn.Module, batch: int, context: int, offload: OffloadConfig | None) -> SparseCache:
    """Ours, filled with as many latents."""
    return filled(SparseCache(_config(context), offload, model.config), model, batch, context)


def our_rows(model: nn.Module, batch: int, context: int, offload: OffloadConfig | None) -> RowBatch:
    """Ours, in rows that have joined one by one."""
    cache = SparseCache(_config(context), offload)
    rows = cache.rows(batch, context + 2 * STEPS)
    for _ in range(batch):
        one = cache.beside()
        one.bind(model.config)
        rows.adopt(filled(one, model, 1, context))
        rows.join(one)
    return rows


def _config(context: int) -> TokenConfig:
    return TokenConfig(max_length=context + 2 * STEPS)


def filled(cache: SparseCache, model: nn.Module, batch: int, context: int) -> SparseCache:
    """``cache``, which gets random latents and keys of indexers."""
    like = {"dtype": model.dtype, "device": model.device}
    modules = [module for module in model.modules() if is_mla(module)]
    for layer, module in zip(cache.layers, modules, strict=True):
        query = torch.randn(batch, module.num_heads, 1, module.qk_head_dim, **like)
        latents = [torch.randn(batch, 1, context, n, **like) for n in (module.kv_lora_rank, module.qk_rope_head_dim)]
        layer.fill(query, *latents, absorbed=Absorbed(module))
        layer.policy.keep_keys(_index_keys(model, batch, context), 0)
    return cache


@torch.no_grad()
def measure(model: nn.Module, held, pattern: Pattern, batch: int, context: int) -> tuple[float, CacheStats | None]:
    """Median milliseconds of a step over ``held``, a cache or rows, and what those steps of ours count."""
    cache = held.cache if isinstance(held, RowBatch) else held
    pattern.begin(batch, context, model.device)
    ids, found, first = torch.ones(batch, 1, dtype=torch.long, device=model.device), [], cache.get_seq_length()
    ours, before = isinstance(cache, SparseCache), None
    for step in range(STEPS):
        if step == WARM and ours:
            before = cache.stats()
        pattern.advance()
        at = torch.full((1, 1), first + step, device=model.device)
        _wait()
        begin = time.perf_counter()
        if cache is held:
            model(ids, position_ids=at, use_cache=True, **over(model, cache))
        else:
            held.step(model, ids)
        _wait()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[WARM:]), cache.stats().since(before) if ours else None


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory(weights: int) -> str:
    return f"{(torch.cuda.max_memory_allocated() - weights) / 1e9:.1f} GB" if torch.cuda.is_available() else "?"


def report(
    config: DeepseekV32Config, shapes, keep: float, hows, device: str, dtype: torch.dtype, stock: bool = True
) -> None:
    """Print a line for each shape and cache; ``hows``: of "eager" and "captured", how ours decode.

    ``stock``: of transformers' own cache as well.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = DeepseekV32ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    pattern, weights = Pattern(model, keep), sum(p.nbytes for p in model.parameters())
    makers = {
        "transformers (sdpa)": stock_cache,
        "ours, on the device": lambda *shape: our_cache(*shape, None),
        "ours, offloaded": lambda *shape: our_cache(*shape, OffloadConfig()),
        "rows, on the device": lambda *shape: our_rows(*shape, None),
        "rows, offloaded": lambda *shape: our_rows(*shape, OffloadConfig()),
    }
    if not stock:
        makers.pop("transformers (sdpa)")
    for batch, context in shapes:
        for name, make in makers.items():
            ours = make is not stock_cache
            model.set_attn_implementation("sparsekv" if ours else "sdpa")
            try:
                cache = make(model, batch, context)
                for how in hows if ours else ("",):
                    if how == "captured":
                        optimize(model, fused=False)
                    if torch.cuda.is_available():
                        torch.cuda.empty_cache()
                        torch.cuda.reset_peak_memory_stats()
                    took, stats = measure(model, cache, pattern, batch, context)
                    line = f"{batch} x {context}  {name:20} {how:8} {took:8.2f} ms a step"
                    print(f"{line}, {_memory(weights)} beside weights")
                    if stats is not None:
                        whole = cache.cache if isinstance(cache, RowBatch) else cache
                        held = {place: f"{n / 1e9:.3g} GB" for place, n in whole.memory_bytes().items()}
                        link = stats.host_to_device_bytes / stats.decode_steps / 1e6
                        print(f"{'':20} {link:.2f} MB a step over the link, hit rate {stats.hit_rate}, cache {held}")
            except torch.OutOfMemoryError as error:
                print(f"{batch} x {context}  {name:20} {str(error).splitlines()[0]}")
            cache = whole = None
            unoptimize(model)
            restore_mla(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    shapes = [(1, 32 << 10), (1, 128 << 10), (8, 32 << 10)]
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=shapes, metavar="BATCHxLENGTH")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--keep", type=float, default=0.9, help="share of a step's tokens that the next one chooses")
    parser.add_argument("--eager", action="store_true", help="ours without optimize() as well")
    parser.add_argument("--ours", action="store_true", help="not transformers' own cache")
    args = parser.parse_args()
    hows = ("eager", "captured") if args.eager else ("captured",)
    print(torch.cuda.get_device_name())
    report(full_config(args.layers), args.shapes, args.keep, hows, "cuda", torch.bfloat16, not args.ours)


if __name__ == "__main__":
    main()
