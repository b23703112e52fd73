"""A fact at many depths of prompts of many lengths, as a heat map a cache."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from .extra import needs
from .measures import Figure
from .ruler_probe import needle_sample, speaks_probe
from .samples import Sample, found, found_share
from .text import needle_prompt


def make_sample(tokenizer, length: int, depth: float, index: int, seed: int = 0) -> Sample:
    """A fact at ``depth`` (0 first, 1 last) of about ``length`` tokens, in the tokenizer's language."""
    if speaks_probe(tokenizer):
        return needle_sample(tokenizer, length, depth, index, seed)
    prompt = needle_prompt(tokenizer, length, depth, f"{seed}-{index}" if index else seed)
    name = f"depth {depth:.2f}"
    return Sample(name, length, index, tuple(prompt.ids[0].tolist()), (prompt.answer,), 12, found_share, items=found)


def plot(figures: list[Figure], path: Path, title: str) -> None:
    """Write a heat map (PNG or SVG, by the suffix): length across, depth down, one panel a cache."""
    needs("the heat map", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figures = [f for f in figures if f.measure == "score" and f.task.startswith("depth ")]
    if not figures:
        raise ValueError("there is nothing to plot yet")
    caches = list(dict.fromkeys(f.cache for f in figures))
    lengths = sorted({f.length for f in figures})
    depths = sorted({float(f.task.removeprefix("depth ")) for f in figures})
    found = {(f.cache, float(f.task.removeprefix("depth ")), f.length): 100 * f.value for f in figures}
    columns = min(3, len(caches))
    rows = math.ceil(len(caches) / columns)
    size = (max(3.5, 0.55 * len(lengths) + 1.6) * columns, max(2.4, 0.32 * len(depths) + 1.2) * rows)
    fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, cache in zip(axes.flat, caches):
        grid = [[found.get((cache, depth, n), math.nan) for n in lengths] for depth in depths]
        image = axis.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        axis.set_title(textwrap.fill(cache.replace(",", ", "), 34), fontsize=9)
        axis.set_xticks(
            range(len(lengths)), [f"{n / 1024:g}k" if n % 1024 == 0 else f"{n / 1000:g}k" for n in lengths], fontsize=8
        )
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
        axis.set_xlabel("tokens", fontsize=8)
        axis.set_ylabel("depth", fontsize=8)
    for axis in axes.flat[len(caches) :]:
        axis.axis("off")
    fig.colorbar(image, ax=axes, label="found, %", shrink=0.8)
    fig.suptitle(title, fontsize=10)
    fig.savefig(path, dpi=110)
    plt.close(fig)
