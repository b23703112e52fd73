"""optimize(): captured decode steps give what eager ones give."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from caches import CACHES, EAGER, FULL, TIGHT, two_level
from models import build, model, prompt, reference
from transformers import TextStreamer

from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.graphs import StepRunner, runner_of
from hf_sparsekv.sliding import SlidingRing

# ---------------------------------------------------------------------- without a GPU


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


def test_fused_needs_a_known_architecture():
    with pytest.raises(ValueError, match="fused=True is not possible"):
        optimize(build("gpt-oss", "sparsekv"), fused=True)


def test_optimize_needs_our_attention():
    with pytest.raises(ValueError, match="set_attn_implementation"):
        optimize(build("llama", "sdpa"))


def same_counts(*caches) -> None:
    """The same was done. A captured step that is followed by a sealing looks ahead twice, which shows in the share of
    blocks that were there already, and may fetch blocks (and note them as chosen) that the second look does without."""
    stats = [cache.stats() for cache in caches]
    if stats[0].hit_rate is not None and stats[1].hit_rate is not None:
        # A second device writes two buffers in turn, but only one in captured steps.
        more = 5 if getattr(caches[0], "rank", None) is not None else 1
        assert stats[0].hit_rate == pytest.approx(stats[1].hit_rate, abs=0.02 * more)
        assert stats[0].host_to_device_bytes == pytest.approx(stats[1].host_to_device_bytes, rel=0.05 * more)
        if stats[0].working_set_bytes is not None:
            assert stats[0].working_set_bytes == pytest.approx(stats[1].working_set_bytes, rel=0.05)
        unlike = {"hit_rate": None, "host_to_device_bytes": 0, "working_set_bytes": None}
        stats = [replace(one, **unlike, needed=0, found=0) for one in stats]
    for one, other in zip(*(each.walks for each in stats)):  # masses are sums, whose roundings depend on their shapes
        masses = [[w.mass or 0.0, w.least_mass or 0.0] for w in (one, other)]
        assert masses[0] == pytest.approx(masses[1], rel=1e-5)
    bare = [tuple(replace(w, mass=None, least_mass=None) for w in each.walks) for each in stats]
    assert replace(stats[0], walks=bare[0]) == replace(stats[1], walks=bare[1])


class Imitation(StepRunner):
    """Replays without a GPU: every replay runs the step anew with the host's state frozen as it was at the capture.

    So whatever the host decides in a step without the replay knowing shows here as it would on a GPU.
    """

    @staticmethod
    def _on_gpu(t):
        return True

    def _record(self, run, device, saved):
        output = run(None)
        queries = [state.layer.query for state in saved]
        rings = [ring for ring in saved[0].layer.owner.layers if isinstance(ring, SlidingRing)]
        frozen = [ring.cumulative_length for ring in rings]

        class Graph:
            def replay(self):
                now = [type(state)(state.layer) for state in saved]
                lengths = [ring.cumulative_length for ring in rings]
                for state in saved:
                    state.put_back_host()
                for ring, length in zip(rings, frozen):
                    ring.cumulative_length = length
                try:
                    output.logits.copy_(run(None).logits)
                    for state, query in zip(saved, queries):
                        query.copy_(state.layer.query)
                finally:
                    for state in now:
                        state.put_back_host()
                    for ring, length in zip(rings, lengths):
                        ring.cumulative_length = length

        return Graph(), output


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_capture_that_fails_half_way_leaves_the_cache_usable(layer, error):
    """Inside a layer's attention: eagerly from then on, or captured the next time if memory was short."""
    ours = build("llama", "sparsekv")
    runner = Imitation(ours)
    runner.install()
    inputs, caches = prompt(2, 90), (two_level(**TIGHT), two_level(**TIGHT))
    tokens = prompt(2, 12, seed=4)["input_ids"].split(1, dim=1)
    with torch.no_grad():
        for net, cache in ((model("llama"), caches[0]), (ours, caches[1])):
            net(**inputs, past_key_values=cache)
        policy = caches[1].sparse_layers[layer].policy
        original = policy.attend

        def fail(*args):
            policy.attend = original
            raise error("not now")

        policy.attend = fail
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
    ours = build("llama", "sparsekv")
    runner = Imitation(ours)
    runner.install()
    inputs, tokens = prompt(2, 90), prompt(2, 12, seed=4)["input_ids"].split(1, dim=1)
    results = []
    with torch.no_grad():
        for fails in (False, True):
            cache = two_level(**TIGHT)
            ours(**inputs, past_key_values=cache)
            policy, original = cache.sparse_layers[layer].policy, cache.sparse_layers[layer].policy.attend
            if fails:

                def fail(*args, policy=policy, original=original):
                    policy.attend = original
                    raise RuntimeError("cannot compile here")

                policy.attend = fail
            results.append(torch.cat([ours(token, past_key_values=cache).logits.clone() for token in tokens]))
    assert torch.equal(*results)
    assert runner.replays == 2 * len(tokens)


