"""Attention to blocks in order of their rank until enough mass is seen (PSA), driven by the device."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .._dispatch import use_triton
from ..sparse_decode.reference import has_latents
from . import reference
from .reference import near_parts
from .state import BINS, MASS_ONE, TOTALS, WalkState

__all__ = ["BINS", "MASS_ONE", "ROUNDS", "TOTALS", "Walk", "WalkState", "block_masses", "progressive_decode"]

ROUNDS = 3  # as many blocks as the last step suggests; about as many again; what suffices for certain


@dataclass
class Walk:
    """One step's walks over the ranked blocks of a layer: its inputs, and the buffers that the rounds share.

    Args:
        q, kv, flags, block_table, recent_kv, recent_valid, scale, softcap, sink_logits, pages, page_ids, from_host,
            attended: as in :func:`..sparse_decode.sparse_decode` with blocks. Of latents (:mod:`.mass_kernel`) the
                rounds compute
            masses alone, and the used blocks are read once more at the end; ``from_host`` counts both.
        ids, tokens: int32 ``[batch, H, n]``, blocks in order of their rank (:func:`..block_rank.block_rank`).
        state: kept from step to step.
        threshold, group_reduce, min_blocks, max_blocks: see ``reference.verify``; logits, logit_scale: see
            ``reference.expect``.
        estimate: see ``reference.verify``. Only ``"scores"`` has kernels of its own: with the others plain torch finds
            where a walk stops, on any device, in about a hundred small kernels a layer.
    """

    q: Tensor
    kv: Tensor
    flags: Tensor
    block_table: Tensor
    ids: Tensor
    tokens: Tensor
    recent_kv: Tensor
    recent_valid: Tensor
    state: WalkState
    value_dim: int
    scale: float
    threshold: float
    group_reduce: str = "all"
    min_blocks: int = 1
    max_blocks: int | None = None
    estimate: str = "scores"
    logits: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    sink_logits: Tensor | None = None
    pages: Tensor | None = None
    page_ids: Tensor | None = None
    from_host: Tensor | None = None
    attended: Tensor | None = None

    def __post_init__(self) -> None:
        batch, heads, n = self.ids.shape
        self.parts = near_parts(self.recent_kv.shape[2], self.kv.shape[2])
        shape = (batch, heads, self.parts + n, self.q.shape[1] // heads)
        self.lse = torch.empty(shape, dtype=torch.float32, device=self.q.device)
        self.acc = None
        if not has_latents(self.kv, self.q):
            self.acc = torch.empty(*shape, self.value_dim, dtype=torch.float32, device=self.q.device)
        self.operators = reference
        # The kernel reads host memory in place only where it is pinned.
        if use_triton(self.q) and (self.kv.is_cuda or self.kv.is_pinned()):
            from . import triton

            self.operators = triton
        self.expected = self.behind = self.live = None

    @property
    def verifier(self) -> ModuleType:
        """Where ``expect`` and ``verify`` of this estimate are."""
        return self.operators if self.estimate == "scores" else reference

    def attend(self, near: bool, limits: Tensor | None = None, **how: int) -> None:
        """Attention within the blocks of the next round, and within the recent buffer.

        ``how`` replaces the kernel's constants.
        """
        self.operators.attend(
            self.q,
            self.kv,
            self.flags,
            self.block_table,
            self.ids,
            self.recent_kv,
            self.recent_valid,
            self.state.limits if limits is None else limits,
            self.acc,
            self.lse,
            near=near,
            scale=self.scale,
            softcap=self.softcap,
            pages=self.pages,
            page_ids=self.page_ids,
            from_host=self.from_host,
            **how,
        )

    def expect(self, **how: int) -> None:
        """What the blocks should hold, for estimates that go by it: before the first :meth:`verify`.

        ``how`` replaces the kernel's constants.
        """
        if self.estimate != "as_min":
            named = {"logit_scale": self.logit_scale, "group_reduce": self.group_reduce}
            found = self.verifier.expect(self.logits, self.ids, self.tokens, **named, **how)
            self.expected, self.behind, self.live = found

    def verify(self, last: bool, certain: bool = True, **how: int) -> None:
        """See ``reference.verify``; ``how`` replaces the kernel's constants."""
        self.verifier.verify(
            self.lse,
            self.tokens,
            self.state,
            parts=self.parts,
            threshold=self.threshold,
            group_reduce=self.group_reduce,
            min_blocks=self.min_blocks,
            max_blocks=self.max_blocks,
            last=last,
            certain=certain,
            sink_logits=self.sink_logits,
            estimate=self.estimate,
            expected=self.expected,
            behind=self.behind,
            live=self.live,
            **how,
        )

    def merge(self, out: Tensor | None = None) -> Tensor:
        """``[batch, Hq, Dv]`` in q's dtype."""
        if out is None:
            out = torch.empty(*self.q.shape[:2], self.value_dim, dtype=self.q.dtype, device=self.q.device)
        if self.acc is None:
            self.operators.attend_used(
                self.q,
                self.kv,
                self.flags,
                self.block_table,
                self.ids,
                self.recent_kv,
                self.recent_valid,
                self.state,
                out,
                scale=self.scale,
                softcap=self.softcap,
                sink_logits=self.sink_logits,
                pages=self.pages,
                page_ids=self.page_ids,
                from_host=self.from_host,
            )
        self.operators.merge(
            self.acc,
            self.lse,
            self.ids,
            self.tokens,
            self.recent_valid,
            self.state,
            None if self.acc is None else out,
            threshold=self.threshold,
            max_blocks=self.max_blocks,
            sink_logits=self.sink_logits,
            attended=self.attended,
        )
        return out


def progressive_decode(walk: Walk, *, rounds: int = ROUNDS, out: Tensor | None = None) -> Tensor:
    """Attend as far as the walk says; see ``reference.verify`` for where it stops.

    Launches depend on shapes alone: rounds that nobody needs find empty limits. Beyond rounding, the result depends on
    neither ``rounds`` (at least 2) nor on what the state suggests for the first.
    """
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, got {rounds}")
    walk.expect()
    for i in range(rounds):
        walk.attend(near=i == 0)
        walk.verify(last=i + 1 == rounds, certain=i + 2 >= rounds)
    return walk.merge(out)


def block_masses(walk: Walk) -> Tensor:
    """Masses of the recent buffer's parts and of all blocks by rank, ``[batch, H, P + n, G]``: logarithms to base 2."""
    limits = torch.zeros_like(walk.state.limits)
    limits[1] = walk.ids.shape[2]
    walk.attend(near=True, limits=limits)
    return walk.lse
