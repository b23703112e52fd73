"""Which preset for a model, a context, a number of rows and a GPU: where keys and values go, and how many tokens.

Keys and values stay on the GPU while they fit: there nothing crosses the link. How many tokens a step chooses follows
from what they cost: of the presets, all of which find what full attention finds on the probe models (docs/presets.md),
the one with the largest budget that makes a step read hardly more than the smallest does. One row's tokens are little
beside the weights; those of many rows are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..config import OffloadConfig
from ..policies.token_config import TokenConfig
from .plan import MemoryPlan, ModelShape, plan_memory

PRESETS = ("accurate", None, "fast")  # the largest budget first; None: the defaults
MORE = 0.05  # share of what a step reads by which a larger budget may exceed the smallest
# Offloaded, 3 % of the chosen tokens cross the link (docs/speed.md), at some 50 GB/s where an H200 reads 4.5 TB/s.
OFFLOADED = 1 + 0.03 * 4.5e12 / 50e9
PIECE = 4096  # tokens of a prompt at once, where it does not fit as a whole


@dataclass(frozen=True)
class Proposal:
    """What to decode with.

    Args:
        preset: of ``TokenConfig``; None: its defaults.
        config: the same.
        offloaded: full blocks in host memory.
        pieces: tokens of the prompt that are read at once: the context, or what ``prefill_chunk_size`` should be.
        every: full attention is as good: the budget covers the context, or dense steps are as quick on this GPU.
        plan: memory with these settings, and the prompt read so.
        more: share by which its steps read more than those of ``"fast"``.
    """

    preset: str | None
    config: TokenConfig
    offloaded: bool
    pieces: int
    every: bool
    plan: MemoryPlan
    more: float

    @property
    def call(self) -> str:
        """As it is written in Python."""
        given = ["model", *([repr(self.preset)] if self.preset else []), *(["offload=True"] if self.offloaded else [])]
        return f"sparse({', '.join(given)})".replace("'", '"')


def propose(
    model: ModelShape, *, context: int, batch: int = 1, gpu: int, host: int, device: torch.device | None = None
) -> Proposal | None:
    """A preset that fits; None if none does.

    Args:
        model: from :func:`.plan.model_shape`.
        context, batch: tokens a row, prompt and answer together, and rows.
        gpu, host: bytes that there are.
        device: the GPU that it is for, if it is there: up to which length dense steps are as quick depends on it.

    Raises:
        ValueError: ``context`` or ``batch`` is not positive.
    """
    for offload in (None, OffloadConfig()):
        least = step_bytes(model, TokenConfig.preset("fast"), offload, context=context, batch=batch)
        for preset in PRESETS:
            config = TokenConfig() if preset is None else TokenConfig.preset(preset)
            planned = plan_memory(model, config, offload, context=context, batch=batch, device=device)
            pieces = pieces_of(planned, gpu)
            more = step_bytes(model, config, offload, context=context, batch=batch) / least - 1
            if pieces is not None and planned.cache_host <= host and more <= MORE:
                every = context <= max(config.token_budget, planned.dense_tokens)
                return Proposal(preset, config, offload is not None, pieces, every, in_pieces(planned, pieces), more)
    return None


@dataclass(frozen=True)
class Shortage:
    """Bytes that are missing for the preset with the least need, ``"fast"``, and the prompt read in pieces.

    Args:
        on_gpu: on the GPU, with keys and values there.
        offloaded: on the GPU, with full blocks in host memory; ``host``: in host memory then.
    """

    on_gpu: int
    offloaded: int
    host: int


def shortage(model: ModelShape, *, context: int, batch: int = 1, gpu: int, host: int) -> Shortage:
    """Why :func:`propose` finds nothing; its arguments."""
    config = TokenConfig.preset("fast")
    here, away = (
        in_pieces(plan_memory(model, config, offload, context=context, batch=batch), min(PIECE, context))
        for offload in (None, OffloadConfig())
    )
    missing = (here.device_total - gpu, away.device_total - gpu, away.cache_host - host)
    return Shortage(*(max(0, n) for n in missing))


def step_bytes(
    model: ModelShape, config: TokenConfig, offload: OffloadConfig | None, *, context: int, batch: int
) -> float:
    """Bytes that a decode step reads, those over the link counted by the time that they take.

    All weights, also of experts that a step leaves out; a model's dense, sliding and other layers; labels and means of
    everything, and the chosen tokens.
    """
    planned = plan_memory(model, config, offload, context=context, batch=batch)
    dense = sparse = 0  # bytes of a token, all layers of a kind
    for index, layer in enumerate(model.layers):
        if layer.kind == "full":
            width = layer.heads * layer.width * model.dtype.itemsize
            dense, sparse = (dense + width, sparse) if index < config.dense_layers else (dense, sparse + width)
    chosen = batch * min(config.token_budget, context) * sparse * (1 if offload is None else OFFLOADED)
    everywhere = planned.labels + planned.means + planned.recent + planned.stock
    return model.weights + batch * context * dense + everywhere + chosen


def pieces_of(planned: MemoryPlan, gpu: int) -> int | None:
    """Tokens of the prompt to read at once: all, or :data:`PIECE` where that is too much; None if that is, too."""
    whole = planned.context
    return next((n for n in (whole, min(PIECE, whole)) if in_pieces(planned, n).device_total <= gpu), None)


def in_pieces(planned: MemoryPlan, tokens: int) -> MemoryPlan:
    """The plan with a prompt that is read so many tokens at a time."""
    return replace(planned, prefill=planned.prefill * tokens // planned.context)
