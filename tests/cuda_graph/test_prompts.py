"""Short prompts that are captured without a cache: what every cache then holds, and what is left to the host."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from caches import ALL, HOST_RANK, ONE_EACH, SMALL, TIGHT, two_level
from calls import EmptyGraphs, calls
from captured import imitated, on_gpu, pair, same_counts
from models import model, prompt
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig
from hf_sparsekv.cuda_graph import prompts
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.cuda_graph.prompts import EAGER, paused_passes
from hf_sparsekv.cuda_graph.runner import StepRunner
from hf_sparsekv.layers.adopting import adopts

GO = {"do_sample": False, "max_new_tokens": 4}
FIRST = EAGER + 2  # prompts until one of a new model is captured: the first tells what layers it has


def plain():
    """A cache of the default method on the device."""
    return two_level(False, level="auto", lag=False, **TIGHT)


@torch.no_grad()
def read(net, tokens: int, times: int = 1, cache=plain, rows: int = 1, seed: int = 0):
    """The logits of the last of several equal prompts, each in a new cache."""
    for _ in range(times):
        out = net(prompt(rows, tokens, seed=seed)["input_ids"], past_key_values=cache(), logits_to_keep=1)
    return out.logits


@pytest.fixture(scope="module")
def replayed():
    """A model whose prompts are replayed, of 2 x 90, 2 x 20 and 1 x 90 tokens at once, and what replays them."""
    net, runner = imitated()
    for rows, tokens in ((2, 90), (2, 20), (1, 90)):
        read(net, tokens, FIRST, lambda: ALL["streaming"](**TIGHT), rows)
    return net, runner


def labels(cache) -> list:
    """The source of each layer's labels: a file, or calibration."""
    found = []
    for layer in cache.sparse_layers:
        if (own := layer.policy.labels) is not None:
            known = (own.channels, own.norms) if own.stats is None else (own.stats.q, own.stats.moments.squares)
            found.append((own.stats is None, None if own.stats is None else own.stats.tokens, *known))
    return found


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize(
    ("name", "tokens"), [(name, 90) for name in ALL] + [(name, 20) for name in ("host", "device-default", "streaming")]
)
def test_every_cache_holds_what_an_eager_prompt_leaves(replayed, name, tokens):
    """Texts, counters, labels and channels; in a new cache and in one that was used."""
    net, runner = replayed
    inputs = prompt(2, tokens, seed=3)
    mine, theirs = ALL[name](**TIGHT), ALL[name](**TIGHT)
    read(net, tokens, EAGER, lambda: ALL[name](**TIGHT), 2)  # each kind of calibration has graphs of its own
    plain = model("llama")
    for _ in range(2):
        before, found = runner.prompts.replays, []
        for reads, cache in ((net, mine), (plain, theirs)):
            with torch.no_grad():
                first = reads(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
            ids = torch.cat((inputs["input_ids"], first[:, None]), dim=1)
            found.append(plain.generate(ids, past_key_values=cache, attention_mask=torch.ones_like(ids), **GO))
        assert torch.equal(*found)
        if name not in HOST_RANK:
            same_counts(mine, theirs)
        for one, other in zip(labels(mine), labels(theirs)):
            assert one[:2] == other[:2]
            for x, y in zip(one[2:], other[2:]):
                assert (x is None) == (y is None)
                if x is not None:
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        mine.reset(), theirs.reset()
    fits = all(adopts(layer.policy) for layer in mine.sparse_layers)
    assert runner.prompts.replays - before == fits


def test_a_shorter_prompt_is_padded(replayed):
    """Lengths within a size share its graph, whatever came before in its memory."""
    net, runner = replayed
    captures = runner.prompts.captures
    for tokens in (90, 64, 51, 64):
        inputs = prompt(1, tokens, seed=tokens)
        mine, theirs = ALL["streaming"](**TIGHT), ALL["streaming"](**TIGHT)
        expected = model("llama").generate(**inputs, past_key_values=theirs, **GO)
        assert torch.equal(net.generate(**inputs, past_key_values=mine, **GO), expected)
    assert runner.prompts.captures == captures


def eagerly(net, runner, run) -> None:
    """``run()`` gives what it gives on a model that is not captured, and is not replayed."""
    before = runner.prompts.replays
    found = run(net)
    assert runner.prompts.replays == before
    assert torch.equal(found, run(model("llama")))


PIECE = (12, 16, 9, 14, 100, 70, 80, 90)


@pytest.mark.few
@torch.no_grad()
@pytest.mark.parametrize("name", ["device", "device-default", "device-tail", "need", "progressive", "predictive"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("whole", [False, True], ids=["last", "all"])
def test_pieces_behind_what_is_cached(replayed, name, rows, whole):
    """Logits, texts and counters of a few tokens behind others are those of eager passes; so they are after a crop."""
    net, runner = replayed
    text, at = prompt(rows, 600, seed=9)["input_ids"], 100
    mine, theirs = ALL[name](**TIGHT), ALL[name](**TIGHT)
    both = (net, mine), (model("llama"), theirs)
    for reads, cache in both:
        reads(text[:, :at], past_key_values=cache)
    before = runner.prompts.replays
    for n in PIECE:
        one, other = (
            reads(text[:, at : at + n], past_key_values=cache, logits_to_keep=n if whole else 1).logits
            for reads, cache in both
        )
        assert one.shape[1] == (n if whole else 1)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        at += n
        ids = torch.cat((text[:, :at], one[:, -1].argmax(-1)[:, None]), dim=1)
        go = {**GO, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(*(model("llama").generate(ids, past_key_values=cache, **go) for cache in (mine, theirs)))
        for cache in (mine, theirs):
            cache.crop(at - cache.get_seq_length())
        same_counts(mine, theirs)
    assert runner.prompts.replays - before >= 2


@torch.no_grad()
def test_pieces_that_are_left_alone(replayed, monkeypatch):
    """Blocks in host memory, padding, many tokens, and what would read too much."""
    net, runner = replayed
    ids = prompt(1, 600)["input_ids"]

    def read_behind(cache, n: int, times: int = EAGER + 2) -> int:
        before = runner.prompts.replays
        net(ids[:, :200], past_key_values=cache)
        for _ in range(times):
            net(ids[:, 200 : 200 + n], past_key_values=cache, logits_to_keep=1)
            cache.crop(-n)
        return runner.prompts.replays - before

    assert not read_behind(ALL["host-default"](**TIGHT), 8)
    assert not read_behind(plain(), 300)
    monkeypatch.setattr(prompts, "WORK", 1e5)
    assert not read_behind(plain(), 16)
    monkeypatch.undo()
    assert read_behind(plain(), 16) == 2
    padded = plain()
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    net(ids[:, :200], attention_mask=mask[:, :200], past_key_values=padded)
    before = runner.prompts.replays
    for _ in range(EAGER + 1):
        net(ids[:, 200:216], attention_mask=mask[:, :216], past_key_values=padded, logits_to_keep=1)
        padded.crop(-16)
    assert runner.prompts.replays == before


@torch.no_grad()
@pytest.mark.parametrize("pads", [(7,), (0, 21)])
@pytest.mark.parametrize("given", [False, True])
def test_pieces_that_show_padding_again_are_refused(replayed, pads, given):
    """However often they come: a replay would read on as if the padding were tokens."""
    net, runner = replayed
    ids, mask = prompt(len(pads), 216, pads).values()
    cache, before = plain(), runner.prompts.replays
    net(ids[:, :200], attention_mask=mask[:, :200], past_key_values=cache)
    more = {"attention_mask": torch.ones_like(mask)} if given else {}
    for _ in range(EAGER + 2):
        with pytest.raises(ValueError, match="shows padding again"):
            net(ids[:, 200:], past_key_values=cache, logits_to_keep=1, **more)
    assert runner.prompts.replays == before


@torch.no_grad()
def test_a_pool_of_other_blocks_has_pieces_of_its_own(replayed, monkeypatch):
    """It may come to lie where another cache's was, with rings of the same shape: that one's graph reads it wrong."""
    net, runner = replayed
    text, kinds = prompt(1, 330, seed=4)["input_ids"], []
    monkeypatch.setattr(runner.prompts, "_new", lambda kind: kinds.append(kind))
    for block_size, window in ((16, 32), (32, 16)):
        cache = two_level(False, level="auto", lag=False, **TIGHT | {"block_size": block_size, "window": window})
        net(text[:, :300], past_key_values=cache)
        for _ in range(EAGER + 1):
            net(text[:, 300:], past_key_values=cache, logits_to_keep=1)
            cache.crop(300 - cache.get_seq_length())
    first, second = kinds[0], kinds[-1]
    assert first.ring == second.ring and first != second._replace(pools=first.pools, width=first.width)


@torch.no_grad()
def test_other_passes_run_eagerly(replayed):
    """Padding, all logits, hidden states, other masks and positions, a past, autocast: not even the output differs."""
    net, runner = replayed
    ids = prompt(2, 90)["input_ids"]
    padded = prompt(2, 90, (0, 30))
    whole = torch.ones(2, 1, 90, 90, dtype=torch.bool).tril()

    def cache():
        return ALL["streaming"](**TIGHT)

    def second(net):
        held = cache()
        net(ids[:, :40], past_key_values=held)
        return net(ids[:, 40:], past_key_values=held, logits_to_keep=1).logits

    eagerly(net, runner, lambda net: net(**padded, past_key_values=cache(), logits_to_keep=1).logits)
    eagerly(net, runner, lambda net: net(ids, past_key_values=cache()).logits)
    eagerly(net, runner, lambda net: net(ids, past_key_values=cache(), logits_to_keep=torch.tensor([3])).logits)
    eagerly(net, runner, lambda net: net(ids, attention_mask=whole, past_key_values=cache(), logits_to_keep=1).logits)
    more = {"output_hidden_states": True, "logits_to_keep": 1}
    eagerly(net, runner, lambda net: net(ids, past_key_values=cache(), **more).hidden_states[1])
    eagerly(net, runner, second)

    def sparse():
        return two_level(False, level="auto", lag=False, prefill=0.9, prefill_below=64, **TIGHT)

    eagerly(net, runner, lambda net: [read(net, 90, 1, sparse, 2) for _ in range(FIRST)][-1])
    eagerly(net, runner, lambda net: net(ids[:, :1], past_key_values=cache(), logits_to_keep=1).logits)
    with torch.autocast("cpu", torch.bfloat16):
        eagerly(net, runner, lambda net: net(ids, past_key_values=cache(), logits_to_keep=1).logits)
    with torch.enable_grad():
        eagerly(net, runner, lambda net: net(ids, past_key_values=cache(), logits_to_keep=1).logits.detach())
    before = runner.prompts.replays
    net(ids, past_key_values=cache(), logits_to_keep=1)
    assert runner.prompts.replays == before + 1


def test_inference_mode():
    """Prompts and pieces that are captured and stored there go on outside."""
    net, runner = imitated()
    mine, theirs = plain(), plain()
    ids = prompt(1, 200)["input_ids"]
    with torch.inference_mode():
        for _ in range(FIRST + 1):
            mine.reset()
            net(ids[:, :100], past_key_values=mine, logits_to_keep=1)
        for _ in range(EAGER + 2):
            net(ids[:, 100:130], past_key_values=mine, logits_to_keep=1)
            mine.crop(-30)
    assert runner.prompts.replays == 4
    expected = model("llama").generate(ids, past_key_values=theirs, **GO)
    assert torch.equal(net.generate(ids, past_key_values=mine, **GO), expected)


def test_a_change_of_the_model_is_seen():
    net, runner = imitated()
    read(net, 60, FIRST)
    before = read(net, 60)
    assert runner.prompts.replays == 2
    with torch.no_grad():
        net.model.layers[0].mlp.down_proj.weight.mul_(3.0)  # in place: a replay reads it
    assert not torch.equal(read(net, 60), before)
    assert runner.prompts.replays == 3
    net.model.layers[0].mlp = net.model.layers[1].mlp
    changed = read(net, 60)
    assert runner.prompts.replays == 3, "it was to run eagerly, and counts anew"
    torch.testing.assert_close(read(net, 60, EAGER + 1), changed)
    assert runner.prompts.replays == 4
    seen = []
    handle = net.model.layers[1].register_forward_hook(lambda *given: seen.append(0))
    read(net, 60, FIRST + 1)
    assert len(seen) == FIRST + 1, "hooks of others are called"
    handle.remove()
    read(net, 60, FIRST)
    assert runner.prompts.replays == 5
    runner.remove()
    assert not runner.prompts.graphs and runner.prompts._memory is None


@pytest.mark.few(name=("gemma3", "deepseek-v3"))
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "deepseek-v3"])
def test_models_that_are_left_alone(name):
    """Sliding layers, experts, latents."""
    net, runner = imitated(name)
    inputs = prompt(1, 40)
    for _ in range(FIRST):
        expected = model(name).generate(**inputs, past_key_values=plain(), **GO)
        assert torch.equal(net.generate(**inputs, past_key_values=plain(), **GO), expected)
    assert runner.prompts.captures == 0


def test_passes_that_may_pause_are_replayed_only_if_quick(monkeypatch):
    net, runner = imitated()
    monkeypatch.setattr(prompts, "QUICK", 128)
    with paused_passes():
        read(net, 60, FIRST + 1)
    assert runner.prompts.captures == 0, "a pass that pauses is never captured"
    for tokens in (60, 200):
        read(net, tokens, FIRST)
    before = runner.prompts.replays
    with paused_passes():
        read(net, 60)
        read(net, 200)
        other = threading.Thread(target=read, args=(net, 200))  # the other threads are not meant
        other.start()
        other.join()
    assert runner.prompts.replays == before + 2


def test_what_cannot_be_captured_runs_eagerly_and_says_why(monkeypatch):
    net, runner = imitated()

    def fails(run, device, saved):
        raise RuntimeError("no such luck\nin detail")

    monkeypatch.setattr(runner.recorder, "record", fails)
    expected = read(net, 60, FIRST - 1)
    with pytest.warns(UserWarning, match="short prompts run eagerly.*no such luck"):
        assert torch.equal(read(net, 60), expected)
    assert torch.equal(read(net, 60), expected)
    assert runner.prompts.captures == 0


@torch.no_grad()
def test_pieces_that_cannot_be_captured_leave_prompts_alone(monkeypatch):
    net, runner = imitated()
    read(net, 60, FIRST)
    cache, ids = plain(), prompt(1, 120)["input_ids"]
    net(ids[:, :100], past_key_values=cache)

    def fails(*given):
        raise ValueError("out of registers")

    monkeypatch.setattr("hf_sparsekv.cuda_graph.prompt_tape.attend_at_once", fails)
    for nth in range(EAGER + 2):
        with warnings.catch_warnings(record=True) as told:
            net(ids[:, 100:116], past_key_values=cache, logits_to_keep=1)
        assert any("out of registers" in str(one.message) for one in told) == (nth == EAGER)
        cache.crop(-16)
    read(net, 60, FIRST)
    assert runner.prompts.replays == 1 + 2, "the passes before have told what layers there are"


def test_an_error_while_storing_is_told(replayed, monkeypatch):
    (net, _), cache = replayed, plain()
    read(net, 90, EAGER + 1)
    ids = prompt(1, 90)["input_ids"]

    def full(*given):
        raise MemoryError("no room")

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("hf_sparsekv.kv.store.LayerStore.took", full)
        with pytest.raises(MemoryError):
            net(ids, past_key_values=cache, logits_to_keep=1)
    with pytest.raises(RuntimeError, match="incomplete after an error"), torch.no_grad():
        net(ids, past_key_values=cache, logits_to_keep=1)
    cache.reset()
    with torch.no_grad():
        found = net(ids, past_key_values=cache, logits_to_keep=1).logits
    torch.testing.assert_close(found, read(net, 90))


class NoWaits(TorchDispatchMode):
    """Counts torch operations, and raises where the host reads the device."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.count, self.reads = 0, reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        assert self.reads or func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


class Watched(EmptyGraphs):
    """Recording must not wait for the device."""

    def record(self, run, device, saved):
        with NoWaits():
            return super().record(run, device, saved)


LAYERS, PROMPT = 12, 300


@pytest.fixture(scope="module")
def bare():
    """A model of some layers whose graphs do nothing."""
    size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, vocab_size=50, **size)).eval()
    net.set_attn_implementation("sparsekv")
    StepRunner(net, Watched()).install()
    return net


@torch.no_grad()
@pytest.mark.parametrize(
    ("offload", "used", "most_calls", "most_operations"),
    [(None, False, 120, 21), (None, True, 90, 16), (OffloadConfig(), False, 180, 45)],
    ids=["new", "used", "offloaded"],
)
def test_the_host_does_little(bare, offload, used, most_calls, most_operations, monkeypatch):
    """Calls of ours and torch operations a layer, without what our own operators make of them on a CPU."""
    launched = []
    for operator in ("store.append", "sealing.seal_range", "together.append", "together.seal_range"):
        monkeypatch.setattr(f"hf_sparsekv.kv.{operator}", lambda *given, **named: launched.append(0))
    small = {key: value for key, value in SMALL.items() if key not in ("dense_layers", "dense_below")}
    ids = torch.arange(PROMPT)[None] % 50
    held = []

    def run() -> None:
        if not (used and held):
            held[:] = [OffloadedSparseCache(TokenConfig(**small, token_budget=64), offload)]
        else:
            held[0].reset()
        bare(ids, past_key_values=held[0], use_cache=True, logits_to_keep=1)

    for _ in range(FIRST):
        run()
    held.clear()  # memory of a cache whose first prompt ran eagerly is each layer's own
    run()
    found = calls(run)
    mine = sum(n for call, n in found.items() if call.has_name and not call.is_operator)
    launched.clear()
    with NoWaits(reads=True) as operations:
        run()
    print(mine / LAYERS, operations.count / LAYERS, len(launched))
    assert len(launched) == (4 if offload is None else 2 * LAYERS), "the dense layer, and the others"
    assert mine <= most_calls * LAYERS
    assert operations.count <= most_operations * LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["device-default", "host-default", "need-host-tail", "host-tail", "predictive"])
def test_on_a_gpu(name):
    """Prompts of several sizes, new and used caches: the texts of eager ones, and they were replayed."""
    eager, fast = pair("llama")
    runner = runner_of(fast)
    mine, theirs = ALL[name](**TIGHT), ALL[name](**TIGHT)
    for tokens in (90, 20, 300):
        for nth in range(EAGER + 3):
            inputs = on_gpu(1, tokens - nth, seed=nth)
            expected = eager.generate(**inputs, past_key_values=theirs, **GO)
            assert torch.equal(fast.generate(**inputs, past_key_values=mine, **GO), expected)
            mine.reset(), theirs.reset()
    assert runner.prompts.captures == 2  # 20 and 90 tokens have one size
    assert runner.prompts.replays >= 5 + 2


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", ["device-default", "need", "device-tail"])
@pytest.mark.parametrize("whole", [False, True], ids=["last", "all"])
def test_pieces_on_a_gpu(name, whole):
    eager, fast = pair("llama")
    text, at = prompt(1, 900, seed=9)["input_ids"].cuda(), 300
    mine, theirs = ALL[name](**TIGHT), ALL[name](**TIGHT)
    for reads, cache in ((fast, mine), (eager, theirs)):
        reads(text[:, :at], past_key_values=cache)
    for n in (30, 30, 30, 30, 120, 100, 120, 65, 9, 12, 16, 14):
        found = [
            reads(text[:, at : at + n], past_key_values=cache, logits_to_keep=n if whole else 1).logits
            for reads, cache in ((fast, mine), (eager, theirs))
        ]
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
        at += n
        ids = torch.cat((text[:, :at], found[0][:, -1].argmax(-1)[:, None]), dim=1)
        go = {**GO, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(*(eager.generate(ids, past_key_values=cache, **go) for cache in (mine, theirs)))
        for cache in (mine, theirs):
            cache.crop(at - cache.get_seq_length())
    assert runner_of(fast).prompts.replays >= 2  # of 30 tokens each; a pool that grows moves, and its kinds with it
