"""Caches in files: saved, loaded elsewhere and gone on with, and files that are refused."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace

import pytest
import torch
from caches import CACHES, FULL, TIGHT, UNSAVED, two_level
from models import build, model, prompt, reference
from safetensors import safe_open
from safetensors.torch import save_file

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, ProgressiveCache, SparseCache, TwoLevelConfig
from hf_sparsekv.layer import SparseLayer
from hf_sparsekv.predictor.channels import calibrate

OFFLOAD = {True: OffloadConfig(), False: None}
IDS = prompt(1, 130)["input_ids"]


@torch.no_grad()
def feed(cache, ids, mask=None, name="llama"):
    return model(name)(ids, attention_mask=mask, past_key_values=cache).logits


def steps(cache, n, name="llama", seed=4):
    """Logits of ``n`` given tokens, one at a time."""
    tokens = prompt(cache.layers[0].keys.shape[0], n, seed=seed)["input_ids"].split(1, dim=1)
    return torch.cat([feed(cache, token, name=name) for token in tokens], 1)


def saved(cache, tmp_path, **load):
    """The cache, by way of a file."""
    path = tmp_path / "context.safetensors"
    cache.save(path)
    assert os.listdir(tmp_path) == [path.name], "something was left beside the file"
    return SparseCache.load(path, **load)


def state(cache):
    """Everything that a cache knows, by value."""
    found = []
    for layer in cache.layers:
        if not isinstance(layer, SparseLayer):
            found.append((layer.keys, layer.values, layer.cumulative_length, layer.record_past))
            continue
        store, policy, fields = layer.store, layer.policy, layer.store.pool.fields
        at = store.table.long()
        host = (store.length, store.sealed, store.padded, store.batch, store.heads, store.dtype, store.device)
        tensors = [store.near_kv, store.near_valid, store.seen, store.pool.kv[at]]
        calibrating = getattr(policy, "_calibrating", False)
        tensors += [fields[name][at] for name in sorted(fields) if not (calibrating and name in ("codes", "qparams"))]
        for name in ("channels", "previous"):
            held = getattr(policy, name, None)
            tensors.append(torch.zeros(0) if held is None else held)
        if calibrating:
            tensors += [policy.stats.q, policy.stats.k]
            host += (policy.stats.tokens,)
        found.append((host, *tensors))
    return found


def same(a, b):
    for mine, theirs in zip(a, b, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype and x.shape == y.shape
                assert torch.equal(x.nan_to_num(), y.nan_to_num())
            else:
                assert x == y


# ---------------------------------------------------------------------- what is saved comes back


@pytest.mark.parametrize("name", CACHES)
def test_everything_comes_back_and_goes_on(name, tmp_path):
    """Saved in the middle of an answer; padding, and rows that share no blocks."""
    cache = CACHES[name](**TIGHT)
    inputs = prompt(2, 130, (0, 30))
    feed(cache, *inputs.values())
    steps(cache, 9)
    if name in UNSAVED:
        with pytest.raises(ValueError, match="cannot be saved yet"):
            cache.save(tmp_path / "cache")
        return
    twin = saved(cache, tmp_path, offload=cache.offload_config)
    assert type(twin) is type(cache) and twin.config == cache.config
    same(state(cache), state(twin))
    assert twin.stats().decode_steps == 0
    assert torch.equal(steps(cache, 40, seed=5), steps(twin, 40, seed=5))
    same(state(cache), state(twin))


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe-lite"])
def test_an_answer_goes_on_elsewhere(name, tmp_path):
    """Off the device with the blocks chosen for the next step; sliding layers that had become rings."""
    cache = two_level(False, lag=True, **TIGHT)
    feed(cache, *prompt(2, 130, (0, 30)).values(), name)
    steps(cache, 9, name)
    cache.use_rings()
    twin = saved(cache, tmp_path, offload=OFFLOAD[True], model_config=model(name).config)
    same(state(cache), state(twin))
    assert torch.equal(steps(cache, 30, name), steps(twin, 30, name))


@pytest.mark.parametrize("length", [5, 25, 31])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_while_calibrating(offload, length, tmp_path):
    """``calibration_tokens`` is 32; blocks may be sealed before."""
    cache = two_level(offload, **{**TIGHT, "window": 1})
    feed(cache, IDS[:, :length])
    twin = saved(cache, tmp_path, offload=OFFLOAD[offload])
    same(state(cache), state(twin))
    assert torch.equal(steps(cache, 70), steps(twin, 70))
    same(state(cache), state(twin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, tmp_path):
    net = build("llama", "sparsekv").to(dtype)
    cache = two_level(**TIGHT)
    with torch.no_grad():
        net(IDS, past_key_values=cache)
        twin = saved(cache, tmp_path)
        same(state(cache), state(twin))
        assert torch.equal(*(net(IDS[:, :1], past_key_values=c).logits for c in (cache, twin)))
    with pytest.raises(ValueError, match=f"keys of dtype {dtype}, got torch.float32: keep one dtype"):
        feed(twin, IDS[:, :1])


def test_shared_blocks_are_stored_once(tmp_path):
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    cache.save(tmp_path / "one")
    cache.batch_repeat_interleave(8)
    cache.save(tmp_path / "eight")
    twin = SparseCache.load(tmp_path / "eight")
    one, eight = ((tmp_path / name).stat().st_size for name in ("one", "eight"))
    near = sum(layer.store.near_kv[1:].nbytes for layer in cache.sparse_layers)
    assert eight - one < near + 20_000
    assert twin.memory_bytes()["host"] == cache.memory_bytes()["host"]
    same(state(cache), state(twin))
    assert torch.equal(steps(cache, 30), steps(twin, 30))


def test_after_rows_were_dropped_and_cropped(tmp_path):
    """Slots that nobody names stay behind."""
    cache = two_level(**TIGHT)
    feed(cache, *prompt(3, 200, (0, 30, 90)).values())
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.crop(-77)
    twin = saved(cache, tmp_path)
    same(state(cache), state(twin))
    assert twin.sparse_layers[0].store.pool.used < cache.sparse_layers[0].store.pool.used
    assert torch.equal(steps(cache, 30), steps(twin, 30))


def test_channel_file(tmp_path):
    """The channels are in the file: the one that they came from may be gone."""
    path = tmp_path / "channels"
    calibrate(build("llama", "sparsekv"), [IDS]).save(path)
    cache = two_level(channel_file=path, **TIGHT)
    feed(cache, IDS)
    with pytest.raises(ValueError, match=r"was saved with channel_file=.*got None"):
        cache.save(tmp_path / "saved")
        SparseCache.load(tmp_path / "saved", config=replace(cache.config, channel_file=None))
    twin = SparseCache.load(tmp_path / "saved", config=cache.config)
    same(state(cache), state(twin))
    path.rename(tmp_path / "elsewhere")
    SparseCache.load(tmp_path / "saved", config=replace(cache.config, channel_file=tmp_path / "elsewhere"))
    twin = SparseCache.load(tmp_path / "saved", model_config=model("llama").config)
    twin.reset()
    cache.reset()
    for each in (cache, twin):
        feed(each, IDS[:, :90])
    same(state(cache), state(twin))


# ---------------------------------------------------------------------- several questions


@pytest.mark.quick
@pytest.mark.parametrize("to_host", [True, False], ids=["to-host", "to-device"])
@pytest.mark.parametrize("from_host", [True, False], ids=["from-host", "from-device"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe-lite"])
def test_several_questions(name, from_host, to_host, tmp_path):
    """Each answer is that of a cache that was prefilled in the same two pieces."""
    cache = two_level(from_host, **TIGHT)
    feed(cache, IDS, name=name)
    loaded = saved(cache, tmp_path, offload=OFFLOAD[to_host], model_config=model(name).config)
    for seed, length in enumerate((5, 40)):
        ids = torch.cat((IDS, prompt(1, length, seed=seed + 1)["input_ids"]), 1)
        common = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 25}
        found = model(name).generate(**common, past_key_values=copy.deepcopy(loaded))
        fresh = two_level(to_host, **TIGHT)
        feed(fresh, IDS, name=name)
        assert torch.equal(found, model(name).generate(**common, past_key_values=fresh))
        assert loaded.get_seq_length() == IDS.shape[1]


@pytest.mark.filterwarnings("ignore:no layer of this mistral model")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "gpt-oss", "mistral-window", "deepseek-v3"])
def test_answers_are_full_attentions(name, tmp_path):
    """With a budget for everything; a padded batch."""
    inputs, more = prompt(2, 90, (0, 30)), prompt(2, 20, (6, 0), seed=1)
    joined = {key: torch.cat((inputs[key], more[key]), 1) for key in inputs}
    cache = two_level(**FULL, model_config=None if name != "mistral-window" else model(name).config)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        model(name)(**inputs, position_ids=positions, past_key_values=cache)
    loaded = saved(cache, tmp_path, model_config=model(name).config)
    same(state(cache), state(loaded))
    common = {**joined, "do_sample": False, "max_new_tokens": 15}
    found = model(name).generate(**common, past_key_values=loaded)
    assert torch.equal(found, reference(name).generate(**common))


@pytest.mark.parametrize("change", [{"token_budget": 48}, {"num_blocks": 6}, {"lag": False}, {"dense_below": 10_000}])
def test_another_way_to_decode(change, tmp_path):
    """A question, then steps, as if all had been prefilled with that configuration."""
    cache, fresh = two_level(**TIGHT), two_level(**{**TIGHT, **change})
    feed(cache, IDS)
    feed(fresh, IDS)
    loaded = saved(cache, tmp_path, config=fresh.config)
    assert loaded.config == fresh.config
    for each in (loaded, fresh):
        feed(each, IDS[:, :7])
    assert torch.equal(steps(loaded, 20), steps(fresh, 20))


def test_recorded_past(tmp_path):
    """Sliding layers that assistants may crop stay so."""
    cache = two_level(**TIGHT)
    cache.activate_past_recording()
    feed(cache, IDS, name="gemma3")
    loaded = saved(cache, tmp_path, model_config=model("gemma3").config)
    same(state(cache), state(loaded))
    for each in (cache, loaded):
        each.crop(-3)
    assert torch.equal(steps(cache, 1, "gemma3"), steps(loaded, 1, "gemma3"))


# ---------------------------------------------------------------------- refusals


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


def rewrite(path, to, tensors=lambda held: None, metadata=lambda held: None, **state):
    """The file with changes; ``state`` changes the first layer's entry."""
    with safe_open(path, "pt") as file:
        held, meta = {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    about = json.loads(meta["state"])
    about["layers"][0] |= state
    meta["state"] = json.dumps(about)
    tensors(held)
    metadata(meta)
    save_file(held, to, metadata=meta)
    return to


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
