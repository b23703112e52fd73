"""Models of the demo: who waits for whom, how many are in memory, which may be named, and damaged files."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e '.[demo]'")

from demos import entries_of, tabs_of
from typer.testing import CliRunner

from demo import __main__ as command
from demo import app, desk, models
from demo.caches import METHODS
from demo.desk import Desk
from demo.language import Language
from demo.models import PROBE, PROBE_PATH, SMALL, Loaded, ModelError, Models
from demo.race import Session
from hf_sparsekv_cli.app import app as cli

CPU = torch.device("cpu")


def a_copy(path: Path, config: object = None, **changes) -> Path:
    """The probe model in a directory of its own, with another ``config.json`` or other values there."""
    path.mkdir()
    for file in PROBE_PATH.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    if config is None:
        config = {**json.loads((PROBE_PATH / "config.json").read_text()), **changes}
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def race(page: Desk, model: object, tab: str = "tab", new_tokens: int = 8):
    """The outputs of a click on Race, one after the other."""
    controls = [control.value for method in METHODS.values() for control in method.controls]
    request = SimpleNamespace(session_hash=tab)
    return page.race(
        request, model, "Bundled", "", None, 512, True, 40, page.question(PROBE, True, 40, 512), "two_level", False,
        new_tokens, True, *controls,
    )  # fmt: skip


def last(outputs) -> str:
    """The status line in the end."""
    return list(outputs)[-1][0]


@pytest.fixture
def slow(monkeypatch):
    """A hub that answers for ``slow/model`` when the event is set; the list has every path that was asked for."""
    answers, asked, real = threading.Event(), [], models.AutoConfig.from_pretrained

    def from_pretrained(path, *args, **kwargs):
        asked.append(path)
        if path == "slow/model":
            assert answers.wait(60)
            raise OSError("no such model")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(models.AutoConfig, "from_pretrained", from_pretrained)
    yield answers, asked
    answers.set()


def in_thread(work) -> tuple[threading.Thread, list]:
    """``work`` in a thread of its own, and what it returned or raised, when it has ended."""
    out = []

    def call() -> None:
        try:
            out.append(work())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, out


# ---------------------------------------------------------------------- who waits


def test_a_slow_hub_keeps_nobody_else_waiting(slow, tmp_path):
    answers, _ = slow
    shared = Models(CPU)
    shared.load(PROBE)
    waiting, told = in_thread(lambda: shared.look("slow/model"))
    other = a_copy(tmp_path / "other")
    for work in (lambda: shared.look(PROBE), lambda: shared.load(PROBE), lambda: shared.load(str(other))):
        thread, out = in_thread(work)
        thread.join(30)
        assert out, "waits for the look-up of another name"
        assert not isinstance(out[0], Exception)
    assert waiting.is_alive() and not told
    answers.set()
    waiting.join(30)
    assert isinstance(told[0], ModelError) and "no such model" in str(told[0])


def test_a_slow_load_keeps_nobody_else_waiting(tmp_path, monkeypatch):
    shared, goes_on, real = Models(CPU), threading.Event(), Models._read
    paths = [str(a_copy(tmp_path / name)) for name in "abc"]

    def read(self, path: str):
        if path == paths[0]:
            assert goes_on.wait(60)
        return real(self, path)

    monkeypatch.setattr(Models, "_read", read)
    shared.load(paths[1])
    waiting, told = in_thread(lambda: shared.load(paths[0]))
    try:
        for work in (
            lambda: shared.look(paths[0]),
            lambda: shared.look(paths[2]),
            lambda: shared.load(paths[1]),
            lambda: shared.load(paths[2]),
        ):
            thread, out = in_thread(work)
            thread.join(30)
            assert out, "waits for the weights of another name, or for weights that it does not need"
            assert not isinstance(out[0], Exception)
        assert waiting.is_alive()
    finally:
        goes_on.set()
    waiting.join(30)
    assert isinstance(told[0], Loaded)


def test_a_slow_download_takes_no_place(tmp_path, monkeypatch):
    shared, goes_on = Models(CPU), threading.Event()
    held = {str(a_copy(tmp_path / name)): None for name in "ab"}
    slow = [str(a_copy(tmp_path / name)) for name in "cd"]
    monkeypatch.setattr(models, "_fetch", lambda path: path not in slow or goes_on.wait(60))
    for path in held:
        held[path] = shared.load(path)
    waiting = [in_thread(lambda path=path: shared.load(path)) for path in slow]
    time.sleep(1)
    assert all(thread.is_alive() for thread, _ in waiting)
    assert all(shared.load(path) is loaded for path, loaded in held.items())
    goes_on.set()
    for thread, out in waiting:
        thread.join(30)
        assert isinstance(out[0], Loaded)


def test_a_name_is_read_once_for_all_that_ask_at_once(tmp_path, monkeypatch):
    path, shared, real, read, made = str(a_copy(tmp_path / "a")), Models(CPU), Models._read, [], []

    def once(self, path: str):
        read.append(path)
        time.sleep(0.2)
        return real(self, path)

    def language(tokenizer):
        made.append(tokenizer)
        time.sleep(0.2)
        return Language(tokenizer)

    monkeypatch.setattr(Models, "_read", once)
    monkeypatch.setattr(models, "Language", language)
    threads = [in_thread(lambda: shared.load(path)) for _ in range(6)]
    for thread, _ in threads:
        thread.join(60)
    assert len({id(out[0]) for _, out in threads}) == 1 and isinstance(threads[0][1][0], Loaded)
    assert read == [path]
    assert len(made) == 1


# ---------------------------------------------------------------------- how much is in memory


def test_two_models_are_in_memory_however_many_tabs_have_raced(tmp_path):
    shared, alive = Models(CPU), []
    page = Desk(shared)
    for name in "abc":
        path = str(a_copy(tmp_path / name))
        assert "Done" in last(race(page, path, tab=name))
        alive.append(weakref.ref(shared.load(path).model))
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True, True]
    kept = [tab.session.memory_bytes()["device"] > 0 for tab in tabs_of(page).values()]
    assert kept == [False, True, True], "what a model that is gone has read is of no use"
    assert "was read before" in last(race(page, path, tab="c"))
    assert "took" in last(race(page, str(tmp_path / "a"), tab="a"))


def test_what_a_race_uses_stays_and_others_wait(tmp_path):
    shared = Models(CPU)
    page = Desk(shared)
    paths = [str(a_copy(tmp_path / name)) for name in "abc"]
    with shared.use(paths[0]) as first, shared.use(paths[1]), shared.use(paths[1]):
        told = last(race(page, paths[2]))
        assert "races with 2 other models run" in told and "wait" in told and "error" in told
        assert shared.load(paths[0]) is first
        assert len(shared.look(paths[2])) == 2, "its tokenizer needs no place"
    third = shared.load(paths[2])
    held = {path: entry.loaded for path, entry in entries_of(shared).items() if path in paths}
    assert held == {paths[0]: first, paths[1]: None, paths[2]: third}, "what was not used for longest made room"


def test_a_model_that_cannot_be_loaded_keeps_no_place(tmp_path):
    shared = Models(CPU)
    for name in "abc":
        with pytest.raises(ModelError, match="cannot load"):
            shared.load(str(a_copy(tmp_path / name, hidden_size=64, num_attention_heads="8")))
    assert not [entry for entry in entries_of(shared).values() if entry.has_place or entry.runs or entry.users]
    shared.load(PROBE)


def test_a_silent_tab_gives_its_memory_back(monkeypatch):
    assert desk.SILENT <= 15 * 60
    monkeypatch.setattr(desk, "SILENT", 0.5)
    monkeypatch.setattr(desk, "_SWEEP", 0.05)
    page = Desk(Models(CPU))
    assert "Done" in last(race(page, PROBE))
    session = tabs_of(page)["tab"].session
    assert session.memory_bytes()["device"] > 0
    end = time.monotonic() + 30
    while tabs_of(page) or page._sweeper:
        assert time.monotonic() < end, "nobody looks for silent tabs"
        time.sleep(0.05)
    assert session.memory_bytes()["device"] == 0
    running = race(page, PROBE, new_tokens=1024)
    next(running)
    time.sleep(1)
    assert tabs_of(page), "a tab that runs is not silent"
    page.stop(SimpleNamespace(session_hash="tab"))
    assert "Stopped" in last(running)


# ---------------------------------------------------------------------- which may be named


def test_which_hosts_others_can_reach():
    closed, opened = ("localhost", "127.0.0.2", "::1"), ("0.0.0.0", "::", "192.168.0.7", "gpu-box")
    assert not any(command.Options(models=[], host=host).is_open for host in closed)
    assert all(command.Options(models=[], host=host).is_open for host in opened)


@pytest.mark.parametrize(
    ("given", "is_open"), [({}, False), ({"host": "::1"}, False), ({"host": "0.0.0.0"}, True), ({"share": True}, True)]
)
def test_a_page_that_others_reach_offers_listed_models_only(given, is_open, tmp_path, monkeypatch, capsys):
    own, other = str(a_copy(tmp_path / "own")), str(a_copy(tmp_path / "other"))
    served = {}

    def launch(shared, first, *args, more=(), **kwargs):
        served.update(shared=shared, page=app.build(shared, first, more))
        return SimpleNamespace(block_thread=lambda: None), "http://here"

    monkeypatch.setattr(app, "launch", launch)
    assert command.serve(command.Options(models=[own, PROBE], **given)) == 0
    shared = served["shared"]
    assert shared.listed == ((PROBE, SMALL, own) if is_open else None)
    assert ("others can reach the page and choose probe, small, " in capsys.readouterr().out) == is_open
    chosen = next(block for block in served["page"].blocks.values() if getattr(block, "elem_id", None) == "model")
    assert [value for _, value in chosen.choices] == [SMALL, PROBE, own]
    assert chosen.value == own
    assert chosen.allow_custom_value != is_open
    assert ("only these" in chosen.info) == is_open
    assert len(shared.look(own)) == len(shared.look(PROBE)) == 2
    page = Desk(shared)
    refused = "this server offers probe, small, "
    for name in (other, f"{own}/", str(tmp_path / "none"), "gpt2", "", None, ["probe"]):
        if is_open:
            for told in (page.chose_model(name, True, 40)[2], page.about(name, "Bundled", "", None, 512)):
                assert refused in told, "the same for every name, whether or not it is here"
            assert refused in last(race(page, name))
    if not is_open:
        assert len(shared.look(other)) == 2


def test_help_and_arguments_say_which_models_others_may_choose(monkeypatch):
    said = " ".join(command.arguments().format_help().split())
    assert "may then choose probe, small and what --model names, and no other hub id or path" in said
    given = command.arguments().parse_args(["--model", "a", "--model", "b"])
    assert command.Options(**vars(given)).models == ["a", "b"]
    served = []
    monkeypatch.setattr(command, "serve", lambda options: served.append(options) or 0)
    assert CliRunner().invoke(cli, ["demo", "a", "b", "--host", "0.0.0.0"]).exit_code == 0
    assert list(served[0].models) == ["a", "b"] and served[0].is_open
    assert CliRunner().invoke(cli, ["demo"]).exit_code == 0
    assert not served[1].models and not served[1].is_open


@pytest.mark.parametrize(
    "name", ["/no/such", "~nobody-of-this-name/x", "/" + "x" * 5000, "a\0b", "/\0", "", None, 3, ["probe"]]
)
def test_names_that_are_no_model_are_told(name):
    page = Desk(Models(CPU))
    assert "error" in page.chose_model(name, True, 40)[2]
    assert "error" in last(race(page, name))


# ---------------------------------------------------------------------- damaged files


TEXTS = ([], [1, 2], "null", "3", '"qwen3"', "", '{"model_type": "qwen3"', "[" * 100_000)
FIELDS = {
    "max_position_embeddings": ("65536", [65536], 0, 1e9, True),
    "model_type": (3, ["qwen3"]),
    **{"hidden_size": ("256",), "num_hidden_layers": ("6",), "num_attention_heads": ("8",), "vocab_size": ("912",)},
    **{"head_dim": ("64",), "rms_norm_eps": ("small",), "rope_parameters": ("yes",), "eos_token_id": ("2",)},
    "layer_types": ("full_attention",),
}


@pytest.mark.parametrize(
    ("config", "changes"),
    [(text, {}) for text in TEXTS[:1]]
    + [(None, {name: values[0]}) for name, values in FIELDS.items()]
    + [pytest.param(text, {}, marks=pytest.mark.slow) for text in TEXTS[1:]]
    + [
        pytest.param(None, {name: value}, marks=pytest.mark.slow)
        for name, values in FIELDS.items()
        for value in values[1:]
    ],
)
def test_a_damaged_config_is_told_in_the_page(config, changes, tmp_path):
    path = str(a_copy(tmp_path / "damaged", config, **changes))
    page = Desk(Models(CPU))
    if config is not None or "model_type" in changes:  # the page itself comes up (half a second each)
        app.build(page.models, path)
    assert f"cannot load {path}: " in page.about(path, "Bundled", "", None, 512)
    for told in (page.chose_model(path, True, 40)[2], last(race(page, path))):
        assert "error" in told and f"cannot load {path}: " in told
    assert not tabs_of(page)["tab"].session.busy


def test_what_nobody_expected_is_told_in_the_page(monkeypatch, capsys):
    page = Desk(Models(CPU))

    def fails(*args):
        raise KeyError("attention")

    monkeypatch.setattr(Session, "_makers", fails)
    told = list(race(page, PROBE))[-1]
    assert "KeyError" in told[0] and "error" in told[0]
    assert told[-2]["interactive"] and not told[-1]["interactive"], "another race may begin"
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.undo()
    assert "Done" in last(race(page, PROBE))


def test_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    from gguf_files import write

    path = tmp_path / "tiny.gguf"
    write(path, "qwen2", "<|endoftext|>")
    found = Models(CPU)
    assert found.look(str(path))[1] == 1024
    loaded = found.load(str(path))
    assert loaded.ends == {loaded.language.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")}
    (tmp_path / "bad.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="is no GGUF file"):
        found.look(str(tmp_path / "bad.gguf"))
