"""The engine: each request's tokens are those of ``generate()`` alone, whatever happens around it."""

from __future__ import annotations

import math
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from caches import SMALL
from captured import imitated
from engines import BUDGET, SERVING, WHOLE, before_steps, greedy, ids_of, inside, once, pieces, quiet
from inside import attention_of, hooks_of
from models import VOCAB, build
from waiting import wait_until

from hf_sparsekv import Engine, OffloadConfig, ProgressiveConfig, Sampling, ServingConfig, SparseCache, TokenConfig
from hf_sparsekv.serving import Busy, Closed, meter, room
from hf_sparsekv.serving.admission import Candidate
from hf_sparsekv.serving.prefill import chunks
from hf_sparsekv.telemetry.working_set import STEPS

pytestmark = pytest.mark.filterwarnings("error:decode steps run eagerly")


@torch.no_grad()
def alone(net, config, ids: list[int], tokens: int) -> list[int]:
    """The same tokens over a cache of its own, whose first chunk is what an engine calibrates label channels on."""
    cache, found, past = SparseCache(config, None), [], 0
    for n in pieces(config, len(ids)):
        logits = net(torch.tensor([ids[past : past + n]]), past_key_values=cache).logits
        past += n
    while True:
        found.append(int(logits[0, -1].argmax()))
        if len(found) == tokens:
            return found
        logits = net(torch.tensor([found[-1:]]), past_key_values=cache).logits


READ = pytest.mark.parametrize(
    ("settings", "layers"),
    [(WHOLE, True), (WHOLE, False), (BUDGET, True)],
    ids=["full-layers", "full-chunks", "budget"],
)


@pytest.mark.few
@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["resident", "offloaded"])
@READ
def test_requests_answer_as_alone(settings, layers, offload):
    net, config = build("llama", "sparsekv"), TokenConfig(**settings)
    sizes = [(150, 40), (20, 9), (301, 60), (65, 1), (90, 30), (7, 50)]
    asked = [(ids_of(n, seed), tokens) for seed, (n, tokens) in enumerate(sizes)]
    expected = [alone(net, config, ids, tokens) for ids, tokens in asked]
    serving = replace(SERVING, layer_segments=layers)
    with Engine(net, None, config, offload, serving) as engine:
        handles = [engine.submit(ids, Sampling(max_tokens=n, temperature=0)) for ids, n in asked]
        outputs = [handle.result(60) for handle in handles]
    assert [list(output.token_ids) for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"length"}


def test_an_engine_is_opened_outside_of_autocast():
    """Its own threads have none, whoever opens it."""
    answers = []
    for on in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=on),
            Engine(build("llama", "sdpa"), None, TokenConfig(**BUDGET), None, SERVING) as engine,
        ):
            answers.append(engine.submit(ids_of(150, 1), greedy(20)).result(60).token_ids)
    assert answers[0] == answers[1]


SHORT = {**BUDGET, "calibration_tokens": 64, "token_budget": 64}


@pytest.mark.parametrize(
    ("config", "offload"),
    [
        pytest.param(TokenConfig(**SHORT), None, marks=pytest.mark.slow),
        (TokenConfig(**SHORT), OffloadConfig(device_pool=120_000)),
        (ProgressiveConfig(**{**SMALL, "dense_below": 0, "calibration_tokens": 64, "min_tokens": 64}), None),
    ],
    ids=["resident", "crowded", "progressive"],
)
def test_short_prompts_are_calibrated_with_their_answers(config, offload):
    """As ``generate()`` does; but only those whose answers become so long that tokens are left out."""
    net = build("llama", "sparsekv")
    sizes = [(7, 130), (20, 110), (150, 40), (3, 120), (40, 80), (63, 60), (64, 60), (30, 20)]
    asked = [(ids_of(n, seed), tokens) for seed, (n, tokens) in enumerate(sizes)]
    expected = [alone(net, config, ids, tokens) for ids, tokens in asked]
    with Engine(build("llama", "sdpa"), None, config, offload, SERVING) as engine:
        work, calibrated = inside(engine).loop.work, []
        plain = work.calibrate
        work.calibrate = lambda row, ids: calibrated.append(list(ids)) or plain(row, ids)
        handles = [engine.submit(ids, greedy(tokens)) for ids, tokens in asked]
        outputs = [list(handle.result(100).token_ids) for handle in handles]
        quiet(engine)
    assert outputs == expected
    whole = [(ids + answer)[:64] for (ids, _), answer in zip(asked, expected)]
    assert sorted(calibrated) == sorted(whole[i] for i in (0, 1, 3, 4, 5))


