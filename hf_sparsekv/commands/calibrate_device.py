"""``hf-sparsekv calibrate-device``."""

from __future__ import annotations

import datetime
import gc
import re
import time
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.table import Table

from .. import crossover
from ..config import TwoLevelConfig
from ..crossover import Timing
from ..ops._dispatch import has_triton
from . import loading
from .output import CommandError, messages, note, results

# Batch and context around the lengths at which GPUs of today change sides, short ones first.
GRID = ((4, 2048), (16, 2048), (1, 4096), (4, 4096), (16, 4096), (1, 8192), (4, 8192), (16, 8192))
GRID += ((1, 12288), (1, 16384), (4, 16384), (1, 32768))
SECONDS = 60  # no further shape is begun then
REPLAYS = 10
BLOCKS = TwoLevelConfig(num_blocks=128)
# Few enough blocks for the coarse level to be left out: such a step scores the labels of every token.
FEW = TwoLevelConfig(num_blocks=16)


class Precision(str, Enum):
    """What ``--dtype`` takes."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def calibrate_device(
    device: Annotated[str, typer.Option(help="The GPU to measure.")] = "auto",
    heads: Annotated[str, typer.Option(help="Query and KV heads of a layer.", metavar="QUERYxKV")] = "32x8",
    dim: Annotated[int, typer.Option(min=16, help="Head dimension.")] = 128,
    dtype: Annotated[Precision, typer.Option(help="Precision of keys and values.")] = Precision.bfloat16,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
) -> None:
    """Measure up to which length dense attention is as quick as selecting on this GPU (dense_below="auto")."""
    match = re.fullmatch(r"(\d+)x(\d+)", heads)
    q_heads, kv_heads = (int(n) for n in match.groups()) if match else (0, 0)
    if not kv_heads or q_heads % kv_heads or not q_heads:
        raise typer.BadParameter(f"--heads {heads}: write for example 32x8, query heads a multiple of KV heads")
    where = loading.pick_device(device)
    if where.type != "cuda":
        raise CommandError("calibrate-device measures a GPU; `hf-sparsekv doctor` shows what there is")
    if not has_triton():
        raise CommandError("the kernels need Triton: pip install 'hf-sparsekv[gpu]'")
    from ..benchmark.results import versions

    kind = getattr(torch, dtype.value)
    with torch.cuda.device(where), messages.status("measuring") as status:
        name = torch.cuda.get_device_name()
        here = torch.device("cuda", torch.cuda.current_device())
        timings = measure(here, q_heads, kv_heads, dim, kind, GRID, status.update)
    width = 2 * kv_heads * dim * kind.itemsize
    rules = crossover.fit(timings, width)
    _show(name, timings, rules, width)
    if not rules:
        raise CommandError("no method gains on dense attention with the length: there is nothing to write")
    if dry_run:
        note("dry run: nothing is written")
        return
    about = {
        "heads": heads,
        "dim": dim,
        "dtype": dtype.value,
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "timings_us": [{"batch": t.batch, "tokens": t.tokens, "dense": t.dense, **t.sparse} for t in timings],
    }
    results.print(str(crossover.save(name, rules, about)), markup=False)


def measure(
    device: torch.device,
    q_heads: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    grid: tuple[tuple[int, int], ...],
    progress=lambda text: None,
) -> list[Timing]:
    """Captured steps of one layer, dense and with each method; shapes that do not fit the GPU are left out."""
    from ..benchmark.operator_inputs import Shape

    began, timings = time.perf_counter(), []
    for batch, context in grid:
        if time.perf_counter() - began > SECONDS:
            note(f"{SECONDS} s have passed: the rest is not measured")
            break
        progress(f"measuring {batch} x {context:,}")
        shape = Shape(batch, context, q_heads, heads, dim, dtype, BLOCKS)
        coarse = shape.sealed > BLOCKS.coarse_blocks
        if not coarse:
            shape = Shape(batch, context, q_heads, heads, dim, dtype, FEW)
        try:
            times = _times(shape, device, coarse)
        except torch.OutOfMemoryError:
            note(f"{batch} x {context:,} does not fit the GPU")
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if not coarse:
            times["two_level"] = times["two_level:lag"] = times["token_only"]
        timings.append(Timing(batch, shape.sealed * shape.config.block_size, times.pop("dense"), times))
    return timings


def _times(shape, device: torch.device, coarse: bool) -> dict[str, float]:
    """Microseconds of a step of this shape, by method."""
    from ..benchmark.operator import set_count
    from ..benchmark.operator_inputs import Layer
    from ..benchmark.operator_timing import captured

    sets = set_count(shape, device)
    layers = [Layer(shape, device, seed) for seed in range(sets)]
    return {name: captured(run, sets, replays=REPLAYS).median for name, run in _steps(layers, coarse).items()}


def _steps(layers: list, coarse: bool) -> dict:
    """What is captured, by method; ``run(i)`` is a step over set ``i``."""
    first = layers[0]
    every = first.slots.shape[1] * first.shape.config.block_size
    scores = torch.empty(*first.blocks.shape[:2], every, dtype=torch.float32, device=first.q.device)
    steps = {
        "dense": lambda i: layers[i].dense_step(),
        "block_only": lambda i: layers[i].block_step(),
        "token_only": lambda i: layers[i].token_step(scores),
    }
    if coarse:
        side = torch.cuda.Stream() if first.q.is_cuda else None
        steps["two_level"] = lambda i: layers[i].step()
        steps["two_level:lag"] = lambda i: layers[i].lagged_step(side)
    return steps


def _show(name: str, timings: list[Timing], rules: dict, width: int) -> None:
    """A table of times, the quicker side marked, and the rules in words."""
    results.print(f"{name}, microseconds of one layer's attention in a captured step", markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("rows", "tokens", "dense", *crossover.METHODS):
        table.add_column(title, justify="right")
    for t in sorted(timings, key=lambda t: (t.batch, t.tokens)):
        cells = []
        for method in crossover.METHODS:
            mark = ">" if t.sparse[method] < t.dense else " "
            cells.append(f"{mark} {t.sparse[method]:.1f}")
        table.add_row(str(t.batch), f"{t.tokens:,}", f"{t.dense:.1f}", *cells)
    results.print(table)
    results.print("(> quicker than dense)", markup=False)
    for method in crossover.METHODS:
        rule = rules.get(method)
        if rule is None:
            results.print(f"{method}: gains nothing with the length, no rule", markup=False)
            continue
        ends = ", ".join(f"{rule.tokens(rows, width):,} ({rows})" for rows in (1, 2, 4, 8, 16))
        worst = max(crossover.wrong_by(rule, t, method, width) for t in timings)
        results.print(
            f"{method}: dense up to so many tokens a row (rows): {ends}; at most {worst:.0%} slower than the quicker "
            f"side; Rule({rule.fixed_bytes:.4g}, {rule.row_tokens:.4g})",
            markup=False,
        )
