"""``hf-sparsekv eval``: what it says of figures that mean nothing, and of lengths that no model was made for."""

from __future__ import annotations

import importlib.util

import pytest
from command_line import error, flat, run

WIDE = "two_level:token_budget=1024"
TIGHT = "two_level:block_size=16,window=16,dense_layers=0,token_budget=32,num_blocks=4"
SAYS_NOTHING = "attended to everything at 300 tokens: there it is full attention, and these figures say nothing about"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return "--text-file", path


@pytest.mark.quick
@pytest.mark.parametrize("task", ["agreement", "perplexity"])
def test_a_cache_that_attends_to_all_is_said_to(task, tiny, text, tmp_path):
    """By name; neither the one that does not nor full attention, which is meant to."""
    sizes = ("--lengths", "300", "--tokens", "4", "--samples", "1", "--out", tmp_path)
    told = flat(run("eval", task, tiny, *text, *sizes, "--cache", "full", "--cache", WIDE, "--cache", TIGHT).stderr)
    assert f"{WIDE} {SAYS_NOTHING}" in told and told.count("attended to everything") == 1
    assert "--cache token:token_budget=64" in told


def test_eval_all_says_it_too(tiny, text, tmp_path):
    args = ("--lengths", "300", "--only", "text", "--tokens", "4", "--passages", "1", "--out", tmp_path)
    told = flat(run("eval", "all", tiny, *text, *args, "--cache", WIDE, "--cache", TIGHT).stderr)
    assert f"{WIDE} {SAYS_NOTHING}" in told and told.count("attended to everything") == 1


def test_lengths_that_the_model_was_not_made_for(tiny, text, tmp_path):
    """Refused at once; where only the answer goes beyond, it is said."""
    out = ("--out", tmp_path / "out")
    for task in ("ruler", "needle", "tasks", "agreement", "perplexity", "output", "all"):
        line = error("eval", task, tiny, "--lengths", "1k,100k", *out)
        assert "102,400 tokens are more than the 2,048 that the model was made for" in line and "shorter ones" in line
    assert not (tmp_path / "out").exists()
    sizes = ("--lengths", "2040", "--tokens", "16", "--samples", "1")
    told = run("eval", "agreement", tiny, *text, *sizes, *out, "--cache", "full").stderr
    assert "2,056 tokens are more than the 2,048 that the model was made for" in told


@pytest.mark.parametrize(
    ("args", "package"),
    [
        (("needle",), "matplotlib"),
        (("longbench",), "datasets"),
        (("all", "--longbench", "x"), "datasets"),
    ],
)
def test_what_the_extra_would_bring_is_named_at_once(args, package, tiny, tmp_path, monkeypatch):
    """Before a model is loaded and a directory made."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    line = error("eval", args[0], tiny, *args[1:], "--out", tmp_path / "out")
    assert f"needs {package}: install the extra, `pip install '.[eval]'`" in line
    assert not (tmp_path / "out").exists()


def test_lm_eval_names_its_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )
    assert "pip install '.[lm-eval]'" in error("lm-eval", "--help")
