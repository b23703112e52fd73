"""Draw the benchmark's rows.

    python -m hf_sparsekv.benchmark.plot --csv benchmarks/results/step.csv --out docs/tpot.svg

Time per output token against context, one row, from the newest rows of the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

# variant, metric -> label; the loop of generate() is part of tpot_ms and not of step_ms
LINES = {
    ("hf_dynamic", "tpot_ms"): "transformers: DynamicCache, sdpa",
    ("captured_dense+fused", "tpot_ms"): "captured, dense, our kernel",
    ("sdpa_best+fused", "step_ms"): "captured, dense, best sdpa (forward alone)",
    ("two_level:lag+fused", "tpot_ms"): "captured, two-level, 1024 tokens",
    ("limit", "step_ms"): "limit of dense: bytes over bandwidth",
}


def main(argv: list[str] | None = None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/step.csv"))
    parser.add_argument("--out", type=Path, default=Path("docs/tpot.svg"))
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args(argv)
    rows = pd.read_csv(args.csv)
    rows = rows[rows.batch == args.batch].drop_duplicates(["variant", "context", "metric"], keep="last")
    figure, axes = plt.subplots(figsize=(7, 4))
    for (variant, metric), label in LINES.items():
        line = rows[(rows.variant == variant) & (rows.metric == metric)].sort_values("context")
        style = "--" if variant == "limit" else "-"
        axes.plot(line.context / 1024, line.value, style, marker="o", markersize=4, label=label)
    axes.set(xlabel="context, thousand tokens", ylabel="ms per token", yscale="log")
    axes.set_yticks([4, 6, 8, 10, 20, 40, 60], labels=["4", "6", "8", "10", "20", "40", "60"])
    axes.minorticks_off()
    axes.set_xticks(sorted(rows.context.unique() / 1024))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    last = rows.iloc[-1]
    axes.set_title(f"{last.case}, {args.batch} x context, {last.device}", fontsize=10)
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, metadata={"Date": None} if args.out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
