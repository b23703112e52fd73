"""Label channels: the ranking's definition, online calibration, files."""

from __future__ import annotations

import pytest
import torch
from caches import TIGHT, predictive, two_level
from captured import Imitation
from inside import attention_of
from models import build, model, prompt
from safetensors import safe_open
from safetensors.torch import save_file
from saved_files import rewrite
from transformers import AttentionInterface, DynamicCache

from hf_sparsekv import SparseCache
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.predictor.channels import ChannelStats, LabelChannels
from hf_sparsekv.tuning.channels import calibrate

IDS = prompt(1, 120)["input_ids"]
_seen: dict[int, list] = {}


def _record(module, query, key, value, attention_mask, scaling=None, **kwargs):
    _seen.setdefault(module.layer_idx, []).append((query, key))
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2), None


AttentionInterface.register("recording_attention", _record)


def queries_and_keys(name, ids):
    """``{layer: (queries, keys)}`` of a forward without any cache of ours."""
    _seen.clear()
    with torch.no_grad():
        model(name, "recording_attention")(ids, past_key_values=DynamicCache())
    return {layer: calls[0] for layer, calls in _seen.items()}


def importance(q, k):
    """The formula for one row: ``q [Hq, n, D]``, ``k [H, n, D]``."""
    group = q.shape[0] // len(k)
    each = (q[head * group : (head + 1) * group].double().square().mean((0, 1)).sqrt() for head in range(len(k)))
    return torch.stack(list(each)).float() * k.double().std(1, correction=0).float()


def norms_of(k):
    """Mean and spread of ``k [H, n, D]``, as if one more key deviated as much as all channels do on average."""
    squares, n = (k - k.mean(1, keepdim=True)).square(), k.shape[1]
    return torch.stack((k.mean(1), ((squares.sum(1) + squares.mean((1, 2))[:, None]) / (n + 1)).sqrt()), 1)


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "qwen3"])
def test_ranking_follows_the_formula(name):
    channels = calibrate(build(name, "sdpa"), [IDS])
    assert channels.tokens == 120
    for layer, (q, k) in queries_and_keys(name, IDS).items():
        expected = importance(q[0], k[0]).argsort(-1, descending=True)
        assert torch.equal(channels.ranking[layer].long(), expected)


