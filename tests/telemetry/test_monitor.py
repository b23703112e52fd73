"""StepMonitor: a report for every token."""

from __future__ import annotations

import itertools

import pytest
import torch
from caches import TIGHT, two_level
from captured import Imitation
from models import build, model, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import StepMonitor
from hf_sparsekv.telemetry.timing import TokenTimer


def generate(ours, cache, monitor, tokens: int = 10):
    inputs = prompt(1, 120)
    out = ours.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=tokens, streamer=monitor)
    return out[0, 120:].tolist()


def test_reports_every_token_with_its_statistics():
    reports = []
    cache = two_level(**TIGHT)
    tokens = generate(model("llama"), cache, StepMonitor(cache, reports.append, blocks=True))
    assert [report.index for report in reports] == list(range(10))
    assert [report.tokens[0] for report in reports] == tokens
    assert all(report.seconds > 0 for report in reports)
    first, *rest = reports
    assert first.stats is None
    assert first.blocks is None
    assert all(report.stats.decode_steps == 1 for report in rest)
    assert sum(report.stats.kv_bytes_read for report in rest) == cache.stats().kv_bytes_read
    assert [report.blocks.length for report in rest] == [120 + i for i in range(1, 10)]


@pytest.mark.parametrize("every", [1, 0])
def test_the_first_token_tells_what_its_prompt_has_covered(every):
    reports, cache = [], two_level(False, prefill=0.7, prefill_below=0)
    inputs, monitor = prompt(1, 700), StepMonitor(cache, reports.append, every=every)
    model("llama").generate(
        **inputs, past_key_values=cache, do_sample=False, max_new_tokens=2, min_new_tokens=2, streamer=monitor
    )
    assert reports[0].prompts == (cache.stats().prompts if every else ())
    assert not reports[1].prompts
    assert len(cache.stats().prompts) == 2


def test_a_second_call_with_the_same_monitor():
    reports = []
    monitor = StepMonitor(cache := two_level(**TIGHT), reports.append)
    generate(model("llama"), cache, monitor)
    cache.reset()
    generate(model("llama"), cache, monitor)
    assert [report.index for report in reports] == [*range(10)] * 2
    assert sum(report.stats.decode_steps for report in reports[11:]) == cache.stats().decode_steps == 9


@pytest.mark.parametrize(
    ("how", "looked"),
    # The clock goes on by a second whenever somebody looks at it.
    [({"every": 4}, {4: 4, 8: 4}), ({"interval": 8}, None), ({"every": 0}, {})],
    ids=str,
)
def test_statistics_now_and_then(how, looked):
    reports, ticks, cache = [], itertools.count(), two_level(**TIGHT)
    generate(model("llama"), cache, StepMonitor(cache, reports.append, clock=lambda: float(next(ticks)), **how))
    found = {report.index: report.stats.decode_steps for report in reports if report.stats}
    assert len(reports) == 10 and all(report.blocks is None for report in reports)
    assert found == looked if looked is not None else 1 < len(found) < 9
    assert cache.sparse_layers[0].policy.watch is None, "nobody has asked for blocks"


def test_what_it_takes_itself_is_not_counted():
    now = [0.0]

    def slow(report):
        now[0] += 100

    monitor = StepMonitor(two_level(), slow, every=0, clock=lambda: now[0])
    monitor.put(torch.tensor([[1, 2, 3]]))
    for seconds in (5, 1, 2):
        now[0] += seconds
        monitor.put(torch.tensor([7]))
    assert monitor.summary().ttft_s == 5
    assert monitor.steps_s == [1, 2]


def test_a_cache_of_transformers():
    reports = []
    tokens = generate(reference("llama"), cache := DynamicCache(), StepMonitor(cache, reports.append, blocks=True))
    assert [report.tokens[0] for report in reports] == tokens
    assert all(report.stats is None and report.blocks is None for report in reports)


def test_another_streamer_gets_everything():
    class Kept(TokenTimer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen.append(value.tolist())

        def end(self):
            self.ended = True

    kept, cache = Kept(), two_level(**TIGHT)
    tokens = generate(model("llama"), cache, StepMonitor(cache, lambda report: None, streamer=kept))
    assert [value[0] for value in kept.seen[1:]] == tokens
    assert kept.ended


def test_raising_ends_generation_and_leaves_the_cache_usable():
    cache = two_level(**TIGHT)

    def stop(report):
        if report.index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model("llama"), cache, StepMonitor(cache, stop))
    assert cache.get_seq_length() == 123
    with torch.no_grad():
        model("llama")(torch.tensor([[5]]), past_key_values=cache)
    assert cache.get_seq_length() == 124


def test_captured_steps():
    found = {}
    for captured in (False, True):
        ours = build("llama", "sparsekv")
        if captured:
            Imitation(ours).install()
        reports, cache = [], two_level(False, **TIGHT)
        tokens = generate(ours, cache, StepMonitor(cache, reports.append, blocks=True), 30)
        found[captured] = tokens, [(r.stats.kv_bytes_read, r.blocks.share.tolist()) for r in reports[1:]]
    assert found[False] == found[True]


@pytest.mark.parametrize("wrong", [{"every": -1}, {"interval": -0.5}])
def test_negative_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="negative"):
        StepMonitor(two_level(), print, **wrong)


def test_no_cycle_keeps_the_cache():
    import gc
    import weakref

    cache = two_level()
    gone = weakref.ref(cache)
    monitor = StepMonitor(cache, print)
    gc.disable()
    try:
        del cache, monitor
        assert gone() is None
    finally:
        gc.enable()
