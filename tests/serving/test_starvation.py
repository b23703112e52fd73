"""Nobody waits for ever: a long request among many short ones begins in its turn, decodes in its turn, and ends."""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engines import BUDGET, SERVING, WHOLE, greedy, ids_of, inside, quiet
from models import build

from hf_sparsekv import Engine, OffloadConfig, TokenConfig
from hf_sparsekv.serving.admission import OVERTAKEN


@contextmanager
def a_stream_of_short_ones(engine: Engine, clients: int, tokens: int):
    """Each of so many clients asks again as soon as it has its answer, until this ends; gives the handles."""
    over, handles, wrong = threading.Event(), [], []

    def client(seed: int) -> None:
        while not over.is_set():
            try:
                handles.append(handle := engine.submit(ids_of(20, seed), greedy(tokens)))
                handle.result(60)
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield handles
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
        assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_request_that_needs_much_memory_begins_in_its_turn():
    """Short ones would always fit what is free; those that came later wait behind it."""
    serving = replace(SERVING, max_tokens=360, prefix_cache=False)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        loop, begun = inside(engine).loop, []
        plain = loop.work.begin
        loop.work.begin = lambda ids, *rest: begun.append(len(ids)) or plain(ids, *rest)
        with a_stream_of_short_ones(engine, 6, 12) as short:
            while len(short) < 12:
                time.sleep(0.01)
            before = len(begun)
            output = engine.submit(ids_of(250, 1), greedy(60)).result(60)
            assert len(output.token_ids) == 60
            while len(short) < 24:  # the stream goes on behind it
                time.sleep(0.01)
        # Each client has one request at most that is not answered when the long one comes.
        assert begun.index(250) - before <= 6 and len(begun) > begun.index(250) + 1
        quiet(engine)


@pytest.mark.parametrize(
    ("prefill_ms", "sizes"),
    [(math.inf, [100, 90, 300, 5, 6, 280, 7, 8, 9]), (0.5, [100, 90, 300, 70, 80, 280, 65, 90, 95])],
    ids=["a prompt has all of the GPU", "none is short"],
)
def test_the_order_of_beginning_is_that_of_arrival(prefill_ms, sizes):
    serving = replace(SERVING, max_tokens=360, prefix_cache=False, prefill_ms=prefill_ms)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        loop, begun = inside(engine).loop, []
        plain = loop.work.begin
        loop.work.begin = lambda ids, *rest: begun.append(len(ids)) or plain(ids, *rest)
        handles = [engine.submit(ids_of(n, n), greedy(20)) for n in sizes]
        for handle in handles:
            handle.result(60)
        assert begun == sizes
        quiet(engine)


def test_a_row_that_is_held_back_is_overtaken_a_few_times_and_comes_back():
    """Its working set does not fit beside the oldest row's; short ones would, again and again."""
    serving = replace(SERVING, max_rows=6, prefix_cache=False)
    config = TokenConfig(**BUDGET)
    with Engine(build("llama", "sdpa"), None, config, OffloadConfig(device_pool=120_000), serving) as engine:
        loop, room = inside(engine).loop, inside(engine).rows.slots
        expected = engine.submit(ids_of(200, 2), greedy(40)).result(60).token_ids
        seen: list[tuple[bool, int, int]] = []  # of the long one: it runs, was overtaken, later ones that run
        plain, long = loop.room.choose, []

        def choose() -> None:
            for request in loop.room.running:  # what they need is known here, whatever was measured
                request.need = {20: room // 8, 60: room * 5 // 8, 200: room // 2}[len(request.ids)]
            plain()
            for request in loop.room.running:
                if request.handle in long:
                    later = sum(one.candidate.runs for one in loop.room.running if one.order > request.order)
                    seen.append((request.candidate.runs, request.candidate.overtaken, later))

        loop.room.choose = choose
        oldest = engine.submit(ids_of(60, 1), greedy(300))
        next(iter(oldest))
        with a_stream_of_short_ones(engine, 3, 8) as short:
            long.append(engine.submit(ids_of(200, 2), greedy(40)))
            output = long[0].result(100)
            behind = len(short)
            while len(short) < behind + 3:  # the stream goes on behind it
                time.sleep(0.01)
        assert len(oldest.result(60).token_ids) == 300
        assert output.token_ids == expected
        held = [one for one in seen if not one[0]]
        assert held and max(overtaken for _, overtaken, _ in seen) == OVERTAKEN
        assert seen[-1][0] and any(later for _, _, later in held)
        assert engine.stats().held == 0
        quiet(engine)
