"""Saved caches that are refused: for another configuration or model, damaged, truncated, of something else."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from caches import CACHES, TIGHT, two_level
from models import build, model, prompt
from safetensors import safe_open
from safetensors.torch import save_file
from saved_files import IDS, feed, rewrite, same, state

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, ProgressiveCache, SparseCache, TokenConfig
from hf_sparsekv.persistence import checks as persistence


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A saved cache of the Llama."""
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    path = tmp_path_factory.mktemp("saved") / "context.safetensors"
    cache.save(path)
    return path


CHANGES = {"block_size": 32, "sinks": 5, "window": 17, "max_draft": 3, "dense_layers": 1, "level": "token"}
CHANGES |= {"label_channels": 2, "calibration_tokens": 33}


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_config_that_changes_the_data(path, name, value):
    config = replace(two_level(**TIGHT).config, **{name: value})
    with pytest.raises(ValueError, match=rf"was saved with {name}=.*which its contents depend on; got {value!r}"):
        SparseCache.load(path, config=config)


def test_another_configuration_or_model(path):
    with pytest.raises(TypeError, match="config must be a TokenConfig, got str"):
        SparseCache.load(path, config="fast")
    for name, message in (
        ("llama-mqa", "another model: num_key_value_heads is 2 in the file, 1 in model_config"),
        ("qwen3", "another model: model_type is llama in the file, qwen3 in model_config"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseCache.load(path, model_config=model(name).config)


def test_other_windows(tmp_path):
    cache = two_level(**TIGHT)
    feed(cache, IDS, name="gemma3")
    cache.save(tmp_path / "saved")
    with pytest.raises(
        ValueError, match=r"'sliding', 8\), \('full', None\), .*those of model_config \[\('sliding', 9\)"
    ):
        SparseCache.load(tmp_path / "saved", model_config=build("gemma3", "sparsekv", sliding_window=9).config)
    with pytest.raises(ValueError, match=r"layer 0 .* of the kind 'sliding'.*pass model_config=model\.config"):
        SparseCache.load(tmp_path / "saved")


def test_rewritten_file_is_still_good(path, tmp_path):
    """The file is plain safetensors: another writer's order of tensors will do."""
    same(state(SparseCache.load(rewrite(path, tmp_path / "x"))), state(SparseCache.load(path)))


def _put(name, *value, at=0):
    """Overwrite entries of a tensor of the first layer, or of the rows."""

    def put(held):
        tensor = held[f"layers.0.{name}" if f"layers.0.{name}" in held else name]
        tensor.view(-1)[at : at + len(value)] = torch.tensor(value, dtype=tensor.dtype)

    return put


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A saved cache of rows of 130 and 100 tokens, 6 and 5 blocks."""
    cache = two_level(**TIGHT)
    feed(cache, *prompt(2, 130, (0, 30)).values())
    path = tmp_path_factory.mktemp("saved") / "padded.safetensors"
    cache.save(path)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("table").tolist()[1][-1] == -1
        assert json.loads(file.metadata()["state"])["rows"] == {
            "lengths": [130, 100],
            "sealed": [6, 5],
            "padding": 130,
            "inexact_from": None,
        }
    return path


def _configured(**changes):
    return lambda held: held["config"].update(changes)


DEEP = "[" * 100_000 + "]" * 100_000
NO_FIT = "of the rows does not fit"

# What is changed in which file, and what is said of it.
TENSORS = [
    (lambda t: t.pop("layers.1.blocks"), "tensor layers.1.blocks is missing"),
    (lambda t: t.update(more=torch.zeros(1)), "tensor more is not expected"),
    (lambda t: t.update(table=torch.zeros(6).int()), r"tensor table is I32 \[6\]"),
    (lambda t: t.update(table=torch.zeros(1, 6)), "tensor table is F32"),
    (lambda t: t.pop("table"), "tensor table is missing"),
    (lambda t: t.update(valid=torch.ones(1, 130, dtype=torch.bool)), "tensor valid is not expected"),
    # More blocks than there are, one twice, none, and what stands for none.
    *((_put("table", *ids), f"table {NO_FIT}") for ids in ((999,), (0, 0), (-1,), (-2,), (6,))),
    (_put("channels", 16), "channels in layer 0 is out of range"),
    (_put("channels", 3, 3), "channels in layer 0 does not fit"),
    (_put("previous", -2), "previous in layer 0 is out of range"),
    (_put("previous", 1, 1), "previous in layer 0 does not fit"),
]
# By place: what is said of which values of a field.
ROWS = {
    "lengths in rows is .*, not a list of an integer from 0": {
        "lengths": [130, [130, 1 << 31], [130, -1], [130, 100.0], [130, True]]
    },
    "tensor table is": {"lengths": [[], [130], [130, 100, 100]], "sealed": [[7, 5]]},
    f"padding {NO_FIT}": {"lengths": [[130, 101]]},
    f"sealed {NO_FIT}": {"lengths": [[100, 130]], "sealed": [[6, 5, 5], [6, 6]]},
    "blocks in layer 0 does not fit": {"sealed": [[6], [6, 4]]},  # there are more
    "tensor table is not expected": {"sealed": [[], [0, 0]]},
    "sealed in rows is .*, not": {"sealed": [[6, None]]},
    "tensor valid is not expected": {"padding": [None]},
    "padding in rows is 0, not an integer from 1": {"padding": [0]},
    "tensor valid is": {"padding": [131]},
    f"inexact_from {NO_FIT}": {"inexact_from": [130]},
    "inexact_from in rows is -1, not an integer from 0": {"inexact_from": [-1]},
    "'more' in rows is not known": {"more": [1]},
}
ROWS_AND_TENSORS = [
    ({}, _put("valid", True, at=130), f"padding {NO_FIT}"),
    ({}, _put("valid", False), f"padding {NO_FIT}"),
    # The map says of more columns than there are, but counts right.
    (
        {"padding": 131},
        lambda t: t.update(valid=torch.cat((t["valid"], torch.zeros(2, 1, dtype=torch.bool)), 1)),
        f"padding {NO_FIT}",
    ),
    ({}, _put("table", 0, at=11), f"table {NO_FIT}"),  # behind the second row's blocks
    ({}, _put("table", 0, at=6), f"table {NO_FIT}"),  # shared: the other one is nobody's
    ({}, _put("table", 1, 0), f"table {NO_FIT}"),  # one is nobody's
    # Nothing to look at, of as many blocks as there could be.
    (
        {"lengths": [], "sealed": [(1 << 31) - 1]},
        lambda t: t.update(table=torch.zeros(0, (1 << 31) - 1).int(), valid=t["valid"][:0]),
        f"lengths {NO_FIT}",
    ),
    ({"lengths": [130]}, lambda t: t.update({n: t[n][:1] for n in ("table", "valid")}), f"lengths {NO_FIT}"),
]
LAYERS = {
    "length in layer 1 does not fit": {"length": [140, 13]},  # that of the first one
    "policy in layer 0 does not fit": {"policy": ["Policy"]},
    "tensor layers.0.* is": {"batch": [2]},
    "{name} in layer 0 is {value!r}, not an integer from 1": {"length": ["130", -1, 1 << 31], "batch": [1.0, True, 0]},
    "{name} in layer 0 is {value!r}, not true or false": {"record_past": ["no", 0]},
    "{name} in layer 0 is {value!r}, not": {"latent": [0], "device": ["meta", 3]},
    "its header: {name} in layer 0 is {value!r}, not one of float64, ": {"dtype": ["float8", "int32"]},
    "its header: '{name}' in layer 0 is not known": {"surprise": [1]},
    "latent in layer 0 does not fit": {"latent": [True]},
    "index in layer 0 is .*, not an object": {"index": [{"bounds": ["float32", None]}, {"bounds": [[], [1]]}]},
    "channels in layer 0 does not fit": {"stats_tokens": [1]},
    "tensor layers.0.stats_centre is missing": {"query_heads": [4]},
    "tensor layers.0.near_kv": {"near": [53]},
}
STATE = {
    "{name} in the state is": {"layers": [[], 3], "model": [{"model_type": [[]]}], "cache": [["x"]]},
    "layer 0 is 3, not an object": {"layers": [[3]]},
    "{name} in the state is {value!r}, not": {"config": [3, []], "model": ["llama"], "record_past": [1]},
    "{name} is {value!r}, not an object": {"channel_file": [3], "rows": [None]},
    "'{name}' in the state is not known": {"more": [1]},
    "lengths in rows is missing": {"rows": [{}]},
}
WHOLE = {
    DEEP: "its header: it is nested too deeply",
    "{": "its header",
    "{}": "its header: cache in the state is missing",
    "3": "the state is 3, not an object",
    "NaN": "the state is nan, not an object",
}
CONFIGURATION = {
    "near buffer in layer 0 does not fit": {"sinks": [1 << 40], "window": [1 << 40], "max_draft": [1 << 40]},
    "config in the state is": {"window": [10**30], "level": [[]]},
    "{name} in the configuration is {value!r}": {"block_size": [1 << 40, 16.0]},
    "policy in layer 0 does not fit": {"dense_layers": [1]},
    "label_channels=32 exceeds": {"label_channels": [32]},
    "index in layer 0 does not fit": {"label_channels": [8]},
    "its configuration: lag must be True or False": {"lag": [1]},
    "its configuration: channel_file must be text, a path or None": {"channel_file": [3]},
    "channel_file does not fit the rest": {"channel_file": ["x"]},
}


def _cases(file, place, table):
    """Each value in turn: the file, what is changed in it, and what is said."""
    for says, fields in table.items():
        for name, values in fields.items():
            for value in values:
                message = says.replace("{name}", name).replace("{value!r}", re.escape(repr(value)))
                yield file, {"state": lambda held, new={name: value}: place(held).update(new)}, message


DAMAGED = [
    *(("path", {"tensors": change}, says) for change, says in TENSORS),
    *(
        ("padded", {"state": lambda held, new=entry: held["rows"].update(new), "tensors": change}, says)
        for entry, change, says in ROWS_AND_TENSORS
    ),
    *(("path", {"metadata": lambda meta, text=text: meta.update(state=text)}, says) for text, says in WHOLE.items()),
    *_cases("padded", lambda held: held["rows"], ROWS),
    *_cases("path", lambda held: held["layers"][0], LAYERS),
    *_cases("path", lambda held: held, STATE),
    *_cases("path", lambda held: held["config"], CONFIGURATION),
]


@pytest.mark.parametrize(("file", "changes", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged(file, changes, message, tmp_path, request):
    with pytest.raises(ValueError, match=rf"is damaged \(.*{message}"):
        SparseCache.load(rewrite(request.getfixturevalue(file), tmp_path / "x", **changes))


def test_rows_share_blocks_at_the_same_places_only(tmp_path):
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    cache.reorder_cache(torch.tensor([0, 0]))
    cache.save(tmp_path / "shared")
    assert SparseCache.load(tmp_path / "shared").get_seq_length() == 130
    with pytest.raises(ValueError, match=f"table {NO_FIT}"):
        SparseCache.load(rewrite(tmp_path / "shared", tmp_path / "x", tensors=_put("table", 1, 0)))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"max_length": 1 << 27}, r"64\.00 GiB \(max_length=134217728, 4 blocks"),
        ({"num_blocks": 1 << 27}, r"2\.00 GiB \(max_length=None, 134217728 blocks"),
        ({"token_budget": 1 << 40, "num_blocks": None}, r"1024\.00 GiB \("),
    ],
)
def test_a_small_file_may_not_reserve_much(path, tmp_path, monkeypatch, config, size):
    """Who trusts it says so; nothing is allocated before."""
    file = rewrite(path, tmp_path / "x", state=_configured(**config))
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: pytest.fail("memory was taken"))
    message = rf"{file} reserves {size}.*than the 256\.0 MiB that a file of .*: pass config, with as much"
    with pytest.raises(ValueError, match=message):
        SparseCache.load(file)


def test_a_file_may_reserve_as_much_as_is_usual(path, tmp_path, monkeypatch):
    """Room for some times the prompt; with the configuration given, whatever it says."""
    file = rewrite(path, tmp_path / "x", state=_configured(max_length=5000))
    for config in (None, replace(two_level(**TIGHT).config, max_length=5000)):
        loaded = SparseCache.load(file, config=config)
        assert loaded.config.max_length == 5000
        assert (
            loaded.sparse_layers[0].store.block_table.shape[1] == 320
        )  # 313 blocks; rows of the table are whole 16ths apart
        monkeypatch.setattr(persistence, "_RESERVED", 0)
        monkeypatch.setattr(persistence, "_RESERVED_TIMES", 1)
    with pytest.raises(ValueError, match=r"reserves 2\.4 MiB"):
        SparseCache.load(file)


def test_other_files(path, tmp_path):
    """Truncated, of another version, of something else, and none at all."""
    whole, other = path.read_bytes(), tmp_path / "other"
    for keep in (0, 7, 500, -1):
        other.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match="is not a saved cache, or it is truncated"):
            SparseCache.load(other)
    with pytest.raises(ValueError, match=r"format version 3, of hf-sparsekv .* reads version 4: load it"):
        SparseCache.load(rewrite(path, other, metadata=lambda meta: meta.update(version="3")))
    with pytest.raises(ValueError, match="is not a saved cache"):
        SparseCache.load(rewrite(path, other, metadata=lambda meta: meta.update(format="x")))
    save_file({"x": torch.zeros(3)}, other)
    with pytest.raises(ValueError, match=r"other is not a saved cache: make one with cache\.save"):
        SparseCache.load(other)
    with pytest.raises(FileNotFoundError, match=r"no saved cache at .*make one with cache\.save"):
        SparseCache.load(tmp_path / "none")


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="nothing is cached yet"):
        two_level().save(tmp_path / "x")
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    cache.sparse_layers[1].broken = "an error"
    with pytest.raises(RuntimeError, match="incomplete after an error"):
        cache.save(tmp_path / "x")
    cache = two_level(lag=False, **TIGHT)
    rows = cache.rows(max_rows=2, max_length=200)
    rows.join(rows.prefill(model("llama"), IDS))
    with pytest.raises(ValueError, match="rows that come and go cannot be saved yet: save the cache of a prompt"):
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
    long = tmp_path / ("x" * 256)
    with pytest.raises(OSError, match=rf"File name too long: '{long}'"):
        cache.save(long)
    assert not os.listdir(tmp_path)
    cache.save(tmp_path / ("x" * 255))  # the hidden file's name is no longer


@pytest.mark.parametrize("device", ["cuda:77", "hpu", "vulkan:1", "nothing:1"])
def test_device_that_is_not_here(path, tmp_path, device):
    with pytest.raises(ValueError, match=rf"was saved on {device}, which is not here [\s\S]*: pass device="):
        SparseCache.load(rewrite(path, tmp_path / "x", device=device))


def test_host_limit(path):
    with pytest.raises(MemoryError):
        OffloadedSparseCache.load(path, offload=OffloadConfig(max_host_bytes=1000))


def test_defaults_are_the_saved_configuration_and_the_constructors_place(path, tmp_path):
    """Each class has its own: two-level caches offload, progressive ones stay on the device."""
    loaded = OffloadedSparseCache.load(path)
    assert loaded.config == two_level(**TIGHT).config != TokenConfig()
    assert str(loaded).startswith("OffloadedSparseCache(130 tokens on host")
    assert SparseCache.load(path).offload_config == OffloadConfig() == OffloadedSparseCache().offload_config
    cache = CACHES["progressive"]()
    feed(cache, prompt(1, 90)["input_ids"])
    cache.save(tmp_path / "progressive")
    for kind in (SparseCache, ProgressiveCache):
        assert kind.load(tmp_path / "progressive").offload_config is None
    assert SparseCache.load(tmp_path / "progressive", offload=OffloadConfig()).offload_config is not None
