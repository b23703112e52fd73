"""Failures in an engine, and its state after them: one request ends, told why, and nothing else changes."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import BUDGET, SERVING, WHOLE, before_each, greedy, ids_of, inside, once, quiet
from inside import attention_of, hooks_of
from models import build
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv import Engine, OffloadConfig, TokenConfig
from hf_sparsekv.row_batch import sharing
from hf_sparsekv.serving import Busy, Closed
from hf_sparsekv.serving import drawn as drawn_module
from hf_sparsekv.serving import work as work_module
from hf_sparsekv.serving.prefix import PrefixIndex, block_keys


@contextmanager
def engine_of(offload: OffloadConfig | None = None, budget: bool = False, tokenizer=None, **changes):
    """An engine over a tiny model."""
    sizes = {} if tokenizer is None else {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = TokenConfig(**(BUDGET if budget else WHOLE))
    with Engine(build("llama", "sdpa", **sizes), tokenizer, config, offload, replace(SERVING, **changes)) as engine:
        yield engine


# ---------------------------------------------------------------------- a row's first moments


@pytest.mark.few(where=("room", "token"))
@pytest.mark.parametrize("where", ["room", "channels", "settings", "draw", "token"])
def test_an_error_behind_a_join_leaves_no_row(where, monkeypatch):
    """Whatever fails between a row's join and its first step takes that request only, and the row is free."""
    room = where == "room"
    with engine_of(OffloadConfig(device_pool=120_000) if room else None, room, working_set=not room) as engine:
        expected = engine.submit(ids_of(60, 2), greedy(3)).result(20).token_ids
        busy = engine.submit(ids_of(30, 1), greedy(200))
        next(iter(busy))
        loop, error = inside(engine).loop, torch.OutOfMemoryError("no memory for a row")
        place, name = {
            "room": (loop.work, "give"),
            "channels": (loop.work, "channels"),
            "settings": (loop.room.sampler, "set"),
            "draw": (loop.drawn, "_record"),
            "token": (loop.work, "tokens_are_there"),
        }[where]
        with monkeypatch.context() as patch:
            if where in ("draw", "token"):  # which steps have, too
                failing = once(getattr(place, name), error)
                before_each(loop, "_join", lambda: patch.setattr(place, name, failing))
            else:
                patch.setattr(place, name, once(getattr(place, name), error))
            with pytest.raises(torch.OutOfMemoryError, match="no memory for a row"):
                engine.submit(ids_of(50, 3), greedy(200)).result(20)
            wait_until(lambda: loop.rows.rows == () or len(loop.rows.rows) == 1)
            assert engine.ready and [request.handle for request in loop.room.running] in ([busy], [])
        assert len(busy.result(60).token_ids) == 200
        assert engine.submit(ids_of(60, 2), greedy(3)).result(20).token_ids == expected
        quiet(engine)


# ---------------------------------------------------------------------- what errors keep


