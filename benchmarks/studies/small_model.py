"""Sparse against full attention on the small real model: needles, perplexity and agreement.

    python -m benchmarks.studies.small_model needle        # 5 depths x 1k, 2k, 4k tokens
    python -m benchmarks.studies.small_model perplexity    # held-out text after 4k tokens, several budgets
    python -m benchmarks.studies.small_model choices       # the settings that the papers leave open

Each prints a table and appends its rows to benchmarks/results/accuracy.csv. Every prompt is prefilled once, by full
attention; all caches are filled from it and decode on their own.
"""

from __future__ import annotations

import argparse
import math
import re

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, ProgressiveCache, ProgressiveConfig, TwoLevelConfig
from hf_sparsekv.evaluation.prefix import forced_logits, greedy, prefill
from hf_sparsekv.evaluation.small_model import SMALL_MODEL_NAME, fetch_small_model
from hf_sparsekv.evaluation.text import needle_prompt, python_reference
from hf_sparsekv.results import Row, append_rows

from .. import RESULTS

CSV = RESULTS / "accuracy.csv"
BASE = {"token_budget": 256, "num_blocks": 16}


def load():
    path = fetch_small_model()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    return model, AutoTokenizer.from_pretrained(path)


def cache_for(model, settings: dict | None, full):
    """A cache of the given settings, or full attention's for ``None``."""
    if settings is None:
        return full()
    settings = dict(settings)
    offload = OffloadConfig() if settings.pop("offload", True) else None
    if "threshold" in settings:
        return ProgressiveCache(ProgressiveConfig(**settings), offload=offload, model_config=model.config)
    return OffloadedSparseCache(TwoLevelConfig(**settings), offload=offload, model_config=model.config)


def needle(args) -> None:
    variants = {
        "full": None,
        "two_level:budget=256,blocks=16": BASE,
        "two_level:budget=256,blocks=16,lag=False": {**BASE, "lag": False},
        "two_level:budget=256,blocks=16,bound_tokens=16": {**BASE, "bound_tokens": 16},
        "block_only:budget=256": {"token_budget": 256, "level": "block", "lag": False},
        "token_only:budget=256": {"token_budget": 256, "level": "token"},
    }
    model, tokenizer = load()
    depths, lengths = (0.0, 0.25, 0.5, 0.75, 1.0), args.lengths
    found = {(name, n): 0 for name in variants for n in lengths}
    with Progress() as progress:
        task = progress.add_task("needles", total=len(depths) * len(lengths) * args.repeats)
        for n in lengths:
            for seed in range(args.repeats):
                for depth in depths:
                    prompt = needle_prompt(tokenizer, n, depth, seed)
                    prefix = prefill(model, prompt.ids)
                    for name, settings in variants.items():
                        cache = cache_for(model, settings, prefix.full)
                        if settings is not None:
                            prefix.fill(cache, model)
                        out = greedy(model, prefix, cache, 12, {model.config.eos_token_id})
                        found[name, n] += prompt.answer in tokenizer.decode(out)
                    progress.advance(task)
    total = len(depths) * args.repeats
    table = Table("needles found", *(f"{n} tokens" for n in lengths))
    for name in variants:
        table.add_row(name, *(f"{found[name, n]} of {total}" for n in lengths))
    Console(width=140).print(table)
    rows = [
        Row("accuracy", SMALL_MODEL_NAME, name, 1, n, "needle", found[name, n] / total, unit="share")
        for name in variants
        for n in lengths
    ]
    append_rows(CSV, rows)