def test_an_error_after_a_captured_step_breaks_the_cache(monkeypatch):
    """The device is a step ahead of the host: going on would lose tokens without a word."""
    ours = build("llama", "sparsekv")
    Imitation(ours).install()
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
    ours = build("llama", "sparsekv")
    Imitation(ours).install()
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


def test_a_forward_that_cannot_be_captured_runs_eagerly():
    class Refuses(Imitation):
        def _record(self, run, device, saved):
            run(None)
            raise RuntimeError("Cannot copy between CPU and CUDA tensors")

    fast = build("llama", "sparsekv")
    runner = Refuses(fast)
    runner.install()
    inputs, caches = prompt(2, 120, (0, 30)), (two_level(**TIGHT), two_level(**TIGHT))
    go = {"do_sample": False, "max_new_tokens": 20}
    expected = model("llama").generate(**inputs, past_key_values=caches[0], **go)
    with pytest.warns(UserWarning, match="cannot be captured"):
        found = fast.generate(**inputs, past_key_values=caches[1], **go)
    assert torch.equal(found, expected)
    same_counts(*caches)
    assert runner.replays == 0


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("pads", [None, (0, 70)], ids=["plain", "padded"])
def test_replays_imitated(name, cache, pads):
    """Through calibration, sealing, growth and changes of mode; same text and counters as eager steps."""
    inputs = prompt(2, 90, pads)
    if pads is None:
        inputs = {"input_ids": inputs["input_ids"][:, :20]}
    fast = build(name, "sparsekv")
    runner = Imitation(fast)
    runner.install()
    caches = CACHES[cache](**TIGHT), CACHES[cache](**TIGHT)
    go = {"do_sample": False, "max_new_tokens": 120}
    expected = model(name).generate(**inputs, past_key_values=caches[0], **go)
    found = fast.generate(**inputs, past_key_values=caches[1], **go)
    assert torch.equal(found, expected)
    same_counts(*caches)
    least = 100 if cache == "predictive-second" else 110  # a second device calibrates eagerly
    assert runner.replays > least or cache in EAGER
    assert runner.captures < 12


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_decoding_imitated(how):
    inputs = prompt(2, 120, (0, 30))
    fast = build("llama", "sparsekv")
    runner = Imitation(fast)
    runner.install()
    results = []
    for one in (model("llama"), fast):
        torch.manual_seed(5)
        results.append(one.generate(**inputs, past_key_values=two_level(**TIGHT), max_new_tokens=40, **how))
    assert torch.equal(*results)
    assert runner.replays > 30
    assert runner.captures < 6


# ---------------------------------------------------------------------- with one


def pair(name: str, dtype: torch.dtype = torch.float32):
    """The same model eager and optimised, on the GPU. Not fused: its rounding could turn a selection."""
    eager = build(name, "sparsekv").cuda().to(dtype)
    fast = optimize(build(name, "sparsekv").cuda().to(dtype), fused=False)
    return eager, fast


def on_gpu(*args, **kwargs) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in prompt(*args, **kwargs).items()}


def check(name: str, cache: str, inputs: dict, settings: dict = TIGHT, captured: bool = True, **generate) -> None:
    """Same text and counters, and the steps were really replayed."""
    eager, fast = pair(name)
    generate = {"do_sample": False, "max_new_tokens": 100, **generate}
    caches = CACHES[cache](**settings), CACHES[cache](**settings)
    torch.manual_seed(3)
    expected = eager.generate(**inputs, past_key_values=caches[0], **generate)
    torch.manual_seed(3)
    found = fast.generate(**inputs, past_key_values=caches[1], **generate)
    assert torch.equal(found, expected)
    # What is allocated may differ (beams reorder in place), what was done may not.
    same_counts(*caches)
    runner = runner_of(fast)
    if captured:
        steps = generate["max_new_tokens"] - 1
        assert steps - 3 <= runner.replays <= steps
        assert runner.captures < 12
    else:
        assert runner.replays == 0


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
def test_caches(cache):
    check("llama", cache, on_gpu(1, 180), captured=cache not in EAGER)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["host", "device", "device-block", "host-token", "progressive", "progressive-host"])
