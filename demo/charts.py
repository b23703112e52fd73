"""Pictures for the page, as HTML that needs no script: it scales with the window, its letters do not."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from hf_sparsekv import BlockMap

from .view import Asked, LaneView, RaceView, size

NAMES = ("dense", "sparse")  # CSS classes of the two lanes
_POINTS = 400  # of a line at most
_COLUMNS = 512  # of the heat map at most


def esc(text: str) -> str:
    """For HTML."""
    return html.escape(text, quote=True)


# ---------------------------------------------------------------------- lines


def line_plot(race: RaceView) -> str:
    """Milliseconds per token of both lanes; the running median as a thick line."""
    lanes = [lane.step_ms for lane in race.lanes]
    longest = max(map(len, lanes))
    if not longest:
        return '<div class="plot empty">Time per token, what was read and which blocks: drawn here while it runs.</div>'
    top, clipped = _top(lanes)
    width = max(16, longest)
    parts = []
    for name, values in zip(NAMES, lanes):
        if values:
            parts.append(_line(values, width, top, f"{name} each"))
            parts.append(_line(_running_median(values), width, top, f"{name} median"))
    ticks = axis_ticks(top)
    rules = "".join(
        f'<line class="rule" x1="0" x2="100" y1="{100 - 100 * t / top:.2f}" y2="{100 - 100 * t / top:.2f}"/>'
        for t in ticks
    )
    y_labels = "".join(f'<span style="bottom:{100 * t / top:.2f}%">{t:g}</span>' for t in ticks)
    x_labels = "".join(
        f'<span style="left:{100 * t / width:.2f}%">{t:g}</span>' for t in axis_ticks(width, whole=True) if t
    )
    legend = "".join(f'<span class="{name}">{esc(_label(lane))}</span>' for name, lane in zip(NAMES, race.lanes))
    note = f"; {clipped} slower ones lie above the picture" if clipped else ""
    return (
        f'<div class="plot" data-dense="{len(lanes[0])}" data-sparse="{len(lanes[1])}">'
        f'<div class="legend"><b>ms per token</b>{legend}</div>'
        f'<div class="frame"><div class="y">{y_labels}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="milliseconds per token">'
        f"{rules}{''.join(parts)}</svg></div>"
        f'<div class="x">{x_labels}</div>'
        f'<div class="caption">token; thin: each one, thick: running median{note}</div></div>'
    )


def _label(lane: LaneView) -> str:
    median = lane.median_ms
    short = lane.name.split(",")[0] or "..."
    return short if median is None else f"{short} {median:.1f} ms"


def _top(lanes: list[list[float]]) -> tuple[float, int]:
    """Upper end of the axis: the first steps, which compile or capture, must not flatten all others."""
    values = sorted(v for lane in lanes for v in lane)
    usual = max(values[len(values) // 2], *(sorted(lane)[len(lane) // 2] for lane in lanes if lane))
    top = min(values[-1], 2.5 * usual) * 1.08
    return top, sum(v > top for v in values)


def _line(values: list[float], width: int, top: float, kind: str) -> str:
    stride = max(1, len(values) // _POINTS)
    points = " ".join(
        f"{100 * (i + 1) / width:.2f},{100 - 100 * min(values[i], 2 * top) / top:.2f}"
        for i in range(0, len(values), stride)
    )
    return f'<polyline class="{kind}" points="{points}"/>'


def _running_median(values: list[float], window: int = 15) -> list[float]:
    return [sorted(values[max(0, i - window + 1) : i + 1])[(min(i + 1, window) - 1) // 2] for i in range(len(values))]


def axis_ticks(top: float, whole: bool = False) -> list[float]:
    step = 10 ** math.floor(math.log10(top / 3))
    step *= next(m for m in (1, 2, 5, 10) if m * step * 5.5 >= top)
    step = max(1, step) if whole else step
    return [round(i * step, 9) for i in range(int(top / step) + 1)]


# ---------------------------------------------------------------------- blocks


def heat_map(blocks: BlockMap | None) -> str:
    """Which blocks a step attended to: layers from top to bottom, the context from left to right."""
    if blocks is None or not blocks.share.numel():
        return ""
    if blocks.share.isnan().all():
        return '<div class="heat empty">This cache does not say which blocks it attends to.</div>'
    share = blocks.share.nan_to_num(0.0).numpy()
    if share.shape[1] > _COLUMNS:
        edges = np.linspace(0, share.shape[1], _COLUMNS + 1).astype(int)[:-1]
        share = np.maximum.reduceat(share, edges, axis=1)
    low, high = np.array([238.0, 240.0, 242.0]), np.array([17.0, 94.0, 105.0])
    pixels = low + (high - low) * np.sqrt(share)[..., None]
    held = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(held, "PNG")
    data = base64.b64encode(held.getvalue()).decode()
    last = blocks.share.shape[1] * blocks.block_size
    return (
        '<div class="heat"><div class="legend"><b>blocks attended to</b><span>of one step; darker: more KV heads'
        f"</span></div><div class='frame'><div class='y'><span>layer {blocks.layers[0]}</span>"
        f"<span>layer {blocks.layers[-1]}</span></div>"
        f'<img alt="layers by position" src="data:image/png;base64,{data}"/></div>'
        '<div class="caption between"><span>token 0</span><span>position in the context</span>'
        f"<span>{last:,}</span></div></div>"
    )


# ---------------------------------------------------------------------- numbers


def numbers(race: RaceView, machine: dict[str, str]) -> str:
    """The table below the plot; nothing before the first token."""
    dense, sparse = race.lanes
    if not dense.seconds and not sparse.seconds:
        return ""
    rows = [
        ("time per token, median", _ms(dense.median_ms), _ms(sparse.median_ms)),
        ("tokens per second, by the median", _per_second(dense, race.rows), _per_second(sparse, race.rows)),
        ("time to first token", _seconds(race.ttft_s(dense)), _seconds(race.ttft_s(sparse))),
        ("KV read per token", *_reads(dense, sparse)),
        ("share of the context attended to", "100 %", _percent(sparse.stats, "attended_share")),
        ("hit rate of the device pool", "&ndash;", _percent(sparse.stats, "hit_rate")),
        ("covered attention mass", "100 %", _mass(sparse)),
        ("KV cache on the device", _cache(dense, "device"), _cache(sparse, "device")),
        ("KV cache in host memory", _cache(dense, "host"), _cache(sparse, "host")),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{a}</td><td>{b}</td></tr>" for name, a, b in rows)
    name = esc(sparse.name.split(",")[0] or "sparse")
    whole = " &middot; ".join(f"{esc(name)} {esc(value)}" for name, value in machine.items())
    return (
        '<div class="numbers"><table><thead><tr><th></th><td class="dense">full attention</td>'
        f'<td class="sparse">{name}</td></tr></thead><tbody>{body}</tbody></table>'
        f'<div class="caption">{whole}</div></div>'
    )


def questions(asked: Sequence[Asked]) -> str:
    """The table below the chat: what each question took; nothing before the first."""
    if not asked:
        return ""
    rows = "".join(
        f"<tr><th>{number}. {esc(each.question)}</th><td>{_seconds(each.first_s)}</td><td>{_read(each)}</td>"
        f"<td>{_ms(each.median_ms)}</td>"
        f"<td>{'&ndash;' if each.share is None else f'{100 * each.share:.0f} %'}</td></tr>"
        for number, each in enumerate(asked, 1)
    )
    return (
        '<div class="numbers"><table><thead><tr><td class="left">question</td><td>first token after</td>'
        "<td>the document</td><td>then a token takes</td><td>context read</td></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _read(asked: Asked) -> str:
    if asked.first_s is None:
        return "&ndash;"
    return "not read again" if asked.read_s is None else f"read in {asked.read_s:.1f} s"


def _ms(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.1f} ms"


def _seconds(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.2f} s"


def _per_second(lane: LaneView, rows: int) -> str:
    # Not by the sum: a lane that captures its steps would pay for that in a race of 100 tokens.
    return "&ndash;" if not lane.median_ms else f"{1e3 * rows / lane.median_ms:.1f}"


def _reads(dense: LaneView, sparse: LaneView) -> tuple[str, str]:
    """Reads of both panes. Full attention reads as much as its cache holds, which the other pane shows."""
    stats = sparse.stats or dense.stats
    if stats is None or not stats.decode_steps:
        return "&ndash;", "&ndash;"
    read = (stats.kv_bytes_read + stats.index_bytes_read) / stats.decode_steps
    return size(stats.kv_bytes_dense / stats.decode_steps), "&ndash;" if sparse.stats is None else size(read)


def _percent(stats, name: str) -> str:
    value = None if stats is None else getattr(stats, name)
    return "&ndash;" if value is None else f"{100 * value:.1f} %"


def _mass(lane: LaneView) -> str:
    stats = lane.stats
    if stats is None:
        return "&ndash;"
    if stats.covered_mass is not None:
        return f"{100 * stats.covered_mass:.1f} % (measured)"
    return f"{100 * stats.estimated_mass:.1f} % (estimate)" if stats.estimated_mass is not None else "not measured"


def _cache(lane: LaneView, where: str) -> str:
    return "&ndash;" if lane.memory is None else size(lane.memory[where])
