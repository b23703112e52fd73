"""What a probe model must reach: retrieval with full attention, and attention that is sparse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_sparsekv_eval import probe_cells as cells
from hf_sparsekv_eval.probe_language import Filler

from .network import Network

FULL_AT_LEAST, ORACLE_LOSS = 0.95, 0.01
BUDGET, DENSE_LAYERS = 512, 2


def right(network: Network, ids: Tensor, family: Tensor, budget: int | None) -> Tensor:
    """Whether each row's whole answer would come out greedily, bool ``[batch]``.

    Args:
        budget: tokens that the oracle lets layers ``>= DENSE_LAYERS`` attend to in the question and the answer;
            ``None``: full attention.
    """
    batch, length = ids.shape
    n_tail = cells.WIDE if budget is not None else 0
    hidden, _ = network.hidden(ids, n_tail=n_tail, budget=budget, dense_layers=DENSE_LAYERS)
    end = hidden.view(batch, length, -1)[:, -cells.WIDE - 1 : -1].reshape(batch * cells.WIDE, -1)
    target = ids[:, -cells.WIDE :]
    _, hit = network.losses(
        end, network.model.model.norm.weight, network.model.model.embed_tokens.weight, target.flatten()
    )
    return (hit.view(batch, -1) | (family[:, -cells.WIDE :] == 0)).all(1)


@torch.no_grad()
def scores(
    network: Network, filler: Filler, lengths: tuple[int, ...], count: int, budget: int, log: Callable = print
) -> dict[str, dict[str, dict[str, float]]]:
    """``{length: {family: {"full": share, "oracle": share}}}`` over ``count`` prompts a cell."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for length in lengths:
        batch = max(1, min(count, 65536 // length))
        table[str(length)] = {}
        for name in cells.EXAMS:
            found = {"full": 0, "oracle": 0}
            for _ in range(-(-count // batch)):
                ids, family = cells.make(batch, length, cells.exam_mix(name, length), filler)
                for key, tokens in (("full", None), ("oracle", budget)):
                    found[key] += int(right(network, ids, family, tokens).sum())
            done = batch * -(-count // batch)
            table[str(length)][name] = {key: n / done for key, n in found.items()}
        cells_ = "  ".join(f"{n} {100 * s['full']:.1f}/{100 * s['oracle']:.1f}" for n, s in table[str(length)].items())
        log(f"{length} tokens, % right with full attention / oracle of {budget}: {cells_}")
    return table


def failures(table: dict, longest: int) -> list[str]:
    """The gates that are not passed, in words."""
    out, need = [], f"{FULL_AT_LEAST:.0%}"
    for length, families in table.items():
        for name, score in families.items():
            if score["full"] < FULL_AT_LEAST:
                out.append(f"{name} at {length}: {score['full']:.1%} right, {need} needed")
            if int(length) == longest and score["oracle"] < score["full"] - ORACLE_LOSS:
                out.append(
                    f"{name} at {length}: the oracle has {score['oracle']:.1%}, full attention {score['full']:.1%}"
                )
    return out
