"""When the kernels of an offloaded decode step run: a profiler trace, figures from it, and its picture.

    python -m benchmarks offload timeline --keep trace.json.gz
    python -m benchmarks offload timeline --trace trace.json.gz --out docs/offload-timeline.png

The trace is torch.profiler's (chrome's format; also opens in Perfetto). Of each captured step: ``fetch_ms``, the time
in which blocks were on their way; ``hidden_share`` of it, in which the model's own kernels ran as well; ``backlog_us``,
from the model's last kernel to the end of the last fetch, which the next step has to wait for.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import json
import pkgutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..baselines import find, make_cache, prepare
from ..decoding import Steps, generate
from ..filling import ReplayedSource, fill_layers
from ..report import Report
from .curves import WARM

STEPS = 2  # in the trace
ZOOM_US = 700.0  # of the picture's lower part: a few layers
FETCH, ATTEND, OTHER = "fetch blocks", "attend, append", "linear layers, norms"
# kind -> colour, and the operators whose kernels belong to it; all other kernels are those of the model's other layers
KINDS = {
    FETCH: ("tab:red", ("block_copy",)),
    "find pages": ("tab:orange", ("residency",)),
    "choose": ("tab:green", ("block_score", "block_rank", "token_score", "topk_select")),
    ATTEND: ("tab:blue", ("sparse_decode", "progressive", "append")),
}
COLOURS = {name: colour for name, (colour, _) in KINDS.items()} | {OTHER: "0.6"}
MOST_LANES = 5  # a graph may use any number of streams
Span = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """A kernel or a copy on the device. Times in microseconds.

    Args:
        launch: what the kernels of one graph launch have in common.
    """

    name: str
    start: float
    end: float
    stream: int
    launch: int

    @property
    def kind(self) -> str:
        return kinds().get(self.name, OTHER)


def kernel_names(operator: str) -> set[str]:
    """Names of the Triton functions that the modules of ``hf_sparsekv.ops.<operator>`` define, as a trace has them."""
    package = importlib.import_module(f"hf_sparsekv.ops.{operator}")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    functions = [f for module in modules for f in vars(module).values() if type(f).__module__.startswith("triton.")]
    mine = [f.fn for f in functions if getattr(f, "fn", None) and f.fn.__module__.startswith(package.__name__)]
    return {function.__name__ for function in mine}


@functools.cache
def kinds() -> dict[str, str]:
    """Kind by kernel name. Read from the kernels themselves, so that it stays right when one is renamed."""
    return {name: kind for kind, (_, operators) in KINDS.items() for one in operators for name in kernel_names(one)}


def read_trace(path: Path) -> list[Event]:
    """What ran on the device, in order.

    Raises:
        ValueError: the file is no trace, or nothing in it ran on a device.
    """
    data = path.read_bytes()
    try:
        rows = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is no trace of torch.profiler ({error})") from None
    found = [
        Event(row["name"], row["ts"], row["ts"] + row["dur"], args.get("stream", 0), args.get("correlation", 0))
        for row in rows
        if row.get("ph") == "X" and row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        for args in (row.get("args", {}),)
    ]
    if not found:
        raise ValueError(f"nothing in {path} ran on a device")
    return sorted(found, key=lambda event: event.start)


def steps_of(events: list[Event]) -> list[list[Event]]:
    """The captured steps: the launches with many kernels. All events as one, if no launch stands out."""
    sizes = Counter(event.launch for event in events)
    most = max(sizes.values())
    large = [launch for launch, n in sizes.items() if n > most // 2] if most > 1 else []
    steps = [[event for event in events if event.launch == launch] for launch in large]
    return sorted(steps, key=lambda step: step[0].start) or [events]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, without overlaps."""
    out: list[Span] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def length(spans: Iterable[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(end - start for start, end in spans)


def common(a: list[Span], b: list[Span]) -> float:
    """Time that is in both."""
    return length(a) + length(b) - length(union((*a, *b)))


@dataclass(frozen=True)
class Overlap:
    """Microseconds of a step: in all, with blocks on their way, of these beside the model's kernels, and after them."""

    step: float
    fetch: float
    hidden: float
    backlog: float


def overlap_of(step: list[Event]) -> Overlap:
    """Figures of a step. "The model's own" is everything but choosing and fetching the next step's blocks."""
    streams = {event.stream for event in step if event.kind == FETCH}
    # A trace that tells streams apart says which selections belong to the fetching; otherwise all of them do.
    aside = None if any(event.stream in streams and event.kind == ATTEND for event in step) else streams

    def own(event: Event) -> bool:
        if event.kind == FETCH:
            return False
        return event.kind in (ATTEND, OTHER) if aside is None else event.stream not in aside

    fetch = union((event.start, event.end) for event in step if event.kind == FETCH)
    model = union((event.start, event.end) for event in step if own(event))
    start, end = min(event.start for event in step), max(event.end for event in step)
    backlog = max(0.0, fetch[-1][1] - model[-1][1]) if fetch and model else 0.0
    return Overlap(end - start, length(fetch), common(fetch, model), backlog)


# ---------------------------------------------------------------------- the picture


def lanes_of(events: list[Event]) -> list[tuple[str, list[Event]]]:
    """Title and events of each lane, the busiest first: streams, or kinds of kernels if streams tell nothing."""
    streams = sorted({event.stream for event in events})
    by_stream = 1 < len(streams) <= MOST_LANES
    groups: dict = {}
    for event in events:
        groups.setdefault(event.stream if by_stream else event.kind, []).append(event)
    ordered = sorted(groups.items(), key=lambda item: -length(union((e.start, e.end) for e in item[1])))
    return [(f"stream {key}" if by_stream else key, group) for key, group in ordered]


def draw(events: list[Event], out: Path, title: str = "") -> None:
    """All of the time above, a few layers of it below; one lane a stream."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    lanes, origin = lanes_of(events), events[0].start
    total = max(event.end for event in events) - origin
    middle = max(0.0, total / 4 - ZOOM_US / 2)  # within the first of two steps
    figure, axes = plt.subplots(2, figsize=(11, 1.9 + 0.7 * len(lanes)))
    for axis, (start, end) in zip(axes, ((0.0, total), (middle, min(total, middle + ZOOM_US)))):
        for at, (_, group) in enumerate(lanes):
            for kind, colour in COLOURS.items():
                spans = [
                    (e.start - origin, e.end - e.start)
                    for e in group
                    if e.kind == kind and e.end - origin > start and e.start - origin < end
                ]
                if spans:
                    # Across rasters: a step has some thousand kernels, and an svg would hold a path for each.
                    axis.broken_barh(spans, (-at - 0.4, 0.8), color=colour, linewidth=0, rasterized=True)
        axis.set(xlim=(start, end), ylim=(-len(lanes) + 0.4, 0.6), xlabel="microseconds")
        axis.set_yticks([-at for at in range(len(lanes))], labels=[name for name, _ in lanes])
    there = {event.kind for event in events}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in there]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, fontsize=9)
    if title:
        figure.text(0.01, 0.005, title, fontsize=8, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 0.94))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


# ---------------------------------------------------------------------- on a GPU


def record(session, batch: int, context: int, path: Path) -> None:
    """A trace of :data:`STEPS` captured steps of an offloaded cache whose pool is full."""
    from torch.profiler import ProfilerActivity, profile

    model, variant = session.model, find("two_level:lag", offload=True)
    prepare(model, variant, session.fused)
    room = WARM + 64
    source = ReplayedSource(model, batch, context, show=False)
    cache = make_cache(model, variant, context + room, session.host_bytes)
    fill_layers(source, cache)
    after = source.replay(cache, source.made.queries(room))
    generate(model, cache, batch, WARM, each=after)
    steps = Steps(model, cache, batch, 16, after)

    def trace(n: int) -> profile:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(n):
                steps()
            torch.cuda.synchronize()
        return found

    trace(2)  # the first one sets the profiler up
    trace(STEPS).export_chrome_trace(str(path))


def run(part: str, session, report: Report) -> None:
    """Record unless there is a trace; figures as rows if it was recorded; draw."""
    args = session.args
    if args.trace is not None:
        draw(read_trace(args.trace), args.out, args.trace.name)
        report.note(f"drawn: {args.out}")
        return
    for batch, context in session.shapes((1, 131072)):
        label = find("two_level:lag", offload=True).label(session.fused)
        with report.measuring(batch, context, label), tempfile.TemporaryDirectory() as folder:
            path = args.keep or Path(folder) / "trace.json.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            record(session, batch, context, path)
            events = read_trace(path)
            found = [overlap_of(step) for step in steps_of(events)]
            median = {
                name: statistics.median(getattr(one, name) for one in found)
                for name in ("step", "fetch", "hidden", "backlog")
            }
            report.add("step_ms", median["step"] / 1e3)  # under the profiler
            report.add("fetch_ms", median["fetch"] / 1e3)
            if median["fetch"]:
                report.add("hidden_share", median["hidden"] / median["fetch"], "share")
            report.add("backlog_us", median["backlog"], "us")
            draw(events, args.out, f"{session.case}, {batch} x {context}, {label}, {len(found)} captured steps")
            report.note(f"drawn: {args.out}")
