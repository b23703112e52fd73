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
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from hf_sparsekv import ops

from ..baselines import find, make_cache, prepare
from ..decoding import Steps, generate
from ..filling import ReplayedSource, fill_layers
from ..plot import save
from ..report import Report
from .curves import WARM

STEPS = 2  # in the trace
ZOOM_US = 700.0  # of the picture's lower part: a few layers
FETCH, ATTEND, OTHER = "fetch blocks", "attend, append", "linear layers, norms"
# kind -> colour, and the operators whose kernels belong to it; all other kernels are those of the model's other layers
KINDS = {
    FETCH: ("tab:red", ("block_copy",)),
    "find pages": ("tab:orange", ("residency",)),
    "choose": ("tab:green", ("block_score", "token_score", "topk_select", "mass_select")),
    ATTEND: ("tab:blue", ("sparse_decode", "append")),
}
COLOURS = {name: colour for name, (colour, _) in KINDS.items()} | {OTHER: "0.6"}
MOST_LANES = 5  # a graph may use any number of streams


def kernel_names(operator: str) -> set[str]:
    """Names of the Triton functions that the modules of an operator define, as a trace has them."""
    (group,) = (path.parent.name for path in Path(ops.__path__[0]).glob(f"*/{operator}"))
    package = importlib.import_module(f"{ops.__name__}.{group}.{operator}")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    functions = [f for module in modules for f in vars(module).values() if type(f).__module__.startswith("triton.")]
    mine = [f.fn for f in functions if getattr(f, "fn", None) and f.fn.__module__.startswith(package.__name__)]
    return {function.__name__ for function in mine}


@functools.cache
def kinds() -> dict[str, str]:
    """Kind by kernel name. Read from the kernels themselves, so that it stays right when one is renamed."""
    return {name: kind for kind, (_, operators) in KINDS.items() for one in operators for name in kernel_names(one)}


def read_trace(path: Path) -> pd.DataFrame:
    """What ran on the device, in order: name, start and end in microseconds, stream, launch (that the kernels of one
    graph launch have in common), kind.

    Raises:
        ValueError: the file is no trace, or nothing in it ran on a device.
    """
    data = path.read_bytes()
    try:
        rows = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is no trace of torch.profiler ({error})") from None
    found = [
        (row["name"], row["ts"], row["ts"] + row["dur"], args.get("stream", 0), args.get("correlation", 0))
        for row in rows
        if row.get("ph") == "X" and row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        for args in (row.get("args", {}),)
    ]
    if not found:
        raise ValueError(f"nothing in {path} ran on a device")
    events = pd.DataFrame(found, columns=["name", "start", "end", "stream", "launch"])
    return events.assign(kind=events.name.map(kinds()).fillna(OTHER)).sort_values("start", ignore_index=True)


def steps_of(events: pd.DataFrame) -> list[pd.DataFrame]:
    """The captured steps: the launches with many kernels. All events as one, if no launch stands out."""
    sizes = events.groupby("launch").launch.transform("size")
    large = events[(sizes > sizes.max() // 2) & (sizes.max() > 1)]
    return [step for _, step in large.groupby("launch", sort=False)] or [events]


def union(events: pd.DataFrame) -> pd.DataFrame:
    """The same time, without overlaps: start and end."""
    spans = events.sort_values("start")
    apart = spans.start > spans.end.cummax().shift()
    return spans.groupby(apart.cumsum()).agg(start=("start", "min"), end=("end", "max"))


def length(events: pd.DataFrame) -> float:
    """Time in which any of them ran."""
    spans = union(events)
    return float((spans.end - spans.start).sum())


@dataclass(frozen=True)
class Overlap:
    """Microseconds of a step: in all, with blocks on their way, of these beside the model's kernels, and after them."""

    step: float
    fetch: float
    hidden: float
    backlog: float


def overlap_of(step: pd.DataFrame) -> Overlap:
    """Figures of a step. "The model's own" is everything but choosing and fetching the next step's blocks."""
    fetch = step[step.kind == FETCH]
    model = step[step.kind.isin((ATTEND, OTHER))]
    # A trace that tells streams apart says which selections belong to the fetching; otherwise all of them do.
    if not step[step.kind == ATTEND].stream.isin(fetch.stream).any():
        model = step[~step.stream.isin(fetch.stream)]
    hidden = length(fetch) + length(model) - length(pd.concat((fetch, model)))
    backlog = max(0.0, fetch.end.max() - model.end.max()) if len(fetch) and len(model) else 0.0
    return Overlap(float(step.end.max() - step.start.min()), length(fetch), hidden, float(backlog))


# ---------------------------------------------------------------------- the picture


def lanes_of(events: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Title and events of each lane, the busiest first: streams, or kinds of kernels if streams tell nothing."""
    by_stream = 1 < events.stream.nunique() <= MOST_LANES
    groups = events.groupby("stream" if by_stream else "kind", sort=False)
    lanes = [(f"stream {key}" if by_stream else key, group) for key, group in groups]
    return sorted(lanes, key=lambda lane: -length(lane[1]))


def draw(events: pd.DataFrame, out: Path, title: str = "") -> None:
    """All of the time above, a few layers of it below; one lane a stream."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    events = events.assign(end=events.end - events.start.min(), start=events.start - events.start.min())
    lanes, total = lanes_of(events), events.end.max()
    middle = max(0.0, total / 4 - ZOOM_US / 2)  # within the first of two steps
    figure, axes = plt.subplots(2, figsize=(11, 1.9 + 0.7 * len(lanes)))
    for axis, (start, end) in zip(axes, ((0.0, total), (middle, min(total, middle + ZOOM_US)))):
        for at, (_, group) in enumerate(lanes):
            for kind, here in group[(group.end > start) & (group.start < end)].groupby("kind"):
                spans = list(zip(here.start, here.end - here.start))
                # Across rasters: a step has some thousand kernels, and an svg would hold a path for each.
                axis.broken_barh(spans, (-at - 0.4, 0.8), color=COLOURS[kind], linewidth=0, rasterized=True)
        axis.set(xlim=(start, end), ylim=(-len(lanes) + 0.4, 0.6), xlabel="microseconds")
        axis.set_yticks([-at for at in range(len(lanes))], labels=[name for name, _ in lanes])
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in set(events.kind)]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, fontsize=9)
    if title:
        figure.text(0.01, 0.005, title, fontsize=8, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 0.94))
    save(figure, out, dpi=110)


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
            median = pd.DataFrame(found).median()
            report.add("step_ms", median.step / 1e3)  # under the profiler
            report.add("fetch_ms", median.fetch / 1e3)
            if median.fetch:
                report.add("hidden_share", median.hidden / median.fetch, "share")
            report.add("backlog_us", median.backlog, "us")
            draw(events, args.out, f"{session.case}, {batch} x {context}, {label}, {len(found)} captured steps")
            report.note(f"drawn: {args.out}")
