"""Crossover rules from whole steps, for what `hf-sparsekv calibrate-device` leaves out: latents, walks, predictions.

    python -m benchmarks.studies.crossover_of_steps --case glm-4.7-flash --suffix :mla
        two_level:lag=two_level:lag predictive

Reads `step_ms` of captured_dense and of the named variants from benchmarks/results, one device's newest row of each
shape in step.csv, and prints a `Rule` for each (`hf_sparsekv.policies.crossover`). At least two batches and two lengths
are needed. With `--one-layer`: `attention_us` from operator.csv.
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch

from hf_sparsekv.policies.crossover import MEASURED
from hf_sparsekv.tuning.fitting import Timing, fit, wrong_by

from .. import files_of
from ..shapes import known_config, kv_bytes, text_config


def times(rows: pd.DataFrame, variant: str, unit: float) -> dict[tuple[int, int], float]:
    """Microseconds by batch and context; a row's value counts ``unit`` of them."""
    found = rows[rows.variant == variant].drop_duplicates(["batch", "context"], keep="last")
    return {(r.batch, r.context): unit * r.value for r in found.itertuples()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="METHOD[=VARIANT]", help="name in the table, variant of the rows")
    parser.add_argument("--case", default="qwen3-8b", help="model of the rows")
    parser.add_argument("--device", default=MEASURED, help="whose rows")
    parser.add_argument("--kv", default="", help="end of the variants' names, as :kv=replayed")
    parser.add_argument("--suffix", default="", help="of the methods' names, as :mla")
    parser.add_argument("--one-layer", action="store_true", help="a layer's attention instead of whole steps")
    args = parser.parse_args()

    file, metric, unit, end = (
        ("operator", "attention_us", 1, "") if args.one_layer else ("step", "step_ms", 1e3, "+fused")
    )
    rows = pd.concat([pd.read_csv(path) for path in files_of(f"{file}.csv")], ignore_index=True)
    rows = rows[(rows.case == args.case) & (rows.metric == metric) & (rows.device == args.device)]
    config = text_config(known_config(args.case))
    width = kv_bytes(config, 1, 1, torch.bfloat16.itemsize) // config.num_hidden_layers  # of one layer, as rules are
    dense = times(rows, f"captured_dense{end}{args.kv}", unit)
    for text in args.methods:
        method, _, variant = text.partition("=")
        sparse = times(rows, f"{variant or method}{end}{args.kv}", unit)
        timings = [
            Timing(batch, context, dense[batch, context], {method: time})
            for (batch, context), time in sorted(sparse.items())
            if (batch, context) in dense
        ]
        rule = fit(timings, width, (method,)).get(method)
        if rule is None:
            print(f"{method}{args.suffix}: gains nothing with the length")
            continue
        worst = max(wrong_by(rule, t, method, width) for t in timings)
        shapes = ", ".join(f"{t.batch} x {t.tokens}: {t.dense:.0f} and {t.sparse[method]:.0f}" for t in timings)
        print(f'"{method}{args.suffix}": Rule({rule.fixed_bytes:.4g}, {rule.row_tokens:.4g}),  # us: {shapes}')
        reach = ", ".join(f"{rule.tokens(batch, width)} ({batch})" for batch in (1, 4, 8, 16))
        print(f"    dense up to so many tokens a row (rows): {reach}; at most {worst:.0%} slower than the quicker side")


if __name__ == "__main__":
    main()
