"""Time per output token of a whole model: the captured forward alone, and through ``generate()``.

    python -m hf_sparsekv.benchmark.step --shapes 1x32k 1x128k 8x32k

Random weights of a known shape, KV filled with random keys and values (the time of a step does not depend on them while
all KV is on the device). Baselines in the same run: transformers' DynamicCache with sdpa, eager; the captured step with
dense attention; block-only and token-only selection; and the limit, the bytes that must be read over the measured
read-only bandwidth. A failure in one row does not lose the others.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    Qwen3Config,
)

from .. import OffloadConfig, OffloadedSparseCache, TwoLevelConfig, optimize, unoptimize
from ..fused import fuse
from ..graphs import runner_of
from .operator_timing import read_bandwidth
from .results import Row, append_rows, device_name, versions

CSV = Path("benchmarks/results/step.csv")

SHAPES = {
    "qwen3-8b": lambda: Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": lambda: LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
    ),
}

# variant -> settings of a two-level cache; None is transformers' own
VARIANTS: dict[str, dict | None] = {
    "hf_dynamic": None,
    "sdpa_best": None,
    "captured_dense": {"token_budget": 1 << 22},
    "two_level": {"token_budget": 1024, "num_blocks": 128, "lag": False},
    "two_level:lag": {"token_budget": 1024, "num_blocks": 128, "lag": True},
    "block_only": {"token_budget": 1024, "level": "block", "lag": False},
    "token_only": {"token_budget": 1024, "level": "token"},
}


def parse_shape(text: str) -> tuple[int, int]:
    """``8x32k`` -> ``(8, 32768)``."""
    batch, context = text.lower().split("x")
    return int(batch), int(context[:-1]) * 1024 if context.endswith("k") else int(context)


def random_model(config) -> torch.nn.Module:
    """A model of this shape on the GPU, bf16, random weights."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sparsekv", dtype=torch.bfloat16)
    return model.eval()


@torch.no_grad()
def filled(model, settings: dict | None, batch: int, context: int, offload: bool):
    """A cache of ``context`` random tokens per row."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim

    def draw(n_heads: int, n: int) -> torch.Tensor:
        return torch.randn(batch, n_heads, n, dim, dtype=torch.bfloat16, device="cuda")

    if settings is None:
        cache = DynamicCache()
        for index in range(config.num_hidden_layers):
            cache.update(draw(heads, context), draw(heads, context), index)
        return cache
    settings = TwoLevelConfig(**{"max_length": context + 1024, **settings})
    cache = OffloadedSparseCache(settings, offload=OffloadConfig() if offload else None, model_config=config)
    queries = draw(config.num_attention_heads, 512)
    for layer in cache.sparse_layers:
        key, value = draw(heads, context), draw(heads, context)
        layer.fill(queries, key[:, :, :512], value[:, :, :512])
        layer.fill(queries[:, :, :1], key[:, :, 512:], value[:, :, 512:])
    return cache


def generate_tpot(model, cache, batch: int, context: int, tokens: int) -> list[float]:
    """Milliseconds of each token that ``generate()`` makes, the first eight (capture, warm-up) left out."""
    times: list[float] = []

    class Clock:
        def put(self, value):
            torch.cuda.synchronize()
            times.append(time.perf_counter())

        def end(self):
            pass

    def note(input_ids, scores, **kwargs):
        Clock().put(None)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    ids = torch.randint(0, 1000, (batch, context + 1), device="cuda")
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[note],
        pad_token_id=0,
    )
    return [1e3 * (b - a) for a, b in itertools.pairwise(times[8:])]


def replay_ms(model, cache) -> list[float]:
    """Milliseconds of the captured forward alone."""
    step = list(runner_of(model).graphs[cache].values())[-1]
    return timed(step.graph.replay)


@torch.no_grad()
def captured_sdpa_ms(model, batch: int, context: int, fused: bool) -> list[float]:
    """The same forward captured with the best dense attention that torch has: what sparse decoding has to beat.

    Keys and values lie as sdpa likes them, nothing is appended beyond the last column, no mask is made.
    """
    config = model.config
    shape = (batch, config.num_key_value_heads, context + 1, config.head_dim)
    held = [
        [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv"] for _ in range(config.num_hidden_layers)
    ]

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        k, v = held[module.layer_idx]
        k[:, :, -1:], v[:, :, -1:] = key, value
        out = F.scaled_dot_product_attention(query, k, v, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("benchmark_dense", attend)
    unoptimize(model)
    model.set_attn_implementation("benchmark_dense")
    fusion = fuse(model) if fused else None
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    position = torch.full((batch, 1), context, device="cuda")
    medians = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                model(input_ids=ids, position_ids=position, use_cache=False)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                model(input_ids=ids, position_ids=position, use_cache=False)
        times = timed(graph.replay)
        medians[statistics.median(times)] = times
        del graph
    if fusion is not None:
        fusion.undo()
    held.clear()  # the registered function outlives this one
    return medians[min(medians)]


def timed(run: Callable[[], None], repeat: int = 30) -> list[float]:
    """Milliseconds of each of ``repeat`` runs, the first five left out."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events][5:]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return statistics.median(values), low, high


