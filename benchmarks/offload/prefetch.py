"""What a gather over the link costs the captured step that runs beside it.

A captured step of ``two_level:lag`` with everything on the device is timed alone, then captured again with a gather of
so many bytes (blocks of 32 KB from anywhere in pinned memory) on a forked stream of the same graph: a part of it
released by each layer, as caches do, or all of it when the step begins.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.ops.block_copy.config import config
from hf_sparsekv.ops.block_copy.triton import block_copy

from ..baselines import find, make_cache, prepare
from ..decoding import Steps, capture_seconds, replay_ms, timed
from ..filling import fill_cache
from ..report import Report
from .transfer import BLOCK, DIM, HEADS, pinned

NAME = "two_level:lag"
BLOCK_BYTES = BLOCK * 2 * DIM * 2


class Gather:
    """Scattered blocks of pinned memory, copied into pages in so many parts.

    Args:
        host: pinned, flat.
        device: where the pages are.
        size: bytes; rounded down to whole blocks a part.
    """

    def __init__(self, host: Tensor, device: torch.device, size: int, parts: int, programs: int) -> None:
        self.kv, self.parts = host.view(-1, HEADS, BLOCK, 2 * DIM), parts
        each = size // BLOCK_BYTES // parts
        total = each * parts
        most = self.kv.shape[0] * HEADS
        if not 0 < total <= most:
            raise ValueError(f"{size} bytes in {parts} parts: between {parts} and {most} blocks are possible")
        self.bytes = total * BLOCK_BYTES
        sources = torch.randperm(most, generator=torch.Generator().manual_seed(0))[:total]
        self.copies = torch.stack((sources, torch.arange(total)), dim=1).int().to(device)
        self.pages = torch.empty(total, BLOCK, 2 * DIM, dtype=host.dtype, device=device)
        self.config = replace(config(self.kv, self.pages), programs=programs)
        self.each, self.total = (torch.tensor([n], dtype=torch.int32, device=device) for n in (each, total))

    def part(self, at: int) -> None:
        """Part ``at``, on the current stream."""
        n = len(self.copies) // self.parts
        block_copy(self.kv, self.pages, self.copies[at * n : (at + 1) * n], self.each, config=self.config)

    def whole(self) -> None:
        """All parts by one kernel."""
        block_copy(self.kv, self.pages, self.copies, self.total, config=self.config)


@contextmanager
def on_side_stream(model, fork: Callable[[int], None], stream, parts: int) -> Iterator[None]:
    """Steps captured inside run ``fork(i)`` on ``stream`` beside decoder layer ``i < parts`` and all after it.

    ``stream``: None where there are no streams.
    """
    runner = runner_of(model)
    original = runner.original

    def release(at: int) -> None:
        if stream is None:
            fork(at)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fork(at)

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return out

    layers = model.get_decoder().layers
    hooks = [layer.register_forward_pre_hook(lambda *_, at=at: release(at)) for at, layer in enumerate(layers[:parts])]
    runner.original = forward
    try:
        yield
    finally:
        runner.original = original
        for hook in hooks:
            hook.remove()


def measure(session, report: Report, batch: int, context: int) -> None:
    """All sizes, programs and spreads beside the step of one shape."""
    args, model, variant = session.args, session.model, find(NAME)
    prepare(model, variant, session.fused)
    layers = len(model.get_decoder().layers)
    points = len(args.sizes) * len(args.programs) * len(args.spread)
    room = 4 * (points + 4)
    cache = make_cache(model, variant, context + room)
    steps = Steps(model, cache, batch, room, fill_cache(model, cache, batch, context))
    label = variant.label(session.fused)

    def step_ms() -> list[float]:
        runner_of(model).graphs.pop(cache, None)
        capture_seconds(model, steps)
        return replay_ms(model, cache)

    alone: list[float] = []
    with report.measuring(batch, context, label):
        alone = step_ms()
        report.add("step_ms", alone)
    if not alone:
        return
    alone_ms = statistics.median(alone)
    host = pinned(session.device)
    stream = torch.cuda.Stream() if session.device.type == "cuda" else None
    for size, spread, programs in itertools.product(args.sizes, args.spread, args.programs):
        name = f"{label}:gather={size}MiB:programs={programs}:{spread}"
        with report.measuring(batch, context, name, model):
            prepare(model, variant, session.fused)  # after an error, too
            gather = Gather(host, session.device, size << 20, layers if spread == "layers" else 1, programs)
            for at in range(gather.parts):  # compiles, maybe for several alignments: a capture cannot
                gather.part(at)
            gather_ms = timed(gather.whole)
            with on_side_stream(model, gather.part, stream, gather.parts):
                found = step_ms()
            report.add("gather_ms", gather_ms)
            report.add("step_ms", found)
            median, bound = statistics.median(found), max(alone_ms, statistics.median(gather_ms))
            report.add("cost_percent", 100 * (median / alone_ms - 1), "percent")
            report.add("over_bound_percent", 100 * (median / bound - 1), "percent")
    prepare(model, variant, session.fused)
    with report.measuring(batch, context, f"{label}:again"):  # whether the clocks have changed meanwhile
        report.add("step_ms", step_ms())


def run(part: str, session, report: Report) -> None:
    """All shapes."""
    for batch, context in session.shapes((1, 32768)):
        with report.measuring(batch, context, part):
            measure(session, report, batch, context)
