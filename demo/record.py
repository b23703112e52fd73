"""The page's race without the page: the same function, its points in a file and a picture.

    python -m demo.race --model small --length 2k --csv race.csv --plot race.svg
    python -m demo.race --model random:qwen3-8b --length 32k --method two_level --set mass=0.9
    python -m demo.race --csv race.csv --plot race.svg --only-plot
    python -m demo.record --model small --length 4k --save demo/recorded/small-4k.json
    python -m demo.record --model random:qwen3-8b --length 128k --offload --kv replayed --save recorded.json

``--save`` writes a recording, which the page plays (``demo/recording.py``). A model is what the page takes, or
``random:SHAPE``: random weights of a known shape, over random tokens, for times. Random weights choose other tokens in
each step, which a cache in host memory has to fetch. With ``--kv replayed`` keys and queries of the sparse lane imitate
recorded ones instead (``benchmarks/filling.py``).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import shlex
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.filling import ReplayedSource, fill_layers
from benchmarks.shapes import known_config, parse_tokens, random_model
from hf_sparsekv import PrefixCache, optimize
from hf_sparsekv.results import commit, device_name, versions
from hf_sparsekv.tuning.shapes import SHAPES

from . import documents, recording
from .caches import METHODS
from .models import Loaded, ModelError, Models, pick_device
from .race import Event, Reading, Session, Stepped, Task
from .turns import Turns
from .view import RaceView

COLUMNS = (
    "lane", "name", "token", "ms", "own_s", "elapsed_s", "kv_bytes_read", "attended_share", "hit_rate", "covered_mass",
    "device_bytes", "host_bytes", "model", "context", "read_s", "device", "versions", "commit", "date",
)  # fmt: skip
REPLAYED = (
    "sparse lane: keys and queries imitate recorded ones, for random weights would choose other tokens in each step"
)
SHARED = "the sequences share the document's blocks: contexts of their own would take longer"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="probe", help=f"probe, small, a hub id, a path; random:{'|'.join(SHAPES)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--length", type=parse_tokens, default=4096, metavar="TOKENS", help="of context: 4096, 32k")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--method", choices=list(METHODS), default=next(iter(METHODS)))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="controls of the cache")
    parser.add_argument("--offload", action="store_true", help="full blocks in host memory")
    parser.add_argument(
        "--rows", type=int, default=1, help="sequences over one document, read once and copied; lanes run one by one"
    )
    parser.add_argument(
        "--kv", choices=("own", "replayed"), default="own", help="keys and queries of random weights: see above"
    )
    parser.add_argument("--depth", type=float, default=0.4, help="of the hidden fact, 0 to 1")
    parser.add_argument(
        "--warm-up", type=int, help="tokens of a race before, which is not recorded; default 16 on a GPU, else 0"
    )
    parser.add_argument("--csv", type=Path, help="where the points go")
    parser.add_argument("--plot", type=Path, help="a picture of them, svg or png")
    parser.add_argument("--save", type=Path, metavar="JSON", help="where a recording for the page goes")
    parser.add_argument("--title", help="of the recording's button; default: model, context and device")
    parser.add_argument("--note", default="", help="what else a reader of the recording must know")
    parser.add_argument("--only-plot", action="store_true", help="draw the points of --csv")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Race, or draw; 1 if a lane has failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments().parse_args(argv)
    if args.only_plot:
        if not (args.csv and args.plot):
            print("--only-plot needs --csv and --plot", file=sys.stderr)
            return 2
        draw(args.csv, args.plot)
        return 0
    warnings.filterwarnings("ignore", message="decode steps run eagerly")
    device = pick_device(args.device)
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 2) - 1))
    try:
        loaded, task, needle = prepare(args, device)
        if args.rows < 1:
            raise ValueError("--rows: at least one sequence has to decode")
        if args.kv == "replayed" and not args.model.startswith("random:"):
            raise ValueError("--kv replayed is for a model of random weights: --model random:SHAPE")
        view, points, events = record(loaded, task, args)
        if needle:
            view.question, view.wanted = needle.question, needle.answer
            for lane in view.lanes:
                lane.answer, lane.after = loaded.say(lane.ids)
    except (ModelError, documents.DocumentError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.csv:
        write(args.csv, points)
        if args.plot:
            draw(args.csv, args.plot)
    if args.save and not any(lane.ended is None or lane.ended.error for lane in view.lanes):
        command = shlex.join(["python", "-m", "demo.record", *argv])
        recording.write(args.save, recorded(view, events, loaded, args, points[0], command))
    return report(view, loaded, needle)


def prepare(args: argparse.Namespace, device: torch.device):
    """``(model, task, hidden fact)``; no fact for random weights."""
    values = _values(args)
    kind, _, shape = args.model.partition(":")
    if kind != "random":
        loaded = Models(device).load(args.model)
        language = loaded.language
        needle = language.needle(args.length)
        fact = language.ids(needle.fact)
        head = language.head()
        text = language.document(language.bundled())
        ids = documents.fit(text, args.length - len(head) - len(fact))
        ids = documents.hide(ids, fact, args.depth, language.breaks)
        asked = tuple(language.question(needle.question, True))
        task = Task(
            (*head, *ids), asked, (), args.method, values, args.offload, args.new_tokens, go_on=True, rows=args.rows
        )
        return loaded, task, needle
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}; known: {', '.join(SHAPES)}")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = random_model(known_config(shape), dtype, device)
    if device.type == "cuda":
        optimize(model)
    nothing = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=None))
    ids = torch.randint(0, known_config(shape).vocab_size, (args.length + 16,)).tolist()
    asked = tuple(ids[args.length :])
    task = Task(
        tuple(ids[: args.length]), asked, (), args.method, values, args.offload, args.new_tokens, go_on=True,
        rows=args.rows,
    )  # fmt: skip
    return Loaded(args.model, model, nothing), task, None


def _values(args: argparse.Namespace) -> dict[str, float]:
    """Controls: the page's first values, and what ``--set`` says."""
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    controls = METHODS[args.method].controls
    values = {c.name: c.on_gpu if on_gpu and c.on_gpu is not None else c.value for c in controls}
    for text in args.set:
        name, equals, value = text.partition("=")
        if name not in values or not equals:
            raise ValueError(
                f"{text!r}: {args.method} has the controls {', '.join(values) or 'none'}, set as name=value"
            )
        values[name] = float(value)
    return values


