"""Models by name on the command line: known shapes, a hub that does not answer, names that were nearly right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command_line import error, run

from hf_sparsekv.cli import loading
from hf_sparsekv.tuning.shapes import HUB, SHAPES, known_shape


@pytest.mark.quick
def test_plan_knows_shapes():
    """Without a file or the hub: Qwen3-8B's weights in bf16, 16.4 GB."""
    out = run("plan", "qwen3-8b", "--context", "32k", "--gpu-memory", "80GiB").stdout
    assert "qwen3, bfloat16, layers: 36 full; 1 x 32,768 tokens" in out
    row = next(line.split() for line in out.splitlines() if line.startswith("weights"))
    assert row[1:3] == ["15.26", "GiB"]


@pytest.mark.parametrize("name", ["glm-4.7-flash", "gemma3-12b"])
def test_known_shapes_can_be_planned(name):
    assert name in SHAPES
    assert "total" in run("plan", name, "--context", "4k").stdout


@pytest.mark.parametrize(
    ("command", "name", "meant"),
    [
        (("generate", "--prompt", "a"), "smal", "small"),
        (("generate", "--prompt", "a"), "Small", "small"),
        (("plan", "--context", "4k"), "smalll", "small"),
        (("plan", "--context", "4k"), "qwen3-8", "qwen3-8b"),
        (("generate", "--prompt", "a"), "Qwen3-8B", "Qwen/Qwen3-8B"),
        (("generate", "--prompt", "a"), "gemma3-12b", "google/gemma-3-12b-it"),
        (("serve",), "smal", "small"),
        (("calibrate", "--text-file", __file__, "--output", "x"), "smal", "small"),
    ],
)
def test_names_that_are_nearly_right(command, name, meant, monkeypatch):
    """Told before anybody asks the hub."""
    monkeypatch.setattr(loading, "hub_answers", lambda: pytest.fail("the hub was asked"))
    assert f"there is no model {name!r}: did you mean {meant!r}?" in error(command[0], name, *command[1:])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["Qwen3-8B", "qwen3_8b", "Qwen/Qwen3-8B", "qwen/qwen3-8b-base"])
def test_plan_knows_spellings(name, monkeypatch):
    monkeypatch.setattr(loading, "hub_answers", lambda: pytest.fail("the hub was asked"))
    size = ("--context", "32k", "--gpu-memory", "80GiB", "--host-memory", "128GiB")
    found = run("plan", name, *size)
    assert found.stdout == run("plan", "qwen3-8b", *size).stdout
    assert f"{name}: the shape of qwen3-8b that this package knows" in found.stderr


def test_a_directory_goes_before_a_shape(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").symlink_to(tiny)
    assert "llama, float32, layers: 2 full" in run("plan", "qwen3-8b", "--context", 1000).stdout


def test_shapes_and_where_their_weights_are():
    """Every shape is known by its own name and by its model's, in any spelling, and nobody's copy is."""
    assert HUB.keys() == SHAPES.keys()
    for shape, hub in HUB.items():
        names = [shape, shape.upper(), shape.replace("-", "_")]
        if next(one for one, its in HUB.items() if its == hub) == shape:  # of two shapes of a model: the first
            names += [hub, hub.lower(), hub.partition("/")[2]]
        for name in names:
            assert known_shape(name) == shape, name
        assert known_shape(f"someone/{shape}") is None
    for name in ("qwen3-8", "small", "", "/", "qwen3-8b-fp8", "./qwen3-8b", "Qwen/Qwen3-8B-AWQ", "gpt2"):
        assert known_shape(name) is None, name


def test_random_shapes_take_spellings():
    assert loading.random_shape("random:Qwen3_8B").num_hidden_layers == 36
    with pytest.raises(loading.CommandError, match=r"no shape 'qwen3-8' \(did you mean 'qwen3-8b'\?\): known ones"):
        loading.random_shape("random:qwen3-8")


def test_an_evaluation_of_a_wrong_name_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("needle", "ruler", "all"):
        assert "did you mean 'small'?" in error("eval", part, "smal")
    assert not list(tmp_path.iterdir())


def test_an_empty_name():
    assert error("plan", "", "--context", 10) == "error: the model's name is empty"


def test_short_names_of_the_hub_are_no_mistakes():
    assert loading.resolve_model("gpt2", SHAPES) == "gpt2"
    assert loading.resolve_model("someone/small", SHAPES) == "someone/small"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("plan", "--context", "4k"), ("generate", "--prompt", "a")], ids=lambda c: c[0])
def test_a_hub_out_of_reach_is_asked_once(command, tmp_path):
    """Nothing listens at that port. The client's own retries, each with a line of its own, took half a minute."""
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    env = {**kept, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "hf_sparsekv", command[0], "Qwen/Qwen3-14B", *command[1:]],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Retry" not in done.stderr, done.stderr
    message = (
        "error: cannot load Qwen/Qwen3-14B: it is not in the hub's cache on this machine, and the hub is out of reach"
    )
    assert message in done.stderr
    assert ("Known without the hub: qwen3-8b, " in done.stderr) == (command[0] == "plan")


def test_a_directory_asks_no_hub(tiny, monkeypatch):
    monkeypatch.setattr(loading, "hub_answers", lambda: pytest.fail("the hub was asked"))
    run("generate", tiny, "--prompt", "abc", "--max-new-tokens", 2)


def test_what_the_cache_holds_needs_no_hub(monkeypatch):
    """Of a model from the hub every file is then taken from the cache, without a request for each."""
    asked = []

    class Kind:
        @staticmethod
        def from_pretrained(path, **kwargs):
            asked.append((path, kwargs["local_files_only"]))
            return "configuration"

    for answers in (False, True):
        monkeypatch.setattr(loading, "hub_answers", lambda answers=answers: answers)
        monkeypatch.setattr("transformers.AutoConfig", Kind)
        assert loading.load_config("someone/some-model") == "configuration"
    assert asked == [("someone/some-model", True), ("someone/some-model", False)]
