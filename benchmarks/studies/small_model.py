"""Sparse against full attention on the small real model: needles, perplexity and agreement.

    python -m benchmarks.studies.small_model needle        # 5 depths x 1k, 2k, 4k tokens
    python -m benchmarks.studies.small_model perplexity    # held-out text after 4k tokens, several budgets

Each prints a table and appends its rows to benchmarks/results/accuracy.csv. Every prompt is prefilled once, by full
attention; all caches are filled from it and decode on their own.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, ProgressiveCache, ProgressiveConfig, TokenConfig
from hf_sparsekv.results import Row, append_rows
from hf_sparsekv.small_model import SMALL_MODEL_NAME, fetch_small_model
from hf_sparsekv_eval.prefix import forced_steps, greedy_rows, prefill
from hf_sparsekv_eval.text import needle_prompt, python_reference

from .. import RESULTS

CSV = RESULTS / "accuracy.csv"
BASE = {"token_budget": 256, "num_blocks": 16, "level": "two_level", "metadata": "min_max"}
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Variants = dict[str, dict | None]  # settings by name; None: full attention


def load():
    """The model and its tokenizer."""
    path = fetch_small_model()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    return model, AutoTokenizer.from_pretrained(path)


def reference_ids(tokenizer) -> Tensor:
    """The language reference of Python, ``[1, n]``."""
    return tokenizer(python_reference(), add_special_tokens=False, return_tensors="pt")["input_ids"]


def greedy(model, prefix, cache, max_new_tokens: int, eos: set[int]) -> list[int]:
    """Continue a prefilled prompt greedily with a filled cache."""
    return greedy_rows(model, prefix, cache, prefix.logits, max_new_tokens, eos)[0]


def forced_logits(model, cache, ids: Tensor) -> Tensor:
    """Logits ``[n, vocab]`` of feeding ``ids [1, n]`` one at a time, float32."""
    return torch.cat(list(forced_steps(model, cache, ids)))


def filled(model, prefix, settings: dict | None):
    """A cache of the given settings that holds a prefilled prompt."""
    if settings is None:
        return prefix.full()
    settings = {"dense_layers": 2, **settings}  # the default when these studies were made
    offload = OffloadConfig() if settings.pop("offload", True) else None
    kind, config = OffloadedSparseCache, TokenConfig
    if "threshold" in settings:
        kind, config = ProgressiveCache, ProgressiveConfig
    return prefix.fill(kind(config(**settings), offload=offload, model_config=model.config), model)


@torch.no_grad()
def needles(model, tokenizer, variants: Variants, length: int, repeats: int) -> Counter:
    """How many of ``5 * repeats`` planted numbers each variant finds."""
    found: Counter = Counter()
    for seed, depth in track([(s, d) for s in range(repeats) for d in DEPTHS], f"needles, {length} tokens"):
        prompt = needle_prompt(tokenizer, length, depth, seed)
        prefix = prefill(model, prompt.ids)
        for name, settings in variants.items():
            out = greedy(model, prefix, filled(model, prefix, settings), 12, {model.config.eos_token_id})
            found[name] += prompt.answer in tokenizer.decode(out)
    return found


@torch.no_grad()
def forced(
    model, words: Tensor, args, variants: Variants, look: Callable[[str, object], None]
) -> dict[str, tuple[float, float, float]]:
    """Mean loss, top-1 agreement and KL divergence against full attention, teacher-forced over held-out text.

    Args:
        words: ids ``[1, n]``.
        args: ``context`` tokens before ``tokens`` held-out ones, ``passages`` of them spread over the text.
        look: called with each variant's name and cache after a passage.
    """
    n, held = args.context, args.tokens
    starts = [round(i * (words.shape[1] - n - held - 1) / max(1, args.passages - 1)) for i in range(args.passages)]
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in variants}
    for start in track(starts, "passages"):
        prefix = prefill(model, words[:, start : start + n])
        ids, target = words[:, start + n : start + n + held], words[0, start + n + 1 : start + n + held + 1]
        reference = forced_logits(model, prefix.full(), ids).log_softmax(-1)
        for name, settings in variants.items():
            logp = reference
            if settings is not None:
                cache = filled(model, prefix, settings)
                logp = forced_logits(model, cache, ids).log_softmax(-1)
                look(name, cache)
            nll = -logp.gather(-1, target[:, None]).sum()
            same = (logp.argmax(-1) == reference.argmax(-1)).sum()
            kl = (reference.exp() * (reference - logp)).sum()
            sums[name] += torch.stack((nll, same, kl)).double()
    return {name: tuple((total / (len(starts) * held)).tolist()) for name, total in sums.items()}


def forced_rows(common: tuple, figures: tuple[float, float, float], count: int) -> list[Row]:
    """Rows of one variant of :func:`forced`; the agreement with its Wilson interval (95 %)."""
    nll, same, kl = figures
    square = 1.96**2 / count
    centre, half = same + square / 2, math.sqrt(square * (same * (1 - same) + square / 4))
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    return [
        Row(*common, "perplexity", math.exp(nll)),
        Row(*common, "top1_agreement", same, low, high, "share"),
        Row(*common, "kl", kl, unit="nats"),
    ]


def needle(args) -> None:
    variants: Variants = {
        "full": None,
        "two_level:budget=256,blocks=16": BASE,
        "two_level:budget=256,blocks=16,lag=False": {**BASE, "lag": False},
        "two_level:budget=256,blocks=16,bound_tokens=16": {**BASE, "bound_tokens": 16},
        "block_only:budget=256": {"token_budget": 256, "level": "block", "lag": False},
        "token_only:budget=256": {"token_budget": 256, "level": "token"},
    }
    model, tokenizer = load()
    found = {n: needles(model, tokenizer, variants, n, args.repeats) for n in args.lengths}
    total = len(DEPTHS) * args.repeats
    table = Table("needles found", *(f"{n} tokens" for n in args.lengths))
    for name in variants:
        table.add_row(name, *(f"{found[n][name]} of {total}" for n in args.lengths))
    Console(width=140).print(table)
    rows = [(name, 1, n, "needle", found[n][name] / total) for name in variants for n in args.lengths]
    append_rows(CSV, [Row("accuracy", SMALL_MODEL_NAME, *row, unit="share") for row in rows])


def perplexity(args) -> None:
    """A table of :func:`forced`, and its rows."""
    variants: Variants = {"full": None}
    for budget in (128, 256, 512):
        two_level = {"token_budget": budget, "level": "two_level", "num_blocks": max(16, budget // 16)}
        variants[f"two_level:budget={budget}"] = two_level
        variants[f"two_level:budget={budget},bound_tokens=16"] = {**two_level, "bound_tokens": 16}
        for level in ("block", "token"):
            variants[f"{level}_only:budget={budget}"] = {"token_budget": budget, "level": level}
    variants = {name: settings for name, settings in variants.items() if re.search(args.only, name)}
    model, tokenizer = load()
    shares: dict[str, float] = {}

    def look(name: str, cache) -> None:
        shares[name] = cache.stats().attended_share

    found = forced(model, reference_ids(tokenizer), args, variants, look)
    title = f"perplexity, {args.passages} x {args.tokens} tokens after {args.context}"
    table = Table(title, "perplexity", "top-1 agreement", "KL", "attended")
    for name, (nll, same, kl) in found.items():
        table.add_row(name, f"{math.exp(nll):.3f}", f"{same:.1%}", f"{kl:.4f}", f"{shares.get(name, 1):.1%}")
    Console(width=140).print(table)
    count = args.passages * args.tokens
    for name, figures in found.items():
        append_rows(CSV, forced_rows(("accuracy", SMALL_MODEL_NAME, name, 1, args.context), figures, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("needle", "perplexity"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="needle prompts, tokens")
    parser.add_argument("--repeats", type=int, default=1, help="needles per depth and length")
    parser.add_argument("--context", type=int, default=4096, help="tokens before the held-out text")
    parser.add_argument("--tokens", type=int, default=192, help="held-out tokens per passage")
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--only", default="", help="only variants whose name matches this regular expression")
    args = parser.parse_args()
    {"needle": needle, "perplexity": perplexity}[args.what](args)


if __name__ == "__main__":
    main()
