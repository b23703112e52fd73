"""Time per token of an offloaded cache: against the overlap of consecutive selections, and against its device pool.

Keys and queries are those of :mod:`.synthetic`. One cache is filled, in host memory, and never stepped; each point of a
curve decodes over a copy of it, which shares the blocks but has pages, queries and a captured graph of its own. The
first :data:`WARM` tokens fill the pool and are not counted.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hf_sparsekv.policies.ahead.lag import LaggingBlockPolicy

from ..baselines import Variant, find, make_cache, prepare
from ..decoding import free, generate
from ..filling import ReplayedSource, fill_layers
from ..report import Report
from ..shapes import pool_size
from ..traffic import Meter, Traffic

WARM = 48  # tokens
LINK = 51e9  # bytes a second at which the kernel reads scattered blocks over the link (benchmarks/NOTES.md, Pinning)
TENTH = "0.1kv"


class OverlapWatch:
    """Called after each step: the share of the blocks chosen by it that the step before chose as well."""

    def __init__(self, cache, after: Callable[[], None]) -> None:
        self.cache, self.after = cache, after
        self.last: list[Tensor | None] = [None] * len(cache.sparse_layers)
        self.shares: list[Tensor] = []

    def __call__(self) -> None:
        for at, layer in enumerate(self.cache.sparse_layers):  # asked anew: they account for replayed steps then
            if not isinstance(layer.policy, LaggingBlockPolicy) or not layer.policy.chosen:
                continue
            now = layer.policy.ids
            last, self.last[at] = self.last[at], now.clone()
            if last is not None:
                known = (now[..., :, None] == last[..., None, :]).any(-1) & (now >= 0)
                self.shares.append(known.sum() / (now >= 0).sum().clamp_min(1))
        self.after()

    @property
    def mean(self) -> float | None:
        """Over steps and layers; None if nothing was chosen."""
        return float(torch.stack(self.shares).mean()) if self.shares else None


@dataclass(frozen=True)
class Decoded:
    """Tokens ``[batch, WARM + n]``; of the last ``n``, milliseconds and what crossed the link; overlap of the first."""

    tokens: Tensor
    tpot_ms: list[float]
    traffic: Traffic
    overlap: float | None


class Curve:
    """What the points of a shape share."""

    def __init__(self, session, report: Report, batch: int, context: int, variant: str = "two_level:lag") -> None:
        self.session, self.report, self.batch, self.context = session, report, batch, context
        self.name = variant
        self.steps = WARM + session.args.tokens
        self.source = ReplayedSource(session.model, batch, context, show=False)
        self.resident_ms: float | None = None

    def label(self, offload: bool, suffix: str = "") -> str:
        return find(self.name, offload).label(self.session.fused) + suffix

    def queries(self, overlap: float | None = None) -> Tensor:
        """Of one point; as recorded, or with an overlap for the share of the blocks that a step chooses."""
        config = find(self.name).settings
        share = min(1.0, config["num_blocks"] / max(1, self.context // self.source.made.config.block_size))
        return self.source.made.queries(self.steps, overlap=overlap, fraction=share)

    def filled(self, variant: Variant, points: int, device_pool: int | float | None = None):
        """A full cache with room for the tokens of so many points."""
        length = self.context + points * (self.steps + 2 * 128)
        cache = make_cache(self.session.model, variant, length, self.session.host_bytes, device_pool)
        fill_layers(self.source, cache)
        return cache

    def decode(self, cache, overlap: float | None = None) -> Decoded:
        """Tokens that fill the pool, then those that are measured."""
        session = self.session
        prepare(session.model, find(self.name), session.fused)
        after = self.source.replay(cache, self.queries(overlap))
        watch = OverlapWatch(cache, after)
        first = generate(session.model, cache, self.batch, WARM, each=watch)
        meter = Meter(cache)
        found = generate(session.model, cache, self.batch, session.args.tokens, each=after)
        return Decoded(torch.cat((first.tokens, found.tokens), dim=1), found.tpot_ms, meter.read(), watch.mean)

    def resident(self) -> Decoded | None:
        """The same with everything on the device; None if it does not fit."""
        found = None
        with self.report.measuring(self.batch, self.context, self.label(False)):
            cache = self.filled(find(self.name), 1)
            found = self.decode(cache)
            self.report.add("tpot_ms", found.tpot_ms)
            self.resident_ms = statistics.median(found.tpot_ms)
        cache = None  # before the next one is filled
        free()
        return found

    def point(self, suffix: str, make: Callable[[], object], overlap: float | None = None, expected=None) -> None:
        """Decode over the offloaded cache that ``make`` gives; to the ``expected`` tokens, if there are any.

        Raises nothing: the report tells. A wrong token is a failure.
        """
        report = self.report
        with report.measuring(self.batch, self.context, self.label(True, suffix), self.session.model):
            cache = make()
            found = self.decode(cache, overlap)
            if expected is not None:
                same = float((found.tokens == expected).float().mean())
                report.add("same_tokens", same, "share")
                if same < 1:
                    raise RuntimeError(f"{1 - same:.2%} of the tokens differ from those with everything on the device")
            self.add(found, cache)
        cache = None
        free()

    def add(self, found: Decoded, cache) -> None:
        """Rows of a point."""
        report, missed_ms = self.report, 1e3 * found.traffic.missed / LINK
        report.add("tpot_ms", found.tpot_ms)
        found.traffic.add_to(report)
        if found.overlap is not None:
            report.add("block_overlap", found.overlap, "share")
        report.add("pool_gb", cache.device_pools.nbytes / 1e9, "GB")
        if self.resident_ms is not None:
            report.add("bound_ms", max(self.resident_ms, missed_ms))

    def points(self, points: dict[str, tuple[str | None, float | None]]) -> None:
        """Decode over copies of one cache; each point is a device pool and an overlap, None for the usual ones."""
        kv = self.session.kv_bytes(self.batch, self.context)
        base = self.filled(find(self.name, offload=True), len(points), device_pool=0)
        for suffix, (pool, overlap) in points.items():
            self.point(suffix, partial(with_pool, base, pool_size(pool, kv)), overlap)


def with_pool(cache, device_pool: int | float | None):
    """A copy that shares the blocks of an offloaded cache which has no device pool, and gets one of its own."""
    new = copy.deepcopy(cache)
    new.offload_config = new.device_pools.config = replace(new.offload_config, device_pool=device_pool)
    return new


def tenfold(curve: Curve) -> None:
    """KV ten times as large as the pool, blocks chosen in the step that needs them: the same tokens."""
    resident = curve.resident()
    if resident is None:
        raise RuntimeError("nothing to compare with: the cache with everything on the device did not run")
    size = pool_size(TENTH, curve.session.kv_bytes(curve.batch, curve.context))
    make = partial(curve.filled, find(curve.name, offload=True), 1, size)
    curve.point(f":pool={TENTH}", make, expected=resident.tokens)


def run(part: str, session, report: Report) -> None:
    """``overlap``, ``pool`` or ``tenfold``."""
    args = session.args
    name = "two_level" if part == "tenfold" else "two_level:lag"
    for batch, context in session.shapes((1, 131072)):
        curve = Curve(session, report, batch, context, name)
        with report.measuring(batch, context, part):
            if part == "tenfold":
                tenfold(curve)
                continue
            curve.resident()
            points = {f":pool={x}": (x, None) for x in args.pools}
            if part == "overlap":
                points = {f":overlap={x:g}": (None, x) for x in args.overlaps}
            curve.points(points)
        free()
