"""Recorded races: a file for each, made by ``python -m demo.record --save``, which the page plays without a model.

A file is JSON with the fields of :class:`Recording`. Dropping one into ``demo/recorded/`` adds its button to the page.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import statistics
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hf_sparsekv import BlockMap, CacheStats, StepReport
from hf_sparsekv.policies.measured import WalkStats

from .race import Ended, Stepped
from .view import LaneView, RaceView

FOLDER = Path(__file__).resolve().parent / "recorded"
FORMAT = 1
_MAPS = 8  # pictures of attended blocks in a file
_COLUMNS = 512  # of such a picture
_LOOKS = 60  # statistics in a file
_SECONDS = 30  # a longer race is played faster
_LINE = 34  # characters of a button


class RecordingError(ValueError):
    """A file is no recording; the message says why."""


@dataclass(frozen=True)
class RecordedLane:
    """One lane.

    Args:
        name: in words what it is.
        ms: of each token, the first one included.
        pieces: the text that each token added; empty for random weights.
        answer_tokens: tokens of the answer; what follows was decoded for the clocks.
        looks: ``(token, statistics, bytes of memory)``, where they were looked at.
        maps: ``(token, blocks attended to)``.
        totals: statistics of the whole answer; None for full attention of transformers' own.
    """

    name: str
    ms: tuple[float, ...]
    pieces: tuple[str, ...] = ()
    answer_tokens: int = 0
    looks: tuple[tuple[int, CacheStats | None, dict[str, int] | None], ...] = ()
    maps: tuple[tuple[int, BlockMap], ...] = ()
    totals: CacheStats | None = None


@dataclass(frozen=True)
class Recording:
    """A race that was run somewhere else.

    Args:
        title: of its button.
        model, context, rows: name, tokens of context, sequences that decoded together.
        device, versions, commit, date: where, with what and when it was recorded.
        command: that records it again; ``note``: what else a reader must know of it.
        read_s: seconds that reading the document took, once.
        question, wanted: as :class:`demo.view.RaceView`.
        lanes: full attention, then the sparse cache.
    """

    title: str
    model: str
    context: int
    rows: int
    on_gpu: bool
    device: str
    versions: str
    commit: str
    date: str
    command: str
    read_s: float
    question: str
    wanted: str | None
    lanes: tuple[RecordedLane, RecordedLane]
    note: str = ""

    @property
    def mark(self) -> str:
        """A mark that distinguishes it from a race that runs here."""
        many = f" x {self.rows} sequences" if self.rows > 1 else ""
        return (
            f"{self.model}, {self.context:,} tokens{many}, on {self.device}, {self.date}, commit {self.commit}, "
            f"{self.versions.replace(';', ', ').replace('=', ' ')}{self.note and '; ' + self.note}"
        )

    @property
    def headline(self) -> str:
        """How the race ends, in the words that fit a button's line."""
        verdict = self.view(float("inf")).verdict()
        if not verdict:
            return self.title
        said = re.sub(" of the (context|GPU)|hidden ", "", verdict[0])
        while len(said) > _LINE and ", " in said:
            said = said.rpartition(", ")[0]
        return said

    @property
    def gain(self) -> float:
        """How many times as long a token of full attention takes."""
        dense, sparse = (statistics.median(lane.ms[1:] or lane.ms) for lane in self.lanes)
        return dense / sparse

    @property
    def seconds(self) -> float:
        """Seconds that the slower lane took to decode."""
        return max(sum(lane.ms[1:]) for lane in self.lanes) / 1e3

    @property
    def speed(self) -> float:
        """How many times as fast as it was it is played, so that it ends in time."""
        return max(1.0, self.seconds / _SECONDS)

    def view(self, at: float) -> RaceView:
        """The page's view ``at`` seconds after the first tokens: each lane by its own clock."""
        shown = RaceView(
            read_s=self.read_s, question=self.question, wanted=self.wanted, rows=self.rows, on_gpu=self.on_gpu,
            recorded=self.mark,
        )  # fmt: skip
        for number, (lane, recorded) in enumerate(zip(shown.lanes, self.lanes)):
            lane.name = recorded.name
            for event in _events(number, recorded, at):
                shown.add(event)
            self._say(lane, recorded)
        return shown

    @staticmethod
    def _say(lane: LaneView, recorded: RecordedLane) -> None:
        said, end = recorded.pieces[: len(lane.ids)], recorded.answer_tokens
        lane.answer, lane.after = "".join(said[:end]).strip(), "".join(said[end:])


def _events(number: int, lane: RecordedLane, at: float) -> Iterator[Stepped | Ended]:
    """Events in a lane up to ``at`` seconds after its first token."""
    looks = {token: (stats, memory) for token, stats, memory in lane.looks}
    maps, clock = dict(lane.maps), 0.0
    for token, ms in enumerate(lane.ms):
        clock += ms / 1e3 if token else 0.0
        if clock > at:
            return
        stats, memory = looks.get(token, (None, None))
        yield Stepped(number, StepReport(token, (0,), ms / 1e3, stats, maps.get(token)), memory)
    yield Ended(number, lane.totals)


# ---------------------------------------------------------------------- files


def write(path: Path, recording: Recording) -> None:
    """One recording as a file."""
    fields = dataclasses.asdict(dataclasses.replace(recording, lanes=()))
    fields["lanes"] = [_lane_out(lane) for lane in recording.lanes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, **fields}, ensure_ascii=False, separators=(",", ":")) + "\n")


