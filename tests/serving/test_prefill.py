"""Prompts in pieces: their lengths, and forward passes that stop between layers."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import hooks_of
from torch import nn

from hf_sparsekv.attention.parts import GRID
from hf_sparsekv.checking.clock import Clock
from hf_sparsekv.serving.prefill import LEAST, Pace, Reading, Segments, chunks

CPU = torch.device("cpu")


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 60_000), st.integers(3, 40_000), st.integers(0, 50_000))
def test_lengths_of_chunks(tokens, longest, past):
    found = list(chunks(tokens, longest, past))
    assert sum(found) == tokens and max(found) <= longest and min(found) >= 2
    assert len(found) <= -(-tokens // longest) + 1


def test_chunks_end_on_the_grid():
    assert list(chunks(8000, 16384)) == [8000]
    assert list(chunks(20_000, 16384)) == [10_240, 9760]
    first, _ = chunks(20_000, 16384, 64)
    assert (64 + first) % GRID == 0


@pytest.mark.parametrize("tokens", [3, 4, 7, 64, 65, 130, 513])
@pytest.mark.parametrize("longest", [3, 64, 512])
def test_short_chunks_are_no_longer_than_asked_for_and_none_is_a_single_token(tokens, longest):
    from transformers import LlamaConfig

    class Empty:
        def get_seq_length(self) -> int:
            return 0

    ids, pace = torch.zeros(1, tokens, dtype=torch.long), Pace(LlamaConfig())
    reading, found = Reading(None, Empty(), ids, Segments([]), pace, Clock(CPU), longest, False), []
    while reading.left:
        found.append(reading.share(1.0))
        reading.past += found[-1]
    assert sum(found) == tokens and min(found) >= 2 and max(found) <= longest


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.ran: list[int] = []
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda *_, i=i: self.ran.append(i))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_passes_stop_between_layers_and_share_a_thread():
    model, seen = Layers(), set()
    segments = Segments(list(model.layers))

    def run() -> None:
        seen.add(threading.get_ident())
        model(torch.zeros(1, 2))

    for _ in range(3):
        model.ran.clear()
        segments.open(run, CPU)
        assert not segments.run(2) and model.ran == [0, 1]
        model(torch.zeros(1, 2))  # another thread's pass is not stopped
        assert model.ran == [0, 1, 0, 1, 2, 3, 4]
        assert segments.run(1 << 30)
    assert len(seen) == 1 and seen != {threading.get_ident()}
    segments.open(run, CPU)
    assert not segments.run(1)
    segments.cancel()
    segments.cancel()  # there is none any more
    segments.open(run, CPU)
    assert segments.run(1 << 30), "a cancelled one is forgotten"
    threads = threading.active_count()
    segments.close()
    segments.close()
    assert threading.active_count() == threads - 1
    assert not any(hook for layer in model.layers for hook in hooks_of(layer))


def test_sparse_prompts_take_less_of_the_time():
    from transformers import LlamaConfig

    exact, sparse = Pace(LlamaConfig()), Pace(LlamaConfig(), 16_384)
    assert sparse.work(1000, 10_000) == exact.work(1000, 10_000)
    assert sparse.work(8000, 100_000) < 0.5 * exact.work(8000, 100_000)
    for pace in (exact, sparse):
        pace.learn(8000, 100_000, 1, 10.0)
        assert pace.layers_in(20.0, 8000, 100_000) == 2
        assert pace.work(tokens := pace.tokens_in(20.0, 100_000), 100_000) == pytest.approx(
            20.0 * pace.per_ms / pace.layers, rel=2 / tokens
        )


def test_short_chunks_are_exact():
    """So no chunk of a prompt that may be sparse is shorter, and shorter ones are not thought to be."""
    from transformers import LlamaConfig

    exact, sparse = Pace(LlamaConfig()), Pace(LlamaConfig(), 16_384, 1024)
    assert sparse.work(1000, 100_000) == exact.work(1000, 100_000) > sparse.work(1024, 100_000)
    assert [exact.least(past) for past in (0, 100_000)] == [LEAST, LEAST]
    assert [sparse.least(past) for past in (0, 15_359, 15_360, 100_000)] == [LEAST, LEAST, 1024, 1024]
    assert Pace(LlamaConfig(), 0, 257).least(0) == LEAST


def test_an_error_in_a_pass_is_told_once():
    segments = Segments([])

    def fail() -> None:
        raise ValueError("no")

    segments.open(fail, CPU)
    with pytest.raises(ValueError, match="no"):
        segments.run(1)
    segments.open(lambda: None, CPU)
    assert segments.run(1)
    segments.close()


@pytest.mark.timeout(20)  # or it waits for that thread
def test_a_thread_that_cannot_be_started_is_not_waited_for(monkeypatch):
    segments = Segments([])

    def fail(thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="start new thread"):
            segments.open(lambda: None, CPU)
    segments.cancel()
    segments.open(lambda: None, CPU)  # there is one now
    assert segments.run(1)
    segments.close()


def test_a_slow_first_pass_does_not_keep_chunks_short():
    """Launches take as long as 400 tokens' work: chunks grow to what the time allows nevertheless."""
    from transformers import LlamaConfig

    pace = Pace(LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128))
    rate = 1000 * pace.layers * pace.token / 20.0  # of work in a millisecond: 1000 tokens in 20
    pace.learn(LEAST, 0, pace.layers, 5000.0)  # compiled its kernels
    for _ in range(12):
        tokens = max(pace.tokens_in(40.0, 0), LEAST)
        pace.learn(tokens, 0, pace.layers, max(8.0, pace.layers * pace.work(tokens, 0) / rate))
    assert tokens > LEAST and 36 < pace.layers * pace.work(tokens, 0) / rate < 41
