"""Saved caches that are refused: for another configuration or model, damaged, truncated, of something else."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from caches import CACHES, TIGHT, two_level
from models import build, model, prompt
from safetensors.torch import save_file
from saved_files import IDS, feed, rewrite, same, state

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, ProgressiveCache, SparseCache, TwoLevelConfig


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A saved cache of the Llama."""
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    path = tmp_path_factory.mktemp("saved") / "context.safetensors"
    cache.save(path)
    return path


CHANGES = {"block_size": 32, "sinks": 5, "window": 17, "max_draft": 3, "dense_layers": 1, "level": "token"}
CHANGES |= {"bound_tokens": 8, "label_channels": 2, "label_bits": 16, "channel_importance": "mean"}
CHANGES |= {"calibration_tokens": 33}


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_config_that_changes_the_data(path, name, value):
    config = replace(two_level(**TIGHT).config, **{name: value})
    with pytest.raises(ValueError, match=rf"was saved with {name}=.*which its contents depend on; got {value!r}"):
        SparseCache.load(path, config=config)


def test_config_of_another_type(path):
    with pytest.raises(TypeError, match="config must be a TwoLevelConfig, got str"):
        SparseCache.load(path, config="fast")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-mqa", "another model: num_key_value_heads is 2 in the file, 1 in model_config"),
        ("qwen3", "another model: model_type is llama in the file, qwen3 in model_config"),
    ],
)
def test_another_model(path, name, message):
    with pytest.raises(ValueError, match=message):
        SparseCache.load(path, model_config=model(name).config)


def test_other_windows(tmp_path):
    cache = two_level(**TIGHT)
    feed(cache, IDS, name="gemma3")
    cache.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"windows are \[8, None, 8\], those of model_config \[9, None, 9\]"):
        SparseCache.load(tmp_path / "saved", model_config=build("gemma3", "sparsekv", sliding_window=9).config)
    with pytest.raises(ValueError, match=r"holds sliding-window layers.*pass model_config=model\.config"):
        SparseCache.load(tmp_path / "saved")


def test_rewritten_file_is_still_good(path, tmp_path):
    """The file is plain safetensors: another writer's order of tensors will do."""
    same(state(SparseCache.load(rewrite(path, tmp_path / "x"))), state(SparseCache.load(path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": lambda m: m.update(version="2")}, "format version 2, of hf-sparsekv .* reads version 1: load it"),
        ({"metadata": lambda m: m.update(format="x")}, "is not a saved cache"),
        ({"metadata": lambda m: m.update(state="{")}, r"is damaged \(its header"),
        ({"metadata": lambda m: m.update(state="{}")}, r"is damaged \(its header: KeyError"),
        ({"tensors": lambda t: t.pop("layers.1.blocks")}, "tensor layers.1.blocks is missing"),
        ({"tensors": lambda t: t.update(more=torch.zeros(1))}, "tensor more is not expected"),
        ({"tensors": lambda t: t.update({"layers.0.seen": torch.zeros(2).int()})}, r"layers.0.seen is I32 \[2\]"),
        ({"tensors": lambda t: t.update({"layers.0.seen": torch.zeros(1)})}, "layers.0.seen is F32"),
        ({"tensors": lambda t: t["layers.0.table"].fill_(999)}, "table in layer 0 is out of range"),
        ({"tensors": lambda t: t["layers.0.channels"].fill_(16)}, "channels in layer 0 is out of range"),
        ({"tensors": lambda t: t["layers.0.previous"].fill_(-2)}, "previous in layer 0 is out of range"),
        ({"length": 140}, "length in layer 1 does not fit"),
        ({"length": 13}, "length in layer 0 does not fit"),
        ({"policy": "Policy"}, "policy in layer 0 does not fit"),
        ({"batch": 2}, "tensor layers.0.* is"),
        ({"dtype": "float8"}, "its header: KeyError"),
        ({"surprise": 1}, "its header: TypeError"),
    ],
)
def test_damaged_files(path, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        SparseCache.load(rewrite(path, tmp_path / "x", **changes))


@pytest.mark.parametrize("keep", [0, 7, 500, -1])
def test_truncated_files(path, tmp_path, keep):
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="is not a saved cache, or it is truncated"):
        SparseCache.load(cut)


def test_other_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no saved cache at .*make one with cache\.save"):
        SparseCache.load(tmp_path / "none")
    save_file({"x": torch.zeros(3)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"weights is not a saved cache: make one with cache\.save"):
        SparseCache.load(tmp_path / "weights")


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="nothing is cached yet"):
        two_level().save(tmp_path / "x")
    cache = two_level(model_config=model("qwen3-next").config, **TIGHT)
    feed(cache, IDS, name="qwen3-next")
    with pytest.raises(ValueError, match=r"layer 0 is a .*linear attention.* cannot be saved yet"):
        cache.save(tmp_path / "x")
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    cache.sparse_layers[1].broken = "an error"
    with pytest.raises(RuntimeError, match="incomplete after an error"):
        cache.save(tmp_path / "x")
    assert not os.listdir(tmp_path)


def test_a_failing_save_keeps_the_old_file(path, tmp_path, monkeypatch):
    cache = SparseCache.load(path, model_config=model("llama").config)
    cache.save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    assert before == path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        cache.save(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == before


def test_a_path_that_cannot_be_written_is_named_itself(path, tmp_path):
    """Not the hidden file beside it."""
    cache, gone = SparseCache.load(path), tmp_path / "gone" / "x"
    with pytest.raises(FileNotFoundError, match=rf"there is no directory .*gone: make it, .* than at {gone}$"):
        cache.save(gone)
    with pytest.raises(IsADirectoryError, match=rf"^{tmp_path} is a directory: give the path of a file"):
        cache.save(tmp_path)
    long = tmp_path / ("x" * 250)  # with what is added to it, too long
    with pytest.raises(OSError, match=rf"File name too long: '{long}'"):
        cache.save(long)
    assert not os.listdir(tmp_path)
    cache.save(tmp_path / "x")


def test_device_that_is_not_here(path, tmp_path):
    with pytest.raises(ValueError, match=r"was saved on cuda:77, which is not here .*: pass device="):
        SparseCache.load(rewrite(path, tmp_path / "x", device="cuda:77"))


def test_host_limit(path):
    with pytest.raises(MemoryError):
        OffloadedSparseCache.load(path, offload=OffloadConfig(max_host_bytes=1000))


def test_default_config_is_the_saved_one(path):
    loaded = OffloadedSparseCache.load(path)
    assert loaded.config == two_level(**TIGHT).config != TwoLevelConfig()
    assert str(loaded).startswith("OffloadedSparseCache(130 tokens on host")


def test_default_place_is_the_constructors(path, tmp_path):
    """Each class has its own: two-level caches offload, progressive ones stay on the device."""
    assert SparseCache.load(path).offload_config == OffloadConfig() == OffloadedSparseCache().offload_config
    cache = CACHES["progressive"]()
    feed(cache, prompt(1, 90)["input_ids"])
    cache.save(tmp_path / "progressive")
    for kind in (SparseCache, ProgressiveCache):
        assert kind.load(tmp_path / "progressive").offload_config is None
    assert SparseCache.load(tmp_path / "progressive", offload=OffloadConfig()).offload_config is not None