class ReplayedSession(Session):
    """A race in which the sparse lane's keys, and its steps' queries, imitate recorded ones.

    The document is read by the model, as ever; what the sparse lane's cache holds of it is replaced. Times of full
    attention do not depend on keys, but on whether several rows share them. On a GPU, copies of a prefix share its
    blocks, which takes less time. So there each row of full attention gets keys of its own, too.
    """

    def _makers(self, loaded: Loaded, task: Task) -> list:
        full, (name, _) = super()._makers(loaded, task)
        length = len(task.context)
        room = length + len(task.question) + task.new_tokens + 1024
        self._next = lambda: None

        def filled(cache):
            source = ReplayedSource(loaded.model, task.rows, length, show=False)
            fill_layers(source, cache)
            return source, cache

        def dense():
            return filled(PrefixCache(max_length=room, model_config=loaded.model.config))[1]

        def replayed():
            source, cache = filled(METHODS[task.method].make(task.values, task.offload, loaded.model.config, room))
            self._next = source.start(cache)
            return cache

        if loaded.on_gpu and task.rows > 1:
            full = (full[0], dense)
        return [full, (name, replayed)]

    def stepped(self, number: int) -> None:
        if number:
            self._next()

    def left(self, number: int) -> None:
        if number:
            self._next = lambda: None  # else the replay keeps the cache until the next race has made another


