"""Draw the benchmarks' rows.

    python -m benchmarks.plot --device "NVIDIA H200" --out docs/tpot.svg
    python -m benchmarks.plot --what ladder      # whole systems over rates: `benchmarks serving open`, `goodput`

Time per output token against context; one model, batch and device, from the newest rows. Or what whole systems serve,
each a rung above the one before it, against the rate of arrivals. The ending of --out says what kind of picture it is:
svg, png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import ROOT, files_of
from .readme import DATA, SYSTEMS, first_commits

# variant, metric -> label; the loop of generate() is part of tpot_ms and not of step_ms
LINES = {
    ("hf_dynamic", "tpot_ms"): "transformers: DynamicCache, sdpa",
    ("hf_static_compile", "tpot_ms"): "transformers: StaticCache, compiled",
    ("hf_offloaded", "tpot_ms"): "transformers: offloaded",
    ("captured_dense+fused", "tpot_ms"): "captured, dense, our kernel",
    ("sdpa_best+fused", "step_ms"): "captured, dense, best sdpa (forward alone)",
    ("token_only+fused", "tpot_ms"): "captured, 1024 tokens",
    ("token_only+fused+offload:kv=replayed", "tpot_ms"): "captured, 1024 tokens, offloaded",
    ("two_level:lag+fused", "tpot_ms"): "captured, two-level with lag, 1024 tokens",
    ("two_level:lag+fused+offload:kv=replayed", "tpot_ms"): "captured, two-level with lag, 1024 tokens, offloaded",
    ("limit", "step_ms"): "limit of dense: bytes over bandwidth",
}
TICKS = [1, 2, 4, 6, 8, 10, 20, 40, 60, 100, 200, 400, 1000]  # ms


def newest(paths: Sequence[Path], case: str, batch: int, device: str | None = None):
    """The last row of each variant, context and metric in a table's files, all of one device.

    Of the defaults none from before they were today's.

    Args:
        device: None: that of the last row.

    Raises:
        ValueError: there is none.
    """
    import pandas as pd

    every = pd.concat([pd.read_csv(path) for path in paths], ignore_index=True)
    for name in DATA["names_of_defaults"]:
        todays = every.commit.isin(first_commits(name)).cummax()
        if todays.any():
            every = every[todays | (every.variant.str.partition("+")[0] != name)]
    rows = every[(every.case == case) & (every.batch == batch)]
    if rows.empty:
        there = ", ".join(f"{c} x {b}" for c, b in sorted(set(zip(every.case, every.batch))))
        raise ValueError(
            f"{' and '.join(map(str, paths))} has no rows of {case}, batch {batch}; there are {there or 'none'}"
        )
    device = device or rows.device.iloc[-1]
    there = ", ".join(sorted(set(rows.device)))
    rows = rows[rows.device == device]
    if rows.empty:
        raise ValueError(f"there are no rows of {device}, but of {there}")
    return rows.drop_duplicates(["variant", "context", "metric"], keep="last")


def draw(rows, out: Path) -> None:
    """One figure of :func:`newest` rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.8))
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
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    axes.set_xticks(sorted(rows.context.unique() / 1024))
    axes.grid(alpha=0.3)
    last = rows.iloc[-1]
    axes.set_title(f"{last.case}, {last.batch} x context, {last.device}", fontsize=10)
    figure.tight_layout()
    save(figure, out)


CLIP = 32768  # tokens of the longest prompt in the ladder's traces; the table has longer ones, too
# The ladder's panels: metric of rows, its name.
PANELS = (
    ("tokens_per_s", "tokens a second"),
    ("ttft_s:mean", "seconds to the first token, mean"),
    ("between_ms:p99", "ms between tokens, 99th percentile"),
)


def ladder_rows(paths: Sequence[Path], case: str):
    """Rows of traces of one kind, that of the last one with prompts up to CLIP: answered as long, on the same device.

    Returns:
        The newest of each system, rate, seed and metric, with columns ``system``, ``rate``, ``out``, ``most`` and
        ``seed``; and the newest goodput of each system and seed, likewise.

    Raises:
        ValueError: there is none.
    """
    import pandas as pd

    rows = pd.concat([pd.read_csv(path) for path in paths], ignore_index=True)
    there = ", ".join(sorted(set(rows.case))) or "none"
    rows = rows[(rows.benchmark == "serving") & (rows.case == case)]
    usual = DATA["ladder"]["budget"]
    other = rf":chunk=|:budget=(?!{usual}(?::|$))"  # not the usual pieces of prompts, or tokens a step
    rows = rows[~rows.variant.str.contains(other)].copy()
    rows["system"] = rows.variant.str.partition(":")[0]
    for name in ("rate", "out", "most", "seed"):
        found = rows.variant.str.extract(rf":{name}=([0-9.]+)(?::|$)", expand=False)
        rows[name] = pd.to_numeric(found)
    rows = rows[rows.out.notna() & rows.system.isin(SYSTEMS) & (rows.context == CLIP)]
    if not rows.rate.notna().any():
        names = ", ".join(path.name for path in paths)
        raise ValueError(f"{names} have no rows of traces of {case}; there are {there}")
    last = rows[rows.rate.notna()].iloc[-1]
    kind = ["out", "most", "batch", "device"]
    rows = rows[(rows[kind].fillna(0) == last[kind].fillna(0)).all(axis=1)]
    rows = rows.drop_duplicates(["system", "rate", "seed", "metric"], keep="last")
    return rows[rows.rate.notna()], rows[rows.rate.isna() & (rows.metric == "goodput_rps")]