def compare(args, variants: dict[str, dict | None], title: str) -> None:
    """Perplexity, top-1 agreement and KL divergence against full attention, teacher-forced over held-out text."""
    variants = {name: settings for name, settings in variants.items() if re.search(args.only, name)}
    model, tokenizer = load()
    words = tokenizer(python_reference(), add_special_tokens=False, return_tensors="pt")["input_ids"]
    n, held = args.context, args.tokens
    starts = [round(i * (words.shape[1] - n - held - 1) / max(1, args.passages - 1)) for i in range(args.passages)]
    totals = {name: torch.zeros(3, dtype=torch.float64) for name in variants}
    shares: dict[str, float] = {}
    with Progress() as progress:
        task = progress.add_task(title, total=len(starts) * len(variants))
        for start in starts:
            prefix = prefill(model, words[:, start : start + n])
            ids = words[:, start + n : start + n + held]
            target = words[0, start + n + 1 : start + n + held + 1]
            reference = forced_logits(model, prefix.full(), ids).log_softmax(-1)
            for name, settings in variants.items():
                logp = reference
                if settings is not None:
                    cache = prefix.fill(cache_for(model, settings, None), model)
                    logp = forced_logits(model, cache, ids).log_softmax(-1)
                    shares[name] = cache.stats().attended_share
                nll = -logp.gather(-1, target[:, None]).sum()
                same = (logp.argmax(-1) == reference.argmax(-1)).sum()
                kl = (reference.exp() * (reference - logp)).sum()
                totals[name] += torch.stack((nll, same, kl)).double()
                progress.advance(task)
    count = len(starts) * held
    table = Table(
        f"{title}, {len(starts)} x {held} tokens after {n}", "perplexity", "top-1 agreement", "KL", "attended"
    )
    rows = []
    for name, sums in totals.items():
        nll, same, kl = (sums / count).tolist()
        # Wilson interval of the agreement, 95 %
        z, p = 1.96, same
        centre, half = (
            p + z * z / (2 * count),
            z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)),
        )
        low, high = (centre - half) / (1 + z * z / count), (centre + half) / (1 + z * z / count)
        table.add_row(name, f"{math.exp(nll):.3f}", f"{same:.1%}", f"{kl:.4f}", f"{shares.get(name, 1):.1%}")
        common = ("accuracy", SMALL_MODEL_NAME, name, 1, n)
        rows += [
            Row(*common, "perplexity", math.exp(nll)),
            Row(*common, "top1_agreement", same, low, high, "share"),
            Row(*common, "kl", kl, unit="nats"),
        ]
    Console(width=140).print(table)
    append_rows(CSV, rows)


def perplexity(args) -> None:
    variants: dict[str, dict | None] = {"full": None}
    for budget in (128, 256, 512):
        for level in ("two_level", "block", "token"):
            settings = {"token_budget": budget, "level": level}
            if level == "two_level":
                settings |= {"num_blocks": max(16, budget // 16)}
            name = level if level == "two_level" else f"{level}_only"
            variants[f"{name}:budget={budget}"] = settings
            if level == "two_level":
                variants[f"{name}:budget={budget},bound_tokens=16"] = {**settings, "bound_tokens": 16}
    compare(args, variants, "perplexity")


def choices(args) -> None:
    base = {**BASE, "token_budget": 128}
    variants: dict[str, dict | None] = {"two_level": base}
    for key, values in {
        "lag": (False,),
        "bound_tokens": (16, 32),
        "block_reduce": ("mean",),
        "token_reduce": ("mean",),
        "channel_importance": ("mean",),
        "label_channels": (8, 32),
        "label_bits": (16,),
        "block_size": (32, 16),
        "dense_layers": (0, 1),
        "sinks": (0, 16),
        "window": (16, 128),
    }.items():
        for value in values:
            change = {key: value}
            if key == "block_size":
                change["num_blocks"] = BASE["num_blocks"] * 64 // value
            variants[f"two_level:{key}={value}"] = {**base, **change}
    both = {"block_reduce": "mean", "token_reduce": "mean"}
    variants["two_level:block_reduce=mean,token_reduce=mean"] = {**base, **both}
    compare(args, variants, "choices at budget 128")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("needle", "perplexity", "choices"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="needle prompts, tokens")
    parser.add_argument("--repeats", type=int, default=1, help="needles per depth and length")
    parser.add_argument("--context", type=int, default=4096, help="tokens before the held-out text")
    parser.add_argument("--tokens", type=int, default=192, help="held-out tokens per passage")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--only", default="", help="only variants whose name matches this regular expression")
    args = parser.parse_args()
    {"needle": needle, "perplexity": perplexity, "choices": choices}[args.what](args)


if __name__ == "__main__":
    main()
