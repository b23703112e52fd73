"""Draw steps and prompts of tensor parallel models against the number of GPUs: ``python -m benchmarks.spread_picture``.

From the newest rows of ``parallel``, as the tables of docs/measured/serving-scale.md.
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
    """Two panels, of what was measured with several numbers of GPUs.

    Raises:
        ValueError: nothing was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = found.shapes("steps_ms")
    if not shapes:
        raise ValueError("benchmarks/results/parallel.csv has no steps: run `python -m benchmarks parallel`")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.6))
    for of in shapes:
        name, style = f"{MODELS[of[0]]}, {of[1]} x {of[2] // K}k", {}
        for what, line in ((OURS, "o-"), ("captured_dense", "x--"), ("limit", ":")):
            steps = [(size, found.value(*of, what, size, "step_ms")) for size in SIZES]
            there = [one for one in steps if one[1] is not None]
            if what == OURS and len(there) < 2:
                break
            if there:
                (drawn,) = left.plot(*zip(*there), line, **style, linewidth=1 if style else 1.5, markersize=5)
                drawn.set_label("_" if style else name)
                style = {"color": drawn.get_color()}
    for (case, tokens), rows in prompts(found):
        if len(rows) > 1:
            times = [(size, float(rows[size]["value"])) for size in SIZES if size in rows]
            right.plot(*zip(*times), "o-", label=f"{MODELS[case]}, {tokens // K}k")
    for axes, name in ((left, "a step, ms"), (right, "a prompt's first token, s")):
        axes.set(xlabel="GPUs", ylabel=name, xscale="log", yscale="log", xticks=SIZES)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    left.set_title("default: solid, dense: dashed, a dense step's bytes: dotted", fontsize=9)
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
