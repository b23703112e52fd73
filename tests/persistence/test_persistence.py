"""Caches in files: saved, loaded elsewhere and gone on with. Files that are refused: test_persistence_refusals.py."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from caches import ALL, CACHES, FULL, TELLING, TIGHT, UNSAVED, two_level
from models import build, model, prompt, reference
from saved_files import IDS, feed, same, saved, state, steps

from hf_sparsekv import OffloadConfig, SparseCache
from hf_sparsekv.layers.kinds import ready_for_steps
from hf_sparsekv.tuning.channels import calibrate

OFFLOAD = {True: OffloadConfig(), False: None}


# ---------------------------------------------------------------------- what is saved comes back


@pytest.mark.few(name=TELLING)
@pytest.mark.parametrize("name", ALL)
def test_everything_comes_back_and_goes_on(name, tmp_path):
    """Saved in the middle of an answer; padding, and rows that share no blocks."""
    cache = ALL[name](**TIGHT)
    inputs = prompt(2, 130, (0, 30))
    feed(cache, *inputs.values())
    steps(cache, 9)
    if name in UNSAVED:
        with pytest.raises(ValueError, match="cannot be saved yet"):
            cache.save(tmp_path / "cache")
        return
    copied = saved(cache, tmp_path, offload=cache.offload_config)
    assert type(copied) is type(cache) and copied.config == cache.config
    same(state(cache), state(copied))
    assert copied.stats().decode_steps == 0
    assert torch.equal(steps(cache, 11, seed=5), steps(copied, 11, seed=5))  # a block of 16 is sealed
    same(state(cache), state(copied))


@pytest.mark.few(name=("host", "device-tail", "progressive", "predictive-host", "streaming"))
@pytest.mark.parametrize("name", ["host", "device-token", "device-tail", "progressive", "predictive-host", "streaming"])
def test_rows_of_their_own_lengths(name, tmp_path):
    """Padding in front, between two turns and behind all tokens; a row that has no full block."""
    parts = prompt(3, 130, (0, 30, 120)), prompt(3, 40, (6, 0, 38), seed=1), prompt(3, 5, seed=2)
    parts[1]["attention_mask"][0, -7:] = 0
    cache, ids, mask = CACHES[name](**TIGHT), *(torch.cat([part[key] for part in parts], 1) for key in parts[0])
    feed(cache, ids[:, :130], mask[:, :130])
    feed(cache, ids[:, 130:170], mask[:, :170])
    rows = cache.joined_rows()
    assert (rows.lengths, rows.sealed) == ((157, 140, 12), (8, 7, 0))
    copied = saved(cache, tmp_path, offload=cache.offload_config)
    same(state(cache), state(copied))
    go = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20}
    assert torch.equal(*(model("llama").generate(ids, past_key_values=each, **go) for each in (cache, copied)))
    same(state(cache), state(copied))
    assert min(cache.joined_rows().sealed) > 0


@pytest.mark.parametrize("name", ["gemma3", "glm4-moe-lite"])
def test_an_answer_goes_on_elsewhere(name, tmp_path):
    """Off the device with the blocks chosen for the next step; sliding layers that had become rings."""
    cache = two_level(False, lag=True, **TIGHT)
    feed(cache, *prompt(2, 130, (0, 30)).values(), name)
    steps(cache, 9, name)
    ready_for_steps(cache)
    copied = saved(cache, tmp_path, offload=OFFLOAD[True], model_config=model(name).config)
    same(state(cache), state(copied))
    assert torch.equal(steps(cache, 30, name), steps(copied, 30, name))


@pytest.mark.parametrize(("length", "offload"), [(5, True), (25, False), (31, True)])
def test_while_calibrating(offload, length, tmp_path):
    """``calibration_tokens`` is 32; blocks may be sealed before."""
    cache = two_level(offload, **{**TIGHT, "window": 1})
    feed(cache, IDS[:, :length])
    copied = saved(cache, tmp_path, offload=OFFLOAD[offload])
    same(state(cache), state(copied))
    assert torch.equal(steps(cache, 45), steps(copied, 45))
    same(state(cache), state(copied))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, tmp_path):
    net = build("llama", "sparsekv").to(dtype)
    cache = two_level(**TIGHT)
    with torch.no_grad():
        net(IDS, past_key_values=cache)
        copied = saved(cache, tmp_path)
        same(state(cache), state(copied))
        assert torch.equal(*(net(IDS[:, :1], past_key_values=c).logits for c in (cache, copied)))
    with pytest.raises(ValueError, match=f"keys of dtype {dtype}, got torch.float32: keep one dtype"):
        feed(copied, IDS[:, :1])


def test_shared_blocks_are_stored_once(tmp_path):
    cache = two_level(**TIGHT)
    feed(cache, IDS)
    cache.save(tmp_path / "one")
    cache.batch_repeat_interleave(8)
    cache.save(tmp_path / "eight")
    copied = SparseCache.load(tmp_path / "eight")
    one, eight = ((tmp_path / name).stat().st_size for name in ("one", "eight"))
    near = sum(layer.store.recent_kv[1:].nbytes for layer in cache.sparse_layers)
    assert eight - one < near + 20_000
    # The one that grew may have room for more; blocks stored once for each row would take more than either.
    assert 0 < copied.memory_bytes()["host"] <= cache.memory_bytes()["host"]
    same(state(cache), state(copied))
    assert torch.equal(steps(cache, 30), steps(copied, 30))


def test_after_rows_were_dropped_and_cropped(tmp_path):
    """Physical blocks that nobody names stay behind."""
    cache = two_level(**TIGHT)
    feed(cache, *prompt(3, 200, (0, 30, 90)).values())
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.crop(-77)
    copied = saved(cache, tmp_path)
    same(state(cache), state(copied))
    assert copied.row_table.ids.used == sum(copied.joined_rows().sealed) < cache.row_table.ids.used
    assert torch.equal(steps(cache, 30), steps(copied, 30))


def test_a_prompt_that_is_to_join_rows(tmp_path):
    """Its blocks lie between others: the file holds its own."""
    net, batch = model("llama"), two_level(lag=False, **TIGHT)
    rows = batch.rows(max_rows=2, max_length=200)
    prompts = [prompt(1, n, seed=n)["input_ids"] for n in (130, 77)]
    first, second = (rows.prefill(net, ids).cache for ids in prompts)
    rows.join(first)
    copied = saved(second, tmp_path)
    same(state(second), state(copied))
    alone = two_level(lag=False, **TIGHT)
    for piece in prompts[1].tensor_split([alone.config.calibration_tokens], dim=1):  # rows calibrate on these alone
        feed(alone, piece)
    assert copied.row_table.ids.used == 3
    assert torch.equal(*(steps(each, 20) for each in (copied, alone)))


@pytest.mark.filterwarnings("ignore:no layer of this mistral model")
def test_sliding_layers_alone(tmp_path):
    """There is no row of ours; beams and files do without."""
    config = model("mistral-window").config
    cache = two_level(model_config=config, **TIGHT)
    feed(cache, *prompt(2, 90, (0, 30)).values(), "mistral-window")
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    copied = saved(cache, tmp_path, model_config=config)
    same(state(cache), state(copied))
    assert torch.equal(*(steps(each, 12, "mistral-window") for each in (cache, copied)))


def test_channel_file(tmp_path):
    """The channels are in the file: the one that they came from may be gone."""
    path = tmp_path / "channels"
    calibrate(build("llama", "sparsekv"), [IDS]).save(path)
    cache = two_level(channel_file=path, **TIGHT)
    feed(cache, IDS)
    with pytest.raises(ValueError, match=r"was saved with channel_file=.*got None"):
        cache.save(tmp_path / "saved")
        SparseCache.load(tmp_path / "saved", config=replace(cache.config, channel_file=None))
    copied = SparseCache.load(tmp_path / "saved", config=cache.config)
    same(state(cache), state(copied))
    path.rename(tmp_path / "elsewhere")
    SparseCache.load(tmp_path / "saved", config=replace(cache.config, channel_file=tmp_path / "elsewhere"))
    copied = SparseCache.load(tmp_path / "saved", model_config=model("llama").config)
    copied.reset()
    cache.reset()
    for each in (cache, copied):
        feed(each, IDS[:, :90])
    same(state(cache), state(copied))


# ---------------------------------------------------------------------- several questions


@pytest.mark.parametrize("from_host", [True, False], ids=["from-host", "from-device"])
def test_an_automatic_level_is_that_of_the_place(from_host, tmp_path):
    """Both store the labels alone, so either goes on from the other's file."""
    made = {place: CACHES[f"{place}-default"] for place in ("host", "device")}
    cache = made["host" if from_host else "device"](token_budget=32)
    feed(cache, IDS)
    assert saved(cache, tmp_path, offload=OFFLOAD[from_host]).config == cache.config
    other = saved(cache, tmp_path, offload=OFFLOAD[not from_host])
    fresh = made["device" if from_host else "host"](token_budget=32)
    feed(fresh, IDS)
    for each in (other, fresh):
        assert (each.sparse_layers[0].policy.fetches, each.config.level) == (not from_host, "auto")
    ids = torch.cat((IDS, prompt(1, 40, seed=2)["input_ids"]), 1)
    answers = [
        model("llama").generate(ids, past_key_values=each, do_sample=False, max_new_tokens=25)
        for each in (other, fresh)
    ]
    assert torch.equal(*answers)


@pytest.mark.pairwise
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
        fresh = two_level(to_host, **TIGHT, lag=from_host)  # as it was saved
        feed(fresh, IDS, name=name)
        assert torch.equal(found, model(name).generate(**common, past_key_values=fresh))
        assert loaded.get_seq_length() == IDS.shape[1]


@pytest.mark.filterwarnings("ignore:no layer of this mistral model")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt-oss", "mistral-window", "deepseek-v3"])
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
