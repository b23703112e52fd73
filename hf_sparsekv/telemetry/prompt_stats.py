"""Statistics of sparse prompts, by layer and query head: blocks attended to, and mass covered.

Decode steps are counted in :mod:`.stats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..layers.cache_state import FullLayer


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
        visible: blocks that tiles of queries could see, summed over tiles and query heads.
        choices: how often each query head chose blocks: once for some thousand queries of a row.
        again: of these choices, by query head: too little was covered, and the head chose more.
        dense: of these choices, by query head: that was too little as well, and the head attended to everything.
    """

    layer: int
    density: float
    densities: tuple[float, ...]
    audited: int
    covered: float | None
    heads: tuple[float | None, ...]
    least: tuple[float, ...]
    visible: int = 0
    choices: int = 0
    again: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()

    @property
    def dense_heads(self) -> tuple[int, ...]:
        """Query heads that the audit has made dense at least once."""
        return tuple(head for head, times in enumerate(self.dense) if times)

    @property
    def lowest(self) -> tuple[int, float] | None:
        """The query head of which least was covered, and how much of it. None without audited rows."""
        found = [(share, head) for head, share in enumerate(self.heads) if share is not None]
        return min(found)[::-1] if found else None


def audit_tables(layers: Sequence[FullLayer]) -> dict[int, Tensor]:
    """Tables of :class:`.PromptAudit` of layers that have had sparse prompts, on the host. Waits for devices."""
    return {layer.index: layer.audit.table.cpu() for layer in layers if layer.audit.table is not None}


def prompt_stats(tables: Mapping[int, Tensor]) -> tuple[PromptStats, ...]:
    """Statistics of the layers that these tables are of (:func:`audit_tables`)."""
    made = []
    for layer, table in tables.items():
        audited, mass, chosen, seen, choices, again, dense, least = table.T.tolist()
        made.append(
            PromptStats(
                layer=layer,
                density=_ratio(sum(chosen), sum(seen)),
                densities=tuple(map(_ratio, chosen, seen)),
                audited=int(sum(audited)),
                covered=sum(mass) / sum(audited) if sum(audited) else None,
                heads=tuple(held / n if n else None for held, n in zip(mass, audited)),
                least=tuple(least),
                visible=int(sum(seen)),
                choices=int(max(choices)),
                again=tuple(map(int, again)),
                dense=tuple(map(int, dense)),
            )
        )
    return tuple(made)


def _ratio(taken: float, visible: float) -> float:
    """1 where there was nothing to see: of nothing but padding, of heads that an error kept from choosing."""
    return taken / visible if visible else 1.0


def mean_density(prompts: Sequence[PromptStats]) -> float | None:
    """Share of the visible blocks that sparse prompts attended to, mean over layers that had some."""
    return sum(p.density for p in prompts) / len(prompts) if prompts else None


def mean_covered(prompts: Sequence[PromptStats]) -> float | None:
    """Share of the attention mass that sparse prompts covered, mean over audited rows. None without any."""
    audited = sum(p.audited for p in prompts)
    return sum(p.covered * p.audited for p in prompts if p.covered is not None) / audited if audited else None


def described(prompts: Sequence[PromptStats]) -> str:
    """The audit in a line, empty without sparse prompts: density, covered mass, the worst head, and dense heads."""
    density, covered = mean_density(prompts), mean_covered(prompts)
    if density is None:
        return ""
    line = f"sparse prompts attended to {density:.1%} of what they could see"
    if covered is not None:
        share, layer, head = min((p.lowest[1], p.layer, p.lowest[0]) for p in prompts if p.lowest is not None)
        line += f", covered mass {covered:.2%} (layer {layer}, head {head}: {share:.2%})"
    if dense := [f"{p.layer}.{head}" for p in prompts for head in p.dense_heads]:
        heads, more = "head" if len(dense) == 1 else "heads", ", ..." if len(dense) > 4 else ""
        line += f", {len(dense)} {heads} became dense (layer.head {', '.join(dense[:4])}{more})"
    return line
