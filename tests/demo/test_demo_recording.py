"""Recorded races: files, what is played, and the page with and without them."""

from __future__ import annotations

import gc
import json
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e '.[demo]'")

from demos import makers_of, prefix_of, probe_model, read_document

from benchmarks.synthetic.replay import ReplayedQueries
from demo import app, panes, record, recording
from demo.desk import Desk
from demo.models import Models
from demo.recording import RecordedLane, Recording, RecordingError
from demo.turns import Turns
from hf_sparsekv.cache_name import over
from hf_sparsekv.policies import crossover

CPU = torch.device("cpu")
COMMAND = ["--model", "probe", "--length", "1k", "--new-tokens", "20", "--set", "mass=0.6"]
COMMAND += ["--note", "a busy machine"]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "probe.json"
    assert record.main([*COMMAND, "--save", str(path), "--csv", str(path.with_suffix(".csv"))]) == 0
    return path


def bare(ms: tuple[float, ...] = (5.0, 10.0, 10.0), **changes) -> Recording:
    """A recording of random weights, which say nothing."""
    lanes = (RecordedLane("full attention, somewhere", ms), RecordedLane("two-level, somewhere", ms))
    told = {"device": "a GPU", "versions": "torch=1;triton=2", "commit": "abc", "date": "2026-01-01", "command": "run"}
    fields = {"title": "bare", "model": "shape", "context": 1024, "rows": 1, "on_gpu": True, "read_s": 2.0}
    return Recording(**{**fields, **told, "question": "", "wanted": None, "lanes": lanes, **changes})


def test_a_file_holds_what_the_race_showed(path):
    read = recording.read(path)
    assert read.rows == 1 and read.context == 1024 and not read.on_gpu
    assert "--new-tokens 20" in read.command
    for part in (read.date, read.commit, "torch", "CPU", "1,024 tokens", "a busy machine"):
        assert part in read.mark
    answer, question = read.wanted, read.question
    needle = probe_model().language.needle(1024)
    assert (answer, question) == (needle.answer, needle.question)
    end = read.view(read.seconds + 1)
    assert end.ended and end.recorded == read.mark
    for lane in end.lanes:
        assert len(lane.ids) == 20 and end.found(lane) and lane.memory["device"] > 0
    sparse = end.lanes[1]
    assert sparse.stats.decode_steps == 19 and 0 < sparse.stats.attended_share < 1
    assert sparse.blocks is not None and sparse.blocks.share.max() <= 1
    assert "same answer" in end.verdict()[0]
    again = path.with_name("again.json")
    recording.write(again, read)
    assert again.read_bytes() == path.read_bytes()
    assert path.stat().st_size < 50_000


def test_it_plays_by_each_lanes_own_clock():
    slow, quick = RecordedLane("full attention", (5.0, *[20.0] * 9)), RecordedLane("sparse", (5.0, *[10.0] * 9))
    played = bare(lanes=(slow, quick))
    counts = [tuple(len(lane.ids) for lane in played.view(at).lanes) for at in (0.0, 0.055, 0.105, 1.0)]
    assert counts == [(1, 1), (3, 6), (6, 10), (10, 10)]
    assert not played.view(0.105).ended and played.view(1.0).ended
    assert played.speed == 1.0
    assert bare((5.0, *[1e3] * 90)).speed == pytest.approx(3.0)


def test_random_weights_are_said_to_say_nothing():
    shown = bare((5.0, *[10.0] * 20)).view(9.0)
    assert shown.same_answer is None
    assert panes.pane(shown, 0, []) == "", "there is no text to show"
    assert "random weights say nothing" in panes.verdict(shown)
    assert "a GPU" in panes.verdict(shown)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda fields: "", "cannot be played"),
        (lambda fields: "[1, 2]", "cannot be played"),
        (lambda fields: json.dumps({**fields, "format": 99}), "format 99"),
        (lambda fields: json.dumps({**fields, "lanes": fields["lanes"][:1]}), "two lanes"),
        (lambda fields: json.dumps({name: v for name, v in fields.items() if name != "device"}), "cannot be played"),
        (lambda fields: json.dumps({**fields, "surplus": 1}), "cannot be played"),
    ],
)
def test_damaged_files_are_told_and_get_no_button(path, tmp_path, capsys, damage, message):
    damaged = tmp_path / "damaged.json"
    damaged.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(RecordingError, match=message):
        recording.read(damaged)
    assert recording.found(tmp_path) == []
    assert "damaged.json" in capsys.readouterr().err


def buttons(page) -> list[str]:
    return [block.elem_id for block in page.blocks.values() if (block.elem_id or "").startswith("play-")]


def test_a_button_for_each_recording_and_none_without(path):
    assert buttons(app.build(Models(CPU), "probe", recordings=[])) == []
    assert buttons(app.build(Models(CPU), "probe", recordings=[recording.read(path), bare()])) == ["play-0", "play-1"]


def test_what_the_project_ships_can_be_played():
    files = sorted(recording.FOLDER.glob("*.json"))
    found = recording.found()
    assert len(found) == len(files) >= 1 and sum(file.stat().st_size for file in files) < 400_000
    assert found[0].gain == max(each.gain for each in found) > 2, "what the page shows before a press"
    text = found[1].view(float("inf"))
    assert all(text.found(lane) for lane in text.lanes) and found[1].gain > 1.1
    assert "faster" in text.verdict()[0] and "same answer: both find the hidden fact" in text.verdict()[0]
    for file in files:
        assert not recording.read(file).commit.endswith("+"), "of a commit, without changes on top"