def test_several_texts():
    """Calibration over two texts is that over all of their tokens."""
    texts = [prompt(1, 60, seed=1)["input_ids"], prompt(1, 40, seed=2)["input_ids"]]
    channels = calibrate(model("llama"), texts)
    assert channels.tokens == 100
    parts = [queries_and_keys("llama", ids) for ids in texts]
    for layer in range(2):
        q, k = (torch.cat([part[layer][side][0] for part in parts], dim=1) for side in (0, 1))
        assert torch.equal(channels.ranking[layer].long(), importance(q, k).argsort(-1, descending=True))
        torch.testing.assert_close(channels.norms[layer], norms_of(k), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:no layer of this")
def test_calibrate_leaves_the_model_as_it_was():
    net = build("llama", "sdpa")
    calibrate(net, [IDS])
    assert attention_of(net) == "sdpa"
    with pytest.raises(ValueError, match="nothing to calibrate: no input was given"):
        calibrate(net, [])
    assert attention_of(net) == "sdpa"
    with pytest.raises(ValueError, match="the model has no full-attention layer"):
        calibrate(build("mistral-window", "sdpa"), [IDS])


def test_hybrid_ranks_its_full_layers_only(tmp_path):
    channels = calibrate(build("gemma3", "sdpa"), [IDS])
    assert (channels.ranking[[0, 2]] == -1).all()
    assert channels.ranking[1].sort(-1).values.tolist() == [list(range(16))] * 2
    path = tmp_path / "c.safetensors"
    channels.save(path)
    cache = two_level(channel_file=path, **TIGHT)
    model("gemma3").generate(**prompt(2, 100, (0, 30)), max_new_tokens=20, past_key_values=cache)
    assert cache.stats().sparse_calls > 0


def test_save_and_load(tmp_path):
    path = tmp_path / "channels.safetensors"
    made = calibrate(model("llama"), [IDS])
    made.save(path)
    read = LabelChannels.load(path)
    assert torch.equal(read.ranking, made.ranking) and read.ranking.dtype == torch.int32
    assert torch.equal(read.norms, made.norms) and read.norms.shape == (2, 2, 2, 16)
    assert (read.model, read.name, read.tokens) == (made.model, made.name, 120)
    assert read.model["head_dim"] == 16 and read.model["model_type"] == "llama"


def _put(*values):
    def put(ranking):
        ranking[1, 1, : len(values)] = torch.tensor(values, dtype=torch.int32)
        return ranking

    return put


BAD_NORMS = torch.ones(2, 2, 2, 8), torch.ones(2, 2, 2, 16).double(), torch.zeros(2, 2, 2, 16)
BAD_NORMS += (torch.full((2, 2, 2, 16), torch.nan),)
DEEP, EACH = "[" * 100_000 + "]" * 100_000, "the ranking of layer 1 does not name each of 16 channels once"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((_put(*values), EACH) for values in ((99999,), (16,), (-1,), (-2,), (5, 5))),
        (lambda ranking: ranking.float(), r"a channel ranking is int32 .*, got torch\.float32"),
        (lambda ranking: ranking.long(), r"a channel ranking is int32 .*, got torch\.int64"),
        (lambda ranking: ranking[0], r"a channel ranking is int32 \[layers, .*, got torch\.int32 \[2, 16\]"),
        (lambda ranking: ranking[:1], "the channel ranking has 1 layers, its model 2"),
        ({"model": None}, "it does not say its model"),
        ({"tokens": None}, "it does not say its tokens"),
        ({"model": "{"}, "Expecting property name"),
        ({"model": "[]"}, "the model's facts must be a dict, got list"),
        ({"model": DEEP}, "its header is nested too deeply"),
        ({"tokens": "many"}, "invalid literal"),
        *(
            ({"norms": norms}, r"norms are float32 \[2, 2, 2, 16\], finite, with spreads above zero")
            for norms in BAD_NORMS
        ),
    ],
    ids=range(15 + len(BAD_NORMS)),
)
def test_damaged_channel_files(tmp_path, change, message):
    """Kernels would read keys at any channel that a file names."""
    good, path = tmp_path / "good", tmp_path / "bad"
    calibrate(model("llama"), [IDS]).save(good)
    with safe_open(good, "pt") as file:
        ranking, about = file.get_tensor("ranking").clone(), file.metadata()
        norms = file.get_tensor("norms").clone()
    if isinstance(change, dict) and "norms" in change:
        norms = change["norms"]
    elif isinstance(change, dict):
        about = {name: text for name, text in (about | change).items() if text is not None}
    else:
        ranking = change(ranking)
    save_file({"ranking": ranking, "norms": norms}, path, metadata=about)
    damaged = rf"the channel file {path} is damaged \(.*{message}.*\): make it again with `hf-sparsekv calibrate`"
    with pytest.raises(ValueError, match=damaged):
        LabelChannels.load(path)
    with pytest.raises(ValueError, match=damaged):
        two_level(channel_file=path)


def test_channels_of_fewer_layers():
    """A cache that nobody has told the model."""
    made = calibrate(model("llama"), [IDS])
    fewer = LabelChannels(made.ranking[:1], made.model | {"num_hidden_layers": 1}, "", 1, made.norms[:1])
    cache = two_level(**TIGHT)
    cache.shared.channels = fewer
    x = torch.randn(1, 2, 40, 16)
    with pytest.raises(ValueError, match="the channel file has 1 layers, none for layer 1: calibrate this model"):
        SparseLayer.at(cache, 1).fill(x.repeat(1, 2, 1, 1), x, x)


