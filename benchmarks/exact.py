"""Time of a token in exact mode, by how many drafts are accepted.

    python -m benchmarks exact --shapes 1x32k 8x32k --acceptance 0.978

Keys and values are random, so acceptance is imitated: each draft of a row is accepted with the given probability. For
each shape, in a row without ``generate()``: milliseconds of a dense and a sparse step, and of a verification of 4, 8
and 16 tokens. Then ms a token of ``generate()``. Dense: by transformers' loop with captured steps. Exact mode: for each
acceptance, with as many drafts as it finds to pay. Median and range of ``--repeats`` calls over a full cache; dense and
exact calls take turns. A "first" call knows nothing of the model, and its captures count. A "later" one knows what the
first has measured. As with dense ones, its captures do not count: a call of ``--lead`` tokens is subtracted. Rows go to
``benchmarks/results/exact.csv``.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

import hf_sparsekv
from hf_sparsekv import SparseCache
from hf_sparsekv.cache_name import over
from hf_sparsekv.checking import exact as exact_mode
from hf_sparsekv.checking.choice import Choice, Chosen
from hf_sparsekv.checking.exact import Exact
from hf_sparsekv.checking.pace import Pace
from hf_sparsekv.checking.paces import forget
from hf_sparsekv.generating import Settings
from hf_sparsekv.layers.together import keep_tokens
from hf_sparsekv.results import versions

from .arguments import new_parser, parse_count, rows_file
from .baselines import Variant, find, make_cache, prepare
from .decoding import Clock, Steps, free, in_a_row_ms
from .filling import RandomSource, fill_layers
from .report import Report
from .shapes import case_name, known_config, random_model

STEPS = 20
VERIFIED = (4, 8, 16)
RIGHT, WRONG = 7, 9  # tokens


class Imitated(Choice):
    """Every token is the same one, and a draft another as often as it is to be rejected."""

    def __init__(self, cache: SparseCache, accepts: float) -> None:
        super().__init__([], sample=False)  # type: ignore[arg-type]
        self._cache, self._accepts = cache, accepts

    def __call__(self, ids: Tensor, logits: Tensor, ahead: int = 0, rows: list[int] | None = None) -> Chosen:
        chosen = torch.full_like(logits.argmax(-1), RIGHT)
        if not self._cache.row_table.exactness.everything:
            chosen = chosen.masked_fill(torch.rand(len(ids), device=ids.device) >= self._accepts, WRONG)
        return Chosen(chosen, logits, logits[:, 0])


def filled(model, batch: int, context: int, variant: Variant, spare: int, budget: int | None) -> SparseCache:
    """A full cache in exact mode."""
    free()
    cache = make_cache(model, variant, context + spare, budget=budget)
    fill_layers(RandomSource(model, batch, context), cache)
    Exact().begin(cache)
    return cache


def verification_ms(model, cache: SparseCache, batch: int, tokens: int) -> list[float]:
    """Milliseconds of passes over so many tokens, which are taken back."""
    clock, past = Clock(model.device), int(cache.get_seq_length())
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=model.device)
    positions = torch.arange(past, past + tokens, device=model.device).repeat(batch, 1)
    given = {"input_ids": ids, "position_ids": positions, "logits_to_keep": tokens, **over(model, cache)}
    for _ in range(5 + STEPS):
        with torch.no_grad(), cache.drafts():
            clock.mark()
            model(**given, use_cache=True)
            clock.mark()
        cache.crop(-tokens)
    return clock.between()[::2][5:]


def costs(model, batch: int, context: int, variant: Variant, report: Report, args: Namespace) -> None:
    """Times of steps and verifications."""
    cache = filled(model, batch, context, variant, 512, args.budget)
    cache.going_on = True
    report.add("dense_step_ms", in_a_row_ms(Steps(model, cache, batch, 4 * STEPS), STEPS))
    with cache.row_table.exactness.drafting():
        report.add("sparse_step_ms", in_a_row_ms(Steps(model, cache, batch, 4 * STEPS), STEPS))
    for tokens in VERIFIED:
        report.add(f"verify_{tokens}_ms", verification_ms(model, cache, batch, tokens))


def seconds(model, cache: SparseCache, batch: int, tokens: int, accepts: float | None) -> tuple[float, Counter[int]]:
    """Seconds of ``generate()`` over a full cache, and rounds by their drafts. ``accepts``: None: no drafts."""
    rounds: Counter[int] = Counter()
    drafted: Callable = Pace.drafted

    def counted(self, drafts: int, *given) -> None:
        rounds[drafts] += 1
        drafted(self, drafts, *given)

    ids = torch.randint(
        10, min(1000, model.config.vocab_size), (batch, int(cache.get_seq_length()) + 1), device=model.device
    )
    go = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with (
        hf_sparsekv.sparse(model, cache.config, exact=True, optimize=False),
        patch.object(Settings, "cache", lambda *_: cache),
        patch.object(exact_mode, "Choice", lambda *_: Imitated(cache, accepts or 0.0)),
        patch.object(exact_mode, "can_draft", (lambda *_: False) if accepts is None else exact_mode.can_draft),
        patch.object(Pace, "drafted", counted),
        patch.object(Pace, "looks_up", lambda *_: False),  # the text is one token over and over
    ):
        began = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), **go)
        return time.perf_counter() - began, rounds


def shares(rounds: Counter[int]) -> str:
    """How many rounds had how many drafts."""
    return ", ".join(f"{drafts}: {n}" for drafts, n in sorted(rounds.items()))


def through_generate(model, batch: int, context: int, variant: Variant, report: Report, args: Namespace) -> None:
    """Milliseconds a token, dense and by acceptance."""
    kinds: list[tuple[float | None, bool]] = [(None, False)]
    kinds += [(accepts, first) for accepts in args.acceptance for first in (True, False)]
    ms: dict[tuple, list[float]] = {kind: [] for kind in kinds}
    rounds: dict[tuple, Counter[int]] = {kind: Counter() for kind in kinds}
    cache = filled(model, batch, context, variant, args.tokens + 64, args.budget)
    for drafts in (3, 7, 15):  # compiles and captures
        keep_tokens(cache, [context] * batch, None)
        Exact(drafts).begin(cache)
        seconds(model, cache, batch, 32, 0.9)
    for _ in range(args.repeats):
        for accepts, first in kinds:
            if first:
                forget(model)
            calls = []
            for tokens in (args.tokens,) if first else (args.lead, args.tokens):
                keep_tokens(cache, [context] * batch, None)
                Exact().begin(cache)
                calls.append(seconds(model, cache, batch, tokens, accepts))
            found, counted = calls[-1]
            if first:
                ms[accepts, first].append(1e3 * found / args.tokens)
            else:
                ms[accepts, first].append(1e3 * (found - calls[0][0]) / (args.tokens - args.lead))
            rounds[accepts, first] += counted
    for (accepts, first), found in ms.items():
        name = "dense" if accepts is None else f"exact:accepted={accepts:g}:{'first' if first else 'later'}"
        report.add(f"{name}:tpot_ms", sorted(found))
        if accepts is not None:
            report.note(f"rounds by their drafts: {shares(rounds[accepts, first])}")


def main(argv: list[str] | None = None) -> int:
    """Command line; 1 if a shape failed."""
    parser = new_parser("exact", __doc__, "shapes", "model")
    parser.set_defaults(shapes=[(1, 32768), (1, 131072), (8, 32768), (8, 65536)])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--variant", default="token_only", help="as in `step --list`, such as mass:0.9")
    parser.add_argument("--budget", type=parse_count, help="tokens that drafts attend to; default 1024")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--lead", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.7, 0.8, 0.9, 0.95])
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(known_config(args.model, args.layers), dtype, device)
    variant = find(args.variant)
    prepare(model, variant, fused=device.type == "cuda")
    print(versions())
    case = case_name(args.model) + ("" if args.layers is None else f":layers={args.layers}")
    name = variant.name + (f":budget={args.budget}" if args.budget else "")
    with Report("exact", case, rows_file(args), len(args.shapes)) as report:
        for batch, context in args.shapes:
            with report.measuring(batch, context, name, model):
                costs(model, batch, context, variant, report, args)
                through_generate(model, batch, context, variant, report, args)
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
