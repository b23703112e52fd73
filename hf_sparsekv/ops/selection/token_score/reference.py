"""Approximate score of the tokens of chosen blocks from the label cache: the definition (Double Sparsity)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give
from ..partial_sums import PartialSums


def unpack_digits(codes: Tensor) -> Tensor:
    """Digits 0 to 15 of packed codes ``[..., r / 2]`` as float32 ``[..., r]``."""
    return torch.cat((codes & 15, codes >> 4), dim=-1).float()


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
    """``a(t) = mean_h q_h[C] . label_t`` (or the maximum over the group) for each token of the given blocks.

    AsyncTLS section 4.1, fine-grained token selection. A NaN score counts as ``-inf``, also in the maximum. So do all
    scores of a query with NaN or an infinity among its label channels, because implementations disagree on the sign of
    its products with packed labels. (The mean counts as one query.) Labels are scored as
    ``scale * (q . digits) + zero * sum(q)``. This defines the result for an infinite scale or zero point.

    Labels are ``(key - centre) / spread`` in each label channel. The queries are multiplied by the spreads, and their
    products with the centres added, so that scores are products with keys all the same.

    Args:
        q: ``[batch, Hq, Dk]`` queries of this step.
        codes: ``[num_blocks, H, block_size, r / 2]`` uint8.
        qparams: ``[num_blocks, H, block_size, 2]`` float16, scale and zero point of each token.
        channels: ``[batch, H, r]`` int32, the label channels of each row and KV head.
        rows: int32 ``[batch, 2]``, length and sealed tokens (a multiple of ``block_size``) of each row.
        block_table: ``[batch, cap]`` int32, physical id of each block of each row; -1 where there is none. Entries of
            blocks that are not sealed are not read.
        block_ids: ``[batch, H, n]`` int32 (-1 for none), or ``None`` for all ``cap`` blocks.
        reduce: ``"mean"`` or ``"max"`` over the query heads of a group; ``"none"``: a score for each head.
        sinks: first tokens of a row, which cannot be selected; those from there to the last sealed one can.
        norms: ``[batch, H, 2, r]`` float32, centre and spread of each label channel. Finite.
        out: receives the scores.
        fill: False leaves the scores after a row's sealed tokens unwritten, for callers that do not read them. Not with
            ``block_ids``.
        sums: a kernel that can adds these up as well, with ``reduce="none"``.

    Returns:
        ``[batch, H, n * block_size]`` float32 (with ``"none"`` ``[batch, Hq, n * block_size]``), ``-inf`` for tokens
        that cannot be selected; never NaN.

    Raises:
        ValueError: ``fill=False`` with ``block_ids``.
    """
    require_filled(fill, block_ids)
    batch, q_heads, dk = q.shape
    heads = codes.shape[1]
    group = q_heads // heads
    q = q.float().view(batch, heads, group, dk)
    q = q.gather(-1, channels.long()[:, :, None].expand(-1, -1, group, -1))
    if reduce == "mean":
        q = q.mean(2, keepdim=True)
    centre, spread = norms[:, :, None].unbind(3)  # [batch, H, 1, r]
    constant, q = (q * centre).sum(-1, keepdim=True), q * spread
    head = torch.arange(heads, device=q.device)[None, :, None]
    size = codes.shape[2]
    if block_ids is None:
        block_ids = torch.arange(block_table.shape[1], device=q.device).expand(batch, heads, -1)
    at = block_table[:, None].expand(-1, heads, -1).gather(-1, block_ids.clamp_min(0).long()).long()
    token = block_ids[..., None] * size + torch.arange(size, device=q.device)  # [batch, H, n, block_size]
    usable = (token >= sinks) & (token < rows[:, 1, None, None, None]) & (at >= 0)[..., None]
    at = at.masked_fill(~usable.any(-1), 0)  # blocks without a usable token may have any entry
    digits = unpack_digits(codes[at, head]).flatten(2, 3).transpose(-1, -2)
    scale, zero = qparams[at, head].float().flatten(2, 3)[:, :, None].unbind(-1)
    score = scale * (q @ digits) + zero * q.sum(-1, keepdim=True) + constant  # [batch, H, G or 1, n * block_size]
    unknown = score.isnan() | ~q.isfinite().all(-1, keepdim=True)
    score = score.masked_fill(unknown, float("-inf")).masked_fill(~usable.flatten(2)[:, :, None], float("-inf"))
    score = score.flatten(1, 2) if reduce == "none" else score.amax(2)
    if not fill:  # without `out` this is unwritten memory: NaN exposes code that reads it
        held = torch.full_like(score, float("nan")) if out is None else out
        score = torch.where((token < rows[:, 1, None, None, None]).flatten(2)[:, :1], score, held)
    return give(score, out)


def require_filled(fill: bool, block_ids: Tensor | None) -> None:
    """Raise ``ValueError`` for ``fill=False`` with chosen blocks, whose scores are all read."""
    if not fill and block_ids is not None:
        raise ValueError("fill=False is for scores of all blocks: those of chosen ones (block_ids) are all read")
