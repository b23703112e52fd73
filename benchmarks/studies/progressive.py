"""Progressive against fixed-k block selection on the small real model: perplexity, needles and blocks read.

    python -m benchmarks.studies.progressive
    python -m benchmarks.studies.progressive --only '^progressive:0.98' --ks 16 24

Prints tables and appends its rows to benchmarks/results/accuracy.csv. Every prompt is prefilled once, by full
attention. A walk is one step, layer and KV head; blocks have 64 tokens; the first two layers are dense. How true the
walks' estimates are: progressive_estimates.py.
"""

from __future__ import annotations

import argparse
import math
import re

import torch
from rich.console import Console
from rich.table import Table

from hf_sparsekv.evaluation.small_model import SMALL_MODEL_NAME
from hf_sparsekv.results import Row, append_rows

from .small_model import CSV, DEPTHS, Variants, forced, forced_rows, load, needles, reference_ids

THRESHOLDS = (0.90, 0.95, 0.98, 0.99)


def variants(ks: list[int]) -> Variants:
    """Everything that is compared; all KV on the device."""
    found: Variants = {"full": None}
    for threshold in THRESHOLDS:
        found[f"progressive:{threshold},estimate=scores"] = {"threshold": threshold, "offload": False}
    for threshold in THRESHOLDS[1:3]:
        narrow = {"threshold": threshold, "bound_tokens": 16, "offload": False}
        found[f"progressive:{threshold},estimate=scores,bound_tokens=16"] = narrow
    for k in ks:
        block = {"level": "block", "token_budget": 64 * k, "lag": False, "offload": False}
        found[f"block_only:k={k}"] = block
        found[f"block_only:k={k},cuboid_mean"] = {**block, "metadata": "cuboid_mean"}
    return found


def blocks_a_walk(cache) -> list[float]:
    """Blocks used in each sparse layer, the mean over its walks."""
    if walks := cache.stats().walks:
        return [w.blocks_used / w.walks for w in walks]
    layers = [layer.store for layer in cache.sparse_layers if layer.store.counters.sparse]
    return [int(store.counters.blocks) / (store.counters.sparse * store.heads) for store in layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens before the held-out text; of needle prompts")
    parser.add_argument("--tokens", type=int, default=48, help="held-out tokens per passage")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="needles per depth")
    parser.add_argument("--ks", type=int, nargs="+", default=[8, 16, 24, 32], help="blocks of fixed selections")
    parser.add_argument("--only", default="", help="only variants whose name matches this regular expression")
    args = parser.parse_args()
    model, tokenizer = load()
    tried = {name: settings for name, settings in variants(args.ks).items() if re.search(args.only, name)}
    blocks: dict[str, list[list[float]]] = {name: [] for name in tried}
    found = forced(
        model, reference_ids(tokenizer), args, tried, lambda name, cache: blocks[name].append(blocks_a_walk(cache))
    )
    hits, asked = needles(model, tokenizer, tried, args.context, args.repeats), len(DEPTHS) * args.repeats
    title = f"{args.passages} x {args.tokens} tokens after {args.context}"
    table = Table(title, "blocks a walk", "perplexity", "top-1 agreement", "KL", f"needles of {asked}")
    rows, by_layer = [], {}
    for name, (nll, same, kl) in found.items():
        common = ("accuracy", SMALL_MODEL_NAME, f"walks:{name}", 1, args.context)
        rows += forced_rows(common, found[name], args.passages * args.tokens)
        rows.append(Row(*common, "needle", hits[name] / asked, unit="share"))
        mean = math.nan
        if blocks[name]:
            by_layer[name] = torch.tensor(blocks[name]).mean(0)
            mean = float(by_layer[name].mean())
            rows.append(Row(*common, "blocks", mean, unit="count"))
        table.add_row(name, f"{mean:.1f}", f"{math.exp(nll):.3f}", f"{same:.1%}", f"{kl:.4f}", str(hits[name]))
    console = Console(width=160)
    console.print(table)
    for name in (name for name in by_layer if name.startswith("progressive")):
        console.print(f"{name}, blocks a walk by layer: {' '.join(f'{x:.0f}' for x in by_layer[name])}")
    append_rows(CSV, rows)


if __name__ == "__main__":
    main()
