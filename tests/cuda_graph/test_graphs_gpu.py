"""optimize() on a GPU: captured decode steps give what eager ones give."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from caches import ALL, CACHES, FULL, HOST_RANK, TIGHT, two_level
from captured import check, on_gpu, pair
from inside import keep_busy
from models import build

from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.policies.by_need import ByNeed
from hf_sparsekv.policies.device_tokens import DeviceTokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("cache", "padded"), [(cache, i % 2 == 1) for i, cache in enumerate(ALL)])
def test_caches(cache, padded):
    inputs = on_gpu(3, 180, (0, 5, 100)) if padded else on_gpu(1, 180)
    check("llama", cache, inputs, captured=cache not in HOST_RANK)


@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen2", "qwen3", "mistral", "phi3"])
def test_models(name):
    check(name, "host", on_gpu(2, 150, (0, 33)))


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


def test_short_prompt_long_answer():
    """Through calibration, sealing, growth and the change from dense to sparse."""
    check("llama", "device", on_gpu(2, 3), max_new_tokens=400)
    check("llama", "host", on_gpu(1, 5), max_new_tokens=400)


def test_budget_for_everything_equals_dense():
    fast = optimize(build("llama", "sparsekv").cuda())
    inputs = on_gpu(2, 150, (0, 40))
    expected = build("llama", "sdpa").cuda().generate(**inputs, do_sample=False, max_new_tokens=80)
    for offload in (True, False):
        cache = two_level(offload, **FULL)
        assert torch.equal(fast.generate(**inputs, do_sample=False, max_new_tokens=80, past_key_values=cache), expected)
    assert runner_of(fast).replays == 2 * 79


@pytest.mark.filterwarnings("ignore:decode steps run eagerly")
def test_a_layer_that_waits_for_the_gpu():
    """As bitsandbytes' 8 bits that look for outliers: eagerly, for a reason that is said; no trace of the capture."""
    plain, fast = build("llama", "sparsekv").cuda(), build("llama", "sparsekv").cuda()
    layer = fast.model.layers[1].mlp.down_proj
    multiply = layer.forward
    layer.forward = lambda x: multiply(x) if bool((x == x).any()) else x
    optimize(fast, fused=False)
    inputs, go = on_gpu(2, 150, (0, 40)), {"do_sample": False, "max_new_tokens": 40}
    expected = plain.generate(**inputs, past_key_values=two_level(**TIGHT), **go)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be captured .*captur"):
        found = fast.generate(**inputs, past_key_values=two_level(**TIGHT), **go)
    assert torch.equal(found, expected)
    assert runner_of(fast).replays == 0
    assert torch.cuda.current_stream() == stream
    # Memory that another stream has used comes back, tokens can be drawn, and other models are captured.
    other, held = torch.cuda.Stream(), torch.cuda.memory_allocated()
    for _ in range(4):
        torch.zeros(1 << 24, device="cuda").record_stream(other)
        torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_allocated() < held + (1 << 24)
    fast.generate(**inputs, past_key_values=two_level(**TIGHT), do_sample=True, max_new_tokens=4)
    check("llama", "host", inputs)


HOW = [{"do_sample": True, "temperature": 0.8, "top_k": 20}, {"do_sample": True, "num_return_sequences": 3}]


@pytest.mark.parametrize("how", [*HOW, {"num_beams": 3}, {"repetition_penalty": 1.3}], ids=str)
def test_decoding(how):
    check("llama", "host", on_gpu(2, 150, (0, 30)), **how)


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


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", "gemma2"])
def test_fused(name):
    """Everything on; dense attention, which rounding does not turn. A second model is left alone, undoing restores."""
    inputs = on_gpu(2, 150, (0, 33))
    go = {"do_sample": False, "max_new_tokens": 80}
    fast, other = build(name, "sparsekv").cuda(), build(name, "sparsekv").cuda()
    with torch.no_grad():  # prompts with gradients have kernels of torch's
        before = other(**inputs).logits
    expected = other.generate(**inputs, past_key_values=two_level(**FULL), **go)
    optimize(fast, fused=True)
    assert torch.equal(fast.generate(**inputs, past_key_values=two_level(**FULL), **go), expected)
    assert runner_of(fast).replays == 79
    with torch.no_grad():
        assert torch.equal(other(**inputs).logits, before)
        assert torch.equal(unoptimize(fast)(**inputs).logits, before)


@pytest.mark.filterwarnings("ignore:decode steps run eagerly")
@pytest.mark.parametrize("pads", [None, (0, 3)])
def test_hybrid_turns(pads):
    """Sliding layers go from stock to ring and through eager turns; with padding between a row's tokens, eagerly."""
    eager, fast = pair("gemma3")
    first = on_gpu(2, 100, (0, 95))
    more = on_gpu(2, 20, pads, seed=4)
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
    assert (runner_of(fast).replays > 40) == (pads is None)


def test_prompt_lookup_and_crop():
    eager, fast = pair("llama")
    ids = on_gpu(1, 9)["input_ids"].repeat(1, 15)
    go = {"do_sample": False, "max_new_tokens": 60, "prompt_lookup_num_tokens": 3}
    assert torch.equal(*(one.generate(ids, **go, past_key_values=two_level(**FULL)) for one in (eager, fast)))


def test_half_precision():
    check("llama", "host", on_gpu(2, 150), dtype=torch.bfloat16, max_new_tokens=60)


def test_chosen_tokens_outlive_a_slow_side_stream(monkeypatch):
    """Later layers do not overwrite what a captured step has handed to its side stream, however late it is read."""
    made, read = [], []
    select, bring = ByNeed.select, DeviceTokens.bring

    def chosen(self, *args, **named):
        found = select(self, *args, **named)
        if torch.cuda.is_current_stream_capturing():
            made.append(found.count.clone())
        return found

    def late(self, ids, store, used=None):
        if torch.cuda.is_current_stream_capturing():
            keep_busy(20_000_000)  # some 10 ms: the layers that follow have ended
            read.append(used.clone())
        return bring(self, ids, store, used)

    monkeypatch.setattr(ByNeed, "select", chosen)
    monkeypatch.setattr(DeviceTokens, "bring", late)
    fast = optimize(build("llama", "sparsekv", num_hidden_layers=4).cuda())
    cache = CACHES["progressive-host"](**TIGHT)
    fast.generate(**on_gpu(1, 180), do_sample=False, max_new_tokens=8, past_key_values=cache)
    torch.cuda.synchronize()
    assert len(made) == len(read) >= 3
    for expected, found in zip(made, read):
        assert torch.equal(found, expected)


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


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_host_does_not_wait_where_rows_seal_blocks(rows, offload):
    """One row in a step, and of three rows two at once, of four three."""
    fast, lengths = optimize(build("llama", "sparsekv").cuda()), [180, 171, 180, 180][:rows]
    batch = two_level(offload, lag=False, **TIGHT).rows(rows, 400)
    tokens = torch.zeros(rows, dtype=torch.long, device="cuda")
    for steps in (120, 4):  # the first ones make the storage grow, and capture
        for n in lengths:
            batch.join(batch.prefill(fast, on_gpu(1, n)["input_ids"]))
        for _ in range(steps):
            batch.step(fast, tokens)
        if steps > 4:
            for row in batch.rows:
                batch.leave(row)
    replays, sealed = runner_of(fast).replays, batch.cache.joined_rows().sealed
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            batch.step(fast, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner_of(fast).replays == replays + 40
    assert all(now >= then + 2 for then, now in zip(sealed, batch.cache.joined_rows().sealed))
