"""optimize() without a GPU: captured decode steps give what eager ones give. With one: test_graphs_gpu.py."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from caches import ALL, FULL, TELLING, TIGHT, two_level
from captured import ImitatedGraphs, Imitation, imitated, same_counts, through_modes
from models import build, model, prompt, reference

from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.cuda_graph.recorder import Recorder
from hf_sparsekv.layers.kinds import ready_for_steps
from hf_sparsekv.layers.sliding import SlidingRing


def test_optimize_leaves_the_cpu_alone_and_says_so():
    ours = optimize(build("llama", "sparsekv"))
    inputs = prompt(2, 90, (0, 20))
    with pytest.warns(UserWarning, match="decode steps run eagerly: the model is not on a CUDA device"):
        found = ours.generate(**inputs, do_sample=False, max_new_tokens=20, past_key_values=two_level(**FULL))
    assert torch.equal(found, reference("llama").generate(**inputs, do_sample=False, max_new_tokens=20))
    assert runner_of(ours).captures == 0


def test_unoptimize_restores_everything():
    ours = build("llama", "sparsekv")
    before = {name: dict(module.__dict__) for name, module in ours.named_modules()}
    signature = inspect.signature(ours.forward)
    optimize(ours)
    assert inspect.signature(ours.forward) == signature
    assert optimize(ours) is ours, "a second call changes nothing"
    unoptimize(ours)
    assert {name: dict(module.__dict__) for name, module in ours.named_modules()} == before
    unoptimize(ours)


def test_what_cannot_be_optimised():
    with pytest.raises(ValueError, match="fused=True is not possible"):
        optimize(build("minicpm3", "sparsekv"), fused=True)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        optimize(build("llama", "sdpa"))


def fail_once(policy, error: Exception) -> None:
    """The policy's next attention raises."""
    original = policy.attend

    def fail(*args):
        policy.attend = original
        raise error

    policy.attend = fail


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_capture_that_fails_half_way_leaves_the_cache_usable(layer, error):
    """Inside a layer's attention: eagerly from then on, or captured the next time if memory was short."""
    ours, runner = imitated()
    inputs, caches = prompt(2, 90), (two_level(**TIGHT), two_level(**TIGHT))
    tokens = prompt(2, 12, seed=4)["input_ids"].split(1, dim=1)
    with torch.no_grad():
        for net, cache in ((model("llama"), caches[0]), (ours, caches[1])):
            net(**inputs, past_key_values=cache)
        fail_once(caches[1].sparse_layers[layer].policy, error("not now"))
        if error is torch.OutOfMemoryError:
            with pytest.raises(error):
                ours(tokens[0], past_key_values=caches[1])
            assert caches[1].get_seq_length() == 90
            found = [ours(token, past_key_values=caches[1]).logits.clone() for token in tokens]
        else:
            with pytest.warns(UserWarning, match="cannot be captured"):
                found = [ours(token, past_key_values=caches[1]).logits.clone() for token in tokens]
        expected = [model("llama")(token, past_key_values=caches[0]).logits for token in tokens]
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert (runner.replays > 0) == (error is torch.OutOfMemoryError)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_known_kind_that_must_be_compiled_after_all(layer):
    """The capture without a warm-up fails half-way, and is done again with one."""
    ours, runner = imitated()
    inputs, tokens = prompt(2, 90), prompt(2, 12, seed=4)["input_ids"].split(1, dim=1)
    results = []
    with torch.no_grad():
        for fails in (False, True):
            cache = two_level(**TIGHT)
            ours(**inputs, past_key_values=cache)
            if fails:
                fail_once(cache.sparse_layers[layer].policy, RuntimeError("cannot compile here"))
            results.append(torch.cat([ours(token, past_key_values=cache).logits.clone() for token in tokens]))
    assert torch.equal(*results)
    assert runner.replays == 2 * len(tokens)


def test_an_error_after_a_captured_step_breaks_the_cache(monkeypatch):
    """The device is a step ahead of the host: going on would lose tokens without a word."""
    ours, _ = imitated()
    cache, token = two_level(**TIGHT), prompt(1, 1)["input_ids"]
    with torch.no_grad():
        ours(**prompt(1, 90), past_key_values=cache)
        ours(token, past_key_values=cache)
        store = cache.sparse_layers[-1].store

        def full(indexer):
            raise MemoryError("host memory is full")

        monkeypatch.setattr(store, "seal_due", full)
        with pytest.raises(MemoryError, match="host memory is full"):
            ours(token, past_key_values=cache)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            ours(token, past_key_values=cache)