def test_an_error_that_is_kept_keeps_no_memory(monkeypatch):
    """Frames of a traceback have a chunk's activations, and the cache whose blocks these are."""
    with engine_of() as engine:
        plain, held = engine.model.forward, []

        class Large(torch.Tensor):
            """Something that a weak reference can be had of."""

        def forward(*args, **kwargs):
            if kwargs["input_ids"].shape[1] > 1:
                activations = torch.zeros(1000).as_subclass(Large)
                held.append(weakref.ref(activations))
                held.append(weakref.ref(kwargs["past_key_values"]))
                try:
                    raise ValueError("a cause of its own")
                except ValueError as error:
                    raise RuntimeError("unlucky") from error
            return plain(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", forward)
            handle = engine.submit(ids_of(150, 1), greedy(2))
            with pytest.raises(RuntimeError, match="unlucky"):
                handle.result(10)
        assert len(held) == 2
        wait_until(lambda: all(ref() is None for ref in held))  # the loop's own variables last a little longer
        assert "unlucky" in repr(handle)
        quiet(engine)


def test_blocks_of_a_prompt_that_cannot_begin_are_given_back(monkeypatch):
    with engine_of() as engine:
        document = ids_of(200, 4)
        engine.submit([*document, 1], greedy(2)).result(10)
        with monkeypatch.context() as patch:
            patch.setattr(work_module, "Reading", once(work_module.Reading, torch.OutOfMemoryError("no memory")))
            failed = engine.submit([*document, 2], greedy(2))
            with pytest.raises(torch.OutOfMemoryError):
                failed.result(10)
        quiet(engine)
        with monkeypatch.context() as patch:
            patch.setattr(sharing, "read_sinks", once(sharing.read_sinks, torch.OutOfMemoryError("no memory")))
            failed = engine.submit([*document, 2], greedy(2))
            with pytest.raises(torch.OutOfMemoryError):
                failed.result(10)
        quiet(engine)
        assert engine.submit([*document, 3], greedy(2)).result(10).cached_tokens > 0


# ---------------------------------------------------------------------- blocks that are kept


class References:
    """Counts as the engine's blocks do."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def share(self, ids: np.ndarray) -> None:
        for one in ids.tolist():
            self.of[one] = self.of.get(one, 0) + 1

    def drop(self, ids: np.ndarray) -> None:
        for one in ids.tolist():
            self.of[one] -= 1
            assert self.of[one] >= 0


def index_of(size: int = 2):
    counts = References()
    return PrefixIndex(counts, size), counts


def test_a_block_stays_as_long_as_one_behind_it_is_needed():
    """Blocks that are not pinned can go: admission counts on it."""
    index, _ = index_of()
    tokens = list(range(12))
    keys, channels = block_keys(tokens, 2, 6), (None,)
    first = index.match(keys)
    index.keep(keys[:1], np.array([0], dtype=np.int32), channels, first)
    index.release(first)
    one, two = index.match(keys), index.match(keys)  # both go on from block 0, and read the same
    index.keep(keys[:4], np.array([0, 1, 2, 3], dtype=np.int32), channels, one)
    index.keep(keys[:6], np.array([0, 11, 12, 13, 14, 15], dtype=np.int32), channels, two)
    assert (len(index), index.pinned) == (6, 6)
    index.release(one)
    assert index.pinned == 6  # the second one's blocks hang behind the first one's
    assert index.evict(6) == 0 and len(index) == 6
    index.release(two)
    assert index.pinned == 0 and index.evict(6) == 6 and len(index) == 0


def test_any_order_of_keeping_and_letting_go():
    """Blocks that are not pinned can be let go of; references and pins come out even."""
    draw = np.random.default_rng(5)
    index, counts = index_of()
    root, texts, there, ids = (None,), [], [], iter(range(10_000))
    for _ in range(600):
        if there and (len(there) > 5 or draw.random() < 0.4):
            match, _, _ = there.pop(draw.integers(len(there)))
            index.release(match)
        elif there and draw.random() < 0.5:
            match, keys, own = there[draw.integers(len(there))]
            n = int(draw.integers(len(keys) + 1))
            index.keep(keys[:n], np.array(own[:n], dtype=np.int32), root, match)
        else:
            begin = texts[draw.integers(len(texts))][: draw.integers(20)] if texts else []
            texts.append([*begin, *draw.integers(0, 2, 16 - len(begin)).tolist()])
            keys = block_keys(texts[-1], 2, 8)
            match = index.match(keys)
            own = [block.id for block in match.blocks]
            there.append((match, keys, own + [next(ids) for _ in range(8 - len(own))]))
        pinned = {block.key for match, _, _ in there for block in match.blocks}
        assert index.pinned == len(pinned)
        if draw.random() < 0.1:
            free = len(index) - index.pinned
            assert index.evict(len(index)) == free
        assert sum(counts.of.values()) == len(index)
    for match, _, _ in there:
        index.release(match)
    assert index.evict(len(index)) >= 0 and len(index) == index.pinned == 0
    assert not any(counts.of.values())


def test_what_is_known_in_the_middle_of_a_change_is_not_taken_for_what_is_behind_it():
    """A request that may not wait is looked at by the thread that submits it, whatever the loop is doing."""
    index, _ = index_of()
    keys, channels, ids = block_keys(range(12), 2, 6), (None,), np.arange(6, dtype=np.int32)
    seen: list[tuple[int, tuple[int, int]]] = []

    class Asked(list):
        """Keys between which somebody asks."""

        def __iter__(self):
            for key in super().__iter__():
                yield key
                seen.append((index.changes, index.known(keys)))

    row = index.match(keys)
    for change in (
        lambda: index.keep(Asked(keys), ids, channels, row),
        lambda: index.match(Asked(keys)),
        lambda: index.withdraw(Asked(keys)),
    ):
        seen.clear()
        change()
        found = index.changes, index.known(keys)
        assert seen and all(one == found for one in seen if one[0] == found[0])


@pytest.mark.parametrize("tokens", [1, 3])
def test_blocks_of_a_prompt_without_a_distribution_are_not_offered_again(tokens, monkeypatch):
    """Whatever has made the logits NaN may be in the keys and values that were kept."""
    document = ids_of(200, 6)
    with engine_of() as engine:
        loop, plain = inside(engine).loop, engine.model.forward
        expected = engine.submit([*document, 1, 1], greedy(4)).result(10).token_ids
        assert engine.submit([*document, 2], greedy(2)).result(10).cached_tokens > 0

        def forward(*args, **kwargs):
            out = plain(*args, **kwargs)
            if kwargs["input_ids"].shape[1] > 1 and int(kwargs["input_ids"][0, -1]) == 13:
                out.logits[:] = float("nan")
            return out

        sharing = engine.submit([*document, 5], greedy(100))  # has the same blocks, and goes on
        next(iter(sharing))
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", forward)
            with pytest.raises(RuntimeError, match="NaN or infinite"):
                engine.submit([*document, 13], greedy(tokens)).result(10)
            again = engine.submit([*document, 1, 1], greedy(4)).result(10)
        assert again.cached_tokens == 0 and again.token_ids == expected
        assert len(sharing.result(20).token_ids) == 100
        assert engine.submit([*document, 8], greedy(2)).result(10).cached_tokens > 0  # what was read anew
        quiet(engine)
        assert (index := loop.blocks.index).evict(len(index)) >= 0 and len(index) == 0


# ---------------------------------------------------------------------- text


class Panic(BaseException):
    """As the tokenizers' library has it, which is written in Rust."""


@pytest.mark.parametrize("error", [ValueError("no such token"), Panic("index out of bounds")], ids=["error", "panic"])
def test_a_failure_in_detokenising_ends_one_request(error):
    tokenizer = byte_level()
    with engine_of(tokenizer=tokenizer) as engine:
        detokenizer = inside(engine).detokenizer
        before = engine.submit("the cat", greedy(300, ignore_eos=True))
        next(iter(before))
        plain, calls = detokenizer.decode, []

        def decode(ids: list[int]) -> str:
            calls.append(ids)
            if len(calls) > 3:
                raise error
            return plain(ids)

        detokenizer.decode = decode
        try:
            wrong = engine.submit("the dog", greedy(300, ignore_eos=True))
        finally:
            detokenizer.decode = plain
        with pytest.raises(type(error), match=str(error)):
            wrong.result(10)
        assert len(before.result(30).token_ids) == 300
        assert len(engine.submit("the", greedy(5, ignore_eos=True)).result(10).token_ids) == 5
        assert engine.ready and engine.stats().failed == 1 and inside(engine).threads[1].is_alive()
        quiet(engine)
        assert engine.stats().generated_tokens < 500  # it has given its row back long before its end


# ---------------------------------------------------------------------- coming while it ends


@pytest.mark.parametrize("end", ["drain", "close"])
def test_a_request_that_comes_while_the_engine_ends(end, monkeypatch):
    """It is refused, though it was looked at before the end began."""
    with engine_of() as engine:
        looked, ended, found = threading.Event(), threading.Event(), []
        plain = engine._encode

        def encode(prompt):
            looked.set()
            assert ended.wait(10)
            return plain(prompt)

        monkeypatch.setattr(engine, "_encode", encode)

        def submit() -> None:
            try:
                found.append(engine.submit(ids_of(20, 1), greedy(3)))
            except Closed as error:
                found.append(error)

        late = threading.Thread(target=submit)
        late.start()
        assert looked.wait(10)
        if end == "drain":
            assert engine.drain(10)
        else:
            engine.close()
        ended.set()
        late.join(10)
        assert len(found) == 1 and isinstance(found[0], Closed), found
        assert inside(engine).loop.intake.open == [] and engine.stats().refused == {"closed": 1}


def test_many_come_while_it_drains():
    """Whoever was taken has an answer when the drain is over; who was not is told."""
    with engine_of() as engine:
        taken, go = [], threading.Event()

        def client(seed: int) -> None:
            go.wait(10)
            while True:
                try:
                    taken.append(engine.submit(ids_of(10, seed), greedy(2)))
                except Busy:
                    pass
                except Closed:
                    return
                time.sleep(0.005)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        go.set()
        time.sleep(0.1)
        assert engine.drain(60)
        done = [handle.done for handle in taken]
        for thread in threads:
            thread.join(10)
        assert len(done) == len(taken) and all(done)
        assert {handle.result(0).finish_reason for handle in taken} == {"length"}


def test_who_closes_second_waits_for_the_first():
    with engine_of() as engine:
        handle = engine.submit(ids_of(20, 1), greedy(300))
        next(iter(handle))
        loop, slow = inside(engine).loop, threading.Event()
        before_each(loop, "_cancel_all", lambda: slow.set() or time.sleep(0.3))
        first = threading.Thread(target=engine.close)
        first.start()
        assert slow.wait(10)
        engine.close()
        assert not any(thread.is_alive() for thread in inside(engine).threads)
        assert handle.result(0).finish_reason == "cancelled"
        first.join(10)


def test_a_stream_that_nobody_has_begun_to_read_is_cancelled_too():
    with engine_of() as engine:
        stream = engine.stream(ids_of(20, 1), greedy(380))
        stream.close()
        quiet(engine)
        del stream
        engine.stream(ids_of(20, 1), greedy(380))  # and lets go of it
        quiet(engine)
        assert engine.stats().cancelled == 2
        assert sum(len(piece.token_ids) for piece in engine.stream(ids_of(20, 1), greedy(5))) == 5


@pytest.mark.parametrize("where", [(drawn_module, "Sampler"), (work_module, "make_plans")], ids=["sampler", "plans"])
def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was(where, monkeypatch):
    net = build("llama", "sdpa")

    def fails(*args):
        raise torch.OutOfMemoryError("no memory for it")

    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        before = threading.active_count()
        with pytest.raises(torch.OutOfMemoryError):
            Engine(net, None, TokenConfig(**WHOLE), None, SERVING)
        assert threading.active_count() == before
    assert attention_of(net) == "sdpa" and not hooks_of(net.model.layers[0])
    with Engine(net, None, TokenConfig(**WHOLE), None, SERVING) as engine:
        assert len(engine.submit(ids_of(20, 1), greedy(3)).result(10).token_ids) == 3


# ---------------------------------------------------------------------- none may wait


def test_none_may_wait():
    """``max_waiting=0``: what can start at once is taken, and does; anything else is refused."""
    with engine_of(max_waiting=0, max_rows=2) as engine:
        loop = inside(engine).loop
        first = engine.submit(ids_of(20, 1), greedy(300))
        next(iter(first))
        second = engine.submit(ids_of(20, 2), greedy(300))  # a row is free
        next(iter(second))
        with pytest.raises(Busy, match="cannot start at once"):
            engine.submit(ids_of(20, 3), greedy(2))
        second.cancel()
        second.result(10)
        wait_until(lambda: len(loop.rows.rows) == 1)
        assert len(engine.submit(ids_of(20, 3), greedy(2)).result(10).token_ids) == 2
        assert engine.stats().refused == {"waiting": 1} and engine.stats().waiting == 0
        first.cancel()
        found = engine.generate_batch([ids_of(20, seed) for seed in range(5)], greedy(3))
        assert [len(output.token_ids) for output in found] == [3] * 5
        quiet(engine)


def test_none_may_wait_for_memory_or_behind_a_prompt():
    with engine_of(max_waiting=0, max_tokens=200) as engine:
        first = engine.submit(ids_of(100, 1), greedy(60))
        next(iter(first))
        with pytest.raises(Busy):
            engine.submit(ids_of(100, 2), greedy(60))  # a row is free, the memory is not
        first.result(20)
        wait_until(lambda: inside(engine).loop.idle)
        plain, go = inside(engine).loop.work.read, threading.Event()
        inside(engine).loop.work.read = lambda n: go.wait(10) and plain(n)
        first = engine.submit(ids_of(20, 3), greedy(2))
        try:
            for _ in range(50):  # queued, begun or read: it is before this one
                with pytest.raises(Busy):
                    engine.submit(ids_of(20, 4), greedy(2))
        finally:
            go.set()
        assert len(first.result(10).token_ids) == 2
        quiet(engine)


@pytest.mark.parametrize("most", [0, 3])
def test_no_more_wait_than_may_whoever_asks_at_once(most):
    with engine_of(max_waiting=most, max_rows=1) as engine:
        loop, there, go, found = inside(engine).loop, threading.Event(), threading.Event(), []
        before_each(loop, "_once", lambda: there.set() or go.wait(10))
        inside(engine).loop.intake.look()
        assert there.wait(10)  # and no turn is under way
        barrier = threading.Barrier(12)

        def client(seed: int) -> None:
            barrier.wait()
            try:
                found.append(engine.submit(ids_of(10, seed), greedy(2)))
            except Busy as error:
                found.append(error)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        go.set()
        assert sum(not isinstance(one, Busy) for one in found) == max(most, 1)
        for handle in found:
            if not isinstance(handle, Busy):
                handle.result(10)
        quiet(engine)


# ---------------------------------------------------------------------- a failure of all


@pytest.mark.parametrize("also", ["nothing", "ranks", "prompt"])
def test_clients_are_told_of_a_failure_when_the_engine_says_so(also, monkeypatch):
    """Whoever hears the error finds the engine not ready, with the reason; also if more goes wrong behind it."""
    with engine_of() as engine:
        loop, heard, back = inside(engine).loop, [], threading.Event()

        def listen(news) -> None:
            if isinstance(news, BaseException):
                stats = engine.stats()
                heard.append((engine.ready, str(engine.failed), stats.running, stats.waiting, stats.failed))

        handles = [engine.submit(ids_of(30, seed), greedy(300)) for seed in range(6)]
        for handle in handles:
            handle.listen(listen)
        wait_until(lambda: len(loop.room.running) >= 2)
        if also == "ranks":
            monkeypatch.setattr(loop.work, "failed", once(loop.work.failed, OSError("nobody listens")))
        elif also == "prompt":  # whose thread does not come back
            monkeypatch.setattr(loop.work.segments, "cancel", lambda: back.wait(60))

        def step():
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(loop.work, "step", step)
        for handle in handles:
            with pytest.raises(RuntimeError, match="the device is gone"):
                handle.result(10)
        back.set()
        wait_until(lambda: len(heard) == 6)
        assert [one[:4] for one in heard] == [(False, "the device is gone", 0, 0)] * 6
        assert [one[4] for one in heard] == [1, 2, 3, 4, 5, 6]
        with pytest.raises(Closed, match="has failed"):
            engine.submit([1], greedy(1))
        monkeypatch.undo()


# ---------------------------------------------------------------------- conversations


def test_a_conversation_is_the_prompt_that_its_template_makes():
    """With the beginning of an answer, unless that is not wanted; what a template cannot take is told."""
    tokenizer, asked = byte_level(), [{"role": "user", "content": "the cat"}]
    with engine_of(tokenizer=tokenizer) as engine:
        for options, text in (
            ({}, "<|user|>the cat<|assistant|>"),
            ({"add_generation_prompt": False}, "<|user|>the cat"),
        ):
            found = engine.submit_chat(asked, greedy(8), **options).result(60)
            want = engine.submit(tokenizer.encode(text), greedy(8)).result(60)
            assert found.token_ids == want.token_ids
            assert found.prompt_tokens == want.prompt_tokens == len(tokenizer.encode(text))
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(ValueError, match="the chat template refuses these messages: roles must alternate"):
            engine.submit_chat(asked, greedy(8))
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            engine.submit_chat(asked, greedy(8))
