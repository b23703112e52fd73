"""Draw score against the size of the cache, and against bytes read a token: ``python -m benchmarks.peers.picture``.

Apart from the table because it shows one setting only, that of the last row.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from .. import ROOT, files_of
from .report import PICTURE, Measured, Setting, merge, read

AXES = (("kv_gb", "KV cache on the GPU, GB"), ("read_mb", "read a token, MB"))
MARKS = "os^vD<>pPX*hd"


def mean(scores: dict[str, float]) -> float:
    """In %."""
    return 100 * statistics.fmean(scores.values())


def draw(setting: Setting, systems: dict[str, Measured], out: Path) -> None:
    """Two panels; a filled mark has the question after the context, a hollow one inside of it.

    Raises:
        ValueError: no system has both a score and a cost.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(name.partition(":")[0] for name in systems))
    tasks = len({task for one in systems.values() for task in (*one.inside, *one.after)})
    figure, panels = plt.subplots(1, len(AXES), figsize=(11, 5.6), sharey=True)
    drawn = {}
    for axes, (metric, label) in zip(panels, AXES):
        for place, (name, one) in enumerate(systems.items()):
            both = ("full", one.after), ("none", one.inside)
            scores = {fill: mean(of) for fill, of in both if len(of) == tasks}  # of some tasks it would mislead
            if metric not in one.costs or not scores:
                continue
            style = {"color": f"C{groups.index(name.partition(':')[0])}", "marker": MARKS[place % len(MARKS)]}
            costs = [one.costs[metric]] * len(scores)
            axes.plot(costs, list(scores.values()), color=style["color"], linewidth=0.8)
            for fill, score in scores.items():
                (mark,) = axes.plot(costs[:1], [score], **style, fillstyle=fill, linestyle="", label=name)
                drawn.setdefault(name, mark)
        axes.set(xlabel=label, xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="both", labelsize=7)
        axes.grid(alpha=0.3)
    if not drawn:
        plt.close(figure)
        raise ValueError(f"no system of {setting} has a score and a cost")
    panels[0].set_ylabel("score, %")
    figure.legend(handles=list(drawn.values()), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{setting} (filled: question after the context, hollow: inside)", fontsize=10)
    figure.tight_layout(rect=(0, 0.05 + 0.035 * -(-len(drawn) // 4), 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": out.stem}):  # names by chance would make every run a change
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, nargs="+", help="default: peers.csv in benchmarks/results")
    parser.add_argument("--out", type=Path, default=ROOT / PICTURE, help="svg or png")
    args = parser.parse_args(argv)
    try:
        rows = read(args.csv or files_of("peers.csv"))
        if not rows:
            raise ValueError("there are no rows: run benchmarks.peers.run_kvpress and run_ours first")
        found = merge(rows)
        last = next(reversed(merge(rows[-1:])))
        draw(last, found[last], args.out)
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(args.out)


if __name__ == "__main__":
    main()