def read(path: Path) -> Recording:
    """A recording from a file of :func:`write`.

    Raises:
        RecordingError: the file is damaged, or of another format.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if (found := fields.pop("format", None)) != FORMAT:
            raise RecordingError(f"{path.name} has format {found}, not {FORMAT}: record it again")
        lanes = tuple(_lane_in(lane) for lane in fields.pop("lanes"))
        if len(lanes) != 2 or not all(lane.ms for lane in lanes):
            raise RecordingError(f"{path.name} does not have two lanes with times")
        return Recording(lanes=lanes, **fields)
    except RecordingError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecordingError(f"{path.name} cannot be played ({reason}): record it again, or remove it") from error


def found(folder: Path = FOLDER) -> list[Recording]:
    """The recordings of a folder by their gain; the best one with text is the second at the latest.

    Says on standard error which cannot be played.
    """
    recordings = []
    for path in sorted(folder.glob("*.json")):
        try:
            recordings.append(read(path))
        except RecordingError as error:
            print(error, file=sys.stderr)
    recordings.sort(key=lambda each: -each.gain)
    text = next((each for each in recordings if each.question), None)
    return sorted(recordings, key=lambda each: (each is not recordings[0], each is not text))


def _lane_out(lane: RecordedLane) -> dict:
    return {
        "name": lane.name,
        "ms": [round(ms, 3) for ms in lane.ms],
        "pieces": lane.pieces,
        "answer_tokens": lane.answer_tokens,
        "looks": [[token, _stats_out(stats), memory] for token, stats, memory in _few(lane.looks, _LOOKS)],
        "maps": [[token, map_out(blocks)] for token, blocks in _few(lane.maps, _MAPS)],
        "totals": _stats_out(lane.totals),
    }


def _lane_in(fields: dict) -> RecordedLane:
    return RecordedLane(
        name=fields["name"],
        ms=tuple(float(ms) for ms in fields["ms"]),
        pieces=tuple(fields["pieces"]),
        answer_tokens=int(fields["answer_tokens"]),
        looks=tuple((int(token), _stats_in(stats), memory) for token, stats, memory in fields["looks"]),
        maps=tuple((int(token), map_in(blocks)) for token, blocks in fields["maps"]),
        totals=_stats_in(fields["totals"]),
    )


def _few(values: tuple, most: int) -> tuple:
    """At most so many of them, evenly spaced, the last included."""
    stride = -(-len(values) // most) or 1
    return values[::-1][::stride][::-1]


def _stats_out(stats: CacheStats | None) -> dict | None:
    if stats is None:
        return None
    stats = dataclasses.replace(stats, walks=_together(stats.walks))
    values = dataclasses.asdict(stats).items()  # counts of zero and what is missing are most of them
    return {name: value for name, value in values if value not in (None, ()) and not (type(value) is int and not value)}


def _together(walks: tuple[WalkStats, ...]) -> tuple[WalkStats, ...]:
    """The counts of all layers as one. The page shows no layer's, and counts by layer would be most of a file."""
    if len(walks) < 2:
        return walks
    count, audits = sum(w.walks for w in walks), sum(w.audits for w in walks)

    def mean(name: str, weight: str, total: int) -> float | None:
        some = [(getattr(w, name), getattr(w, weight)) for w in walks if getattr(w, weight)]
        return sum(value * n for value, n in some) / total if some else None

    def least(name: str) -> float | None:
        return min((found for w in walks if (found := getattr(w, name)) is not None), default=None)

    together = WalkStats(
        layer=-1,
        walks=count,
        tokens_used=sum(w.tokens_used for w in walks),
        capped=sum(w.capped for w in walks),
        mass=mean("mass", "walks", count),
        least_mass=least("least_mass"),
        histogram=tuple(map(sum, zip(*(w.histogram for w in walks)))),
        audits=audits,
        audited_mass=mean("audited_mass", "audits", audits),
        least_audited_mass=least("least_audited_mass"),
        audited_estimate=mean("audited_estimate", "audits", audits),
    )
    return (together,)


def _stats_in(fields: dict | None) -> CacheStats | None:
    if fields is None:
        return None
    values = {field.name: _nothing(field) for field in dataclasses.fields(CacheStats)}
    values |= fields
    values["walks"] = tuple(WalkStats(**{**w, "histogram": tuple(w["histogram"])}) for w in values["walks"])
    if values["working_set_bytes"] is not None:
        values["working_set_bytes"] = tuple(values["working_set_bytes"])
    return CacheStats(**values)


def _nothing(field: dataclasses.Field) -> object:
    """The value of a field that was not written."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if "None" in str(field.type) else 0


def map_out(blocks: BlockMap) -> dict:
    """Shares in 255ths, with as many columns as a picture has; of blocks that become one column the largest."""
    share, size = blocks.share, blocks.block_size
    if (factor := -(-share.shape[1] // _COLUMNS)) > 1:
        share = torch.nn.functional.pad(share, (0, -share.shape[1] % factor))
        share, size = share.view(len(share), -1, factor).amax(-1), size * factor
    pixels = (share.nan_to_num(0.0) * 255).round().to(torch.uint8).numpy()
    data = base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode()
    return {
        "layers": blocks.layers,
        "columns": share.shape[1],
        "block_size": size,
        "length": blocks.length,
        "data": data,
    }


def map_in(fields: dict) -> BlockMap:
    pixels = np.frombuffer(zlib.decompress(base64.b64decode(fields["data"])), np.uint8)
    share = torch.from_numpy(pixels.reshape(len(fields["layers"]), fields["columns"]).astype(np.float32)) / 255
    return BlockMap(tuple(fields["layers"]), share, fields["block_size"], fields["length"])