def test_blocks_are_kept_once_their_channels_are_those_of_enough_tokens():
    """A conversation that goes on from a short prompt chooses by channels of its own, whatever was kept."""
    config, cached = TokenConfig(**SHORT), []
    with Engine(build("llama", "sdpa"), None, config, None, SERVING) as engine:
        for tokens in (40, 150):
            ids = ids_of(20, tokens)
            answer = list(engine.submit(ids, greedy(tokens)).result(60).token_ids)
            turn = [*ids, *answer, *ids_of(100, 2)]
            output = engine.submit(turn, greedy(40)).result(60)
            cached.append(output.cached_tokens)
            if tokens == 40:
                assert list(output.token_ids) == alone(build("llama", "sparsekv"), config, turn, 40)
        quiet(engine)
    assert cached[0] == 0 and cached[1] > 100


def test_an_error_while_a_row_is_calibrated_is_of_that_request_only(monkeypatch):
    config = TokenConfig(**SHORT)
    with Engine(build("llama", "sdpa"), None, config, OffloadConfig(), SERVING) as engine:
        work, error = inside(engine).loop.work, torch.OutOfMemoryError("no memory to read it anew")
        monkeypatch.setattr(work.rows, "calibrate", once(work.rows.calibrate, error))
        first, second = (engine.submit(ids_of(n, n), greedy(120)) for n in (30, 20))
        with pytest.raises(torch.OutOfMemoryError, match="no memory to read it anew"):
            first.result(60)
        assert list(second.result(60).token_ids) == alone(build("llama", "sparsekv"), config, ids_of(20, 20), 120)
        assert engine.ready
        quiet(engine)


# ---------------------------------------------------------------------- short prompts beside a long one


@contextmanager
def a_long_prompt(engine, ids: list[int] | None = None, tokens: int = 6, most: int = 64):
    """It is being read, and waits until the block ends; gives its handle, and what is read from then on.

    ``most``: tokens that take no longer than a turn, on whatever machine.
    """
    work, go, turns = inside(engine).loop.work, threading.Event(), []
    read, overtake = work.read, work.overtake

    def wait_and_read(n: int) -> bool:
        assert go.wait(30)
        turns.append("long")
        return read(n)

    def overtake_once(ids, *rest):
        turns.append(len(ids))
        return overtake(ids, *rest)

    work.read, work.overtake = wait_and_read, overtake_once
    work.pace.tokens_in = lambda ms, past: most
    handle = engine.submit(ids or ids_of(301, 301), greedy(tokens))
    wait_until(lambda: inside(engine).loop.order.reading is not None)
    try:
        yield handle, turns
    finally:
        go.set()
        handle.result(60)
        quiet(engine)


@pytest.mark.few
@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["resident", "offloaded"])
@READ
def test_short_prompts_overtake_a_long_one(settings, offload, layers):
    net, config = build("llama", "sparsekv"), TokenConfig(**settings)
    sizes = [(301, 6), (40, 12), (64, 9), (280, 5), (7, 20), (30, 3)]
    expected = [alone(net, config, ids_of(n, n), tokens) for n, tokens in sizes]
    serving = replace(SERVING, max_rows=8, layer_segments=layers)
    with Engine(net, None, config, offload, serving) as engine:
        with a_long_prompt(engine) as (long, turns):
            others = [engine.submit(ids_of(n, n), greedy(tokens)) for n, tokens in sizes[1:]]
        outputs = [handle.result(60) for handle in (long, *others)]
    assert [list(output.token_ids) for output in outputs] == expected
    assert turns[:7] == ["long", 40, "long", 64, "long", 7, "long"], "every other turn is the longer one's"
    first = [output.token_times[0] for output in outputs]
    assert max(first[1:3] + first[4:5]) < first[0] < first[3]


@pytest.mark.parametrize(
    ("others", "settings", "most"),
    [
        ([290, 280, 9], {"max_rows": 3}, 64),  # places for all but the last
        ([290, 9], {"max_tokens": 600}, 64),  # no memory beside the two
        ([9], {"prefill_ms": math.inf}, 64),  # a prompt has all of the GPU
        ([302], {}, 1000),  # not shorter
        ([100], {}, 1000),  # longer than a chunk
        ([65], {"chunk": 128}, 64),  # too long for a turn
    ],
)
def test_nobody_who_is_passed_waits_for_what_a_short_prompt_took(others, settings, most):
    serving = replace(SERVING, **{"max_rows": 8, "prefix_cache": False, **settings})
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        with a_long_prompt(engine, tokens=30, most=most) as (_, turns):
            handles = [engine.submit(ids_of(n, 1), greedy(30)) for n in others]
            wait_until(lambda: inside(engine).loop.intake.queued >= len(others))
        for handle in handles:
            handle.result(60)
        quiet(engine)
    assert turns[:4] == ["long"] * 4


def test_a_place_more_stays_free_where_rows_may_be_held_back():
    """Who is passed would find one less, if a row were held by then."""
    serving = replace(SERVING, max_rows=4)
    for offload, passed in ((None, True), (OffloadConfig(device_pool=120_000), False)):
        with Engine(build("llama", "sdpa"), None, TokenConfig(**BUDGET), offload, serving) as engine:
            loop = inside(engine).loop
            assert loop.room.by_need == (offload is not None)
            with a_long_prompt(engine) as (_, turns):
                handles = [engine.submit(ids_of(n, n), greedy(4)) for n in (290, 280, 9)]
                wait_until(lambda loop=loop: loop.intake.queued >= 3)
            for handle in handles:
                handle.result(60)
        assert (turns[1] == 9) == passed