def test_playing_computes_nothing_and_stops(path, monkeypatch):
    desk, request = (
        Desk(Models(CPU), [bare((5.0, *[2.0] * 400)), bare((5.0, *[100.0] * 400))]),
        SimpleNamespace(session_hash="tab"),
    )
    monkeypatch.setattr(Models, "use", lambda *args: pytest.fail("a recording needs no model"))
    pages = list(desk.play(request, desk.recordings[0]))
    assert len(pages) >= 3, "it grows"
    assert "Playing a recording" in pages[0][0] and "has ended" in pages[-1][0]
    assert all("Recorded" in page[1] for page in pages)
    assert all(len(page) == 9 + len(desk.recordings) for page in pages)
    stopped, began = desk.play(request, desk.recordings[1]), time.monotonic()
    next(stopped)
    desk.stop(request)
    assert "stopped" in list(stopped)[-1][0]
    assert time.monotonic() - began < 10
    assert not desk.tab(request).session.busy


@pytest.fixture
def tiny(monkeypatch):
    """A shape of random weights, ``random:tiny``."""
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 64, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 4096}
    monkeypatch.setattr(crossover, "ON_CPU", {})  # so short a context is read whole otherwise
    monkeypatch.setitem(record.SHAPES, "tiny", lambda: Qwen3Config(**shape))


def test_a_race_of_random_weights_with_keys_that_imitate_recorded_ones(tiny, tmp_path, monkeypatch, capsys):
    """The document is read by the model; what the sparse lane holds of it, and asks, is a replay's."""
    path, moved = tmp_path / "tiny.json", []
    following = ReplayedQueries.next
    monkeypatch.setattr(ReplayedQueries, "next", lambda self: moved.append(self.step) or following(self))
    command = [
        "--model",
        "random:tiny",
        "--length",
        "1k",
        "--new-tokens",
        "12",
        "--set",
        "mass=0.6",
        "--offload",
    ]
    assert record.main([*command, "--kv", "replayed", "--device", "cpu", "--save", str(path)]) == 0
    read = recording.read(path)
    assert moved == list(range(12))  # of the sparse lane's steps alone
    assert "imitate recorded ones" in read.mark and "--kv replayed" in read.command
    sparse = read.view(read.seconds + 1).lanes[1]
    assert sparse.stats.decode_steps == 11 and sparse.stats.sparse_calls > 0
    several = path.with_name("several.json")
    assert record.main([*command, "--kv", "replayed", "--device", "cpu", "--rows", "2", "--save", str(several)]) == 0
    two = recording.read(several).view(9.0).lanes[1].stats
    assert two.context_tokens == 2 * sparse.stats.context_tokens and two.sparse_calls > 0
    capsys.readouterr()
    assert record.main(["--model", "probe", "--kv", "replayed"]) == 1
    assert "random weights" in capsys.readouterr().err


def test_one_cache_of_several_rows_is_gone_before_the_next_is_made(tiny, monkeypatch):
    """Two may not fit the device: that of a warm-up, too, whose keys were a replay's."""
    made, makers = [], record.ReplayedSession._makers

    def watched(session, loaded, task):
        return [(name, lambda make=make: watch(make())) for name, make in makers(session, loaded, task)]

    def watch(cache):
        assert [each() for each in made] == [None] * len(made)
        made.append(weakref.ref(cache.layers[-1]))  # which holds the keys, and what a replay put there
        return cache

    monkeypatch.setattr(record.ReplayedSession, "_makers", watched)
    asked = ["--model", "random:tiny", "--length", "1k", "--rows", "2", "--new-tokens", "3", "--warm-up", "2"]
    gc.disable()
    try:
        assert record.main([*asked, "--kv", "replayed", "--device", "cpu"]) == 0
    finally:
        gc.enable()
    assert len(made) == 4


def test_rows_of_full_attention_share_no_blocks_where_keys_imitate_recorded_ones(tiny):
    """On a GPU rows are copies of a prefix. These share its blocks, which makes full attention too fast."""
    asked = ["--model", "random:tiny", "--length", "1k", "--rows", "3", "--device", "cpu"]
    loaded, task, _ = record.prepare(record.arguments().parse_args(asked), CPU)
    on_gpu, held = SimpleNamespace(on_gpu=True, model=loaded.model), {}
    for kind in (record.Session, record.ReplayedSession):
        session = kind(Turns())
        with session.running():
            list(read_document(session, loaded, task))
        cache = makers_of(session, on_gpu, task)[0][1]()
        held[kind] = cache.memory_bytes()["device"] / prefix_of(session).memory_bytes()["device"]
        assert cache.get_seq_length() == 1024
        out = loaded.model(torch.zeros(3, 1, dtype=torch.long), **over(loaded.model, cache))
        assert len(out.logits) == 3 and cache.stats().attended_share == 1.0
    assert held[record.Session] < 1.5 and held[record.ReplayedSession] > 2.5
