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


def mean(scores: dict[str, float]) -> float | None:
    """In %."""
    return 100 * statistics.fmean(scores.values()) if scores else None


def draw(setting: Setting, systems: dict[str, Measured], out: Path) -> None:
    """Two panels; a filled mark has the question after the context, a hollow one inside of it.

    Raises:
        ValueError: no system has both a score and a cost.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from ..plot import save

    groups = list(dict.fromkeys(name.split(":")[0] for name in systems))
    figure, panels = plt.subplots(1, len(AXES), figsize=(11, 4.6), sharey=True)
    drawn = 0
    for axes, (metric, label) in zip(panels, AXES):
        for name, one in systems.items():
            cost, group = one.costs.get(metric), name.partition(":")[0]
            scores = (mean(one.inside), mean(one.after))
            if cost is None or scores == (None, None):
                continue
            drawn += 1
            color = f"C{groups.index(group)}"
            for score, fill in zip(scores, ("none", color)):
                if score is not None:
                    axes.scatter([cost], [score], facecolors=fill, edgecolors=color, zorder=3)
            both = [score for score in scores if score is not None]
            axes.plot([cost, cost], [min(both), max(both)], color=color, linewidth=0.8)
            label_at = (cost, both[-1])
            axes.annotate(name.partition(":")[2], label_at, (5, 3), textcoords="offset points", fontsize=7)
        axes.set(xlabel=label, xscale="log")
        axes.grid(alpha=0.3)
    if not drawn:
        plt.close(figure)
        raise ValueError(f"no system of {setting} has a score and a cost")
    panels[0].set_ylabel("score, %")
    for place, group in enumerate(groups):
        panels[0].scatter([], [], color=f"C{place}", label=group)
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{setting} (filled: question after the context, hollow: inside)", fontsize=10)
    figure.tight_layout()
    save(figure, out)


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