@pytest.mark.parametrize("value", [99999, -2, 16, 5])
def test_damaged_channels_in_a_saved_cache(tmp_path, value):
    path, whole = tmp_path / "channels", tmp_path / "saved"
    calibrate(model("llama"), [IDS]).save(path)
    cache = two_level(channel_file=path, **TIGHT)
    prefill(cache, prompt(1, 120))
    cache.save(whole)

    def put(name):
        def change(held):
            held[name][-1, -1, :2] = torch.tensor([value, 5], dtype=torch.int32)

        return rewrite(whole, tmp_path / "x", tensors=change)

    with pytest.raises(ValueError, match=r"is damaged \(its configuration: the ranking of layer 1"):
        SparseCache.load(put("channel_file"))
    with pytest.raises(ValueError, match=r"is damaged \(channels in layer 1 (is out of range|does not fit)"):
        SparseCache.load(put("layers.1.channels"))

    def shift(held):
        held["layers.1.channels"].add_(1).remainder_(16)  # good channels, but not those of the file

    with pytest.raises(ValueError, match=r"is damaged \(channels in layer 1 does not fit"):
        SparseCache.load(rewrite(whole, tmp_path / "x", tensors=shift))

    def spoil(name):
        return lambda held: held[name][1, :, 1].fill_(-1.0)

    with pytest.raises(ValueError, match=r"is damaged \(its configuration: norms are float32"):
        SparseCache.load(rewrite(whole, tmp_path / "x", tensors=spoil("channel_norms")))
    with pytest.raises(ValueError, match=r"is damaged \(norms in layer 1 does not fit"):
        SparseCache.load(rewrite(whole, tmp_path / "x", tensors=lambda held: held["layers.1.norms"].zero_()))


# ---------------------------------------------------------------------- in a cache


def channels_of(cache):
    return [layer.policy.labels.channels for layer in cache.sparse_layers]


@torch.no_grad()
def prefill(cache, inputs, chunk=None):
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for lo in range(0, ids.shape[1], chunk or ids.shape[1]):
        at = slice(lo, lo + (chunk or ids.shape[1]))
        net = model("llama")
        net(ids[:, at], attention_mask=mask[:, : at.stop], position_ids=positions[:, at], past_key_values=cache)


def test_online_equals_a_file_of_the_same_prompt(tmp_path):
    path = tmp_path / "channels.safetensors"
    calibrate(model("llama"), [IDS]).save(path)
    online = two_level(label_channels=4, **TIGHT)
    fixed = two_level(channel_file=path, label_channels=4, **TIGHT)
    texts = []
    for cache in (online, fixed):
        inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
        texts.append(model("llama").generate(**inputs, max_new_tokens=40, do_sample=False, past_key_values=cache))
    for mine, theirs in zip(channels_of(online), channels_of(fixed)):
        assert mine.shape == (1, 2, 4)
        assert torch.equal(mine, theirs)
    assert torch.equal(*texts)