def test_short_prompts_that_begin_alike_keep_nothing_of_a_long_one():
    """What it brings is kept with its own channels, or all that is further on in it would be lost."""
    config, common = TokenConfig(**{**BUDGET, "calibration_tokens": 16}), ids_of(60, 9)
    long, short = common + ids_of(240, 8), [*common[:50], 5, 6]
    with Engine(build("llama", "sdpa"), None, config, None, replace(SERVING, max_rows=8)) as engine:
        with a_long_prompt(engine, long) as (_, turns):
            first = engine.submit(short, greedy(20))
        assert turns[1] == len(short) and first.result(30).cached_tokens == 0
        assert engine.submit([*long, 3], greedy(4)).result(30).cached_tokens > 250
        assert engine.submit([*short, 3], greedy(4)).result(30).cached_tokens == 32  # of the long one's
        with a_long_prompt(engine, ids_of(300, 7)) as (_, turns):  # one that begins with blocks of another
            again = engine.submit([*short, 4], greedy(20))
        assert turns[1] == len(short) + 1 and again.result(30).cached_tokens == 32
        assert list(again.result(1).token_ids) == list(engine.submit([*short, 4], greedy(20)).result(30).token_ids)


def test_short_prompts_teach_nothing_about_long_ones():
    """They take as long as more tokens would, and waiting for memory is not shorter for them."""
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, replace(SERVING, max_rows=8)) as engine:
        loop, learnt = inside(engine).loop, []
        learn, since = loop.work.pace.learn, []
        loop.work.pace.learn = lambda tokens, *rest: learnt.append(tokens) or learn(tokens, *rest)
        with a_long_prompt(engine) as (_, turns):
            handles = [engine.submit(ids_of(n, n), greedy(3)) for n in (7, 8, 9)]
            since.append(loop.intake._last)
        assert [handle.result(30).finish_reason for handle in handles] == ["length"] * 3
        assert {7, 8, 9} < set(turns) and learnt and min(learnt) > 40
        assert loop.intake._last == since[0] and engine.stats().prefill_s > 0


def test_a_short_prompt_that_fails_takes_nobody_with_it(expected, monkeypatch):
    """Nor does one that is cancelled meanwhile; and rows decode in the order of arrival."""
    serving = replace(SERVING, max_rows=8)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        plain = engine.model.forward

        def forward(*args, **kwargs):
            if kwargs["input_ids"].shape[1] == 33:
                raise RuntimeError("unlucky")
            return plain(*args, **kwargs)

        monkeypatch.setattr(engine.model, "forward", forward)
        orders, loop = [], inside(engine).loop
        before_steps(engine, lambda: orders.append([one.order for one in loop.room.running]))
        with a_long_prompt(engine, tokens=30) as (long, turns):
            unlucky, gone, fine = (engine.submit(ids_of(n, 2), greedy(40)) for n in (33, 34, 35))
            gone.cancel()
        with pytest.raises(RuntimeError, match="unlucky"):
            unlucky.result(10)
        assert gone.result(10).finish_reason == "cancelled"
        assert list(fine.result(10).token_ids) == expected(35, 2, 40)
        assert list(long.result(10).token_ids) == expected(301, 301, 30)
        assert 33 in turns and 35 in turns and all(order == sorted(order) for order in orders)
        assert any(len(order) == 2 for order in orders)
        quiet(engine)


def test_a_short_prompt_that_has_a_row_and_fails_leaves_it(monkeypatch):
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, replace(SERVING, max_rows=8)) as engine:
        with a_long_prompt(engine) as (long, turns):
            sampler = inside(engine).loop.room.sampler
            monkeypatch.setattr(sampler, "set", once(sampler.set, RuntimeError("unlucky")))
            unlucky, fine = (engine.submit(ids_of(n, n), greedy(4)) for n in (33, 34))
        with pytest.raises(RuntimeError, match="unlucky"):
            unlucky.result(10)
        assert {fine.result(10).finish_reason, long.result(10).finish_reason} == {"length"}
        assert turns[:4] == ["long", 33, "long", 34]


# ---------------------------------------------------------------------- one engine for what follows


@pytest.fixture(scope="module")
def net():
    return build("llama", "sdpa")


