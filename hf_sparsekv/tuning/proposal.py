"""Choice of a preset for a model, a context, a number of rows and a GPU: where KV is stored, and the token budget.

Keys and values stay on the GPU while they fit, because then nothing crosses the link. All presets find what full
attention finds on the probe models (docs/accuracy.md). The choice is therefore the largest token budget with which a
step reads hardly more than with the smallest. One row's tokens are few bytes compared with the weights; those of many
rows are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_sparsekv_config.labels import reads, whole_tokens
from hf_sparsekv_config.sparse import OffloadConfig
from hf_sparsekv_config.tokens import TokenConfig

from .plan import MemoryPlan, ModelShape, plan_memory

PRESETS = ("accurate", None, "fast")  # the largest budget first; None: the defaults
MORE = 0.05  # share by which a step of a larger budget may read more than one of the smallest
# Offloaded, 3 % of the chosen tokens cross the link (docs/speed.md), at some 50 GB/s where an H200 reads 4.5 TB/s.
OFFLOADED = 1 + 0.03 * 4.5e12 / 50e9
PIECE = 4096  # tokens of a prompt at once, where it does not fit as a whole


@dataclass(frozen=True)
class Proposal:
    """Proposed settings for decoding.

    Args:
        preset: preset of ``TokenConfig``; None: its defaults.
        config: the configuration of that preset.
        offloaded: full blocks are in host memory.
        pieces: tokens of the prompt to read at once: the context, or a value for ``prefill_chunk_size``.
        every: full attention is as good: the budget covers the context, or dense steps are as fast on this GPU.
        plan: memory with these settings and this chunk size.
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
        """The Python call for these settings."""
        given = ["model", *([repr(self.preset)] if self.preset else []), *(["offload=True"] if self.offloaded else [])]
        return f"sparse({', '.join(given)})".replace("'", '"')


def propose(
    model: ModelShape, *, context: int, batch: int = 1, gpu: int, host: int, device: torch.device | None = None
) -> Proposal | None:
    """A preset that fits; None if none does.

    Args:
        model: from :func:`.plan.model_shape`.
        context, batch: tokens a row, prompt and answer together, and rows.
        gpu, host: bytes available.
        device: the target GPU, if it is present: the length up to which dense steps are as fast depends on it.

    Raises:
        ValueError: ``context`` or ``batch`` is not positive.
    """
    presets = (None,) if model.topk else PRESETS  # an indexer of its own chooses
    for offload in (None, OffloadConfig()):
        least = step_bytes(model, _config(presets[-1]), offload, context=context, batch=batch)
        for preset in presets:
            config = _config(preset)
            planned = plan_memory(model, config, offload, context=context, batch=batch, device=device)
            pieces = pieces_of(planned, gpu)
            more = step_bytes(model, config, offload, context=context, batch=batch) / least - 1
            if pieces is not None and planned.cache_host <= host and more <= MORE:
                every = context <= max(model.topk or whole_tokens(config), planned.dense_tokens)
                return Proposal(preset, config, offload is not None, pieces, every, in_pieces(planned, pieces), more)
    return None


@dataclass(frozen=True)
class Shortage:
    """Missing bytes for the smallest preset, ``"fast"``, with the prompt read in chunks.

    Args:
        on_gpu: missing on the GPU, with keys and values there.
        offloaded: missing on the GPU, with full blocks in host memory.
        host: missing in host memory in that case.
    """

    on_gpu: int
    offloaded: int
    host: int


def shortage(model: ModelShape, *, context: int, batch: int = 1, gpu: int, host: int) -> Shortage:
    """Explain why :func:`propose`, with the same arguments, finds no preset."""
    config = _config(None if model.topk else "fast")
    here, away = (
        in_pieces(plan_memory(model, config, offload, context=context, batch=batch), min(PIECE, context))
        for offload in (None, OffloadConfig())
    )
    missing = (here.device_total - gpu, away.device_total - gpu, away.cache_host - host)
    return Shortage(*(max(0, n) for n in missing))


def _config(preset: str | None) -> TokenConfig:
    return TokenConfig() if preset is None else TokenConfig.preset(preset)


def step_bytes(
    model: ModelShape, config: TokenConfig, offload: OffloadConfig | None, *, context: int, batch: int
) -> float:
    """Bytes that a decode step reads, where bytes over the link are weighted by their time.

    Counts all weights (also of unused experts), the model's dense, sliding and other layers, the labels and means of
    all tokens, and the chosen tokens.
    """
    planned = plan_memory(model, config, offload, context=context, batch=batch)
    dense = sparse = 0  # bytes of a token, all layers of a kind
    for index, layer in enumerate(model.layers):
        if layer.kind == "full":
            width = layer.heads * layer.width * model.dtype.itemsize
            whole = index < config.dense_layers and not model.topk
            dense, sparse = (dense + width, sparse) if whole else (dense, sparse + width)
    read = min(model.topk, context) if model.topk else reads(config, context)
    chosen = batch * read * sparse * (1 if offload is None else OFFLOADED)
    everywhere = planned.labels + planned.means + planned.index_keys + planned.recent + planned.stock
    return model.weights + batch * context * dense + everywhere + chosen


def pieces_of(planned: MemoryPlan, gpu: int) -> int | None:
    """Tokens of the prompt to read at once: all if they fit, else :data:`PIECE`; None if that does not fit either."""
    whole = planned.context
    return next((n for n in (whole, min(PIECE, whole)) if in_pieces(planned, n).device_total <= gpu), None)


def in_pieces(planned: MemoryPlan, tokens: int) -> MemoryPlan:
    """The plan with a prompt that is read in chunks of ``tokens``."""
    return replace(planned, prefill=planned.prefill * tokens // planned.context)