def limit_ms(model, settings: dict | None, batch: int, context: int, rate: float) -> float:
    """Bytes that a step must read (weights without the embedding table, and KV) over the read-only bandwidth."""
    config = model.config
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    token = 2 * config.num_key_value_heads * config.head_dim * 2
    return (weights + batch * context * token * config.num_hidden_layers) / rate * 1e3


def measure(
    model, case: str, batch: int, context: int, name: str, offload: bool, tokens: int, fused: bool
) -> list[Row]:
    settings = VARIANTS[name]
    variant = name + ("+fused" if fused and name != "hf_dynamic" else "") + ("+offload" if offload else "")
    if name == "sdpa_best":
        median, low, high = quartiles(captured_sdpa_ms(model, batch, context, fused))
        print(f"{batch:3} x {context:7}  {variant:24} step_ms    {median:9.3f} [{low:.3f}, {high:.3f}] ms", flush=True)
        return [Row("step", case, variant, batch, context, "step_ms", median, low, high, "ms")]
    if settings is None:
        unoptimize(model)
        model.set_attn_implementation("sdpa")
        tokens = min(tokens, 24)
    else:
        model.set_attn_implementation("sparsekv")
        optimize(model, fused=fused)
    cache = filled(model, settings, batch, context, offload)
    rows = []

    def add(metric: str, values: list[float], unit: str = "ms") -> None:
        median, low, high = quartiles(values)
        rows.append(Row("step", case, variant, batch, context, metric, median, low, high, unit))
        print(
            f"{batch:3} x {context:7}  {variant:24} {metric:10} {median:9.3f} [{low:.3f}, {high:.3f}] {unit}",
            flush=True,
        )

    add("tpot_ms", generate_tpot(model, cache, batch, context, tokens))
    if settings is not None:
        print(f"      {cache.stats()}; {runner_of(model).captures} captures", flush=True)
        add("step_ms", replay_ms(model, cache))
    rows.append(
        Row("step", case, variant, batch, context, "peak_gb", torch.cuda.max_memory_allocated() / 1e9, unit="GB")
    )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[(1, 32768), (1, 131072), (8, 32768)])
    parser.add_argument("--model", default="qwen3-8b", help="a known shape, or a model name or path (its config only)")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--offload", action="store_true", help="keep full blocks in host memory")
    parser.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fuse the small layers and join projections, in the dense baseline too",
    )
    parser.add_argument("--tokens", type=int, default=160, help="tokens to generate")
    parser.add_argument("--csv", type=Path, default=CSV)
    args = parser.parse_args(argv)
    config = SHAPES[args.model]() if args.model in SHAPES else AutoConfig.from_pretrained(args.model)
    print(device_name(), versions())
    rate = read_bandwidth(torch.device("cuda"))
    print(f"read-only bandwidth {rate / 1e12:.2f} TB/s")
    model = random_model(config)
    rows: list[Row] = []
    for batch, context in args.shapes:
        least = limit_ms(model, None, batch, context, rate)
        rows.append(Row("step", args.model, "limit", batch, context, "step_ms", least, unit="ms"))
        print(f"{batch:3} x {context:7}  limit (dense)            step_ms    {least:9.3f} ms", flush=True)
        for name in args.variants:
            torch.cuda.reset_peak_memory_stats()
            try:
                rows += measure(model, args.model, batch, context, name, args.offload, args.tokens, args.fused)
            except Exception as error:
                print(f"{batch:3} x {context:7}  {name}: failed, {error!r}"[:300], flush=True)
                traceback.print_exc()
            gc.collect()
            torch.cuda.empty_cache()
    append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