@pytest.fixture(scope="module")
def engine(net):
    with Engine(net, None, TokenConfig(**WHOLE), None, SERVING) as engine:
        yield engine
    assert attention_of(net) == "sdpa"  # as it was


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens by full attention, of ``(n, seed, tokens)``."""
    other = build("llama", "sdpa")

    def tokens_of(n: int, seed: int, tokens: int) -> list[int]:
        ids = torch.tensor([ids_of(n, seed)])
        return other.generate(ids, max_new_tokens=tokens, do_sample=False)[0, n:].tolist()

    return tokens_of


def test_anything_in_any_order(engine, expected):
    """Random arrivals, lengths and cancellations by several threads."""
    wrong, left = [], []

    def client(seed: int) -> None:
        draw = random.Random(seed)
        for k in range(6):
            n, tokens = draw.choice([1, 2, 17, 63, 130, 299]), draw.choice([1, 2, 8, 30])
            until = draw.choice([None, None, 1, 4])
            time.sleep(draw.random() * 0.05)
            handle, found = engine.submit(ids_of(n, 7 * seed + k), greedy(tokens)), []
            for piece in handle:
                found += piece.token_ids
                if until is not None and len(found) >= until:
                    handle.cancel()
            output = handle.result(30)
            like = expected(n, 7 * seed + k, tokens)
            whole = output.finish_reason == "length"
            if list(output.token_ids) != found or found != like[: len(found)] or (whole and len(found) < tokens):
                wrong.append((seed, k, n, tokens, until, output, like))
            left.append(output.finish_reason)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and len(left) == 30
    assert "cancelled" in left and "length" in left
    quiet(engine)


def test_prompts_that_begin_alike_are_read_once(engine, expected):
    document = ids_of(250, 77)
    first = engine.submit([*document, 5, 6, 7], greedy(4)).result(20)
    assert first.cached_tokens == 0
    asked = [[*document, k, k + 1, k + 2] for k in (5, 9, 30)]
    found = [handle.result(20) for handle in [engine.submit(ids, greedy(12)) for ids in asked]]
    assert [output.cached_tokens for output in found] == [14 * 16] * 3
    other = build("llama", "sdpa")
    for ids, output in zip(asked, found):
        like = other.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert list(output.token_ids) == like
    turn = engine.submit([*asked[0], *found[0].token_ids, 8, 8, 8], greedy(3)).result(20)  # the answer, too
    assert turn.cached_tokens == (253 + 12 + 3 - 20) // 16 * 16
    quiet(engine)


def test_blocks_that_are_shared_are_counted_once():
    """Rows that go on from one document fit together where copies of it would not."""
    config = TokenConfig(**WHOLE)
    serving = replace(SERVING, max_tokens=440)
    document = ids_of(300, 5)
    with Engine(build("llama", "sdpa"), None, config, None, serving) as engine:
        engine.submit([*document, 7, 7], greedy(1)).result(20)
        together, loop = [], inside(engine).loop
        before_steps(engine, lambda: together.append(len(loop.room.running)))
        handles = [engine.submit([*document, k, k], greedy(30)) for k in range(4)]
        assert all(handle.result(30).cached_tokens > 200 for handle in handles)
        assert max(together) >= 3
        quiet(engine)


def test_a_prompt_that_cannot_begin_fails_alone(engine, expected, monkeypatch):
    busy = engine.submit(ids_of(40, 6), greedy(30))
    next(iter(busy))
    plain, failures = inside(engine).cache.beside, []

    def beside():
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("no memory")
        return plain()

    monkeypatch.setattr(inside(engine).cache, "beside", beside)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        engine.submit(ids_of(50, 7), greedy(2)).result(10)
    assert list(engine.submit(ids_of(50, 8), greedy(4)).result(10).token_ids) == expected(50, 8, 4)
    assert list(busy.result(20).token_ids) == expected(40, 6, 30)
    quiet(engine)


def test_what_is_kept_gives_way(expected):
    serving = replace(SERVING, max_tokens=300, max_rows=2)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        for seed in range(6):
            output = engine.submit(ids_of(150, seed), greedy(20)).result(20)
            assert list(output.token_ids) == expected(150, seed, 20)
            quiet(engine)
            assert len(inside(engine).loop.blocks.index) <= inside(engine).blocks
        assert engine.submit(ids_of(150, 5), greedy(20)).result(20).cached_tokens > 0
        assert engine.submit(ids_of(150, 0), greedy(20)).result(20).cached_tokens == 0


def test_an_answer_ends_with_its_end_of_sequence(engine, expected):
    like = expected(40, 3, 20)
    ends = inside(engine).loop.ends
    ends.eos, eos = frozenset({like[5]}), ends.eos
    try:
        output = engine.submit(ids_of(40, 3), greedy(20)).result(20)
        assert (list(output.token_ids), output.finish_reason) == (like[: like.index(like[5]) + 1], "stop")
        assert list(engine.submit(ids_of(40, 3), greedy(20, ignore_eos=True)).result(20).token_ids) == like
    finally:
        ends.eos = eos
    quiet(engine)


def test_seeded_draws_do_not_depend_on_the_batch(engine):
    drawn = Sampling(max_tokens=12, temperature=1.5, top_k=40, seed=5)
    first = engine.submit(ids_of(30, 1), drawn).result(20)
    busy = [engine.submit(ids_of(n, n), Sampling(max_tokens=40)) for n in (50, 9)]
    assert engine.submit(ids_of(30, 1), drawn).result(20).token_ids == first.token_ids
    for handle in busy:
        handle.result(20)
    quiet(engine)


def test_a_batch_of_more_prompts_than_may_wait(expected):
    serving = replace(SERVING, max_waiting=1, max_rows=2)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        found = engine.generate_batch([ids_of(20, seed) for seed in range(6)], greedy(5))
        assert [list(output.token_ids) for output in found] == [expected(20, seed, 5) for seed in range(6)]
        quiet(engine)


def test_who_closes_a_stream_cancels_it(engine):
    stream = engine.stream(ids_of(10, 1), greedy(380))
    next(stream)
    stream.close()
    quiet(engine)


def test_a_prompt_is_cancelled_in_the_middle(engine):
    before = engine.stats().cancelled
    busy = engine.submit(ids_of(10, 2), greedy(60))
    handle = engine.submit(ids_of(390, 1), greedy(2))
    until = time.monotonic() + 10
    while inside(engine).loop.order.reading is None and time.monotonic() < until:
        time.sleep(0.001)
    handle.cancel()
    assert handle.result(10).finish_reason in ("cancelled", "length")  # it may have been quick
    assert busy.result(20).finish_reason == "length"
    assert engine.stats().cancelled - before <= 1
    quiet(engine)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "empty"),
        ([3, VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([-1], "token id -1"),
        ([1.5], "integers"),
        ("text", "tokenizer"),
        (torch.ones(2, 3, dtype=torch.long), "integers"),
        ([1] * 399, "more than the 400 that max_length allows"),
    ],
)
def test_bad_prompts_are_refused(engine, given, says):
    with pytest.raises(ValueError, match=says):
        engine.submit(given, greedy(2))


def test_what_would_never_fit_is_refused():
    serving = replace(SERVING, max_tokens=64)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        with pytest.raises(ValueError, match="that the memory holds"):
            engine.submit([1] * 200, greedy(2))
        assert len(engine.submit([1] * 30, greedy(2)).result(10).token_ids) == 2
    with pytest.raises(ValueError, match="fit the memory that is free"):
        Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, replace(SERVING, max_tokens=1 << 50))


def test_an_engine_takes_the_host_memory_that_it_may(expected):
    """On a CPU, too, where keys and values of all places are in one memory."""
    offload = OffloadConfig(max_host_bytes=600_000)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), offload, SERVING) as engine:
        assert 400_000 < engine.stats().host_bytes <= 600_000
        handles = [engine.submit(ids_of(300, seed), greedy(20)) for seed in range(4)]  # one after another
        assert [list(one.result(30).token_ids) for one in handles] == [expected(300, seed, 20) for seed in range(4)]
        quiet(engine)


@torch.no_grad()
def moved(net, config, ids: list[int], tokens: int) -> int:
    """Bytes that a cache of its own moves for one request."""
    cache, past = SparseCache(config, OffloadConfig()), 0
    for n in chunks(len(ids), SERVING.chunk):
        logits = net(torch.tensor([ids[past : past + n]]), past_key_values=cache).logits
        past += n
    for _ in range(tokens - 1):  # the last one is not read
        logits = net(logits[:, -1:].argmax(-1), past_key_values=cache).logits
    stats = cache.stats()
    return stats.host_to_device_bytes + stats.device_to_host_bytes


def test_bytes_over_the_link(monkeypatch):
    """Counts of prompts and steps, as caches of their own count them; of a prompt that is given up, too."""
    monkeypatch.setattr(meter, "EACH_S", 0.0)
    net, config = build("llama", "sparsekv"), TokenConfig(**WHOLE)
    with Engine(net, None, config, OffloadConfig(), replace(SERVING, prefix_cache=False)) as engine:
        total = 0
        for n, tokens in ((60, 1), (150, 1), (150, 40)):
            engine.submit(ids_of(n, 1), greedy(tokens)).result(30)
            quiet(engine)
            total += moved(net, config, ids_of(n, 1), tokens)
            wait_until(lambda: engine.stats().link_bytes >= total)  # noqa: B023 (called at once)
            assert engine.stats().link_bytes == total > 0
        handle = engine.submit(ids_of(300, 2), greedy(1))
        wait_until(
            lambda: (found := inside(engine).loop.work.reading) is not None and found.cache.get_seq_length() > 100
        )
        handle.cancel()
        quiet(engine)
        wait_until(lambda: engine.stats().link_bytes > total)


def test_the_link_is_looked_at_only_when_somebody_asks(monkeypatch):
    """And not more often than that: it makes the host wait for the device."""
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), OffloadConfig(), SERVING) as engine:
        counted, count = [], inside(engine).loop.work.link_bytes
        monkeypatch.setattr(inside(engine).loop.work, "link_bytes", lambda: counted.append(1) or count())
        engine.submit(ids_of(150, 1), greedy(20)).result(30)
        assert not counted
        handle = engine.submit(ids_of(150, 2), greedy(20))
        began = time.monotonic()
        while not handle.done:
            engine.stats()
            time.sleep(0.001)  # the engine needs the interpreter, too
        assert len(counted) <= 2 + (time.monotonic() - began) / meter.EACH_S
        wait_until(lambda: counted)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, SERVING) as engine:
        engine.submit(ids_of(60, 1), greedy(4)).result(30)
        assert engine.stats().link_bytes == inside(engine).loop.work.link_bytes() == 0


def test_requests_wait_for_memory(expected):
    serving = replace(SERVING, max_tokens=200)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        handles = [engine.submit(ids_of(100, seed), greedy(30)) for seed in range(4)]
        assert [list(one.result(30).token_ids) for one in handles] == [expected(100, seed, 30) for seed in range(4)]
        quiet(engine)


@pytest.mark.few(layers=(True,))
@pytest.mark.parametrize("layers", [True, False])
def test_no_more_memory_is_taken_than_was_reserved(layers):
    """Blocks that are kept of rows that run are not let go for others: that would free nothing."""
    serving, draw = replace(SERVING, max_tokens=800, layer_segments=layers), random.Random(3)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        loop, ids = inside(engine).loop, inside(engine).cache.row_table.ids
        most = []
        before_steps(engine, lambda: most.append((ids.used, loop.blocks.used + len(loop.blocks.index))))
        asked = [(draw.randint(5, 350), draw.randint(1, 40)) for _ in range(30)]
        for handle in [engine.submit(ids_of(n, seed), greedy(tokens)) for seed, (n, tokens) in enumerate(asked)]:
            handle.result(60)
        quiet(engine)
        assert max(used for used, _ in most) <= inside(engine).blocks
        assert max(spoken for _, spoken in most) <= inside(engine).blocks
        beside = 32 // 16  # in which a row is calibrated
        assert {pool.capacity for pool in inside(engine).cache.block_pools.values()} == {inside(engine).blocks + beside}


def test_too_many_waiting_are_refused():
    serving = replace(SERVING, max_waiting=2, max_rows=1)
    with Engine(build("llama", "sdpa"), None, TokenConfig(**WHOLE), None, serving) as engine:
        handles = []
        with pytest.raises(Busy, match="wait already") as refused:
            for _ in range(8):
                handles.append(engine.submit(ids_of(200, 1), greedy(100)))
        assert refused.value.retry_after >= 0 and len(handles) >= 2
        assert engine.stats().refused == {"waiting": 1}
    assert {handle.result(5).finish_reason for handle in handles} <= {"cancelled"}


def test_a_failing_prompt_takes_nobody_with_it(engine, expected, monkeypatch):
    net, plain = engine.model, engine.model.forward
    busy = engine.submit(ids_of(40, 4), greedy(40))

    def forward(*args, **kwargs):
        ids = kwargs["input_ids"]
        if ids.shape[1] > 1 and int(ids[0, -1]) == 13:
            raise RuntimeError("unlucky")
        return plain(*args, **kwargs)

    monkeypatch.setattr(net, "forward", forward)
    with pytest.raises(RuntimeError, match="unlucky"):
        engine.submit([5] * 30 + [13], greedy(2)).result(10)
    assert list(busy.result(20).token_ids) == expected(40, 4, 40)
    assert engine.ready
    quiet(engine)


def test_logits_that_are_no_distribution_fail_one_request(engine, expected, monkeypatch):
    plain = engine.model.forward
    busy = engine.submit(ids_of(40, 5), greedy(30))

    def forward(*args, **kwargs):
        out = plain(*args, **kwargs)
        if kwargs["input_ids"].shape[1] == 31:
            out.logits[:] = float("nan")
        return out

    monkeypatch.setattr(engine.model, "forward", forward)
    with pytest.raises(RuntimeError, match="NaN or infinite"):
        engine.submit([5] * 31, greedy(2)).result(10)
    assert list(busy.result(20).token_ids) == expected(40, 5, 30)
    quiet(engine)


def test_a_failing_step_fails_all_and_says_so():
    net = build("llama", "sdpa")
    with Engine(net, None, TokenConfig(**WHOLE), None, SERVING) as engine:
        handles = [engine.submit(ids_of(30, seed), greedy(100)) for seed in range(6)]
        next(iter(handles[0]))

        def forward(*args, **kwargs):
            raise RuntimeError("the device is gone")

        net.forward = forward
        for handle in handles:
            with pytest.raises(RuntimeError, match="the device is gone"):
                handle.result(10)
        del net.forward
        assert not engine.ready and "the device is gone" in str(engine.failed)
        with pytest.raises(Closed, match="has failed"):
            engine.submit([1], greedy(1))


def test_draining_and_closing():
    net = build("llama", "sdpa")
    engine = Engine(net, None, TokenConfig(**WHOLE), None, SERVING)
    handle = engine.submit(ids_of(20, 1), greedy(30))
    assert engine.drain(20) and handle.result(0).finish_reason == "length"
    with pytest.raises(Closed, match="drains"):
        engine.submit([1], greedy(1))
    engine.close()
    engine.close()
    assert "closed" in repr(engine) and attention_of(net) == "sdpa"
    assert not any(thread in threading.enumerate() for thread in inside(engine).threads)
    assert not hooks_of(net.model.layers[0])
    out = net.generate(torch.tensor([ids_of(20, 1)]), max_new_tokens=3, do_sample=False)
    assert out[0, 20:].tolist() == list(handle.result().token_ids[:3])


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("mistral-window", {}, "this model has none"),
        ("gemma3", {"serving": replace(SERVING, exact=True)}, "cannot take drafts back"),
        ("llama", {"config": TokenConfig(level="two_level", num_blocks=16, lag=True)}, "chooses ahead"),
        ("llama", {"serving": ServingConfig(max_length=5000)}, "over the model's context"),
        ("linear", {}, "models of transformers"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(name, given, says):
    net = torch.nn.Linear(2, 2) if name == "linear" else build(name, "sdpa")
    with pytest.raises((ValueError, TypeError), match=says):
        Engine(net, None, **{"serving": SERVING, **given})
    if name != "linear":
        assert attention_of(net) == "sdpa"


def test_counts(engine):
    before = engine.stats()
    engine.submit(ids_of(20, 1), greedy(7)).result(10)
    quiet(engine)
    after = engine.stats()
    assert (after.requests - before.requests, after.finished - before.finished) == (1, 1)
    assert after.generated_tokens - before.generated_tokens == 7
    assert after.prompt_tokens - before.prompt_tokens == 20
    assert after.ttft_s.count - before.ttft_s.count == after.total_s.count - before.total_s.count == 1
    assert after.between_s.count - before.between_s.count == 6
    assert after.steps - before.steps == 6


@pytest.mark.few
@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["resident", "offloaded"])
@pytest.mark.parametrize("dense_below", [0, 600], ids=["chosen", "crossover"])
def test_all_steps_are_captured_at_the_start(offload, dense_below):
    net, runner = imitated()
    config = TokenConfig(**{**BUDGET, "dense_below": dense_below})
    asked = [(150, 40), (20, 9), (301, 30), (65, 1), (90, 30), (7, 50)]
    asked = [(ids_of(n, seed), tokens) for seed, (n, tokens) in enumerate(asked)]
    with Engine(net, None, config, offload, replace(SERVING, prefix_cache=False)) as engine:
        captures, replays = runner.captures, runner.replays
        assert captures > len(inside(engine).rows.widths)
        handles = [engine.submit(ids, greedy(tokens)) for ids, tokens in asked]
        outputs = [handle.result(100) for handle in handles]
        assert runner.captures == captures == engine.stats().captures
        assert runner.replays - replays == engine.stats().steps
    if not dense_below:  # which goes by the mean of a batch
        other = build("llama", "sparsekv")
        assert [list(output.token_ids) for output in outputs] == [alone(other, config, *one) for one in asked]


@pytest.mark.few(max_length=(6, 163))
@pytest.mark.parametrize("max_length", [6, 162, 163, 164])
def test_steps_are_captured_in_all_widths_whatever_the_longest_row(max_length):
    """Each width is a step more for the rows that are captured: they have room for these."""
    net, runner = imitated()
    serving = replace(SERVING, max_rows=8, max_length=max_length)
    with Engine(net, None, TokenConfig(**BUDGET), None, serving) as engine:
        captures = runner.captures
        assert len(engine.submit(ids_of(max_length - 3, 1), greedy(3)).result(20).token_ids) == 3
        assert runner.captures == captures


@pytest.fixture
def crowded(request):
    """Room for copies of the tokens that some of the rows choose."""
    config, pool = TokenConfig(**BUDGET), OffloadConfig(device_pool=getattr(request, "param", 120_000))
    serving = replace(SERVING, max_rows=6, prefix_cache=False)
    with Engine(build("llama", "sdpa"), None, config, pool, serving) as engine:
        yield engine


def test_rows_are_held_back_until_their_working_sets_fit(crowded):
    held, rooms, lacking, loop = [], [], [], inside(crowded).loop

    def most_of(request) -> int:
        return len(request.ids) + request.sampling.max_tokens

    def look() -> None:
        held.append(sum(not request.candidate.runs for request in loop.room.running))
        rooms.append(sum(loop.rows.room(row) for row in loop.rows.rows))
        assert all(loop.rows.room(r.row) == 0 for r in loop.room.running if not r.candidate.runs)
        decoding = [r for r in loop.room.running if r.candidate.runs]
        if sum(r.candidate.need for r in decoding) <= loop.rows.slots:  # not the oldest one, which runs anyway
            lacks = [r for r in decoding if loop.rows.room(r.row) < 0.75 * min(r.candidate.need, most_of(r)) - 16]
            lacking.append(len(lacks))

    before_steps(crowded, look)
    asked = [(ids_of(n, seed), tokens) for seed, (n, tokens) in enumerate(6 * [(150, 40)] + [(40, 70), (301, 25)])]
    handles = [crowded.submit(ids, greedy(tokens)) for ids, tokens in asked]
    outputs = [handle.result(100) for handle in handles]
    net = build("llama", "sparsekv")
    expected = [alone(net, TokenConfig(**BUDGET), ids, tokens) for ids, tokens in asked]
    assert [list(output.token_ids) for output in outputs] == expected
    assert max(held) > 0 and max(rooms) <= loop.rows.slots
    assert len(lacking) > 50 and max(lacking) == 0, "who has just come has room at once, too"
    assert crowded.stats().held == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [((1200, 1200, 1200, 0), (992, 992, 992, 992)), ((1200, 1024, 992, 0), (992, 1024, 992, 992))],
)
def test_a_row_that_has_just_come_gets_what_others_have_too_much(before, after):
    """They need less than they have by less than a quarter, which nobody takes from them otherwise."""
    rooms = dict(enumerate(before))

    def give(row: int, tokens: int) -> None:
        assert tokens - rooms[row] <= rows.free_slots
        rooms[row] = tokens

    class Fake(SimpleNamespace):
        free_slots = property(lambda self: 4000 - sum(rooms.values()))

    rows = Fake(cache=SimpleNamespace(config=SimpleNamespace(block_size=16)), slots=4000, room=rooms.get)
    running = [
        SimpleNamespace(candidate=Candidate(960, True), row=row, ids=range(4000), sampling=greedy(9), launched=5)
        for row in range(4)
    ]
    mine = SimpleNamespace(rows=rows, work=SimpleNamespace(give=give), running=running)
    room.Room._share_room(mine)
    assert tuple(rooms.values()) == after


def test_working_sets_are_counted_once_more_room_has_filled_up(crowded):
    loop, grown, asked = inside(crowded).loop, {}, []
    give, working_sets = loop.work.give, loop.rows.working_sets

    def gave(row: int, tokens: int) -> None:
        had = loop.rows.room(row)
        give(row, tokens)
        if loop.rows.room(row) > had:
            request = next(one for one in loop.room.running if one.row == row)
            grown[request] = request.launched

    def counted():
        asked.append(None)
        return working_sets()

    loop.work.give, loop.rows.working_sets = gave, counted
    measured = loop.room.measured

    def looked(steps: int) -> bool:
        before = len(asked)
        found = measured(steps)
        if len(asked) > before:
            asked[-1] = [one.launched - grown[one] for _, one in loop.room._sets[1]]
        return found

    loop.room.measured = looked
    for seed in range(12):
        crowded.submit(ids_of(150, seed), greedy(18 + 7 * (seed % 5)))
    crowded.drain()
    steps = [n for each in asked for n in each]
    assert grown and steps and min(steps) >= STEPS


def test_rows_close_up(crowded):
    """Rows that decode move to the front, so that a step is no wider than needed."""
    loop, widths = inside(crowded).loop, []
    before_steps(crowded, lambda: widths.append((len(loop.rows.active), loop.rows.width)))
    tokens = [60, 5, 5, 5, 5, 40]
    handles = [crowded.submit(ids_of(20, seed), greedy(n)) for seed, n in enumerate(tokens)]
    outputs = [handle.result(60) for handle in handles]
    assert {len(output.token_ids) for output in outputs} == {5, 40, 60}
    assert all(width <= max(2 * active, 1) for active, width in widths)


@pytest.mark.parametrize("crowded", [480_000], indirect=True, ids=[""])
def test_rows_that_are_held_back_get_out_of_the_way(crowded, monkeypatch):
    """Some rows that came first wait: those that decode take their places, and give them back behind."""
    mine, seen = inside(crowded).loop, []

    def chosen(candidates, room):
        first = len(seen) < 30
        for i, one in enumerate(candidates):
            one.runs = i >= 3 or not first
        return [one.runs for one in candidates]

    def look() -> None:
        seen.append((mine.rows.active, mine.rows.width, len(mine.rows.rows)))
        if len(seen) == 30:
            mine.room.changed = True

    monkeypatch.setattr(room, "admit", chosen)
    before_steps(crowded, look)
    asked = [(ids_of(90 + seed, seed), 60) for seed in range(7)]
    outputs = [handle.result(100) for handle in [crowded.submit(ids, greedy(tokens)) for ids, tokens in asked]]
    net = build("llama", "sparsekv")
    expected = [alone(net, TokenConfig(**BUDGET), ids, tokens) for ids, tokens in asked]
    assert [list(output.token_ids) for output in outputs] == expected
    assert ((0, 1), 2, 5) in seen, "the fourth and fifth, in the places of the first two"
    assert all(width == room.width(len(active), 6) for active, width, _ in seen if active)
