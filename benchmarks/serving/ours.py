"""Our engine, with as much of SparseServe's design as a setting names (its figure 13): each adds one thing.

A setting fails if the engine lacks something that it needs: none is silently the same as another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_sparsekv import TokenConfig
from hf_sparsekv.serving import rounds
from hf_sparsekv.serving.engine import Engine
from hf_sparsekv.serving.request import Handle
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv.serving.stats import EngineStats
from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig

from ..report import Report
from ..traffic import Meter
from .replayed import ReplayedKeys, replaying
from .settings import Settings

BUDGET = 2048  # tokens: SparseServe, section 4.2
ACCEPTS = 0.9
INDEX_SHARE = 0.052  # of a token's keys and values: labels and bounds, which stay on the GPU


@dataclass(frozen=True)
class Rung:
    """A named setting.

    Args:
        about: what it adds to the one before.
        sparse: attention chooses; otherwise it reads everything.
        offload: full blocks are in host memory.
        working_set: rows are held back whose working sets do not fit beside the others'.
        segments: prompts are read layer by layer between steps.
        exact: steps only draft, and full attention verifies. (With random weights acceptance is imitated: each draft is
            accepted with a probability of :data:`ACCEPTS`.)
    """

    about: str
    sparse: bool = True
    offload: bool = False
    working_set: bool = False
    segments: bool = False
    exact: bool = False


RUNGS = {
    "dense": Rung("all keys and values on the GPU, dense attention", sparse=False),
    "sparse": Rung("+ sparse attention (SA)"),
    "exact": Rung("+ full attention verifies drafts of sparse steps", exact=True),
    "offload": Rung("+ full blocks in host memory, copied as they are chosen (Offload, FT)", offload=True),
    "working-set": Rung("+ rows are held back whose working sets do not fit (WC)", offload=True, working_set=True),
    "segments": Rung("+ prompts in layer segments (LP)", offload=True, working_set=True, segments=True),
}


def memory(settings: Settings, rung: Rung, config: TokenConfig) -> tuple[int, OffloadConfig | None]:
    """Tokens that all requests may have together, and how they are offloaded, within the same bytes for all.

    Offloaded, of ``kv_gpu`` bytes the index takes its part, and dense layers, and rows' recent windows; what is left is
    for copies of chosen tokens. Tokens are as many as host memory holds, or half of the GPU's bytes have an index for.

    Raises:
        ValueError: nothing is left.
    """
    if not rung.offload:
        return settings.gpu_tokens, None
    layers, token = settings.config.num_hidden_layers, settings.token_bytes
    stays = token * (config.dense_layers / layers + INDEX_SHARE)
    recent = settings.max_rows * (config.sinks + config.window + config.max_draft) * token
    # An engine takes 98 % of host memory. Each row may leave a block of it half empty. Blocks of its first row, and
    # those in which a row is calibrated, come on top (some 20).
    more = (settings.max_rows + 32) * config.block_size
    held = 0.98 * settings.kv_host / (token * (1 - config.dense_layers / layers)) - more
    tokens = int(min(settings.kv_host / token, held, settings.kv_gpu / 2 / stays))
    pool = int(settings.kv_gpu - recent - tokens * stays)
    if pool <= 0 or tokens < settings.max_length:
        raise ValueError(
            f"{settings.kv_gpu / 1e9:.1f} GB of GPU memory and {settings.kv_host / 1e9:.1f} GB of host memory do not "
            f"hold {settings.max_rows} rows: give more with --kv-gb and --host-gb, or have fewer rows"
        )
    return tokens, OffloadConfig(device_pool=pool, max_host_bytes=settings.kv_host)


SERVED = ("sparse", "segments")


def serve_flags(settings: Settings, name: str, budget: int = BUDGET) -> list[str]:
    """Options of ``hf-sparsekv serve`` with the rows, lengths and memory of a setting.

    Prompts are read as ``segments`` reads them, because the command has no options for the baselines' chunks. So a
    server like ``sparse`` is that setting with faster prompts.

    Args:
        name: in ``SERVED``.
    """
    tokens, offload = memory(settings, RUNGS[name], TokenConfig(token_budget=budget))
    flags = {
        "--max-rows": settings.max_rows,
        "--context": settings.max_length,
        "--batch-tokens": min(tokens, settings.max_rows * settings.max_length),
        "--max-waiting": 1 << 20,
        "--token-budget": budget,
        "--dtype": settings.dtype,
    }
    if offload is not None:
        flags |= {"--device-kv": offload.device_pool, "--host-kv": offload.max_host_bytes}
    text = [str(part) for flag in flags.items() for part in flag]
    return [*text, "--no-offload" if offload is None else "--offload"]


def imitated(drafted: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """How many first drafts ``[n, k]`` are accepted, at random: int64 ``[n]``."""
    return (torch.rand(drafted.shape, device=drafted.device) < ACCEPTS).long().cumprod(1).sum(1)


class OurSystem:
    """A :class:`.client.System`.

    Args:
        model: of our shapes; the engine prepares it.
        name: in ``RUNGS``.
        budget: tokens that a step chooses.
        typical: tokens of a prompt, for ``settings.kv == "replayed"``.
        options: of the configuration, instead of what the setting says.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: Settings,
        name: str,
        budget: int = BUDGET,
        typical: int = 8192,
        **options: Any,
    ) -> None:
        rung = RUNGS[name]
        if rung.exact:
            if settings.kv == "replayed":
                raise ValueError("exact is not for replayed keys: verifications would ask for other ones")
            rounds.agreed = imitated
        if not rung.sparse:
            options = {**options, "dense_below": settings.max_rows * settings.max_length}  # of all rows together
        config = TokenConfig(token_budget=budget, **options)
        tokens, offload = memory(settings, rung, config)
        keys = None
        if settings.kv == "replayed" and rung.sparse:
            keys = ReplayedKeys(model, settings.max_length, typical)
        with replaying(keys, model):
            self.engine = Engine(
                model,
                None,
                config,
                offload,
                ServingConfig(
                    max_rows=settings.max_rows,
                    max_length=settings.max_length,
                    max_tokens=min(tokens, settings.max_rows * settings.max_length),
                    max_waiting=1 << 20,  # a trace's delays are measured, not cut
                    # Baselines: the paper's chunks, one beside each step, however long that takes.
                    prefill_ms=settings.prefill_ms if rung.segments else math.inf,
                    chunk=ServingConfig().chunk if rung.segments else settings.chunk,
                    working_set=rung.working_set,
                    layer_segments=rung.segments,
                    exact=rung.exact,
                ),
            )
        self.rung, self.config = rung, config
        self._meter: Meter | None = None
        self._before: EngineStats | None = None
        self._after: EngineStats | None = None

    def submit(self, ids: Sequence[int], sampling: Sampling) -> Handle:
        """Take a request; raises as the engine does."""
        return self.engine.submit(ids, sampling)

    def restart(self) -> None:
        """Count from here; nothing may run."""
        self._before, self._after = self.engine.stats(), None
        if self.rung.offload:
            self._meter = Meter(self.engine._cache)

    def look(self) -> None:
        """Its own counts are of the time between two looks, if it is looked at; what crosses the link is not."""
        self._before, self._after = self._after or self.engine.stats(), self.engine.stats()

    def add_to(self, report: Report) -> None:
        """Rows of what was counted since; nothing may run."""
        now, before = self._after or self.engine.stats(), self._before
        steps = now.steps - before.steps
        report.add("captures", now.captures - before.captures, "count")
        report.add("prefill_s", now.prefill_s - before.prefill_s, "s")
        report.add("cached_tokens", now.cached_tokens - before.cached_tokens, "count")
        if steps:
            report.add("steps", steps, "count")
            if self.rung.exact:
                report.add("drafted", now.drafted - before.drafted, "count")
                report.add("accepted", now.accepted - before.accepted, "count")
            report.add("step_ms", 1e3 * (now.step_s - before.step_s) / steps)
            report.add("rows_a_step", (now.generated_tokens - before.generated_tokens) / steps, "count")
        if self._meter is not None and steps:
            self._meter.read().add_to(report)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
