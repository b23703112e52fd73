"""Draw the benchmark's rows.

    python -m hf_sparsekv.benchmark.plot --csv benchmarks/results/step.csv --out docs/tpot.svg

Time per output token against context, one model and batch, from the newest rows of the file. The ending of --out says
what kind of picture it is: svg, png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

# variant, metric -> label; the loop of generate() is part of tpot_ms and not of step_ms
LINES = {
    ("hf_dynamic", "tpot_ms"): "transformers: DynamicCache, sdpa",
    ("hf_static_compile", "tpot_ms"): "transformers: StaticCache, compiled",
    ("hf_offloaded", "tpot_ms"): "transformers: offloaded",
    ("captured_dense+fused", "tpot_ms"): "captured, dense, our kernel",
    ("sdpa_best+fused", "step_ms"): "captured, dense, best sdpa (forward alone)",
    ("two_level:lag+fused", "tpot_ms"): "captured, two-level, 1024 tokens",
    ("two_level:lag+fused+offload", "tpot_ms"): "captured, two-level, 1024 tokens, offloaded",
    ("limit", "step_ms"): "limit of dense: bytes over bandwidth",
}
TICKS = [1, 2, 4, 6, 8, 10, 20, 40, 60, 100, 200, 400, 1000]  # ms


def newest(path: Path, case: str, batch: int):
    """The last row of each variant, context and metric.

    Raises:
        ValueError: there is none.
    """
    import pandas as pd

    every = pd.read_csv(path)
    rows = every[(every.case == case) & (every.batch == batch)]
    if rows.empty:
        there = ", ".join(f"{c} x {b}" for c, b in sorted(set(zip(every.case, every.batch))))
        raise ValueError(f"{path} has no rows of {case}, batch {batch}; there are {there or 'none'}")
    return rows.drop_duplicates(["variant", "context", "metric"], keep="last")


def draw(rows, out: Path) -> None:
    """One figure of :func:`newest` rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    values = []
    for (variant, metric), label in LINES.items():
        line = rows[(rows.variant == variant) & (rows.metric == metric)].sort_values("context")
        if line.empty:
            continue
        values += list(line.value)
        style = "--" if variant == "limit" else "-"
        axes.plot(line.context / 1024, line.value, style, marker="o", markersize=4, label=label)
    axes.set(xlabel="context, thousand tokens", ylabel="ms per token", yscale="log")
    if values:
        ticks = [tick for tick in TICKS if 0.9 * min(values) <= tick <= 1.1 * max(values)]
        axes.set_yticks(ticks, labels=[str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.62))
    axes.set_xticks(sorted(rows.context.unique() / 1024))
    axes.grid(alpha=0.3)
    last = rows.iloc[-1]
    axes.set_title(f"{last.case}, {last.batch} x context, {last.device}", fontsize=10)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    # A date in the file would make every run a change.
    figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/step.csv"))
    parser.add_argument("--out", type=Path, default=Path("docs/tpot.svg"))
    parser.add_argument("--case", default="qwen3-8b", help="the model shape")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        draw(newest(args.csv, args.case, args.batch), args.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
