"""Scores, times and bytes of a system as rows, and the options that both environments share.

It decides which tokens are warm-up, which memory counts, and which mean.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .. import RESULTS
from .answering import INSIDE, System, decode, output
from .prompt_file import Prompt, fingerprint, read
from .row_file import RowFile, commit

WARM_UP, TIMED = 8, 64  # tokens that do not count, and that do


def interval(values: list[float]) -> tuple[float, float | None, float | None]:
    """Mean, and where it lies with 95 % (normal)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def scores_of(
    model, tokenizer, system: System, prompts: list[Prompt], question: str, log: Callable[[dict], None]
) -> list[float]:
    """Scores of the prompts of one task. ``log`` gets every answer."""
    found = []
    for prompt in prompts:
        text = output(model, tokenizer, system, prompt, question)
        found.append(prompt.scored(text))
        where = {"system": system.name, "question": question, "task": prompt.task, "index": prompt.index}
        log({**where, "score": found[-1], "output": text})
    return found


def quartiles(values: list[float]) -> tuple[float, float | None, float | None]:
    """Median and quartiles; a single value has none."""
    if len(values) < 2:
        return values[0], None, None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def cost_rows(model, system: System, prompts: list[Prompt]) -> list[tuple]:
    """Times, bytes and memory over ``prompts``, with the question inside; the first prompt is run once before."""
    on_gpu, first, between, sizes, peaks, held = model.device.type == "cuda", [], [], [], [], []
    for prompt in (prompts[0], *prompts):
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        steps = decode(model, system, prompt, INSIDE)
        answer = next(itertools.islice(steps, WARM_UP + TIMED, None))
        steps.close()
        first.append(answer.first_s)
        between.append(answer.between_ms[WARM_UP:])
        sizes.append(system.sizes(answer.cache))
        if on_gpu:
            held.append(torch.cuda.memory_allocated() - before)
            peaks.append(torch.cuda.max_memory_allocated())
        del answer, steps
    rows = [
        ("ttft_s", *quartiles(first[1:]), "s"),
        ("tpot_ms", *quartiles([ms for each in between[1:] for ms in each]), "ms"),
        ("kv_gb", *quartiles([size.device / 1e9 for size in sizes[1:]]), "GB"),
        ("host_gb", *quartiles([size.host / 1e9 for size in sizes[1:]]), "GB"),
        ("read_mb", *quartiles([size.read / 1e6 for size in sizes[1:]]), "MB"),
    ]
    if on_gpu:
        rows.append(("held_gb", *quartiles([size / 1e9 for size in held[1:]]), "GB"))
        rows.append(("peak_gb", *quartiles([size / 1e9 for size in peaks[1:]]), "GB"))
    return rows


def measure(model, tokenizer, system: System, args: argparse.Namespace, prompts: list[Prompt], rows: RowFile) -> None:
    """Costs, then scores with the question inside and after; rows are written after each task.

    The report averages tasks, so that several processes may share those of a system.
    """

    def log(line: dict) -> None:
        if args.answers is not None:
            with args.answers.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    if args.timed:
        rows.append(system.name, cost_rows(model, system, prompts[: args.timed]))
    if args.no_scores:
        return
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.task == task]
        for question in (INSIDE, system.after):
            found = scores_of(model, tokenizer, system, mine, question, log)
            rows.append(system.name, [(f"score:{question}:{task}", *interval(found), "share")])


def parser(doc: str, systems: Iterable[str]) -> argparse.ArgumentParser:
    """Options of both runs."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--model", required=True, help="a directory")
    add("--prompts", type=Path, required=True, help="what benchmarks.peers.prompts has written")
    add("--systems", nargs="+", default=list(systems), metavar="NAME", help=f"default: {' '.join(systems)}")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="of the file; default: all")
    add("--each", type=int, help="so many prompts of each task; default: all")
    add("--no-scores", action="store_true", help="costs only")
    add("--timed", type=int, default=3, help="prompts whose costs are measured; 0: scores only")
    add("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--case", help="the model's name in the rows; default: that of its directory")
    add("--csv", type=Path, default=RESULTS / "peers.csv", help="rows are appended to it")
    add("--no-csv", action="store_true", help="print only")
    add("--answers", type=Path, help="append every answer to this file of JSON lines")
    add("--commit", help="of the rows; default: the checkout's")
    return made


def run(args: argparse.Namespace, load: Callable, make: Callable, versions: str) -> int:
    """Measure each system; the exit status. One that fails is told, and the others go on.

    Args:
        load: ``args`` to ``(model, tokenizer)``.
        make: ``(name, model)`` to a context with a :class:`System`.
    """
    try:
        prompts, mark = read(args.prompts, args.tasks, args.each), fingerprint(args.prompts)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if not Path(args.model, "config.json").is_file():
        raise SystemExit(f"error: {args.model} is no directory of a model: there is no config.json in it")
    model, tokenizer = load(args)
    case = args.case or Path(args.model).resolve().name
    path = None if args.no_csv else args.csv
    rows = RowFile(path, case, prompts[0].length, f"{versions};prompts={mark}", args.commit or commit())
    failed = []
    for name in args.systems:
        try:
            with make(name, model) as system:
                measure(model, tokenizer, system, args, prompts, rows)
        except Exception as error:  # the others may still run
            traceback.print_exc()
            text = (str(error).splitlines() or [type(error).__name__])[0]
            failed.append(f"{name}: {text}")
            print(f"FAILED: {failed[-1]}", flush=True)
    for text in failed:
        print(f"FAILED: {text}")
    return 1 if failed else 0
