"""Time of a token with an audit and without.

    python -m benchmarks.probes.audited [--model qwen3-8b] [--shapes 1x32k 1x128k 8x32k] [--kv replayed]

Milliseconds a token of ``generate()`` over a full cache, with captured steps: without an audit, with ``audit=True``,
and with ``max_loss=1``, which never goes back. Median and range of ``--repeats`` calls that take turns, after one of
each that captures. A call of ``--lead`` tokens is subtracted, so what is left has whole intervals. Prints only.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from unittest.mock import patch

import torch

import hf_sparsekv
from hf_sparsekv import AuditConfig, SparseCache
from hf_sparsekv.checking.audit import check_of
from hf_sparsekv.generating import Settings
from hf_sparsekv.layers.together import keep_tokens
from hf_sparsekv.results import versions

from ..baselines import find, make_cache, prepare
from ..decoding import free
from ..filling import SOURCES, fill_layers
from ..shapes import known_config, parse_shape, random_model


def seconds(model, cache: SparseCache, batch: int, context: int, tokens: int, audit) -> float:
    """Seconds of ``generate()`` over a full cache."""
    keep_tokens(cache, [context] * batch, None)
    exactness = cache.row_table.exactness
    exactness.cropped(context)
    exactness.audited = None
    if audit:
        check_of(audit).begin(cache)
    ids = torch.randint(10, min(1000, model.config.vocab_size), (batch, context + 1), device=model.device)
    go = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with (
        hf_sparsekv.sparse(model, cache.config, audit=audit or False, optimize=False),
        patch.object(Settings, "cache", lambda *_: cache),
    ):
        _wait(model)
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **go)
        _wait(model)
        return time.perf_counter() - began


def _wait(model) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def measure(model, batch: int, context: int, args: argparse.Namespace) -> None:
    """Print milliseconds a token of one shape."""
    variant = find(args.variant)
    prepare(model, variant, fused=model.device.type == "cuda")
    free()
    cache = make_cache(model, variant, context + args.tokens + args.lead + 64)
    source = SOURCES[args.kv](model, batch, context)
    source.show = False
    fill_layers(source, cache)
    source.start(cache)  # the same queries in each step
    kinds = {"without": None, "audit": AuditConfig(interval=args.interval)}
    kinds["max_loss=1"] = AuditConfig(interval=args.interval, max_loss=1.0)
    ms: dict[str, list[float]] = {name: [] for name in kinds}
    for nth in range(args.repeats + 1):
        for name, audit in kinds.items():
            lead = seconds(model, cache, batch, context, args.lead, audit)
            long = seconds(model, cache, batch, context, args.lead + args.tokens, audit)
            if nth:
                ms[name].append(1e3 * (long - lead) / args.tokens)
    usual = median(ms["without"])
    for name, every in ms.items():
        found, low, high = median(every), min(every), max(every)
        print(
            f"{batch} x {context} {name}: {found:.3f} ms ({low:.3f} to {high:.3f}), {found / usual - 1:+.1%}",
            flush=True,
        )
    print(f"  {cache.stats().audit}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=["1x32k", "1x128k", "8x32k"])
    parser.add_argument("--variant", default="mass:0.9", help="as in `step --list`")
    parser.add_argument("--kv", choices=sorted(SOURCES), default="replayed")
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--lead", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began = time.perf_counter()
    model = random_model(known_config(args.model, args.layers), dtype, device)
    print(f"{versions()}; model made in {time.perf_counter() - began:.0f} s", flush=True)
    for shape in args.shapes:
        batch, context = parse_shape(shape) if isinstance(shape, str) else shape
        measure(model, batch, context, args)
        print(f"  {time.perf_counter() - began:.0f} s since the beginning", flush=True)


if __name__ == "__main__":
    main()
