"""Which settings of two-level selection keep closest to full attention on the small real model.

    python -m benchmarks.studies.calibration_study        # all tables at 2k, 4k and 7k tokens: half an hour on a CPU
    python -m benchmarks.studies.calibration_study --only 'channels|reference' --lengths 4096 --passages 4

Teacher-forced agreement on held-out text: KL divergence and top-1 agreement with full attention at each step. Every
setting is changed alone, from a base whose budget is so small that differences show. Channel files are calibrated on
text that no passage is taken from. An interrupted run goes on where it stopped (``--out``). Prints a table a group and
appends rows to benchmarks/results/accuracy.csv.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from hf_sparsekv import TwoLevelConfig
from hf_sparsekv.evaluation.cache_specs import CacheSpec, parse_cache
from hf_sparsekv.evaluation.forced import MEASURES, evaluate, passages
from hf_sparsekv.evaluation.records import Results
from hf_sparsekv.evaluation.small_model import SMALL_MODEL_NAME
from hf_sparsekv.policies.label_index import LabelIndex
from hf_sparsekv.policies.registry import register
from hf_sparsekv.policies.two_level import TwoLevelPolicy
from hf_sparsekv.results import Row, append_rows
from hf_sparsekv.tuning.channels import calibrate

from .small_model import CSV, load, reference_ids

BASE = {"token_budget": 128, "num_blocks": 16, "lag": True, "label_channels": 16}
METRICS = {"KL": ("kl", "nats"), "top-1 agreement": ("top1_agreement", "share"), "perplexity": ("perplexity", "")}


@dataclass(frozen=True, kw_only=True)
class Int8Config(TwoLevelConfig):
    """As those of the method that is varied."""


@dataclass(frozen=True, kw_only=True)
class EarlyConfig(TwoLevelConfig):
    """As those of the method that is varied."""


class Int8Index(LabelIndex):
    """Labels rounded to 8 bits with a scale and a zero point a token, and kept as they are then."""

    def index(self, kv: Tensor) -> dict[str, Tensor]:
        if self.calibrating:
            return {}
        labels = super().index(kv)["codes"].float()
        low, high = labels.amin(-1, keepdim=True), labels.amax(-1, keepdim=True)
        step, zero = ((high - low) / 255).half().float().clamp_min(1e-8), low.half().float()
        return {"codes": (((labels - zero) / step).round().clamp(0, 255) * step + zero).to(kv.dtype)}


class EarlyIndex(LabelIndex):
    """Channels of the first ``calibration_tokens`` tokens alone, as after a prompt of so many and a long answer."""

    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None) -> bool:
        n = self.config.calibration_tokens
        return super().observe(q[:, :, :n], k[:, :, :n], None if valid is None else valid[:, :n])


@register("int8", Int8Config, about="two_level with labels of 8 bits", reference=True)
class Int8Labels(TwoLevelPolicy):
    """Labels of 8 bits."""

    label_index = Int8Index


@register("early", EarlyConfig, about="two_level with channels of the first tokens", reference=True)
class EarlyChannels(TwoLevelPolicy):
    """Channels of the first tokens."""

    label_index = EarlyIndex


def variants(files: dict[str, Path]) -> dict[str, dict[str, dict]]:
    """``{group: {name: spec}}``; what differs from the base is in the name."""
    groups: dict[str, dict[str, dict]] = {
        "channels": {
            f"two_level:channels={where}-{form},r={r}": {
                "label_channels": r,
                **({"channel_importance": form} if where == "online" else {"channel_file": str(files[form])}),
            }
            for r in (8, 16, 32)
            for where in ("online", "file")
            for form in ("max", "mean")
        },
        "labels": {
            f"two_level:label_bits={bits},r={r}": {"label_bits": bits, "label_channels": r}
            for r in (8, 16, 32, 64)
            for bits in (4, 16)
        },
        "8 bits": {
            f"two_level:label_bits=8,r={r}": {"cache": "int8", "label_bits": 16, "label_channels": r}
            for r in (8, 16, 32)
        },
        "metadata": {
            f"two_level:metadata={kind},bound_tokens={part}": {
                "metadata": kind,
                "bound_tokens": None if part == 64 else part,
            }
            for kind in ("min_max", "cuboid_mean", "mean")
            for part in (64, 16)
        },
        "staleness": {
            f"two_level:channels=online-max,of={n}": {"cache": "early", "calibration_tokens": n}
            for n in (512, 1024, 2048)
        },
        "blocks": {
            f"two_level:block_size={size},num_blocks={1024 // size},bound_tokens={part}": {
                "block_size": size,
                "num_blocks": 1024 // size,
                "bound_tokens": None if part == size else part,
            }
            for size, part in ((16, 16), (32, 32), (32, 16), (64, 64), (64, 32), (64, 16))
        },
        "dense layers": {f"two_level:dense_layers={n}": {"dense_layers": n} for n in (0, 1, 2)},
        "lag": {f"two_level:lag={lag}": {"lag": lag} for lag in (True, False)},
    }
    out = {g: {n: {"cache": "two_level", **BASE, **s} for n, s in v.items()} for g, v in groups.items()}
    out["reference"] = {"two_level": {"cache": "two_level", **BASE}}
    for name in ("token_only", "block_only", "oracle", "random"):
        out["reference"][name] = {"cache": name, "token_budget": BASE["token_budget"]}
    return out


def unique(groups: dict[str, dict[str, dict]]) -> tuple[list[CacheSpec], dict[str, str]]:
    """Specs to run, and for each name the one that stands for it: the base turns up in every group."""
    specs: list[CacheSpec] = []
    same: dict[str, str] = {}
    seen: dict[str, str] = {}
    for group in groups.values():
        for name, options in group.items():
            spec = parse_cache({**options, "name": name})
            what = f"{spec.method} {spec.make()!r}"
            if what not in seen:
                seen[what] = name
                specs.append(spec)
            same[name] = seen[what]
    return specs, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 7168], help="tokens before the held-out")
    parser.add_argument("--tokens", type=int, default=64, help="held-out tokens of a passage")
    parser.add_argument("--passages", type=int, default=2, help="of each length")
    parser.add_argument("--only", default="", help="only groups whose name matches this regular expression")
    parser.add_argument("--out", type=Path, default=Path("eval-results/calibration"), help="samples and channel files")
    parser.add_argument("--no-csv", dest="csv", action="store_false", help="append no rows")
    args = parser.parse_args()

    model, tokenizer = load()
    model.set_attn_implementation("sparsekv")
    words = reference_ids(tokenizer)[0]
    cut = len(words) - 4 * 2048
    held, rest = words[:cut], words[cut:]

    settings = {"tokens": args.tokens, "passages": args.passages}
    results = Results(args.out, settings)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {form: args.out / f"channels-{form}.safetensors" for form in ("max", "mean")}
    for form, file in files.items():
        if not file.exists():
            calibrate(model, rest.view(4, 1, 2048), importance=form).save(file)
    groups = {g: v for g, v in variants(files).items() if re.search(args.only, g)}
    specs, same = unique(groups)
    with Progress() as progress:
        task = progress.add_task("calibration", total=len(args.lengths) * args.passages * len(specs))
        for n in args.lengths:
            starts = passages(held, n, args.tokens, args.passages)
            evaluate(
                model, held, starts, n, args.tokens, specs, results, "agreement",
                advance=lambda k: progress.advance(task, k),
            )  # fmt: skip
    figures = {(f.length, f.cache, f.measure): f for f in results.figures(MEASURES["agreement"])}
    for group, entries in groups.items():
        print(f"\n### {group}\n\n| | " + " | ".join(f"KL {n} | top-1 {n}" for n in args.lengths) + " |")
        print("|---|" + "---|" * (2 * len(args.lengths)))
        for name in entries:
            cells = []
            for n in args.lengths:
                kl, top = (figures[n, same[name], m] for m in ("KL", "top-1 agreement"))
                cells += [f"{kl.value:.4f}", f"{100 * top.value:.1f}"]
            print(f"| {name.partition(':')[2] or name} | " + " | ".join(cells) + " |")
    if args.csv:
        rows = [
            Row("accuracy", SMALL_MODEL_NAME, spec.name, 1, n, metric, f.value, f.low, f.high, unit)
            for n in args.lengths
            for spec in specs
            for measure, (metric, unit) in METRICS.items()
            for f in [figures[n, spec.name, measure]]
        ]
        append_rows(CSV, rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
