"""Statistics of selections on given keys and queries, measured as on the real model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig

from .statistics import (
    FRACTIONS,
    LayerStatistics,
    block_bounds,
    block_mass,
    bound_scores,
    chosen_blocks,
    stored_blocks,
)

WEIGHTS = 1 << 24  # attention weights that are held at once
SHOWN = {
    "overlap": "k=1/8:bound:overlap_1",
    "lag 16": "k=1/8:bound:overlap_16",
    "mass": "k=1/8:bound:covered_mass",
    "mass, oracle": "k=1/8:oracle:covered_mass",
    "working set": "k=1/8:bound:working_set",
    "95 % of mass": "blocks_for_95",
    "not stored": "rest_mass",
}


def measure(
    k: Tensor, q: Tensor, config: SparseConfig, fractions: Iterable[Fraction] = FRACTIONS
) -> dict[str, np.ndarray]:
    """Statistics of the selections of queries over unchanging keys.

    Args:
        k: ``[H, context, D]``.
        q: ``[steps, Hq, D]``.

    Returns:
        ``[H]`` by name, see :class:`~.statistics.LayerStatistics`.
    """
    n = stored_blocks(config, k.shape[1])
    k, q = k.float(), q.float()
    bounds, chosen = block_bounds(k, config, 0, n), chosen_blocks(n, fractions)
    found = LayerStatistics(chosen, n)
    for part in q.split(max(1, WEIGHTS // (q.shape[1] * k.shape[1]))):
        mass, rest = block_mass(part, k, n, config, k.shape[-1] ** -0.5)
        found.add({"bound": bound_scores(part, bounds), "oracle": mass}, mass, rest)
    return found.values()


def achieved(
    keys: Callable[[int], Tensor] | Mapping[int, Tensor],
    queries: Tensor,
    config: SparseConfig,
    *,
    layers: Iterable[int] | None = None,
    heads: int = 2,
    steps: int = 64,
    fractions: Iterable[Fraction] = FRACTIONS,
    targets: Callable[[int], dict[str, float]] | None = None,
    console: Console | None = None,
) -> dict[int, dict[str, float]]:
    """Measure and print a sample: the first row's first ``heads`` KV heads over the first ``steps`` steps.

    Args:
        keys: ``[batch, H, context, D]`` of a layer.
        queries: ``[steps, layers, batch, Hq, D]``.
        layers: which to measure; all.
        targets: recorded values of a layer, printed beside.
        console: where to print.

    Returns:
        Values by layer and name, averaged over the heads.
    """
    found = {}
    table = Table("layer", *SHOWN, title="achieved (recorded)" if targets else "achieved")
    for layer in range(queries.shape[1]) if layers is None else layers:
        k = keys[layer] if isinstance(keys, Mapping) else keys(layer)
        group = queries.shape[3] // k.shape[1]
        values = measure(k[0, :heads], queries[:steps, layer, 0, : heads * group], config, fractions)
        mine = found[layer] = {name: float(v.mean()) for name, v in values.items()}
        wanted = {} if targets is None else targets(layer)
        shown = [name if name in mine else None for name in SHOWN.values()]
        cells = ["" if n is None else f"{mine[n]:.3f}" + (f" ({wanted[n]:.3f})" if n in wanted else "") for n in shown]
        table.add_row(str(layer), *cells)
    (console or Console(width=140)).print(table)
    return found
