"""Approximate score of tokens from the label cache on a CPU: one product of all heads with labels as numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....tensors import no_inference_mode
from ..partial_sums import PartialSums
from . import reference


def token_score(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor,
    channels: Tensor,
    rows: Tensor,
    block_table: Tensor,
    block_ids: Tensor | None,
    reduce: str,
    *,
    sinks: int,
    norms: Tensor,
    out: Tensor | None = None,
    fill: bool = True,
    sums: PartialSums | None = None,
) -> Tensor:
    """See :func:`.reference.token_score`; for one row, whose sealed blocks all have an id, and all of them.

    Other calls go to the reference.
    """

    def by_definition() -> Tensor:
        given = (q, codes, qparams, channels, rows, block_table, block_ids, reduce)
        return reference.token_score(*given, sinks=sinks, norms=norms, out=out, fill=fill)

    heads, size = codes.shape[1:3]
    n = rows.tolist()[0][1] // size if rows.shape[0] == 1 else 0
    if block_ids is not None or out is not None or not 0 < n == block_table.shape[1]:
        return by_definition()
    blocks = tuple(block_table.tolist()[0])
    if min(blocks) < 0:
        return by_definition()
    asked = q.float().view(heads, q.shape[1] // heads, -1)
    asked = asked.gather(-1, channels.long().view(heads, 1, -1).expand(-1, asked.shape[1], -1))
    if reduce == "mean":
        asked = asked.mean(1, keepdim=True)
    centre, spread = norms[0, :, None].unbind(2)  # [H, 1, r]
    constant = (asked * centre).sum(-1, keepdim=True)
    score = torch.baddbmm(constant, asked * spread, numbers(codes, qparams, blocks))  # [H, G or 1, sealed]
    score = score.flatten(0, 1) if reduce == "none" else score.amax(1)
    if not math.isfinite(score.sum().item()):  # which of them count as -inf is the definition's business
        return by_definition()
    score.narrow(1, 0, min(sinks, n * size)).fill_(float("-inf"))
    return score[None]


class Numbers(NamedTuple):
    """Labels of a row's tokens, and what they were made from.

    Args:
        of: the blocks, and the versions of the tensors at that time.
        labels: float32 ``[H, r, sealed]``.
    """

    of: tuple[tuple[int, ...], int, int]
    labels: Tensor


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # Numbers of the last call, by the tensor of the codes


def numbers(codes: Tensor, qparams: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """:attr:`Numbers.labels` of these blocks.

    Kept until codes are written: torch counts that. (Not of inference tensors.)
    """
    if codes.is_inference() or qparams.is_inference():
        return unpacked(codes, qparams, blocks)
    of = blocks, codes._version, qparams._version
    known = _known.get(codes)
    if known is None or known.of != of:
        known = _known[codes] = Numbers(of, unpacked(codes, qparams, blocks))
    return known.labels


@no_inference_mode
def unpacked(codes: Tensor, qparams: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """:attr:`Numbers.labels` from the codes."""
    at = list(blocks)
    held = codes[at]  # [n, H, block_size, r / 2]
    scale, zero = qparams[at].float().split(1, -1)
    labels = torch.cat((held & 15, held >> 4), -1).float() * scale + zero
    return labels.permute(1, 3, 0, 2).flatten(2).contiguous()
