"""Statistics of a decoding model's selections: overlap of consecutive steps, attention mass.

Every function takes plain tensors, so that recorded attention and made-up tensors (:mod:`.keys`)
are measured alike. Everything is about *stored* blocks, those that a cache selects from. Sinks, the recent window and
blocks that are not full yet are left out, as in :class:`~hf_sparsekv.kv.store.LayerStore`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv.ops.selection.block_score import block_score
from hf_sparsekv_config.sparse import SparseConfig

FRACTIONS = (Fraction(1, 16), Fraction(1, 8), Fraction(1, 4))  # of the stored blocks that a step selects
LAGS = (1, 2, 4, 8, 16)  # steps between two selections that are compared
SHARES = (90, 95, 98, 99)  # percent of the stored blocks' attention mass
WORKING_SET = 12  # steps whose selections are united
SELECTORS = ("bound", "oracle")  # by our bound on the score; by the true attention mass


def stored_blocks(config: SparseConfig, length: int) -> int:
    """Blocks that a step selects from when ``length`` tokens were cached before it."""
    return max(0, length - config.window - config.max_draft) // config.block_size


def block_bounds(k: Tensor, config: SparseConfig, first: int, last: int) -> Tensor:
    """Largest and smallest selectable key of blocks ``first .. last - 1``, ``k [H, n, D]`` to ``[blocks, H, 2, D]``."""
    size = config.block_size
    keys = k[:, first * size : last * size].unflatten(1, (-1, size))  # [H, blocks, size, D]
    high, low = keys.amax(2), keys.amin(2)
    if first == 0 and config.sinks:  # the first tokens are attended anyway, and not selected
        high[:, 0], low[:, 0] = keys[:, 0, config.sinks :].amax(1), keys[:, 0, config.sinks :].amin(1)
    return torch.stack((high, low), dim=2).transpose(0, 1).contiguous()


def bound_scores(q: Tensor, bounds: Tensor, reduce: str = "max") -> Tensor:
    """The score that our selection goes by: ``q [T, Hq, D]``, ``bounds [n, H, 2, D]`` to ``[T, H, n]``."""
    n = bounds.shape[0]
    counts = torch.tensor([[n, n]], dtype=torch.int32, device=q.device)  # each block counts as one token
    block_table = torch.arange(n, dtype=torch.int32, device=q.device)[None]
    # One query at a time: the reference copies bounds per row.
    return torch.cat([block_score(one[None], bounds, counts, block_table, reduce, tokens=1, sinks=0) for one in q])


def block_mass(q: Tensor, k: Tensor, n: int, config: SparseConfig, scale: float) -> tuple[Tensor, Tensor]:
    """Attention mass of each stored block, averaged over the query heads that share a KV head.

    Args:
        q: ``[T, Hq, D]``, queries that see all of ``k``.
        k: ``[H, length, D]``.
        n: stored blocks; tokens after them, and the sinks, count as the rest.
        scale: softmax scaling.

    Returns:
        mass ``[T, H, n]`` and the rest's ``[T, H]``, float32; together they are 1.
    """
    steps, q_heads, dim = q.shape
    heads = k.shape[0]
    rows = q.view(steps, heads, -1, dim).transpose(0, 1).flatten(1, 2)  # [H, T * G, D]
    weights = (rows.float() @ k.float().transpose(1, 2) * scale).softmax(-1)
    weights = weights.view(heads, steps, q_heads // heads, -1).mean(2)  # [H, T, length]
    weights[..., : config.sinks] = 0
    mass = weights[..., : n * config.block_size].unflatten(-1, (n, config.block_size)).sum(-1).transpose(0, 1)
    return mass, 1 - mass.sum(-1)


def ranking(scores: Tensor) -> np.ndarray:
    """Ids of the blocks, best first and the lower one of equals first, as ``block_select`` does: ``[..., n]``."""
    return scores.sort(dim=-1, descending=True, stable=True).indices.cpu().numpy()


def as_masks(ids: np.ndarray, n: int) -> np.ndarray:
    """Selections ``[..., k]`` as bool ``[..., n]``."""
    masks = np.zeros((*ids.shape[:-1], n), dtype=bool)
    np.put_along_axis(masks, ids, True, axis=-1)
    return masks


def blocks_for(mass: np.ndarray, percent: float) -> np.ndarray:
    """Share of the blocks that hold ``percent`` of all blocks' mass at least: ``[..., n]`` to ``[...]``."""
    sums = np.cumsum(-np.sort(-mass.astype(np.float64), axis=-1), axis=-1)
    needed = (sums < sums[..., -1:] * (percent / 100) - 1e-9).sum(-1) + 1
    return needed / mass.shape[-1]


class LayerStatistics:
    """Statistics of one layer's selections, step by step; keeps the selections of the last few steps only.

    Args:
        chosen: blocks that a step selects, for each fraction.
        most_blocks: stored blocks at the last step.
    """

    def __init__(self, chosen: dict[Fraction, int], most_blocks: int) -> None:
        self.chosen, self.most = chosen, most_blocks
        self._sums: dict[str, tuple[np.ndarray, int]] = {}
        self._past = {(s, f): deque(maxlen=max(*LAGS, WORKING_SET)) for s in SELECTORS for f in chosen}

    def _note(self, name: str, values: np.ndarray) -> None:
        """``values [T, H]`` of some steps."""
        total, count = self._sums.get(name, (0, 0))
        self._sums[name] = (total + values.sum(0), count + len(values))

    def add(self, scores: dict[str, Tensor], mass: Tensor, rest: Tensor) -> dict[tuple[str, Fraction], np.ndarray]:
        """Steps in their order, all with the same ``n`` stored blocks.

        Args:
            scores: ``[T, H, n]`` of each selector.
            mass, rest: ``[T, H, n]`` and ``[T, H]``, see :func:`block_mass`.

        Returns:
            The selected ids ``[T, H, k]`` by (selector, fraction).
        """
        share, outside = mass.double().cpu().numpy(), rest.double().cpu().numpy()
        self._note("rest_mass", outside)
        for percent in SHARES:
            self._note(f"blocks_for_{percent}", blocks_for(share, percent))
        found = {}
        ranked = {selector: ranking(scores[selector]) for selector in SELECTORS}
        for (selector, fraction), past in self._past.items():
            k, name = self.chosen[fraction], f"k={fraction}:{selector}"
            ids = found[selector, fraction] = np.sort(ranked[selector][..., :k], axis=-1)
            covered = np.take_along_axis(share, ids, -1).sum(-1)
            self._note(f"{name}:covered_mass", covered / share.sum(-1))
            self._note(f"{name}:covered_mass_all", covered + outside)
            for now in as_masks(ids, self.most):
                for lag in LAGS:
                    if len(past) >= lag:
                        self._note(f"{name}:overlap_{lag}", ((now & past[-lag]).sum(-1) / k)[None])
                past.append(now)
                if len(past) >= WORKING_SET:
                    union = np.any([past[-i] for i in range(1, WORKING_SET + 1)], axis=0)
                    self._note(f"{name}:working_set", (union.sum(-1) / k)[None])
        return found

    def values(self) -> dict[str, np.ndarray]:
        """Means over the steps, ``[H]`` each: ``blocks_for_95``, ``k=1/8:bound:overlap_1`` ..."""
        return {name: total / count for name, (total, count) in self._sums.items()}


def chosen_blocks(n: int, fractions: Iterable[Fraction] = FRACTIONS) -> dict[Fraction, int]:
    """How many of ``n`` stored blocks a fraction is, at least one."""
    return {fraction: max(1, round(n * fraction)) for fraction in fractions}