def test_padding_and_neighbours_do_not_count():
    """A row's channels are those it has alone."""
    together, pads = two_level(**TIGHT), (0, 43)
    inputs = prompt(2, 100, pads)
    prefill(together, inputs)
    for row, pad in enumerate(pads):
        alone = two_level(**TIGHT)
        ids = inputs["input_ids"][row : row + 1, pad:]
        prefill(alone, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        for mine, theirs in zip(channels_of(together), channels_of(alone)):
            assert torch.equal(mine[row : row + 1], theirs)


def test_channels_are_fixed_in_time():
    cache = two_level(**{**TIGHT, "calibration_tokens": 64})
    inputs = prompt(1, 200)
    start = {key: value[:, :63] for key, value in inputs.items()}
    prefill(cache, start)
    assert channels_of(cache) == [None, None]
    with torch.no_grad():
        model("llama")(inputs["input_ids"][:, 63:64], past_key_values=cache)
        first = channels_of(cache)
        assert all(c is not None for c in first)
        for token in inputs["input_ids"][:, 64:].split(1, dim=1):
            model("llama")(token, past_key_values=cache)
    assert all(mine is then for mine, then in zip(channels_of(cache), first))
    cache.reset()
    assert channels_of(cache) == [None, None]


def test_blocks_that_came_before_channels_get_labels():
    """Those of a prompt in one piece: both have been calibrated on all of it."""
    ids, found = prompt(1, 160)["input_ids"], []
    for pieces in (160, 80):
        cache = two_level(level="token", lag=False, calibration_tokens=100, **TIGHT)
        with torch.no_grad():
            for piece in ids.split(pieces, dim=1):
                model("llama")(piece, past_key_values=cache)
        store = cache.sparse_layers[0].store
        found.append(store.pool.fields["codes"][store.table.flatten().long()][: store.full_blocks])
    assert found[0].any() and torch.equal(*found)


def test_statistics_may_come_in_pieces():
    q, k = torch.randn(2, 4, 50, 8), torch.randn(2, 2, 50, 8)
    valid = torch.rand(2, 50) < 0.7
    whole, pieces = ChannelStats(), ChannelStats()
    whole.update(q, k, valid)
    for lo in range(0, 50, 13):
        at = slice(lo, lo + 13)
        pieces.update(q[:, :, at], k[:, :, at], valid[:, at])
    torch.testing.assert_close(pieces.scores(), whole.scores())
    for row in range(2):
        ok = valid[row]
        expected = importance(q[row][:, ok], k[row][:, ok])
        ratio = whole.scores()[row] / expected
        torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-4, atol=0)
        for stats in (whole, pieces):
            torch.testing.assert_close(stats.norms()[row], norms_of(k[row][:, ok]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [1, 7, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_spreads_about_a_large_mean(step, dtype):
    """A deviation of 1 about 400, as biases of keys are: sums of squares would lose it in float32."""
    k = torch.randn(2, 2, 512, 8)
    k[..., 3] += 400.0
    k[..., 5] -= 400.0
    k, valid = k.to(dtype), torch.rand(2, 512) < 0.8
    stats = ChannelStats()
    for lo in range(0, 512, step):
        part = k[:, :, lo : lo + step]
        stats.update(torch.ones(2, 4, *part.shape[2:]), part, valid[:, lo : lo + step])
    for row, ok in enumerate(valid):
        torch.testing.assert_close(stats.norms()[row], norms_of(k[row][:, ok].double()).float(), rtol=1e-3, atol=1e-4)


def test_channels_that_do_not_vary():
    """They are ranked last, and their spread is such that labels of later tokens can be told apart all the same."""
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    k[:, :, :, 2], q[:, :, :, 2] = 400.0, 50.0
    k[:, 1] = 3.0  # a head all of whose channels are constant
    stats = ChannelStats()
    stats.update(q, k, None)
    assert int(stats.ranking()[0, 0, -1]) == 2
    (centre, spread), other = stats.norms()[0, 0], stats.norms()[0, 1]
    assert centre[2] == 400 and 0.1 < spread[2] < 0.15 and spread.min() == spread[2]
    assert (other[0] == 3).all() and (other[1] == 1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_norms_of_keys_that_are_not_finite(value):
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 1, 20, 8)
    k[0, 0, 3, 5] = value
    stats = ChannelStats()
    for at in (slice(0, 7), slice(7, 20)):
        stats.update(q[:, :, at], k[:, :, at], None)
    norms = stats.norms()
    assert norms.isfinite().all() and (norms[:, :, 1] > 0).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
@pytest.mark.parametrize("make", [two_level, predictive])
def test_keys_stand_for_queries_until_there_are_some(make, name, captured):
    """Something else reads the beginning of a prompt, which is too short to make channels from."""
    net, ids = build(name, "sdpa"), prompt(2, 140)["input_ids"]
    if captured:
        Imitation(net).install()
    cache = make(False, token_budget=32, num_blocks=4)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="reads the keys"):
            net(ids[:, :20], past_key_values=cache)
        net.set_attn_implementation("sparsekv")
        stats = cache.sparse_layers[0].policy.labels.stats
        assert stats.keys_only and stats.q.shape[1] == stats.moments.centre.shape[1]
        for part in ids[:, 20:].split([3, *[1] * 117] if not captured else [1] * 120, dim=1):
            net(part, past_key_values=cache)
    assert not stats.keys_only and stats.q.shape[1] == 4
    assert cache.stats().sparse_calls > 0