def record(loaded: Loaded, task: Task, args: argparse.Namespace) -> tuple[RaceView, list[dict], list[Stepped]]:
    """Run the race.

    Returns:
        The page's view at the end, a row for each point of its plot, and the steps.
    """
    session = (ReplayedSession if args.kv == "replayed" else Session)(Turns())
    warm = args.warm_up if args.warm_up is not None else 16 * loaded.on_gpu
    view, points, began = RaceView(rows=task.rows, on_gpu=loaded.on_gpu), [], 0.0
    stamped: list[tuple[Event, float]] = []
    with session.running():
        if warm:
            few = Task(**{**task.__dict__, "new_tokens": warm})
            read = [e for e in session.race(loaded, few) if isinstance(e, Reading)]
            session.new_talk()
        for event in session.race(loaded, task):  # and nothing else meanwhile
            stamped.append((event, time.perf_counter()))
        session.forget()
    steps = [event for event, _ in stamped if isinstance(event, Stepped)]
    for event, at in stamped:
        began = at if isinstance(event, Reading) and event.done == event.total else began
        view.add(event)
        if isinstance(event, Stepped):
            points.append(_point(view, event, at - began))
    if warm:
        view.read_s = read[-1].seconds
    common = {
        "model": args.model, "context": len(task.context), "read_s": f"{view.read_s:.4g}", "device": device_name(),
        "versions": versions(), "commit": commit(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    return view, [{**point, **common} for point in points], steps


def recorded(
    view: RaceView, steps: list[Stepped], loaded: Loaded, args: argparse.Namespace, common: dict, command: str
) -> recording.Recording:
    """The race as a recording; ``common``: a row of its points, which says where and when."""
    random = args.model.startswith("random:")
    name = "SmolLM2-135M" if args.model == "small" else args.model.replace("random:", "")
    name = Path(name).stem if name.endswith(".gguf") else name
    long = f"{args.length >> 10}k" if args.length % 1024 == 0 else f"{args.length:,}"
    many = f"{args.rows} x " if args.rows > 1 else ""
    device = (
        common["device"] if loaded.on_gpu else f"{platform.machine()} CPU, torch threads: {torch.get_num_threads()}"
    )
    return recording.Recording(
        title=args.title or f"{name}, {many}{long}, {device.partition(',')[0]}",
        model=f"{name}'s shape, random weights" if random else name,
        context=int(common["context"]),
        rows=args.rows,
        on_gpu=loaded.on_gpu,
        device=device,
        versions=common["versions"],
        commit=common["commit"],
        date=common["date"],
        command=command,
        note=args.note or (REPLAYED if args.kv == "replayed" else SHARED * (loaded.on_gpu and args.rows > 1)),
        read_s=float(view.read_s),
        question=view.question,
        wanted=view.wanted,
        lanes=tuple(_lane(number, view, steps, loaded, random) for number in range(2)),
    )


def _lane(number: int, view: RaceView, steps: list[Stepped], loaded: Loaded, random: bool) -> recording.RecordedLane:
    lane, mine = view.lanes[number], [step for step in steps if step.lane == number]
    looked = [(i, step.report.stats, step.memory) for i, step in enumerate(mine) if step.memory or step.report.stats]
    return recording.RecordedLane(
        name=lane.name,
        ms=tuple(1e3 * seconds for seconds in lane.seconds),
        pieces=() if random else _pieces(loaded.language.tokenizer, lane.ids),
        answer_tokens=0 if random else loaded.answer_tokens(lane.ids),
        looks=tuple(looked),
        maps=() if lane.blocks is None else ((len(mine) - 1, lane.blocks),),
        totals=lane.totals,
    )


def _pieces(tokenizer, ids: list[int]) -> tuple[str, ...]:
    """The text that each token adds; of letters that several tokens make, the last one has all."""
    pieces, said = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        whole = text.rstrip("\ufffd") if end < len(ids) else text
        new = whole[len(said) :] if whole.startswith(said) else ""
        pieces.append(new)
        said += new
    return tuple(pieces)


def _point(view: RaceView, event: Stepped, elapsed: float) -> dict:
    lane, report = view.lanes[event.lane], event.report
    stats, memory = report.stats, event.memory or {}
    mass = None if stats is None else stats.covered_mass if stats.covered_mass is not None else stats.estimated_mass
    return {
        "lane": ("dense", "sparse")[event.lane],
        "name": lane.name,
        "token": len(lane.ids) - 1,
        "ms": f"{1e3 * report.seconds:.4f}",
        "own_s": f"{sum(lane.seconds):.5f}",
        "elapsed_s": f"{elapsed:.5f}",
        "kv_bytes_read": "" if stats is None else round(stats.kv_bytes_read / stats.decode_steps),
        "attended_share": "" if stats is None else f"{stats.attended_share:.4f}",
        "hit_rate": "" if stats is None or stats.hit_rate is None else f"{stats.hit_rate:.4f}",
        "covered_mass": "" if mass is None else f"{mass:.4f}",
        "device_bytes": memory.get("device", ""),
        "host_bytes": memory.get("host", ""),
    }


def write(path: Path, points: list[dict]) -> None:
    """The points of one race as csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(points)


def draw(points: Path, out: Path) -> None:
    """Left: what the page draws, ms per token. Right: the race itself, tokens against each lane's own clock."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    rows = pd.read_csv(points)
    first = rows.iloc[0]
    fig, (times, race) = plt.subplots(1, 2, figsize=(9.5, 3.4), width_ratios=(3, 2), layout="constrained")
    for lane, colour in (("dense", "#8a6d3b"), ("sparse", "#115e69")):
        mine = rows[rows.lane == lane]
        steps = mine[mine.token > 0]
        label = f"{mine['name'].iloc[0]}: {steps.ms.median():.2f} ms"
        times.plot(steps.token, steps.ms, color=colour, alpha=0.35, linewidth=0.8)
        times.plot(steps.token, steps.ms.rolling(15, 1).median(), color=colour, linewidth=1.8, label=label)
        race.plot(mine.own_s - mine.own_s.iloc[0], mine.token + 1, color=colour, linewidth=1.8)
    usual = rows[rows.token > 0].groupby("lane").ms.median().max()
    times.set_ylim(0, 2.5 * usual)
    times.set_xlabel("token")
    times.set_ylabel("ms per token")
    times.legend(fontsize=7.5, frameon=False, loc="upper right")
    race.set_xlabel("own seconds since the first token")
    race.set_ylabel("tokens")
    for axis in (times, race):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e5e7eb")
    fig.suptitle(f"{first.model}, {first.context:,} tokens of context, {first.device}", fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(fig)


def report(view: RaceView, loaded: Loaded, needle) -> int:
    """Print what the page shows."""
    failed = False
    for lane in view.lanes:
        if lane.ended is None or lane.ended.error:
            failed = True
            print(f"{lane.name or 'a lane'}: {lane.ended.error if lane.ended else 'did not end'}", file=sys.stderr)
            continue
        line = f"{lane.name}: first token {view.ttft_s(lane):.2f} s, then {lane.median_ms or 0:.2f} ms"
        if needle is not None:
            answer = loaded.language.tokenizer.decode(lane.ids)
            line += f", hidden fact {'found' if needle.answer in answer else 'not found'}"
        print(line)
        if lane.stats is not None:
            print(f"  {lane.stats}")
    if not failed and (verdict := view.verdict()):
        print(". ".join(verdict))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
