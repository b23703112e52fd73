"""Time of a token with an audit and without.

    python -m benchmarks audit --shapes 1x32k 1x128k 8x32k

Milliseconds a token of ``generate()`` over a full cache, with captured steps: without an audit, with ``audit=True``,
and with ``max_loss=1``, which never goes back. The calls take turns, after one of each that captures. A call of
``--lead`` tokens is subtracted, so what is left has whole intervals. Rows go to ``benchmarks/results/audit.csv``.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any
from unittest.mock import patch

import torch

import hf_sparsekv
from hf_sparsekv import AuditConfig, SparseCache
from hf_sparsekv.checking.audit import check_of
from hf_sparsekv.generating import Settings
from hf_sparsekv.layers.together import keep_tokens
from hf_sparsekv.results import versions

from .arguments import new_parser, rows_file
from .baselines import Variant, find, make_cache, prepare
from .decoding import free
from .filling import fill_layers, make_source
from .report import Report
from .shapes import case_name, known_config, random_model


def seconds(model, cache: SparseCache, batch: int, context: int, tokens: int, audit: AuditConfig | None) -> float:
    """Seconds of ``generate()`` over a full cache."""
    keep_tokens(cache, [context] * batch, None)
    exactness = cache.row_table.exactness
    exactness.cropped(context)
    exactness.audited = None
    if audit is not None:
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


def measure(model, batch: int, context: int, variant: Variant, report: Report, args: Namespace) -> None:
    """Milliseconds a token of one shape."""
    free()
    cache = make_cache(model, variant, context + args.tokens + args.lead + 64)
    source: Any = make_source(args.kv, model, batch, context)
    source.show = False
    fill_layers(source, cache)
    source.start(cache)  # the same queries in each step
    kinds = {
        "without": None,
        "audit": AuditConfig(interval=args.interval),
        "max_loss=1": AuditConfig(interval=args.interval, max_loss=1.0),
    }
    ms: dict[str, list[float]] = {name: [] for name in kinds}
    for nth in range(args.repeats + 1):
        for name, audit in kinds.items():
            lead = seconds(model, cache, batch, context, args.lead, audit)
            whole = seconds(model, cache, batch, context, args.lead + args.tokens, audit)
            if nth:
                ms[name].append(1e3 * (whole - lead) / args.tokens)
    for name, found in ms.items():
        report.add(f"{name}:interval={args.interval}:tpot_ms", sorted(found))
    report.note(str(cache.stats().audit))


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 if a shape failed."""
    parser = new_parser("audit", __doc__, "shapes", "model")
    parser.set_defaults(shapes=[(1, 32768), (1, 131072), (8, 32768)])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--variant", default="mass:0.9", help="as in `step --list`")
    parser.add_argument("--kv", default="replayed", help="keys, values and queries: random, or replayed")
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="whole intervals")
    parser.add_argument("--lead", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(known_config(args.model, args.layers), dtype, device)
    variant = find(args.variant)
    prepare(model, variant, fused=device.type == "cuda")
    print(versions())
    case = case_name(args.model) + ("" if args.layers is None else f":layers={args.layers}")
    with Report("audit", case, rows_file(args), len(args.shapes)) as report:
        for batch, context in args.shapes:
            with report.measuring(batch, context, f"{variant.name}:kv={args.kv}", model):
                measure(model, batch, context, variant, report, args)
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
