"""What sparse prompts have attended to and covered, by layer and query head.

Apart from :mod:`.stats`, which counts decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layers.sparse_layer import SparseLayer


@dataclass(frozen=True)
class PromptStats:
    """Sparse prompts of one layer since the cache was made or reset (``SparseConfig(prefill=...)``).

    Rows are audited where a tile of queries left something out: one of 128 queries, of which all scores are computed
    and which had no say in the choice.

    Args:
        layer: index of the layer.
        density: share of the visible blocks of keys that were attended to, mean over query heads.
        densities: the same by query head.
        audited: rows audited, of all heads.
        covered: share of the attention mass of the audited rows that was covered, mean over all. None without any.
        heads: the same by query head.
        least: the least of a row, by query head; 1 without any.
    """

    layer: int
    density: float
    densities: tuple[float, ...]
    audited: int
    covered: float | None
    heads: tuple[float | None, ...]
    least: tuple[float, ...]


def prompt_stats(layers: list[SparseLayer]) -> tuple[PromptStats, ...]:
    """Those of the layers that have had sparse prompts. Synchronises with their devices."""
    found = []
    for layer in layers:
        sums, least = layer.audit.sums, layer.audit.least
        if sums is None or least is None:
            continue
        rows = sums.tolist()
        audited, mass, chosen, seen = map(sum, zip(*rows))
        found.append(
            PromptStats(
                layer=layer.index,
                density=chosen / seen,
                densities=tuple(taken / visible for *_, taken, visible in rows),
                audited=int(audited),
                covered=mass / audited if audited else None,
                heads=tuple(held / n if n else None for n, held, *_ in rows),
                least=tuple(least.tolist()),
            )
        )
    return tuple(found)
