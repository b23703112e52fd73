"""Sums of attention masses in parts, by their definition: what token_score's kernel adds up for mass_select's."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_sparsekv.ops._recent import recent_valid
from hf_sparsekv.ops.selection.mass_select.reference import logits
from hf_sparsekv.ops.selection.partial_sums import PARTS, PartialSums


def parts_of(args: tuple, named: dict, n: int = 5) -> PartialSums:
    """Arguments of :func:`mass_select`, in ``n`` parts: every n-th token is in the same one."""
    scores, q, channels, near, rows = args
    batch, heads = near.shape[:2]
    q = q.float().view(batch, heads, -1, q.shape[-1])
    keys, at, scale = near[..., : q.shape[-1]].float(), channels.long(), named["scale"]
    own = q.gather(-1, at[:, :, None].expand(-1, -1, q.shape[2], -1))
    labels = keys.gather(-1, at[:, :, None].expand(-1, -1, keys.shape[2], -1))
    true = logits(q @ keys.transpose(-1, -2), scale, None)
    over = true - logits(own @ labels.transpose(-1, -2), scale, None)
    stored = named["stored"]
    there = rows if stored is None else torch.stack((torch.minimum(rows[:, 0], stored), rows[:, 1]), dim=1)
    valid = recent_valid(there, named["sinks"], near.shape[2])[:, None, None]
    recent = valid.clone()
    recent[..., : named["sinks"]] = False
    held = logits(scores.unflatten(1, q.shape[1:3]), scale, None).clamp_max(1e30)
    behind = torch.arange(scores.shape[-1], device=scores.device) >= rows[:, 1, None, None, None]
    sums = [_in_parts(held.nan_to_num(nan=-torch.inf, neginf=-torch.inf).masked_fill(behind, -torch.inf), n)]
    sums += [_in_parts(x.masked_fill(~mask, -torch.inf), n) for x, mask in ((true, valid), (over, recent))]
    parts = torch.stack(sums, 4).permute(0, 1, 3, 2, 4, 5).flatten(0, 1).contiguous()
    assert parts.shape == (batch * heads, n, q.shape[2], PARTS, 2)
    return PartialSums(near, stored, scale, parts)


def whole(parts: Tensor) -> Tensor:
    """Base-2 logarithms ``[batch * H, G, 3]`` of the sums of all parts."""
    most, total = parts.double().unbind(-1)
    return ((most + total.log2()) * torch.log(torch.tensor(2.0))).logsumexp(1) / torch.log(torch.tensor(2.0))


def _in_parts(x: Tensor, n: int) -> Tensor:
    """``[batch, H, G, tokens]`` -> ``[batch, H, G, n, 2]``."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % n), value=-torch.inf).unflatten(-1, (-1, n))
    most = torch.where(x.isnan(), -torch.inf, x).amax(-2)
    base = torch.where(most == -torch.inf, 0, most)
    return torch.stack((most, (x - base[..., None, :]).exp2().sum(-2)), -1)
