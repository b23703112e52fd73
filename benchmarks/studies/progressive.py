"""Progressive against fixed selections on the small real model: perplexity, needles and what is read.

    python -m benchmarks.studies.progressive
    python -m benchmarks.studies.progressive --only '^progressive:0.95' --ks 16 24

Prints tables and appends its rows to benchmarks/results/accuracy.csv. Every prompt is prefilled once, by full
attention. "Read" is the share of the tokens in full blocks that layers behind the two dense ones attend to. How true
the estimates are: progressive_estimates.py.
"""

from __future__ import annotations

import argparse
import math
import re

import torch
from rich.console import Console
from rich.table import Table

from hf_sparsekv.results import Row, append_rows
from hf_sparsekv.small_model import SMALL_MODEL_NAME

from .small_model import CSV, DEPTHS, Variants, forced, forced_rows, load, needles, reference_ids

THRESHOLDS = (0.90, 0.95, 0.98)


def variants(ks: list[int]) -> Variants:
    """Everything that is compared; all KV on the device."""
    found: Variants = {"full": None}
    for threshold in THRESHOLDS:
        found[f"progressive:{threshold},labels"] = {"threshold": threshold, "offload": False}
    for estimate in ("scores", "as_min"):
        found[f"progressive:0.98,{estimate}"] = {"threshold": 0.98, "estimate": estimate, "offload": False}
    for k in ks:
        found[f"token_only:k={64 * k}"] = {"level": "token", "token_budget": 64 * k, "offload": False}
        found[f"block_only:k={k}"] = {"level": "block", "token_budget": 64 * k, "lag": False, "offload": False}
    return found


def read(cache) -> list[float]:
    """Share of the tokens in full blocks that each sparse layer attended to, the mean over steps and KV heads."""
    stores = [layer.store for layer in cache.sparse_layers if layer.store.counters.sparse]
    found = []
    for store in stores:
        counters = store.counters
        stored = store.full_blocks * store.block_size
        near = store.length - stored + store.sinks  # after the last step: about the mean
        chosen = counters.total_attended - store.heads * counters.sparse * near
        found.append(chosen / (store.heads * counters.sparse * (stored - store.sinks)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens before the held-out text; of needle prompts")
    parser.add_argument("--tokens", type=int, default=48, help="held-out tokens per passage")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="needles per depth")
    parser.add_argument("--ks", type=int, nargs="+", default=[4, 8, 16], help="blocks of fixed selections")
    parser.add_argument("--only", default="", help="only variants whose name matches this regular expression")
    args = parser.parse_args()
    model, tokenizer = load()
    tried = {name: settings for name, settings in variants(args.ks).items() if re.search(args.only, name)}
    shares: dict[str, list[list[float]]] = {name: [] for name in tried}
    found = forced(model, reference_ids(tokenizer), args, tried, lambda name, cache: shares[name].append(read(cache)))
    hits, asked = needles(model, tokenizer, tried, args.context, args.repeats), len(DEPTHS) * args.repeats
    title = f"{args.passages} x {args.tokens} tokens after {args.context}"
    table = Table(title, "read", "perplexity", "top-1 agreement", "KL", f"needles of {asked}")
    rows, by_layer = [], {}
    for name, (nll, same, kl) in found.items():
        common = ("accuracy", SMALL_MODEL_NAME, f"walks:{name}", 1, args.context)
        rows += forced_rows(common, found[name], args.passages * args.tokens)
        rows.append(Row(*common, "needle", hits[name] / asked, unit="share"))
        mean = math.nan
        if shares[name]:
            by_layer[name] = torch.tensor(shares[name]).mean(0)
            mean = float(by_layer[name].mean())
            rows.append(Row(*common, "read", mean, unit="share"))
        table.add_row(name, f"{mean:.1%}", f"{math.exp(nll):.3f}", f"{same:.1%}", f"{kl:.4f}", str(hits[name]))
    console = Console(width=160)
    console.print(table)
    for name in (name for name in by_layer if name.startswith("progressive")):
        console.print(f"{name}, read by layer, percent: {' '.join(f'{100 * x:.0f}' for x in by_layer[name])}")
    append_rows(CSV, rows)


if __name__ == "__main__":
    main()
