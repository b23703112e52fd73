"""What selections on given keys and queries are like, measured as on the real model.

python -m benchmarks.synthetic.achieved --layers 36 --context 16384    # synthetic ones, recorded values beside
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_sparsekv.config import SparseConfig

from .statistics import (
    FRACTIONS,
    POOLS,
    LayerStatistics,
    PoolStatistics,
    block_bounds,
    block_mass,
    bound_scores,
    chosen_blocks,
    stored_blocks,
)

WEIGHTS = 1 << 24  # attention weights that are held at once
WARM_UP = 16  # steps before a pool's hits count: it starts empty
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
        ``[H]`` by name, see :class:`~.statistics.LayerStatistics`; and ``[1]``, hit rates of a pool for these heads:
        ``k=1/8:bound:lru_layer_25``.
    """
    n = stored_blocks(config, k.shape[1])
    k, q = k.float(), q.float()
    bounds, chosen = block_bounds(k, config, 0, n), chosen_blocks(n, fractions)
    found = LayerStatistics(chosen, n)
    pools = {fraction: PoolStatistics(1, len(k), n, WARM_UP) for fraction in chosen}
    for part in q.split(max(1, WEIGHTS // (q.shape[1] * k.shape[1]))):
        mass, rest = block_mass(part, k, n, config, k.shape[-1] ** -0.5)
        selected = found.add({"bound": bound_scores(part, bounds), "oracle": mass}, mass, rest)
        for fraction, pool in pools.items():
            for ids in selected["bound", fraction]:
                pool.add(0, ids)
    values = found.values()
    if len(q) > WARM_UP:
        for fraction, pool in pools.items():
            values |= {f"k={fraction}:bound:lru_layer_{p}": np.array(pool.by_layer(p)) for p in POOLS}
    return values


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


def main(argv: list[str] | None = None) -> None:
    """Print how close synthetic keys and queries of a shape come to the recorded statistics."""
    from .keys import SyntheticKV

    parser = argparse.ArgumentParser(prog="achieved", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", default="32x8", metavar="QUERYxKV")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=7168)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=3, help="measure every n-th layer")
    parser.add_argument("--sample", type=int, default=8, help="KV heads to measure")
    parser.add_argument("--overlap", type=float, help="ask for this overlap instead of the recorded ones")
    parser.add_argument("--fraction", type=Fraction, default=Fraction(1, 8), help="of the blocks, that it is for")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    q_heads, heads = (int(n) for n in args.heads.split("x"))
    kind = {"dtype": torch.float32, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    made = SyntheticKV(args.layers, q_heads, heads, args.dim, 1, args.context, seed=args.seed, **kind)
    layers = range(0, args.layers, args.every)
    targets = {layer: made.profile.targets(layer, args.layers) for layer in layers}
    found = achieved(
        lambda layer: made.keys_values(layer)[0],
        made.queries(args.steps, overlap=args.overlap, fraction=args.fraction),
        made.config,
        layers=layers,
        heads=args.sample,
        steps=args.steps,
        targets=targets.get,
    )
    mine, wanted = pd.DataFrame(found).T.sort_index(axis=1), pd.DataFrame(targets).T
    off = (mine - wanted).abs()
    shown = {"recorded": wanted.mean(), "achieved": mine.mean(), "mean |difference|": off.mean(), "largest": off.max()}
    print(pd.DataFrame(shown).to_string(float_format="{:.3f}".format, na_rep=""))


if __name__ == "__main__":
    main()
