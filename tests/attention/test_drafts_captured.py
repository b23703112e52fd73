"""Passes over drafts, captured: what eager passes give. Imitated here; on a GPU: test_drafts_gpu.py."""

from __future__ import annotations

import random

import pytest
import torch
from caches import CACHES, CODED, ONE_EACH, predictive, two_level
from captured import ImitatedGraphs, Imitation, calls_of, imitated, same_counts
from models import build, prompt
from test_drafts import MOST, TIGHT, bare, filled, repetitive, together, unannounced, ways

from hf_sparsekv import predict_ahead
from hf_sparsekv.cuda_graph.inputs import draft_width
from hf_sparsekv.kv.read_back import tokens
from hf_sparsekv.kv.ring import ring_tokens
from hf_sparsekv.kv.step_rows import StepRows

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*by that layer's own query"),
    pytest.mark.filterwarnings("ignore:decode steps run eagerly. hidden states"),
]

TOGETHER = ways("together")


def same_tokens(ours, theirs) -> None:
    """Both hold the same, in as many blocks."""
    for one, other in zip(ours.sparse_layers, theirs.sparse_layers):
        assert one.store.held.same(other.store.held)
        held = [tokens(layer.store)[:, :, : one.store.length] for layer in (one, other)]
        torch.testing.assert_close(*held, atol=1e-4, rtol=1e-4)


def alternate(net, plain, ours, theirs, n: int, lengths: list[int], seed: int = 0) -> float:
    """Passes of some lengths over both, drafts taken back between them; the largest difference of a logit."""
    draw, worst = random.Random(seed), 0.0
    for i in range(n):
        new = draw.choice(lengths)
        ids = prompt(1, new, seed=100 * seed + i)["input_ids"].to(net.device)
        found, expected = together(net, ids, ours), together(plain, ids, theirs)
        assert found.shape == expected.shape
        worst = max(worst, float((found - expected).abs().max()))
        if remove := draw.randint(0, new - 1):
            ours.crop(-remove)
            theirs.crop(-remove)
    return worst


@torch.no_grad()
def placed(net, ids, kv):
    """A pass, or a step, as loops give it: with positions, without which the host looks at all layers each time."""
    past = kv.get_seq_length()
    with kv.drafts():
        positions = torch.arange(past, past + ids.shape[1])[None]
        return net(input_ids=ids, position_ids=positions, past_key_values=kv).logits.clone()


@pytest.mark.quick
def test_room_of_a_graph():
    assert [draft_width(n, 17) for n in range(2, 18)] == [4, 4, 4, 8, 8, 8, 8, *[16] * 8, 17]
    assert [draft_width(n, 7) for n in range(2, 8)] == [4, 4, 4, 7, 7, 7]
    assert draft_width(2, 2) == 2


@pytest.mark.pairwise(once=("name",))
@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("net", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("name", TOGETHER)
def test_captured_passes_are_eager_ones(name, net):
    """And the steps between them. (Steps of predictive caches choose for another query where the model has hooks.)"""
    (fast, runner), plain = imitated(net), bare(net)
    ours, theirs = filled(fast, CACHES[name]), filled(plain, CACHES[name])
    blocks = ours.sparse_layers[-1].store.full_blocks
    lengths = [2, 3, MOST - 1, MOST, MOST]
    assert alternate(fast, plain, ours, theirs, 24, lengths if "predictive" in name else [1, *lengths]) < 1e-3
    assert runner.replays == 24
    assert runner.captures <= 8
    assert ours.sparse_layers[-1].store.full_blocks > blocks
    same_tokens(ours, theirs)
    assert ours.stats().draft_queries == theirs.stats().draft_queries > 0
    if not ours.config.dense_layers:  # whose passes are exact, and count as such, where they are eager
        same_counts(ours, theirs)


@pytest.mark.parametrize(
    "name", ["host-default-int8", "host-tail-int8", "progressive-host-int8", "streaming-host-int8"]
)
def test_codes_in_host_memory(name):
    (fast, runner), plain = imitated(), bare("llama")
    ours, theirs = filled(fast, CODED[name]), filled(plain, CODED[name])
    assert alternate(fast, plain, ours, theirs, 12, [1, 3, MOST, MOST]) < 1e-3
    assert runner.replays == 12
    same_tokens(ours, theirs)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["device-default", "host-default", "device-dense1", "progressive-host", "streaming"])
