"""Adaptive top-p selection on a CPU: bins by torch, then counts and the cut by NumPy, nothing sorted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..partial_sums import PartialSums
from . import reference
from .reference import BINS, NONE, STEPS, Selection

EACH = np.exp2(-(np.arange(BINS, dtype=np.float32) + np.float32(0.5)) / STEPS)  # share at the middle of each bin


def mass_select(
    scores: Tensor,
    q: Tensor,
    channels: Tensor,
    recent_kv: Tensor,
    rows: Tensor,
    *,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    threshold: float,
    min_tokens: int,
    max_tokens: int | None = None,
    group_reduce: str = "all",
    totals: Tensor | None = None,
    stored: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    sums: PartialSums | None = None,
) -> Selection:
    """See :func:`.reference.mass_select`. Entries of ``ids`` after ``count`` are not written."""
    given: dict[str, Any] = {"sinks": sinks, "sink_logits": sink_logits, "stored": stored}
    given |= {"scale": scale, "softcap": softcap}
    bins = None
    if softcap is None and group_reduce == "all" and scores.dtype == torch.float32 and len(rows) == 1:
        bins = bins_of_row(scores, q, channels, recent_kv, rows, given)
    if bins is None:
        bins = reference.bins_of(scores, q, channels, recent_kv, rows, group_reduce=group_reduce, **given)
    lists, n = bins.shape[:2], bins.shape[2]
    ids = torch.empty(*lists, n, dtype=torch.int32) if out is None else out[0]
    by_list, to = bins.detach().flatten(0, 1).numpy(), ids.detach().numpy()
    count, mass, cut, capped = (np.empty(lists.numel(), dtype) for dtype in (np.int32, np.float32, np.int32, bool))
    for i, one in enumerate(by_list):
        counts = np.bincount(one, minlength=NONE + 1)[:BINS]
        left = np.cumsum((counts * EACH)[::-1])[::-1]  # from each bin on
        so_far = np.cumsum(counts)
        live, enough = int(so_far[-1]), int(counts[left > np.float32(1 - threshold)].sum())
        wanted = max(enough, min_tokens)
        k = min(wanted if max_tokens is None else min(wanted, max_tokens), live)
        last = int((so_far < k).sum()) if k > 0 else -1
        need = k - int(counts[:last].sum()) if k > 0 else 0  # tokens of the last bin that are taken
        columns = np.flatnonzero(one <= last) if k > 0 else np.empty(0, np.int64)
        if len(columns) > k:
            ties = one[columns] == last
            columns = columns[~ties | (np.cumsum(ties) <= need)]
        to[i // lists[1], i % lists[1], :k] = columns
        rest = float(left[last + 1]) if last + 1 < BINS else 0.0
        rest += (int(counts[last]) - need) * float(EACH[last]) if k > 0 else 0.0
        count[i], mass[i], cut[i], capped[i] = k, min(max(1 - rest, 0.0), 1.0), last, k < min(enough, live)
    counted, covered, at, ended = (torch.from_numpy(each).view(lists) for each in (count, mass, cut, capped))
    if out is not None:
        counted = out[1].copy_(counted)
    if totals is not None:
        reference.add_up(totals, rows, counted, covered, ended)
    return Selection(ids, counted, covered, bins, at)


def bins_of_row(
    scores: Tensor, q: Tensor, channels: Tensor, recent_kv: Tensor, rows: Tensor, given: dict[str, Any]
) -> Tensor | None:
    """``reference.bins_of`` of the only row, in a third of the passes; None where a mass is not finite.

    Shares are rounded otherwise, so one on the border of two bins may be in either.
    """
    (length, sealed), n, heads = rows[0].tolist(), scores.shape[-1], recent_kv.shape[1]
    live, about = min(sealed, n), {name: value for name, value in given.items() if name != "stored"}
    stored = given["stored"]
    if stored is not None and int(stored[0]) < length:
        rows = torch.stack((stored.to(rows.dtype), rows[:, 1]), dim=1)
    near, mean = reference.near_masses(q, channels, recent_kv, rows, **about)
    held = scores[0, :, :live] * (given["scale"] * reference.LOG2E)  # [Hq, live]
    most = held.amax(-1, keepdim=True) if live else held.new_zeros(len(held), 1)
    total = torch.exp2(held - most).sum(-1).log2() + most[:, 0] + mean.flatten()
    whole = torch.logaddexp2(near.flatten(), total)
    if not (whole.isfinite().all() and total.isfinite().all()):
        return None
    held += (mean.flatten() - whole)[:, None]
    share = held.view(heads, -1, live).amax(1)  # [H, live]
    bins = torch.full((1, heads, n), NONE, dtype=torch.uint8)
    bins[0, :, :live] = (share * -STEPS).clamp_(0, BINS - 1)  # what is converted is rounded towards zero
    bins[0, :, :live].masked_fill_(share == -math.inf, NONE)
    return bins
