"""``hf-sparsekv calibrate-device``."""

from __future__ import annotations

import datetime
import gc
import time
from dataclasses import replace

import torch
from rich.table import Table

from hf_sparsekv_cli.commands import Precision
from hf_sparsekv_cli.values import parse_heads
from hf_sparsekv_config.tokens import TokenConfig

from ..ops._dispatch import has_triton
from ..policies import crossover
from ..tuning.fitting import METHODS, Timing, fit, fit_verifications, wrong_by
from . import loading
from .output import CommandError, messages, note, results

# Batch and context around the lengths at which GPUs of today change sides, short ones first.
GRID = ((4, 2048), (16, 2048), (1, 4096), (4, 4096), (16, 4096), (1, 8192), (4, 8192), (16, 8192))
GRID += ((1, 12288), (1, 16384), (4, 16384), (1, 32768))
SECONDS = 60  # no further shape is begun then
REPLAYS = 10
# Few enough blocks for the coarse level to be left out: such a step scores the labels of every token.
FEW = TokenConfig(level="two_level", num_blocks=16)


def calibrate_device(
    *,
    device: str,
    heads: str,
    dim: int,
    dtype: Precision,
    dry_run: bool,
) -> None:
    """Measure this GPU: up to which length dense attention is as quick as selecting; what verifying drafts takes."""
    q_heads, kv_heads = parse_heads(heads)
    where = loading.pick_device(device)
    if where.type != "cuda":
        raise CommandError("calibrate-device measures a GPU; `hf-sparsekv doctor` shows what there is")
    if not has_triton():
        raise CommandError("the kernels need Triton: pip install triton")
    with torch.cuda.device(where):
        here = torch.device("cuda", torch.cuda.current_device())
        _crossover(here, q_heads, kv_heads, dim, getattr(torch, dtype.value), dry_run)
    if dry_run:
        note("dry run: nothing is written")


def _origin() -> dict:
    """Versions and date to store with measured numbers."""
    from ..results import versions

    return {"versions": versions(), "date": datetime.date.today().isoformat()}


def _crossover(device: torch.device, q_heads: int, heads: int, dim: int, dtype: torch.dtype, dry_run: bool) -> None:
    """Measure, show and keep up to which length dense attention is as fast."""
    name, width = torch.cuda.get_device_name(), 2 * heads * dim * dtype.itemsize
    with messages.status("measuring") as status:
        timings = measure(device, q_heads, heads, dim, dtype, GRID, status.update)
    rules, verified = fit(timings, width), fit_verifications(timings, width)
    saved = None
    if rules and not dry_run:  # first: printing ends the command if its reader has gone
        about = {
            "heads": f"{q_heads}x{heads}",
            "dim": dim,
            "dtype": str(dtype).removeprefix("torch."),
            **_origin(),
            "timings_us": [{"batch": t.batch, "tokens": t.tokens, "dense": t.dense, **t.sparse} for t in timings],
        }
        saved = crossover.save(name, rules, about, verified)
    _show(name, timings, rules, width)
    for tokens, one in verified.items():
        results.print(
            f"verifying {tokens} tokens a row: {1e6 * one.fixed:.1f} us and {1e15 * one.per_byte:.1f} us a GB beyond a "
            "dense step, in each layer",
            markup=False,
        )
    if not rules:
        raise CommandError("no method gains on dense attention with the length: there is nothing to write")
    if saved is not None:
        results.print(str(saved), markup=False)


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
    from ..tuning.layer_step import BLOCKS, VERIFIED, Shape

    began, timings = time.perf_counter(), []
    for batch, context in grid:
        if time.perf_counter() - began > SECONDS:
            note(f"{SECONDS} s have passed: the rest is not measured")
            break
        progress(f"measuring {batch} x {context:,}")
        shape = Shape(batch, context, q_heads, heads, dim, dtype)
        coarse = shape.full_blocks > BLOCKS.coarse_blocks
        if not coarse:
            shape = replace(shape, config=FEW)
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
        verify = {tokens: times.pop(f"verify:{tokens}") for tokens in VERIFIED}
        tokens = shape.full_blocks * shape.config.block_size
        timings.append(Timing(batch, tokens, times.pop("dense"), times, verify))
    return timings


def _times(shape, device: torch.device, coarse: bool) -> dict[str, float]:
    """Microseconds of a step of this shape, by method."""
    from ..tuning.layer_step import Layer, set_count, steps
    from ..tuning.timing import captured

    sets = set_count(shape, device)
    layers = [Layer(shape, device, seed) for seed in range(sets)]
    side = torch.cuda.Stream() if device.type == "cuda" else None
    return {name: captured(run, sets, replays=REPLAYS).median for name, run in steps(layers, side, coarse).items()}


def _show(name: str, timings: list[Timing], rules: dict, width: int) -> None:
    """Print a table of times, with the faster side marked, and the rules."""
    results.print(f"{name}, microseconds of one layer's attention in a captured step", markup=False)
    table = Table(box=None, pad_edge=False)
    for title in ("rows", "tokens", "dense", *METHODS):
        table.add_column(title, justify="right")
    for t in sorted(timings, key=lambda t: (t.batch, t.tokens)):
        cells = []
        for method in METHODS:
            mark = ">" if t.sparse[method] < t.dense else " "
            cells.append(f"{mark} {t.sparse[method]:.1f}")
        table.add_row(str(t.batch), f"{t.tokens:,}", f"{t.dense:.1f}", *cells)
    results.print(table)
    results.print("(> faster than dense)", markup=False)
    for method in METHODS:
        rule = rules.get(method)
        if rule is None:
            results.print(f"{method}: gains nothing with the length, no rule", markup=False)
            continue
        ends = ", ".join(f"{rule.tokens(rows, width):,} ({rows})" for rows in (1, 2, 4, 8, 16))
        worst = max(wrong_by(rule, t, method, width) for t in timings)
        results.print(
            f"{method}: dense up to so many tokens a row (rows): {ends}; at most {worst:.0%} slower than the faster "
            f"side; Rule({rule.fixed_bytes:.4g}, {rule.row_tokens:.4g})",
            markup=False,
        )
