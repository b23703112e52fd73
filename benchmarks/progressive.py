"""Progressive against fixed-k block selection on the small real model, and the estimated against the true mass.

    python benchmarks/progressive.py quality       # perplexity, needles and blocks read, per threshold and per k
    python benchmarks/progressive.py calibration   # estimated and true mass along the walks; docs/progressive.svg

Each prints tables and appends its rows to benchmarks/results/accuracy.csv. Every prompt is prefilled once, by full
attention. A walk is one step, layer and KV head; blocks have 64 tokens; the first two layers are dense.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from small_model import RESULTS, cache_for, load
from torch import Tensor

from hf_sparsekv import ProgressiveConfig
from hf_sparsekv.benchmark.results import Row, append_rows
from hf_sparsekv.evaluation.prefix import forced_logits, greedy, prefill
from hf_sparsekv.evaluation.text import needle_prompt, python_reference
from hf_sparsekv.models import SMALL_MODEL_NAME
from hf_sparsekv.ops.block_score.reference import query_parts
from hf_sparsekv.ops.seal import key_metadata

THRESHOLDS = (0.90, 0.95, 0.98, 0.99)
PLOT = Path(__file__).parents[1] / "docs" / "progressive.svg"
KINDS = (("cuboid_mean", 64), ("cuboid_mean", 16), ("min_max", 64), ("mean", 64))  # and tokens that share one


def variants(ks: list[int]) -> dict[str, dict | None]:
    """Everything that is compared; all KV on the device."""
    found: dict[str, dict | None] = {"full": None}
    for threshold in THRESHOLDS:
        found[f"progressive:{threshold}"] = {"threshold": threshold, "min_blocks": 1, "offload": False}
    for threshold in THRESHOLDS[1:3]:
        found[f"progressive:{threshold},bound_tokens=16"] = {**found[f"progressive:{threshold}"], "bound_tokens": 16}
    for threshold in THRESHOLDS[1:3]:
        for least in (8, 16):
            at_least = {**found[f"progressive:{threshold}"], "min_blocks": least}
            found[f"progressive:{threshold},min_blocks={least}"] = at_least
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
    append_rows(RESULTS, rows)


# ---------------------------------------------------------------------- estimated and true mass


def walk(
    q: Tensor, keys: Tensor, config: ProgressiveConfig, scale: float, kind: str, share: int
) -> tuple[Tensor, Tensor, int]:
    """One layer's walks for one query ``[Hq, D]`` over ``keys [H, n, D]``, to their ends; ``share`` tokens a metadata.

    Returns:
        the estimated and the true share after each block, ``[H, blocks]``, the least of the query heads; and the number
        of blocks.
    """
    heads, n, dim = keys.shape
    size, recent = config.block_size, config.window + config.max_draft
    sealed = (n - recent) // size
    q = q.view(heads, -1, dim)
    logits = torch.einsum("hgd,hnd->hgn", q, keys) * scale
    mass = (logits - logits.amax(-1, keepdim=True)).exp()
    stored = mass[..., : sealed * size].clone()
    near = mass[..., sealed * size :].sum(-1) + stored[..., : config.sinks].sum(-1)
    stored[..., : config.sinks] = 0
    held = stored.unflatten(-1, (sealed, size)).sum(-1)  # [H, G, blocks]
    usable = torch.ones(sealed, size, dtype=torch.bool)
    usable[0, : config.sinks] = False
    blocks = keys[:, : sealed * size].unflatten(1, (sealed, size)).transpose(0, 1)
    kept = key_metadata(blocks, usable, size // share, kind).flatten(3)  # [blocks, parts, H, sides * D]
    score = torch.einsum("hgd,bphd->hgbp", query_parts(q, kind), kept).amax((1, 3))
    order = score.argsort(-1, descending=True)[:, None].expand_as(held)
    tokens = usable.sum(-1).expand_as(held).gather(-1, order).float()
    held = held.gather(-1, order)
    seen = near[..., None] + held.cumsum(-1)
    left = tokens.sum(-1, keepdim=True) - tokens.cumsum(-1)
    estimate = seen / (seen + (held / tokens).cummin(-1).values * left)
    return estimate.amin(1), (seen / mass.sum(-1)[..., None]).amin(1), sealed


@torch.no_grad()
def calibration(args) -> None:
    model, tokenizer = load()
    words = tokenizer(python_reference(), add_special_tokens=False, return_tensors="pt")["input_ids"]
    n, config = args.context, ProgressiveConfig()
    starts = [round(i * (words.shape[1] - n) / max(1, args.passages - 1)) for i in range(args.passages)]
    curves: dict[tuple, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)
    for start in starts:
        prefix = prefill(model, words[:, start : start + n])
        for layer in range(config.dense_layers, len(prefix.queries)):
            keys = prefix.cache.layers[layer].keys[0].float()
            scale = model.model.layers[layer].self_attn.scaling
            for step in range(args.steps):
                at = n - 1 - step * args.stride
                query = prefix.queries[layer][0, :, at].float()
                for kind in KINDS:
                    estimate, true, sealed = walk(query, keys[:, : at + 1], config, scale, *kind)
                    curves[kind].append((layer, estimate, true))
    table = Table(
        f"{len(starts)} x {args.steps} queries after {n} tokens",
        *("threshold", "blocks a walk", "true mass", "10 %", "1 %", "walks below the threshold", "blocks that suffice"),
    )
    rows, common = [], ("accuracy", SMALL_MODEL_NAME)
    for kind in KINDS:
        for threshold in THRESHOLDS:
            used, reached, needed, by_layer = [], [], [], defaultdict(list)
            for layer, estimate, true in curves[kind]:
                stop = torch.where((estimate > threshold).any(-1), (estimate > threshold).int().argmax(-1), -1)
                stop = torch.where(stop < 0, estimate.shape[-1] - 1, stop)
                used.append(stop + 1)
                reached.append(true.gather(-1, stop[:, None])[:, 0])
                needed.append((true <= threshold).sum(-1) + 1.0)
                by_layer[layer].append((stop + 1).float().mean())
            used, reached = torch.cat(used).float(), torch.cat(reached)
            needed = torch.cat(needed).clamp_max(sealed).mean()
            tenth, hundredth = (float(reached.quantile(p)) for p in (0.1, 0.01))
            below = float((reached < threshold).float().mean())
            table.add_row(
                *(
                    "{}, {} tokens".format(*kind),
                    f"{threshold}",
                    f"{used.mean():.1f} of {sealed}",
                    f"{reached.mean():.4f}",
                ),
                *(f"{tenth:.4f}", f"{hundredth:.4f}", f"{below:.1%}", f"{needed:.1f}"),
            )
            variant = f"walk:{kind[0]}:{threshold},bound_tokens={kind[1]}"
            rows += [
                Row(*common, variant, 1, n, "covered_mass", float(reached.mean()), tenth, None, "share"),
                Row(*common, variant, 1, n, "blocks", float(used.mean()), unit="count"),
            ]
    Console(width=160).print(table)
    append_rows(RESULTS, rows)
    plot(curves[KINDS[0]], args.plot)


def plot(curves: list[tuple[int, Tensor, Tensor]], path: Path) -> None:
    """The true share that walks have covered when they estimate a share: median and ranges over walks."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    edges = 1 - torch.logspace(math.log10(0.3), math.log10(0.003), 25)
    estimate = torch.cat([e.flatten() for _, e, _ in curves])
    true = torch.cat([t.flatten() for _, _, t in curves])
    at = torch.bucketize(estimate, edges)
    quantiles = [0.01, 0.1, 0.5, 0.9, 0.99]
    points, found = [], []
    for i in range(1, len(edges)):
        if int((at == i).sum()) > 50:
            points.append(float(1 - (edges[i - 1] + edges[i]) / 2))
            found.append((1 - true[at == i].quantile(torch.tensor(quantiles))).tolist())
    low, less, middle, more, high = zip(*found)
    figure, axes = plt.subplots(figsize=(5.4, 4.2))
    axes.fill_between(points, low, high, alpha=0.15, color="C0", label="1 - 99 % of the walks")
    axes.fill_between(points, less, more, alpha=0.3, color="C0", label="10 - 90 %")
    axes.plot(points, middle, color="C0", label="median")
    axes.plot(points, points, color="black", linewidth=0.8, linestyle="--", label="estimate = truth")
    axes.set(xscale="log", yscale="log", xlabel="mass estimated to be missing", ylabel="mass that is missing")
    axes.invert_xaxis()
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    axes.set_title("SmolLM2-135M, cuboid mean, blocks of 64 tokens", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "calibration"))
    parser.add_argument("--context", type=int, default=4096, help="tokens before the held-out text; of needle prompts")
    parser.add_argument("--tokens", type=int, default=48, help="held-out tokens per passage")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="needles per depth")
    parser.add_argument("--ks", type=int, nargs="+", default=[8, 16, 24, 32], help="blocks of fixed selections")
    parser.add_argument("--only", default="", help="only variants whose name matches this regular expression, quality")
    parser.add_argument("--steps", type=int, default=16, help="queries per passage, calibration")
    parser.add_argument("--stride", type=int, default=4, help="tokens between them")
    parser.add_argument("--plot", type=Path, default=PLOT)
    args = parser.parse_args()
    {"quality": quality, "calibration": calibration}[args.what](args)


if __name__ == "__main__":
    main()