def test_prompt_lookup(name):
    """generate(): the same text, and the host looks at the layers only when a pass is the first of its width."""
    go = {"do_sample": False, "max_new_tokens": 60, "prompt_lookup_num_tokens": MOST - 1}
    (fast, runner), ours, theirs = imitated(), CACHES[name](**TIGHT), CACHES[name](**TIGHT)
    verified = calls_of(runner, "_verify")
    found = fast.generate(**repetitive(), past_key_values=ours, **go)
    assert torch.equal(found, bare("llama").generate(**repetitive(), past_key_values=theirs, **go))
    stats, expected = ours.stats(), theirs.stats()
    assert stats.draft_queries == expected.draft_queries > 0
    assert runner.replays == stats.decode_steps == expected.decode_steps
    assert len(verified) <= 5 < runner.replays - 4
    if name != "device-dense1":
        same_counts(ours, theirs)


def test_a_short_crop_is_a_change_of_the_table_alone(monkeypatch):
    net, runner = imitated()
    cache, ids = filled(net, CACHES["host-default"]), prompt(1, 4, seed=3)["input_ids"]
    first = placed(net, ids, cache)
    changes, layers = cache.changes, []
    monkeypatch.setattr(type(cache.sparse_layers[0]), "crop", lambda *args: layers.append(args))
    cache.crop(torch.tensor(-3))
    cache.crop(0)
    assert cache.get_seq_length() == 166
    assert cache.changes == changes
    cache.crop(165)
    assert [layer.get_seq_length() for layer in cache.sparse_layers] == [165, 165]
    assert not layers
    monkeypatch.setattr(runner, "_verify", None)  # no long look
    assert torch.equal(placed(net, ids, cache), first)
    monkeypatch.undo()
    cache.crop(-100)  # which takes back blocks
    assert cache.changes > changes
    assert cache.sparse_layers[0].store.full_blocks == (169 - 100 - 16) // 16
    unannounced(net, prompt(1, 99)["input_ids"], cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 167


@pytest.mark.pairwise(once=("name",))
@pytest.mark.parametrize("name", ["host-default", "device-default"])
@pytest.mark.parametrize("window", [1, 12, 32])
@pytest.mark.parametrize("max_draft", [1, 20, 40])
def test_several_blocks_are_sealed_in_a_pass(name, window, max_draft):
    """And windows and drafts of which the ring has no more room than they need. Each query finds what a step would."""
    (fast, runner), plain = imitated(), bare("llama")
    changes = {
        "window": window,
        "max_draft": max_draft,
        "token_budget": 2,
    }  # of all tokens, which more would read twice
    captured, eager, single = (filled(net, CACHES[name], **changes) for net in (fast, plain, plain))
    most, worst = max_draft + 1, 0.0
    for i in range(6):
        ids = prompt(1, most if i % 2 else max(2, most - 3), seed=i)["input_ids"]
        expected = torch.cat([unannounced(plain, token, single) for token in ids.split(1, dim=1)], dim=1)
        for net, cache in ((fast, captured), (plain, eager)):
            worst = max(worst, float((together(net, ids, cache) - expected).abs().max()))
    assert worst < 1e-3
    assert runner.replays == 6
    assert eager.stats().exact_calls == 0
    same_tokens(captured, single)
    same_tokens(eager, single)


@pytest.mark.quick
@pytest.mark.parametrize("window", [1, 16, 31, 64])
@pytest.mark.parametrize("max_draft", [0, 4, 16, 33])
def test_the_ring_holds_a_pass(window, max_draft):
    """Behind as many tokens as can be in it: no token that a query of the pass attends to is written over."""
    config = two_level(False, window=window, max_draft=max_draft).config
    assert ring_tokens(config) >= (window + max_draft + config.block_size - 1) + (max_draft + 1)


@pytest.mark.quick
@pytest.mark.parametrize("block_size, recent", [(16, 20), (32, 5), (64, 80)])
def test_rows_of_a_pass(block_size, recent):
    """As steps take them further, one token after the other."""
    for width in (3, 17, 40):
        for length in range(recent, recent + 3 * block_size, 7):
            for count in {1, 2, width // 2, width}:
                steps, single = (StepRows(1, torch.device("cpu")) for _ in range(2))
                start = [length, max(0, (length - recent) // block_size) * block_size]
                for one in (steps, single):
                    one.after.copy_(torch.tensor([start]))
                given = torch.tensor([count], dtype=torch.int32)
                queries, due = steps.begin_drafts(given, width, block_size, recent)
                seen = []
                for _ in range(count):
                    single.begin(None, block_size, recent)
                    seen.append(single.now[0].tolist())
                assert queries.tolist() == seen + [[0, 0]] * (width - count)
                assert steps.past.tolist() == [length]
                assert torch.equal(steps.after, single.after)
                assert due[0].tolist() == [[length + count, start[1]]]
                assert torch.equal(due[-1], single.after)
                sealed = torch.cat(due)[:, 1]
                assert int(sealed.diff().min()) >= 0
                assert int(sealed.diff().max()) <= block_size


def test_a_padding_token_among_drafts_is_read_exactly():
    net, runner = imitated()
    cache, plain = filled(net, CACHES["device-default"]), filled(bare("llama"), CACHES["device-default"])
    ids, mask = prompt(1, 3, seed=3)["input_ids"], torch.ones(1, 168, dtype=torch.long)
    for i in range(3):  # not the first time, nor where it is expected
        mask[0, -2] = i != 2
        found = []
        for one, kv in ((net, cache), (bare("llama"), plain)):
            with torch.no_grad(), kv.drafts():
                found.append(one(ids, attention_mask=mask, past_key_values=kv).logits.clone())
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
        mask = torch.cat((mask, torch.ones(1, 3, dtype=torch.long)), dim=1)
    assert runner.replays == 2
    assert cache.stats().exact_calls == plain.stats().exact_calls == 2


def test_padding_before_the_past():
    net, runner = imitated()
    found = []
    for one in (net, bare("llama")):
        kv, given, outs = two_level(False, level="token", **TIGHT), prompt(1, 165, (20,)), []
        mask = given["attention_mask"]
        with torch.no_grad():
            one(**given, past_key_values=kv)
            for i in range(4):
                ids = prompt(1, 4, seed=i)["input_ids"]
                mask = torch.cat((mask[:, : kv.get_seq_length()], torch.ones_like(ids)), dim=1)
                with kv.drafts():
                    outs.append(one(ids, attention_mask=mask, past_key_values=kv).logits.clone())
                kv.crop(-2)
        found.append(torch.cat(outs, dim=1))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert runner.replays == 4


@pytest.mark.parametrize("keep", [None, 0, 1, 3, 7])
def test_logits_that_are_asked_for(keep):
    """The last ones of the tokens that there are."""
    (net, runner), plain = imitated(), bare("llama")
    ours, theirs = filled(net, CACHES["device-default"]), filled(plain, CACHES["device-default"])
    more = {} if keep is None else {"logits_to_keep": keep}
    for seed in range(2):
        ids, found = prompt(1, 4, seed=seed)["input_ids"], []
        for one, kv in ((net, ours), (plain, theirs)):
            with torch.no_grad(), kv.drafts():
                found.append(one(ids, past_key_values=kv, **more).logits.clone())
        assert found[0].shape == found[1].shape
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert runner.replays == 2


@pytest.mark.parametrize("name", ["host-nolag", "host", "progressive", "rows", "delta", "hidden", "unsaid"])
def test_what_is_not_captured_runs_eagerly(name):
    """Choices that take each other's pages or are a step ahead, several rows, what tells tokens apart, more outputs."""
    (net, runner), plain = imitated(), build("llama", "sparsekv")
    batch, more = 2 if name == "rows" else 1, {"output_hidden_states": True} if name == "hidden" else {}
    make, changes = CACHES.get(name, CACHES["device-default"]), {}
    if name == "delta":
        make, changes = predictive, {"predictor": "layer:in_delta"}
        predict_ahead(plain)
    elif name == "progressive":
        changes = {"audit_every": 2}
    ours, theirs = filled(net, make, batch=batch, **changes), filled(plain, make, batch=batch, **changes)
    for seed in range(3):
        token, ids = prompt(batch, 1, seed=9 + seed)["input_ids"], prompt(batch, 4, seed=seed)["input_ids"]
        torch.testing.assert_close(
            unannounced(net, token, ours), unannounced(plain, token, theirs), atol=1e-4, rtol=1e-4
        )
        before, found = runner.replays, []
        for one, kv in ((net, ours), (plain, theirs)):
            with torch.no_grad(), kv.drafts(name != "unsaid"):
                found.append(one(ids, past_key_values=kv, **more).logits.clone())
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
        assert runner.replays == before
        for kv in (ours, theirs):
            kv.crop(-2)
    assert runner.replays == 3


def test_passes_that_cannot_be_captured_leave_steps_captured():
    class Refuses(ImitatedGraphs):
        def record(self, run, device, saved):
            output, graph = None, None
            if len(saved[0].layer.store.held.lengths) and saved[0].layer.captured is None:
                graph, output = super().record(run, device, saved)
            if output.logits.shape[1] > 1:
                raise RuntimeError("this model looks at its tokens")
            return graph, output

    net, plain = build("llama", "sparsekv"), bare("llama")
    runner = Imitation(net, Refuses())
    runner.install()
    ours, theirs = filled(net, CACHES["host-default"]), filled(plain, CACHES["host-default"])
    with pytest.warns(UserWarning, match="drafts are verified eagerly .this model looks at its tokens"):
        assert alternate(net, plain, ours, theirs, 12, [1, 3, MOST]) < 1e-3
    assert 0 < runner.replays < 12
    same_tokens(ours, theirs)


def test_what_is_marked():
    net, ids = bare("llama"), prompt(1, 4, seed=3)["input_ids"]
    fast, runner = imitated()
    ours, theirs = filled(fast, CACHES["host-default"]), filled(net, CACHES["host-default"])
    for kv in (ours, theirs):
        kv.watch_blocks()
    for seed in range(3):
        ids = prompt(1, 4, seed=seed)["input_ids"]
        together(fast, ids, ours)
        together(net, ids, theirs)
        for one, other in zip(ours.sparse_layers, theirs.sparse_layers):
            assert torch.equal(one.policy.watch.marks[..., :-1], other.policy.watch.marks[..., :-1])
    assert runner.replays == 3


def test_an_error_behind_a_pass_is_told(monkeypatch):
    net, _ = imitated()
    cache, ids = filled(net, CACHES["device-default"]), prompt(1, 4, seed=3)["input_ids"]
    together(net, ids, cache)

    def full(*args):
        raise MemoryError("no memory for statistics")

    monkeypatch.setattr(cache.replays, "add", full)
    with pytest.raises(MemoryError):
        together(net, ids, cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        together(net, ids, cache)


def test_a_step_has_no_more_to_ask():
    """Steps between passes stay expected, as passes do between steps."""
    net, runner = imitated()
    cache, looks = filled(net, CACHES["device-default"]), calls_of(runner, "_step")
    for i in range(30):
        placed(net, prompt(1, [1, 3, MOST][i % 3], seed=i)["input_ids"], cache)
        cache.crop(-(i % 2) * min(i % 3, 1))
    assert runner.replays == 30
    assert len(looks) <= 8
