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
from collections import defaultdict

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_sparsekv.evaluation.prefix import forced_logits, greedy, prefill
from hf_sparsekv.evaluation.small_model import SMALL_MODEL_NAME
from hf_sparsekv.evaluation.text import needle_prompt, python_reference
from hf_sparsekv.results import Row, append_rows

from .small_model import CSV, cache_for, load

THRESHOLDS = (0.90, 0.95, 0.98, 0.99)


def variants(ks: list[int]) -> dict[str, dict | None]:
    """Everything that is compared; all KV on the device."""
    found: dict[str, dict | None] = {"full": None}
    for estimate in ("scores", "as_min"):
        for threshold in THRESHOLDS:
            walk = {"threshold": threshold, "estimate": estimate, "offload": False}
            found[f"progressive:{threshold},estimate={estimate}"] = walk
    for threshold in THRESHOLDS[1:3]:
        narrow = {"threshold": threshold, "bound_tokens": 16, "offload": False}
        found[f"progressive:{threshold},estimate=scores,bound_tokens=16"] = narrow
    for k in ks:
        block = {"level": "block", "token_budget": 64 * k, "lag": False, "offload": False}
        found[f"block_only:k={k}"] = block
        found[f"block_only:k={k},cuboid_mean"] = {**block, "metadata": "cuboid_mean"}
    return found


def blocks_a_walk(cache) -> tuple[float, list[float]]:
    """Blocks used, mean over all sparse layers, and of each."""
    stats = cache.stats()
    if stats.walks:
        return stats.blocks_per_walk, [w.blocks_used / w.walks for w in stats.walks]
    layers = [layer for layer in cache.sparse_layers if layer.store.counters.sparse]
    each = [int(x.store.counters.blocks) / (x.store.counters.sparse * x.store.heads) for x in layers]
    return sum(each) / len(each), each


@torch.no_grad()
def quality(args) -> None:
    model, tokenizer = load()
    tried = {name: settings for name, settings in variants(args.ks).items() if re.search(args.only, name)}
    words = tokenizer(python_reference(), add_special_tokens=False, return_tensors="pt")["input_ids"]
    n, held = args.context, args.tokens
    starts = [round(i * (words.shape[1] - n - held - 1) / max(1, args.passages - 1)) for i in range(args.passages)]
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in tried}
    blocks, layers, needles = defaultdict(list), {}, defaultdict(int)
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    with Progress() as progress:
        task = progress.add_task("passages", total=len(starts) * len(tried))
        for start in starts:
            prefix = prefill(model, words[:, start : start + n])
            ids = words[:, start + n : start + n + held]
            target = words[0, start + n + 1 : start + n + held + 1]
            reference = forced_logits(model, prefix.full(), ids).log_softmax(-1)
            for name, settings in tried.items():
                logp = reference
                if settings is not None:
                    cache = prefix.fill(cache_for(model, settings, None), model)
                    logp = forced_logits(model, cache, ids).log_softmax(-1)
                    mean, each = blocks_a_walk(cache)
                    blocks[name].append(mean)
                    layers.setdefault(name, []).append(each)
                nll = -logp.gather(-1, target[:, None]).sum()
                same = (logp.argmax(-1) == reference.argmax(-1)).sum()
                kl = (reference.exp() * (reference - logp)).sum()
                sums[name] += torch.stack((nll, same, kl)).double()
                progress.advance(task)
        task = progress.add_task("needles", total=len(depths) * args.repeats * len(tried))
        for seed in range(args.repeats):
            for depth in depths:
                prompt = needle_prompt(tokenizer, n, depth, seed)
                prefix = prefill(model, prompt.ids)
                for name, settings in tried.items():
                    cache = cache_for(model, settings, prefix.full)
                    if settings is not None:
                        prefix.fill(cache, model)
                    out = greedy(model, prefix, cache, 12, {model.config.eos_token_id})
                    needles[name] += prompt.answer in tokenizer.decode(out)
                    progress.advance(task)
    count, asked = len(starts) * held, len(depths) * args.repeats
    title = f"{len(starts)} x {held} tokens after {n}"
    table = Table(title, "blocks a walk", "perplexity", "top-1 agreement", "KL", f"needles of {asked}")
    rows = []
    for name in tried:
        nll, same, kl = (sums[name] / count).tolist()
        mean = sum(blocks[name]) / len(blocks[name]) if blocks[name] else math.nan
        table.add_row(name, f"{mean:.1f}", f"{math.exp(nll):.3f}", f"{same:.1%}", f"{kl:.4f}", str(needles[name]))
        common = ("accuracy", SMALL_MODEL_NAME, f"walks:{name}", 1, n)
        rows += [
            Row(*common, "perplexity", math.exp(nll)),
            Row(*common, "top1_agreement", same, unit="share"),
            Row(*common, "kl", kl, unit="nats"),
            Row(*common, "needle", needles[name] / asked, unit="share"),
        ]
        if blocks[name]:
            rows.append(Row(*common, "blocks", mean, unit="count"))
    console = Console(width=160)
    console.print(table)
    for name in (name for name in layers if name.startswith("progressive")):
        each = torch.tensor(layers[name]).mean(0)
        console.print(f"{name}, blocks a walk by layer: {' '.join(f'{x:.0f}' for x in each)}")
    append_rows(CSV, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens before the held-out text; of needle prompts")
    parser.add_argument("--tokens", type=int, default=48, help="held-out tokens per passage")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="needles per depth")
    parser.add_argument("--ks", type=int, nargs="+", default=[8, 16, 24, 32], help="blocks of fixed selections")
    parser.add_argument("--only", default="", help="only variants whose name matches this regular expression")
    quality(parser.parse_args())


if __name__ == "__main__":
    main()
