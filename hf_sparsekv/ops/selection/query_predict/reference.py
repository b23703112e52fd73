"""Predict the next query from the last ones: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._dispatch import give

TINY = 1e-30  # queries with a smaller mean squared norm count as zero: the inverse must be a normal float32

MAX_WINDOW = 32  # one warp holds the Gram matrix of a head in registers; longer windows measured no better
MIN_EPSILON = 1e-4  # the Gram matrix's condition number stays below MAX_WINDOW / MIN_EPSILON: float32 solves that


def check(ring: Tensor, position: Tensor, count: Tensor, window: int, epsilon: float, out: Tensor | None) -> None:
    """Raise ``ValueError`` for arguments that no implementation accepts; reads shapes and dtypes only."""
    if ring.ndim != 4 or not ring.is_floating_point():
        raise ValueError(f"ring must be floating point [batch, Hq, slots, D], got {ring.dtype} {tuple(ring.shape)}")
    batch, heads, slots, dim = ring.shape
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"window must lie in [1, {MAX_WINDOW}], got {window}")
    if slots < window + 1:
        raise ValueError(f"a window of {window} needs a ring of {window + 1} slots or more, got {slots}")
    if not MIN_EPSILON <= epsilon < float("inf"):
        raise ValueError(f"epsilon must be at least {MIN_EPSILON} (float32 solves no worse systems), got {epsilon}")
    for name, t in (("position", position), ("count", count)):
        if t.dtype != torch.int32 or t.shape != (batch,):
            raise ValueError(f"{name} must be int32 with {batch} elements, got {t.dtype} {tuple(t.shape)}")
        if t.device != ring.device:
            raise ValueError(f"{name} lies on {t.device}, the ring on {ring.device}")
    if out is not None and (out.shape, out.dtype, out.device) != ((batch, heads, dim), ring.dtype, ring.device):
        raise ValueError(
            f"out must be {ring.dtype} {(batch, heads, dim)} on {ring.device}, got {out.dtype} {tuple(out.shape)} on "
            f"{out.device}"
        )


def query_predict(
    ring: Tensor,
    position: Tensor,
    count: Tensor,
    window: int,
    epsilon: float,
    out: Tensor | None = None,
) -> Tensor:
    """Predict the next query of each row and head by ridge regression over its last ones.

    For ``k`` predecessors: ``w = argmin |Q_t - sum_i w_i Q_(t-i)|^2 + lambda |w|^2`` over ``i = 1 .. k``, then
    softmax, and ``Q^(k)_(t+1) = sum_i w_i Q_(t+1-i)``. All windows ``k = 1 .. n`` are averaged. Source: AsyncSpade
    section 4.2, equations 2 to 5; not its Algorithm 1, which differs.

    ``lambda`` is ``epsilon`` times the mean squared norm of the ``n`` predecessors, the same for all windows. Their
    systems are therefore leading submatrices of one matrix, whose Cholesky factor solves them all. A row uses the
    queries that it has: ``n = min(window, count - 1)``. With one query, or predecessors that are all zero or overflow,
    the prediction is the last query. With no query it is zero.

    Args:
        ring: ``[batch, Hq, slots, D]``, queries after the rotary embedding; ``slots > window``. Slots outside ``count``
            may hold anything. Layers may be stacked along the batch.
        position: int32 ``[batch]``, the slot of a row's next query; the newest query is in the slot before it.
        count: int32 ``[batch]``, queries that a row has in the ring.
        window: longest window.
        epsilon: strength of the ridge, relative to the mean squared norm of the predecessors; at least ``MIN_EPSILON``.

    Returns:
        ``[batch, Hq, D]`` in the ring's dtype, ``out`` if given. The call does not synchronise with the device.
    """
    check(ring, position, count, window, epsilon, out)
    device = ring.device
    age = torch.arange(window + 1, device=device)
    slot = (position[:, None].long() - 1 - age) % ring.shape[2]  # [batch, window + 1], newest first
    q = ring.gather(2, slot[:, None, :, None].expand(-1, ring.shape[1], -1, ring.shape[3])).float()
    q = q.masked_fill((age >= count[:, None])[:, None, :, None], 0.0)
    gram = q @ q.transpose(-1, -2)
    n = (count - 1).clamp(0, window)[:, None]  # [batch, 1]
    mean = gram[..., 1:, 1:].diagonal(dim1=-2, dim2=-1).sum(-1) / n.clamp_min(1)  # [batch, Hq]
    solvable = (mean > TINY) & mean.isfinite()
    gram = (gram / mean[..., None, None]).masked_fill(~solvable[..., None, None], 0.0)
    ridge = epsilon * torch.eye(window, device=device)
    factor, _ = torch.linalg.cholesky_ex(gram[..., 1:, 1:] + ridge)
    # With L L' = A and M = L^-1, the leading k equations are solved by the sum of the first k rows of y_k M[k].
    inverse = torch.linalg.solve_triangular(factor, torch.eye(window, device=device), upper=False)
    weights = (inverse @ gram[..., 1:, :1] * inverse).cumsum(-2)  # [batch, Hq, k, i], of window k + 1
    i = torch.arange(window, device=device)
    weights = weights.masked_fill(i > i[:, None], float("-inf")).softmax(-1)
    used = i < n  # [batch, k]
    weights = (weights * used[:, None, :, None]).sum(-2) / used.sum(-1).clamp_min(1)[:, None, None]
    weights = torch.where(solvable[..., None], weights, (i == 0).float())
    q = q[:, :, :-1].masked_fill((weights == 0)[..., None], 0.0)  # queries of weight 0 may be infinite
    return give((weights[..., None, :] @ q)[:, :, 0].to(ring.dtype), out)
