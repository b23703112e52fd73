"""Rows of a batch that come and go: steps of rows of any lengths, joins and leaves.

    python -m benchmarks rows

Random weights of a known shape and random keys, as in ``step``. Each batch of rows of different lengths stands beside
one of as many rows of their mean length, which chooses as many tokens.

Metrics: step_ms the captured step alone, steps_ms steps in a row as ``RowBatch.step`` makes them, host_ms of such a
call until it returns, beside an idle GPU, without the launch of the graph; join_ms of a prompt that has been read and
leave_ms, both until the GPU has done them; one_active_ms steps in a row while all rows but the first are held; captures
of all steps. With --offload give_ms of a row that gets more room, or less, and working_sets_ms, likewise;
working_sets_host_ms of the latter until the call returns.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser

import torch

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig, optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.results import device_name, versions

from .arguments import new_parser, rows_file
from .decoding import free, in_a_row_ms, replay_ms
from .filling import RandomSource, fill_layers
from .report import Report
from .shapes import case_name, known_config, random_model

K = 1024
LENGTHS = {
    "ragged": [4 * K, 4 * K, 8 * K, 16 * K, 32 * K, 48 * K, 64 * K, 128 * K],
    "one-long": [128 * K] + 31 * [4 * K],
}
STEPS, TRIES = 80, 6


class RowSteps:
    """Steps of all rows, one after the other."""

    def __init__(self, model, rows) -> None:
        self.model, self.rows = model, rows
        self.tokens = torch.zeros(rows.max_rows, dtype=torch.long, device=model.device)

    def __call__(self):
        return self.rows.step(self.model, self.tokens)


def prefilled(model, rows, length: int, seed: int = 0):
    """A prompt of random keys and values, as if it had been read."""
    cache = rows.cache.beside()
    cache.bind(model.config)
    fill_layers(RandomSource(model, 1, length, seed), cache)
    rows.adopt(cache)
    return cache


def seconds(run) -> float:
    """Until the GPU has done it, too."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def host_ms(model, step) -> float:
    """Of a call until it returns, without the launch of its graph."""
    graph = list(runner_of(model).graphs[step.rows.cache].values())[-1].graph
    took = {True: [], False: []}
    plain = type(graph).replay
    launches = took[True]

    def replay() -> None:
        begin = time.perf_counter()
        plain(graph)
        launches.append(time.perf_counter() - begin)

    captured = list(runner_of(model).graphs[step.rows.cache].values())[-1]

    class Timed:
        def replay(self) -> None:
            replay()

    captured.graph = Timed()
    try:
        for _ in range(STEPS // 2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            took[False].append(time.perf_counter() - begin)
    finally:
        captured.graph = graph
    torch.cuda.synchronize()
    return 1e3 * (statistics.median(took[False][5:]) - statistics.median(took[True][5:]))


def measure_room(report: Report, rows, row: int) -> None:
    """Half the room, and all of it again; and how much the rows need."""
    room, given, launched = rows.room(row), [], []
    for _ in range(TRIES):
        given += [1e3 * seconds(lambda tokens=tokens: rows.give(row, tokens)) for tokens in (room // 2, room)]
    counted = [1e3 * seconds(lambda: rows.working_sets().read()) for _ in range(TRIES)]
    for _ in range(TRIES):
        launched.append(1e3 * timed(rows.working_sets))
        torch.cuda.synchronize()
    report.add("give_ms", given)
    report.add("working_sets_ms", counted)
    report.add("working_sets_host_ms", launched)


def timed(run) -> float:
    """Seconds until it returns."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(model, report: Report, lengths: list[int], offload: bool) -> None:
    """All figures of one batch."""
    config = TokenConfig(dense_below=0)
    cache = OffloadedSparseCache(config, OffloadConfig() if offload else None)
    rows = cache.rows(len(lengths), max(lengths) + 2 * K)
    joins, leaves = [], []
    for seed, length in enumerate(lengths):
        one = prefilled(model, rows, length, seed)
        joins.append(1e3 * seconds(lambda one=one: rows.join(one)))
    step = RowSteps(model, rows)
    before = runner_of(model).captures
    steps = in_a_row_ms(step, STEPS)
    host = host_ms(model, step)
    short = min(range(len(lengths)), key=lambda row: lengths[row])
    joins = []  # the first one makes the batch's memory
    for seed in range(TRIES):
        leaves.append(1e3 * seconds(lambda: rows.leave(short)))
        one = prefilled(model, rows, lengths[short], seed)
        joins.append(1e3 * seconds(lambda one=one: rows.join(one)))
    in_a_row_ms(step, 4)
    if rows.slots:
        measure_room(report, rows, short)
    report.add("captures", runner_of(model).captures - before, "count")
    report.add("steps_ms", steps)
    report.add("host_ms", host)
    report.add("join_ms", joins)
    report.add("leave_ms", leaves)
    for row in rows.rows[1:]:
        rows.hold(row)
    report.add("one_active_ms", in_a_row_ms(step, STEPS))
    for row in rows.rows[1:]:
        rows.resume(row)
    in_a_row_ms(step, 4)
    report.add("step_ms", replay_ms(model, cache))


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("rows", __doc__, "model", "dtype")
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--batches", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--offload", action="store_true", help="full blocks in host memory")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed."""
    args = arguments().parse_args(argv)
    if not torch.cuda.is_available():
        print("the rows benchmark needs a CUDA device")
        return 1
    print(device_name(), versions())
    model = random_model(known_config(args.model), getattr(torch, args.dtype), torch.device("cuda"))
    model.set_attn_implementation("sparsekv")
    optimize(model)
    with Report("rows", case_name(args.model), rows_file(args), 2 * len(args.batches)) as report:
        for name in args.batches:
            lengths = LENGTHS[name]
            mean = sum(lengths) // len(lengths)
            for label, these in ((name, lengths), (f"{name}:uniform", [mean] * len(lengths))):
                with report.measuring(len(lengths), mean, label + "+offload" * args.offload, model):
                    measure(model, report, these, args.offload)
                free()
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
