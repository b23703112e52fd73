"""Counters of a cache, summed over its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from ..kv.row_table import RowTable
from ..layers.cache_state import FullLayer
from ..offload.host_limit import readable
from ..offload.page_table import DevicePools
from ..policies.measured import PackStats, WalkStats
from ..policies.shared import Shared
from .audit_stats import AuditStats, audit_stats
from .prompt_stats import PromptStats, audit_tables, described, mean_covered, mean_density, prompt_stats
from .working_set import working_set_bytes


@dataclass(frozen=True)
class CacheStats:
    """Counters of a cache since it was created or reset. Counts are summed over steps, layers, rows and KV heads.

    Only layers that the cache manages itself count; sliding and linear-attention layers are transformers' own.

    Args:
        layers: full-attention layers that the cache manages.
        cached_tokens: columns cached per row (padding included).
        decode_steps: forward passes of one query a row, or of several drafts that were decoded like steps
            (``draft_queries``).
        sparse_calls, dense_calls: layer calls of decode steps that attended to a selection / to all tokens.
        crossover_calls: the ``dense_calls`` made because dense attention is as fast there (``dense_below``).
        exact_calls: layer calls with several queries over cached tokens that attended to all tokens (later chunks,
            second turns, drafts that are not decoded like steps).
        attended_tokens: cached tokens attended to in decode steps.
        context_tokens: cached tokens that full attention would have attended to in these steps.
        blocks_chosen: blocks that the coarse level kept for a step's attention.
        kv_bytes_read: bytes of keys and values of ``attended_tokens``.
        kv_bytes_dense: bytes of keys and values of ``context_tokens``.
        index_bytes_read: bytes of block bounds and labels read for the selection, and of the means of unselected
            tokens.
        host_to_device_bytes, device_to_host_bytes: bytes of keys and values moved (or read in place) each way.
        needed, found: blocks (in a predictive cache: tokens) that were looked up on the device, and found there. Both
            are 0 if KV is read in place.
        hit_rate: ``found / needed``; None if KV is read in place.
        working_set_bytes: bytes of the blocks that each row has chosen in its last 12 steps
            (``telemetry/working_set.py``); None without a device pool.
        covered_mass: share of the attention mass that decode steps covered; None unless measured
            (``ProgressiveConfig(audit_every=...)``).
        materialised: times that code other than the sparsekv attention function read all keys and values.
        device_bytes, host_bytes: bytes currently allocated by the layers of the cache.
        second_bytes: the same on a second device that chooses; not part of ``device_bytes``.
        walks: statistics of adaptive top-p selection per layer; empty for other methods.
        late: layer calls that attended to an older selection, because a second device had not chosen in time.
        foreseen_calls: the ``sparse_calls`` whose tokens were chosen beforehand, for a query that the preceding layer
            predicted (``PredictiveConfig.predictor``).
        draft_queries: draft queries of a row in decode steps, beyond the first query. Tokens and bytes count for each
            query.
        drafted, accepted: tokens that sparse steps drafted in exact mode, and those that full attention chose too.
        audit: how far the texts' tokens are from full attention; None without an audit (``sparse(audit=True)``).
        prompts: what sparse prompts covered, per layer; empty without (``SparseConfig(prefill=...)``).
    """

    layers: int
    cached_tokens: int
    decode_steps: int
    sparse_calls: int
    dense_calls: int
    crossover_calls: int
    exact_calls: int
    attended_tokens: int
    context_tokens: int
    blocks_chosen: int
    kv_bytes_read: int
    kv_bytes_dense: int
    index_bytes_read: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    needed: int
    found: int
    hit_rate: float | None
    working_set_bytes: tuple[int, ...] | None
    covered_mass: float | None
    materialised: int
    device_bytes: int
    host_bytes: int
    walks: tuple[WalkStats, ...] = ()
    late: int = 0
    second_bytes: int = 0
    foreseen_calls: int = 0
    draft_queries: int = 0
    drafted: int = 0
    accepted: int = 0
    audit: AuditStats | None = None
    prompts: tuple[PromptStats, ...] = ()

    @property
    def prompt_density(self) -> float | None:
        """Share of the visible blocks that sparse prompts attended to, mean over layers that had some."""
        return mean_density(self.prompts)

    @property
    def prompt_covered(self) -> float | None:
        """Share of the attention mass that sparse prompts covered, mean over audited rows. None without any."""
        return mean_covered(self.prompts)

    @property
    def tokens_per_walk(self) -> float | None:
        """Mean number of tokens that a progressive selection used, over steps, layers, rows and KV heads."""
        walks = sum(w.walks for w in self.walks)
        return sum(w.tokens_used for w in self.walks) / walks if walks else None

    @property
    def estimated_mass(self) -> float | None:
        """Mean share of the attention mass that progressive selections estimated to cover."""
        walks = sum(w.walks for w in self.walks)
        return sum(w.mass * w.walks for w in self.walks if w.walks) / walks if walks else None

    @property
    def attended_share(self) -> float:
        """Share of the cached tokens that decode steps attended to."""
        return self.attended_tokens / self.context_tokens if self.context_tokens else 1.0

    def since(self, earlier: CacheStats) -> CacheStats:
        """Counters of the steps after ``earlier``, which are earlier statistics of the same cache.

        Allocated and cached sizes, the working set, the audit, and what prompts covered are current values.

        Raises:
            ValueError: ``earlier`` counts more steps: it belongs to another cache, or there was a ``reset()``.
        """
        if earlier.decode_steps > self.decode_steps:
            raise ValueError(
                f"the earlier statistics count {earlier.decode_steps} steps, these {self.decode_steps}: they belong to "
                "another cache, or it was reset"
            )
        counts = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self) if f.name in _COUNTS}
        before = {w.layer: w for w in earlier.walks}
        walks = tuple(w.since(before[w.layer]) if w.layer in before else w for w in self.walks)
        needed = counts["needed"]
        return replace(
            self,
            **counts,
            hit_rate=counts["found"] / needed if needed else None,
            covered_mass=_covered(walks),
            walks=walks,
        )

    def __str__(self) -> str:
        where = f"KV {readable(self.device_bytes)} on the device"
        if self.host_bytes:
            where += f", {readable(self.host_bytes)} in host memory"
        if self.second_bytes:
            where += f", {readable(self.second_bytes)} on a second device"
        if self.prompts:
            where += f"; {described(self.prompts)}"
        if not self.decode_steps:
            what = "no decode step yet"
            if self.materialised:
                what = f"no sparse decode step: {self.materialised} layer calls bypassed sparse attention"
            return f"{self.cached_tokens} tokens cached, {what}; {where}"
        steps, what = self.decode_steps, "steps"
        if self.draft_queries:
            what = f"passes of {steps + self.draft_queries} queries"
        each = "a pass" if self.draft_queries else "a step"
        read = readable((self.kv_bytes_read + self.index_bytes_read) / steps)
        line = f"{steps} {what} over {self.cached_tokens} cached tokens: "
        if self.crossover_calls and not self.sparse_calls:
            line += f"attended to all of them, which is as fast at this length (dense_below), read {read} {each}"
        else:
            line += f"attended to {self.attended_share:.1%}, read {read} {each} instead of "
            line += readable(self.kv_bytes_dense / steps)
        if self.host_bytes:
            line += f", {readable(self.host_to_device_bytes / steps)} of it from host memory"
        if self.hit_rate is not None:
            line += f", hit rate {self.hit_rate:.1%}"
        if self.working_set_bytes:
            line += f", working set {readable(sum(self.working_set_bytes))}"
        if self.tokens_per_walk is not None:
            line += f", {self.tokens_per_walk:.0f} tokens chosen for an estimated mass of {self.estimated_mass:.2%}"
        if self.late:
            line += f", {self.late} of {self.sparse_calls} selections late"
        if self.covered_mass is not None:
            line += f", covered mass {self.covered_mass:.2%}"
        if capped := sum(w.capped for w in self.walks):
            line += f", {capped / sum(w.walks for w in self.walks):.1%} of the selections ended by token_budget"
        if self.crossover_calls and self.sparse_calls:
            share = self.crossover_calls / (self.sparse_calls + self.dense_calls)
            line += f"; {share:.0%} of the layer calls were dense because that is as fast there (dense_below)"
        if self.drafted:
            line += f"; {self.accepted} of {self.drafted} drafts accepted"
        if self.audit is not None:
            line += f"; {self.audit}"
        if self.materialised:
            line += f"; {self.materialised} layer calls bypassed sparse attention"
        return f"{line}; {where}"


_COUNTS = frozenset(
    {
        "decode_steps",
        "sparse_calls",
        "dense_calls",
        "crossover_calls",
        "exact_calls",
        "attended_tokens",
        "context_tokens",
        "blocks_chosen",
        "kv_bytes_read",
        "kv_bytes_dense",
        "index_bytes_read",
        "host_to_device_bytes",
        "device_to_host_bytes",
        "needed",
        "found",
        "materialised",
        "late",
        "foreseen_calls",
        "draft_queries",
        "drafted",
        "accepted",
    }
)


def allocated(
    layers: Sequence[FullLayer], shared: Shared, pools: DevicePools | None, table: RowTable
) -> dict[str, int]:
    """Bytes that a cache takes on its ``device``, in ``host`` memory and on a ``second`` device.

    Counts its sparse layers, their shared state, their ``pools``, and the block table, which each device has a copy of.
    """
    begun = [layer for layer in layers if layer.store is not None]
    sizes = [layer.store.nbytes() for layer in begun]
    home = {layer.store.device for layer in begun}
    tables = sum(size for device, size in table.blocks.nbytes.items() if device in home)
    return {
        "device": sum(s[0] for s in sizes)
        + sum(layer.policy.nbytes for layer in layers)
        + (0 if pools is None else pools.nbytes)
        + tables,
        "host": sum(s[1] for s in sizes),
        "second": sum(layer.store.second_bytes for layer in begun)
        + shared.second_bytes(layer.policy for layer in begun)
        + sum(table.blocks.nbytes.values())
        - tables,
    }


def _covered(walks: tuple[WalkStats, ...]) -> float | None:
    audits = sum(w.audits for w in walks)
    return sum(w.audited_mass * w.audits for w in walks if w.audits) / audits if audits else None


def collect(layers: Sequence[FullLayer], shared: Shared, pools: DevicePools | None, table: RowTable) -> CacheStats:
    """Sum the counters of a cache's layers and of its device pools. Waits for their devices, on all streams."""
    fetched = {"needed": 0, "found": 0, "bytes": 0} if pools is None else pools.counters()
    stores = [layer.store for layer in layers if layer.store is not None]
    for device in {store.device for store in stores}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # steps may run on any stream, and fetch on a side stream
    attended = context = blocks = read = dense = index = down = up = 0
    for store in stores:
        counters = store.counters
        mine, all_of_it = counters.total_attended, counters.context
        attended += mine
        context += all_of_it
        blocks += int(counters.blocks)
        read += mine * store.token_bytes
        dense += all_of_it * store.token_bytes
        index += counters.index_bytes
        up += counters.to_host_bytes
        down += counters.to_device_bytes
        down += counters.total_from_host * store.stored_bytes
    held = allocated(layers, shared, pools, table)
    total = [store.counters for store in stores]
    measured = [one for layer in layers for one in layer.policy.measured()]
    walks = tuple(m for m in measured if isinstance(m, WalkStats))
    packs = [m for m in measured if isinstance(m, PackStats)]
    needed = fetched["needed"] + sum(p.needed for p in packs)
    found = fetched["found"] + sum(p.needed - p.copied for p in packs)
    return CacheStats(
        layers=len(layers),
        cached_tokens=max((store.length for store in stores), default=0),
        decode_steps=max((c.steps for c in total), default=0),
        sparse_calls=sum(c.sparse for c in total),
        dense_calls=sum(c.dense for c in total),
        crossover_calls=sum(c.crossover for c in total),
        exact_calls=sum(c.exact for c in total),
        attended_tokens=attended,
        context_tokens=context,
        blocks_chosen=blocks,
        kv_bytes_read=read,
        kv_bytes_dense=dense,
        index_bytes_read=index,
        host_to_device_bytes=down + fetched["bytes"] + sum(p.bytes for p in packs),
        device_to_host_bytes=up,
        needed=needed,
        found=found,
        hit_rate=found / needed if needed else None,
        working_set_bytes=working_set_bytes(stores),
        covered_mass=_covered(walks),
        materialised=sum(c.materialised for c in total),
        device_bytes=held["device"],
        host_bytes=held["host"],
        walks=walks,
        late=sum(p.late for p in packs),
        second_bytes=held["second"],
        foreseen_calls=sum(c.foreseen for c in total),
        draft_queries=max((c.drafts for c in total), default=0),
        drafted=table.exactness.drafted,
        accepted=table.exactness.accepted,
        audit=audit_stats(table.exactness.audited),
        prompts=prompt_stats(audit_tables(layers)),
    )
