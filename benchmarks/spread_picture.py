"""Draw steps and prompts of tensor parallel models against the number of GPUs: ``python -m benchmarks.spread_picture``.

From the newest rows of ``parallel``, as the tables of docs/serving-scale.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import ROOT
from .plot import save
from .spread_tables import MODELS, OURS, Found, prompts

SIZES = (1, 2, 4)
K = 1024


def draw(found: Found, out: Path) -> None:
    """Two panels; what a dense step's bytes take is dotted.

    Raises:
        ValueError: nothing was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = found.shapes("steps_ms")
    if not shapes:
        raise ValueError("benchmarks/results/parallel.csv has no steps: run `python -m benchmarks parallel`")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    for place, of in enumerate(shapes):
        style = {"color": f"C{place % 10}", "marker": "os^D"[list(MODELS).index(of[0])]}
        for ours, line in ((OURS, "-"), (f"{OURS}+offload", "--")):
            steps = [(size, found.value(*of, ours, size, "step_ms")) for size in SIZES]
            if there := [one for one in steps if one[1] is not None]:
                name = f"{MODELS[of[0]]}, {of[1]} x {of[2] // K}k" + ", offloaded" * (ours != OURS)
                left.plot(*zip(*there), line, label=name, **style)
        limits = [(size, found.value(*of, "limit", size, "step_ms")) for size in SIZES]
        if there := [one for one in limits if one[1] is not None]:
            left.plot(*zip(*there), ":", color=style["color"], linewidth=1)
    for place, ((case, tokens), rows) in enumerate(prompts(found)):
        times = [(size, float(rows[size]["value"])) for size in SIZES if size in rows]
        right.plot(*zip(*times), "-", color=f"C{place % 10}", marker="o", label=f"{MODELS[case]}, {tokens // K}k")
    for axes, name in ((left, "a step, ms"), (right, "a prompt's first token, s")):
        axes.set(xlabel="GPUs", ylabel=name, xscale="log", yscale="log", xticks=SIZES)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    save(figure, out)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "serving-scale.svg")
    args = parser.parse_args(argv)
    try:
        draw(Found(), args.out)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