def test_padding_in_the_middle_of_an_answer_is_noticed():
    """A captured step of an unpadded batch does not wait to look at the mask; the next one refuses."""
    ours, _ = imitated()
    inputs, cache = prompt(2, 60), two_level(**TIGHT)
    mask, token = inputs["attention_mask"], inputs["input_ids"][:, :1]

    def step(valid):
        nonlocal mask
        mask = torch.cat((mask, torch.tensor([[1], [valid]])), dim=1)
        ours(token, attention_mask=mask, past_key_values=cache)

    with torch.no_grad():
        ours(**inputs, past_key_values=cache)
        step(1)
        step(0)
        with pytest.raises(ValueError, match="padding token in the middle"):
            step(1)
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            step(1)
        cache.reset()
        mask = inputs["attention_mask"]
        ours(**inputs, past_key_values=cache)
        step(1)
        step(0)
        cache.reset()  # with the last mask not looked at
        mask = inputs["attention_mask"]
        ours(**inputs, past_key_values=cache)
        step(1)
        step(1)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("Cannot copy between CPU and CUDA tensors\nCUDA kernel errors"), r"\(Cannot copy .* tensors\)"),
        (NotImplementedError(), r"\(NotImplementedError\)"),
    ],
    ids=["message", "none"],
)
def test_a_forward_that_cannot_be_captured_runs_eagerly(error, says):
    class Refuses(ImitatedGraphs):
        def record(self, run, device, saved):
            run(None)
            raise error

    fast = build("llama", "sparsekv")
    runner = Imitation(fast, Refuses())
    runner.install()
    inputs, caches = prompt(2, 120, (0, 30)), (two_level(**TIGHT), two_level(**TIGHT))
    go = {"do_sample": False, "max_new_tokens": 20}
    expected = model("llama").generate(**inputs, past_key_values=caches[0], **go)
    with pytest.warns(UserWarning, match=f"cannot be captured {says}"):
        found = fast.generate(**inputs, past_key_values=caches[1], **go)
    assert torch.equal(found, expected)
    same_counts(*caches)
    assert runner.replays == 0


@pytest.mark.parametrize("ends", [False, True], ids=["ends-badly", "ends-well"])
def test_a_capture_that_fails_says_why_and_is_forgotten(monkeypatch, ends):
    """torch's graph raises another error as it ends, before it has told its allocator and put the stream back.

    Nor has it told the generator: a small capture behind it, that ends well, does.
    """
    left, entered = [], []

    class Context:
        def __init__(self, *args, **kwargs):
            self.bad = "pool" in kwargs and not ends

        def __enter__(self):
            entered.append(self)

        def __exit__(self, *error):
            left.append(self)
            if self.bad:
                raise RuntimeError("operation failed due to a previous error during capture")

    def end(device, pool):
        if ends:
            raise RuntimeError("not currently recording to mempool_id")
        left.append(("ended", device, pool))

    class Stream:
        def wait_stream(self, other):
            pass

    for name, value in (("CUDAGraph", object), ("graph", Context), ("stream", Context)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: left.append(("released", *of)), raising=False)
    recorder = Recorder()
    monkeypatch.setattr(recorder, "streams", lambda device: (Stream(), None))
    device = torch.device("cuda", 3)
    captured = []
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: captured.append((device, list(left))))

    def run(sides):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(run, device, [])
    forgotten = [] if ends else [("ended", 3, (0, 7)), ("released", 3, (0, 7))]
    first, behind = entered[:2][::-1], entered[2:][::-1]
    assert left == [*first, *forgotten, *behind], "the stream is put back"
    assert captured == [(device, [*first, *forgotten])] and len(behind) == 2


@pytest.mark.pairwise(once=("cache",))
@pytest.mark.few(cache=TELLING)
@pytest.mark.parametrize("cache", ALL)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_replays_imitated(name, cache, padded):
    through_modes(cache, name, padded)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_decoding_imitated(how):
    inputs = prompt(2, 120, (0, 30))
    fast, runner = imitated()
    results = []
    for one in (model("llama"), fast):
        torch.manual_seed(5)
        results.append(one.generate(**inputs, past_key_values=two_level(**TIGHT), max_new_tokens=40, **how))
    assert torch.equal(*results)
    assert runner.replays > 30
    assert runner.captures < 6


def test_model_is_shared_by_other_tests_unchanged():
    assert runner_of(model("llama")) is None


@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
def test_rings_answer_as_stock_sliding_layers(name):
    """Eagerly, on any device: second turns, more tokens than the window, a copy."""
    inputs, go = prompt(2, 60, (0, 50)), {"do_sample": False, "max_new_tokens": 20}
    results = []
    for rings in (False, True):
        cache = two_level(**FULL)
        turn = model(name).generate(**inputs, past_key_values=cache, **go)
        if rings:
            ready_for_steps(cache)
            assert any(isinstance(layer, SlidingRing) for layer in cache.layers)
        branch = copy.deepcopy(cache)
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 35, dtype=torch.long)), 1)
        more = torch.cat((turn, prompt(2, 15, seed=2)["input_ids"]), 1)
        for one in (cache, branch):
            results.append(model(name).generate(more, attention_mask=mask, past_key_values=one, **go))
    for found in results[1:]:
        assert torch.equal(found, results[0])