def draw_ladder(rows, goodput, out: Path) -> None:
    """One figure of :func:`ladder_rows`, means over seeds: lines over rates, or bars if there is one rate only.

    Where a system has not finished all its name says so, or a cross; times are of the requests that it has finished,
    and left out where these are less than half.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted(rows.rate.unique())
    one = len(rates) == 1  # bars
    figure, panels = plt.subplots(1, len(PANELS), figsize=(11, 3.2 if one else 4.2), sharey=one)
    bars = []
    for place, (system, label) in enumerate(SYSTEMS.items()):
        mine = rows[rows.system == system]
        if mine.empty:
            continue
        table = mine.pivot_table(index="rate", columns="metric", values="value", aggfunc="mean").sort_index()
        best = goodput[goodput.system == system].value
        label += f": goodput {best.mean():g}/s" if len(best) else ""
        asked = table.get("requests", table.failed)
        whole, left = table[2 * table.failed <= asked], table[table.failed > 0]
        if one and len(left):
            label += f"\n({left.failed.iloc[0]:.0f} of {asked.iloc[0]:.0f} not finished)"
        bars.append(label)
        for axes, (metric, _) in zip(panels, PANELS):
            points = whole[metric].dropna() if metric in whole else table.failed[:0]
            if one:
                found = axes.barh([len(bars) - 1] * len(points), points, color=f"C{place}")
                axes.bar_label(found, fmt="%.3g", padding=3, fontsize=8)
            else:
                axes.plot(points.index, points, marker="o", markersize=5, color=f"C{place}", label=label)
        if len(left) and "tokens_per_s" in left and not one:
            panels[0].plot(left.index, left.tokens_per_s, f"xC{place}")
    for axes, (_, name) in zip(panels, PANELS):
        axes.set_title(name, fontsize=10)
        if one:
            axes.margins(x=0.18)
            axes.set_yticks(range(len(bars)), labels=bars, fontsize=8)
        else:
            axes.set(xlabel="requests a second", ylim=(0, None), xticks=rates)
        axes.grid(alpha=0.3, axis="x" if one else "both")
    last = rows.iloc[-1]
    about = f"{last.case}, prompts up to {int(last.context) // 1024}k, answers of {last.out:g} tokens in the median"
    about += f", {rates[0]:g} requests a second" if one else ""
    figure.suptitle(f"{about}, {last.device}" + " (x: not all were finished)" * (not one), fontsize=10)
    if one:
        panels[0].invert_yaxis()
    else:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0 if one else 0.16, 1, 1))
    save(figure, out)


def save(figure, out: Path, dpi: int = 150) -> None:
    """Write a picture and close it."""
    import matplotlib.pyplot as plt

    out.parent.mkdir(parents=True, exist_ok=True)
    # A date or names by chance in the file would make every run a change.
    with plt.rc_context({"svg.hashsalt": out.stem}):
        figure.savefig(out, dpi=dpi, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", default="tpot", choices=("tpot", "ladder"))
    about = "default: step.csv or serving.csv in benchmarks/results"
    parser.add_argument("--csv", type=Path, help=about)
    about = "default: docs/tpot.svg or docs/serving-ladder.svg"
    parser.add_argument("--out", type=Path, help=about)
    parser.add_argument("--case", default="qwen3-8b", help="the model shape")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", help="whose rows, but of the ladder; default: that of the last row")
    args = parser.parse_args(argv)
    if args.what == "ladder":
        files = [args.csv] if args.csv else files_of("serving.csv")
        try:
            draw_ladder(*ladder_rows(files, args.case), args.out or ROOT / "docs" / "serving-ladder.svg")
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
        return
    files = [args.csv] if args.csv else files_of("step.csv")
    try:
        draw(newest(files, args.case, args.batch, args.device), args.out or ROOT / "docs" / "tpot.svg")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
