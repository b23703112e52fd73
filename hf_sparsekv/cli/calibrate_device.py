"""``hf-sparsekv calibrate-device``."""

from __future__ import annotations

import datetime
import gc
import re
import time
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import torch
import typer
from rich.table import Table

from ..config import TwoLevelConfig
from ..ops._dispatch import has_triton
from ..tuning import crossover, transfer
from ..tuning.crossover import Timing
from ..tuning.link import link_name
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
    with_transfer: Annotated[
        bool, typer.Option("--transfer/--no-transfer", help="Measure block copies over the link.")
    ] = True,
    with_crossover: Annotated[
        bool, typer.Option("--crossover/--no-crossover", help="Measure when dense attention is as quick.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
) -> None:
    """Measure this GPU: how its link is best used, and up to which length dense attention is as quick as selecting."""
    match = re.fullmatch(r"(\d+)x(\d+)", heads)
    q_heads, kv_heads = (int(n) for n in match.groups()) if match else (0, 0)
    if not kv_heads or q_heads % kv_heads or not q_heads:
        raise typer.BadParameter(f"--heads {heads}: write for example 32x8, query heads a multiple of KV heads")
    if not (with_transfer or with_crossover):
        raise typer.BadParameter("--no-transfer --no-crossover leave nothing to measure")
    where = loading.pick_device(device)
    if where.type != "cuda":
        raise CommandError("calibrate-device measures a GPU; `hf-sparsekv doctor` shows what there is")
    if not has_triton():
        raise CommandError("the kernels need Triton: pip install 'hf-sparsekv[gpu]'")
    with torch.cuda.device(where):
        here = torch.device("cuda", torch.cuda.current_device())
        if with_transfer:  # first, and written at once: it takes seconds
            _transfer(here, dry_run)
        if with_crossover:
            _crossover(here, q_heads, kv_heads, dim, getattr(torch, dtype.value), dry_run)
    if dry_run:
        note("dry run: nothing is written")


def _origin() -> dict:
    """What is kept beside measured numbers."""
    from ..results import versions

    return {"versions": versions(), "date": datetime.date.today().isoformat()}


def _transfer(device: torch.device, dry_run: bool) -> None:
    """Measure, show and keep how blocks are copied."""
    name, link = torch.cuda.get_device_name(), link_name(device)
    with messages.status("measuring") as status:
        try:
            found = measure_transfer(device, status.update)
        except torch.OutOfMemoryError:
            raise CommandError("block copies need 0.7 GB of GPU memory to be measured: --no-transfer") from None
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    chosen = transfer.choose(found.points)
    _show_transfer(f"{name}, {link}", found, chosen)
    if dry_run:
        return
    about = {
        **_origin(),
        "limit_gbps": found.limit,
        "points": [asdict(point) for point in found.points],
    }
    results.print(str(transfer.save(name, link, chosen, about)), markup=False)


def measure_transfer(device: torch.device, progress=lambda text: None):
    """Rates of block copies, and what they cost a step; see :mod:`hf_sparsekv.tuning.block_copies`."""
    from ..tuning.block_copies import measure  # needs Triton

    return measure(device, progress)


def _crossover(device: torch.device, q_heads: int, heads: int, dim: int, dtype: torch.dtype, dry_run: bool) -> None:
    """Measure, show and keep up to which length dense attention is as quick."""
    name, width = torch.cuda.get_device_name(), 2 * heads * dim * dtype.itemsize
    with messages.status("measuring") as status:
        timings = measure(device, q_heads, heads, dim, dtype, GRID, status.update)
    rules = crossover.fit(timings, width)
    _show(name, timings, rules, width)
    if not rules:
        raise CommandError("no method gains on dense attention with the length: there is nothing to write")
    if dry_run:
        return
    about = {
        "heads": f"{q_heads}x{heads}",
        "dim": dim,
        "dtype": str(dtype).removeprefix("torch."),
        **_origin(),
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
    from ..tuning.layer_step import Shape

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
    from ..tuning.layer_step import Layer, set_count, steps
    from ..tuning.timing import captured

    sets = set_count(shape, device)
    layers = [Layer(shape, device, seed) for seed in range(sets)]
    side = torch.cuda.Stream() if device.type == "cuda" else None
    return {name: captured(run, sets, replays=REPLAYS).median for name, run in steps(layers, side, coarse).items()}


def _show_transfer(where: str, found, chosen: transfer.Settings) -> None:
    """A table of rates and slow-downs, and what was chosen, in words."""
    results.print(f"{where}: scattered blocks from pinned memory, and a chain of kernels beside them", markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("blocks", "programs", "warps", "GB/s", "slow-down", ""):
        table.add_column(title, justify="right")
    for p in found.points:
        programs = chosen.programs_small if p.small else chosen.programs
        mark = "chosen" if (p.programs, p.warps) == (programs, chosen.warps) else ""
        slowdown = "" if p.slowdown is None else f"{p.slowdown:.1%}"
        table.add_row("4 KB" if p.small else "32 KB", str(p.programs), str(p.warps), f"{p.gbps:.1f}", slowdown, mark)
    results.print(table)
    results.print(
        f"one large copy: {found.limit:.1f} GB/s\nchosen: {chosen}",
        markup=False,
    )


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