def test_left_padding(cache):
    check("llama", cache, on_gpu(3, 180, (0, 5, 100)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen2", "qwen3", "mistral", "phi3"])
def test_models(name):
    check(name, "host", on_gpu(2, 150, (0, 33)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
def test_hybrids(name):
    """Sliding layers run another kernel when captured, whose rounding may turn a greedy token: logits are compared."""
    given, tokens = on_gpu(2, 150, (0, 33)), on_gpu(2, 60, seed=3)["input_ids"]
    logits = []
    for one in pair(name):
        cache, mask, rows = CACHES["host"](**FULL), given["attention_mask"], []
        with torch.no_grad():
            one(
                given["input_ids"],
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp_min(0),
                past_key_values=cache,
            )
            for token in tokens.split(1, dim=1):
                mask = torch.cat((mask, torch.ones_like(token)), dim=1)
                positions = mask.cumsum(1)[:, -1:] - 1
                out = one(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
                rows.append(out.logits[:, -1].clone())
        logits.append(torch.stack(rows))
    difference, size = (logits[0] - logits[1]).abs().max(), logits[0].abs().max()
    assert difference < 2e-3 * size
    assert runner_of(one).replays == 60


@pytest.mark.gpu
def test_short_prompt_long_answer():
    """Through calibration, sealing, growth and the change from dense to sparse."""
    check("llama", "device", on_gpu(2, 3), max_new_tokens=400)
    check("llama", "host", on_gpu(1, 5), max_new_tokens=400)


@pytest.mark.gpu
def test_budget_for_everything_equals_dense():
    fast = optimize(build("llama", "sparsekv").cuda())
    inputs = on_gpu(2, 150, (0, 40))
    expected = build("llama", "sdpa").cuda().generate(**inputs, do_sample=False, max_new_tokens=80)
    for offload in (True, False):
        cache = two_level(offload, **FULL)
        assert torch.equal(fast.generate(**inputs, do_sample=False, max_new_tokens=80, past_key_values=cache), expected)
    assert runner_of(fast).replays == 2 * 79


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"repetition_penalty": 1.3},
    ],
    ids=["sample", "sample-return", "beams", "penalty"],
)
def test_decoding(how):
    check("llama", "host", on_gpu(2, 150, (0, 30)), **how)


@pytest.mark.gpu
def test_streaming_and_stopping():
    class Words:
        def decode(self, ids, **kwargs):
            return " ".join(str(int(i)) for i in ids)

    class Stream(TextStreamer):
        def __init__(self):
            super().__init__(Words())
            self.text = ""

        def on_finalized_text(self, text, stream_end=False):
            self.text += text

    eager, fast = pair("llama")
    inputs = on_gpu(1, 120)
    texts = []
    for one in (eager, fast):
        stream = Stream()
        one.generate(**inputs, past_key_values=two_level(**TIGHT), max_new_tokens=40, do_sample=False, streamer=stream)
        texts.append(stream.text)
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_second_turn_copies_and_two_caches():
    eager, fast = pair("llama")
    first, more = on_gpu(1, 150), on_gpu(1, 40, seed=9)["input_ids"]
    results = []
    for one in (eager, fast):
        cache, other = two_level(**TIGHT), two_level(False, **TIGHT)
        go = {"do_sample": False, "max_new_tokens": 30}
        turn = one.generate(**first, past_key_values=cache, **go)
        branch = copy.deepcopy(cache)
        side = one.generate(**first, past_key_values=other, **go)
        again = torch.cat((turn, more), 1)
        go["attention_mask"] = torch.ones_like(again)  # or generate() takes an answer's tokens for padding
        second = one.generate(again, past_key_values=cache, **go)
        third = one.generate(torch.cat((turn, more.flip(1)), 1), past_key_values=branch, **go)
        results.append((turn, side, second, third))
    for expected, found in zip(*results):
        assert torch.equal(found, expected)
    assert runner_of(fast).replays > 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", "gemma2"])
def test_fused(name):
    """Everything on; dense attention, which rounding does not turn. A second model is left alone, undoing restores."""
    inputs = on_gpu(2, 150, (0, 33))
    go = {"do_sample": False, "max_new_tokens": 80}
    fast, other = build(name, "sparsekv").cuda(), build(name, "sparsekv").cuda()
    before = other(**inputs).logits
    expected = other.generate(**inputs, past_key_values=two_level(**FULL), **go)
    optimize(fast, fused=True)
    assert torch.equal(fast.generate(**inputs, past_key_values=two_level(**FULL), **go), expected)
    assert runner_of(fast).replays == 79
    with torch.no_grad():
        assert torch.equal(other(**inputs).logits, before)
        assert torch.equal(unoptimize(fast)(**inputs).logits, before)


@pytest.mark.gpu
def test_hybrid_turns():
    """Sliding layers go from stock to ring and through eager turns, padding included."""
    eager, fast = pair("gemma3")
    first = on_gpu(2, 100, (0, 95))
    more = on_gpu(2, 20, (0, 3), seed=4)
    results = []
    for one in (eager, fast):
        cache = two_level(**TIGHT)
        turn = one.generate(**first, past_key_values=cache, do_sample=False, max_new_tokens=25)
        grown = torch.ones(2, turn.shape[1] - 100, dtype=torch.long, device="cuda")
        mask = torch.cat((first["attention_mask"], grown, more["attention_mask"]), 1)
        ids = torch.cat((turn, more["input_ids"]), 1)
        results.append(
            one.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=25)
        )
    assert torch.equal(*results)
    assert runner_of(fast).replays > 40


@pytest.mark.gpu
def test_prompt_lookup_and_crop():
    eager, fast = pair("llama")
    ids = on_gpu(1, 9)["input_ids"].repeat(1, 15)
    out = [
        one.generate(
            ids, do_sample=False, max_new_tokens=60, prompt_lookup_num_tokens=3, past_key_values=two_level(**FULL)
        )
        for one in (eager, fast)
    ]
    assert torch.equal(*out)


@pytest.mark.gpu
def test_half_precision():
    eager, fast = pair("llama", torch.bfloat16)
    inputs = on_gpu(2, 150)
    out = [
        one.generate(**inputs, do_sample=False, max_new_tokens=60, past_key_values=two_level(**TIGHT))
        for one in (eager, fast)
    ]
    assert torch.equal(*out)


@pytest.mark.gpu
def test_graphs_die_with_their_cache():
    fast = optimize(build("llama", "sparsekv").cuda())
    cache = two_level(**TIGHT)
    fast.generate(**on_gpu(1, 150), do_sample=False, max_new_tokens=10, past_key_values=cache)
    runner, gone = runner_of(fast), weakref.ref(cache)
    assert len(runner.graphs) == 1
    del cache
    gc.collect()
    assert gone() is None
    assert len(runner.graphs) == 0


@pytest.mark.gpu
def test_two_threads_on_one_model():
    eager, fast = pair("llama")
    inputs = [on_gpu(1, 120 + 30 * i, seed=i) for i in range(2)]
    expected = [
        eager.generate(**one, do_sample=False, max_new_tokens=60, past_key_values=two_level(**TIGHT)) for one in inputs
    ]
    found: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        cache = two_level(**TIGHT)
        found[i] = fast.generate(**inputs[i], do_sample=False, max_new_tokens=60, past_key_values=cache)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert torch.equal(found[i], expected[i])


@pytest.mark.gpu
def test_no_allocation_and_no_synchronisation_in_a_step():
    fast = optimize(build("llama", "sparsekv").cuda())
    cache = two_level(False, **TIGHT)
    fast.generate(**on_gpu(1, 180), do_sample=False, max_new_tokens=10, past_key_values=cache)
    runner = runner_of(fast)
    step = next(iter(runner.graphs[cache].values()))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


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
            cache.use_rings()
            assert any(isinstance(layer, SlidingRing) for layer in cache.layers)
        branch = copy.deepcopy(cache)
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 35, dtype=torch.long)), 1)
        more = torch.cat((turn, prompt(2, 15, seed=2)["input_ids"]), 1)
        for one in (cache, branch):
            results.append(model(name).generate(more, attention_mask=mask, past_key_values=one, **go))
    for found in results[1:]:
        assert torch.equal(found, results[0])
