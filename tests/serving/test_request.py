"""Checks of settings, and a handle between threads: order, one reader, cancelling, failing."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref

import pytest
from tokenizers_made import byte_level

from hf_sparsekv.serving.in_flight import Request
from hf_sparsekv.serving.output import Teller
from hf_sparsekv.serving.request import Busy, Closed, Handle, Output, Piece, merged
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv.serving.stats import Counts, SampleCounter, Samples
from hf_sparsekv.serving.text import Detokenizer
from hf_sparsekv_config.serving import ServingConfig

pytestmark = pytest.mark.quick

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")


def output(text: str = "ab", reason: str = "stop") -> Output:
    return Output(text, tuple(range(len(text))), reason, 3)


# By field: what is allowed, and values that are not.
SAMPLING = {
    "max_tokens": {"a positive integer": (0, 1.5, True, None)},
    "temperature": {r"a number in \[0, 100\]": (-0.1, math.nan, math.inf, "1", True, 1e39, 100.5)},
    "top_p": {r"\(0, 1\]": (0, 1.01, math.nan)},
    "top_k": {">= 0": (-1, 2.0)},
    "min_p": {r"\[0, 1\]": (-0.1, 2)},
    "repetition_penalty": {r"a number in \[0.01, 100\]": (0, math.nan, 1e-39, 1e-3, 1e38)},
    "seed": {"64-bit": (2**63, 1.0)},
    "stop": {
        "strings": (3, ("a", 3), b"ab"),
        "empty": (("a", ""), ""),
        "32 strings at most, got 33": (tuple("a" * 33),),
        "1024 characters at most, got 1025": (("a", "b" * 1025),),
    },
    "stop_token_ids": {
        "token ids": (3, "ab", (1, "a"), (-1,), (True,), (1.5,), {1: 2}),
        "128 tokens at most, got 129": (tuple(range(129)),),
    },
    "min_tokens": {">= 0": (-1, 2.0), "at most max_tokens=256, got 257": (257,)},
    "prompt_logprobs": {r"an integer in \[0, 20\]": (-1, 21, 1.5)},
    "ignore_eos": {"True or False": (1,)},
}
SERVING = {
    "max_rows": {r"an integer in \[1, 4096\], got 0": (0,), r"an integer in \[1, 4096\], got None": (None,)},
    "max_length": {"a positive integer or None": (0,)},
    "max_tokens": {"a positive integer or None": (True,)},
    "max_waiting": {">= 0": (-1,)},
    "max_wait_s": {">= 0": (-0.1, math.nan)},
    "prefill_ms": {"> 0": (0, math.nan, True)},
    "chunk": {">= 3": (2,)},
    "prefix_cache": {"True or False": (1,)},
}
REFUSED = [
    (kind, field, value, allowed)
    for kind, table in ((Sampling, SAMPLING), (ServingConfig, SERVING))
    for field, by in table.items()
    for allowed, values in by.items()
    for value in values
]


@pytest.mark.parametrize(("kind", "field", "value", "allowed"), REFUSED)
def test_settings_refuse(kind, field, value, allowed):
    with pytest.raises(ValueError, match=f"^{field} .*{allowed}"):
        kind(**{field: value})


@pytest.mark.parametrize("field", [*NUMBERS, "top_k", "max_tokens", "seed"])
@pytest.mark.parametrize("digits", [90, 400, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_no_float_holds_is_a_value_error(field, digits, sign):
    if field in ("top_k", "max_tokens") and sign > 0:
        Sampling(**{field: 10**digits})  # more than there are: all
        return
    with pytest.raises(ValueError, match=f"{field} .*an integer of more than 80 digits"):
        Sampling(**{field: sign * 10**digits})


@pytest.mark.parametrize("field", [*NUMBERS, "top_k", "max_tokens", "seed", "ignore_eos", "stop"])
@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 10**6] * 1000, {"x" * 10**6: [[[1]]]}], ids=type)
def test_errors_quote_briefly(field, value):
    with pytest.raises(ValueError, match=f"^{field} ") as error:
        Sampling(**{field: [value] if field == "stop" else value})
    assert len(str(error.value)) < 800


def test_limits_are_taken_and_stops_are_a_tuple():
    ServingConfig(max_length=None, max_tokens=None, max_waiting=0, max_wait_s=0, prefill_ms=math.inf, chunk=3)
    Sampling(max_tokens=1, temperature=0, top_p=1, min_p=1, seed=-(2**63))
    assert Sampling(stop="ab").stop == ("ab",)
    assert Sampling(stop=["a", "b", "c", "d"]).stop == ("a", "b", "c", "d")
    assert Sampling(stop=None).stop == ()
    assert hash(Sampling(stop=["a"])) == hash(Sampling(stop="a"))


def test_pieces_add_up():
    assert Piece("a", (1,)) + Piece("b", (2, 3)) == Piece("ab", (1, 2, 3))
    assert merged([Piece("a", (1,)), Piece("", (2,)), Piece("c", ())]) == Piece("ac", (1, 2))


def test_iteration_gives_all_pieces_in_order_and_ends():
    handle, read = Handle("r", 3), []

    def engine() -> None:
        for i in range(200):
            handle.push(Piece(chr(97 + i % 26), (i,)))
            if i % 50 == 0:
                time.sleep(0.005)
        assert handle.finish(output())

    thread = threading.Thread(target=engine)
    thread.start()
    read = list(handle)
    thread.join()
    assert merged(read).token_ids == tuple(range(200))
    assert handle.done and handle.result() == output()


def test_iteration_of_a_finished_request_and_one_reader_only():
    handle = Handle("r7", 3)
    handle.push(Piece("a", (1,)))
    handle.push(Piece("b", (2,)))
    handle.finish(output())
    assert list(handle) == [Piece("ab", (1, 2))]
    with pytest.raises(RuntimeError, match="r7 has an iteration already"):
        iter(handle)
    with pytest.raises(RuntimeError, match="iteration"):
        handle.listen(print)


def test_a_failure_is_raised_behind_the_last_piece():
    handle = Handle("r", 3)
    handle.push(Piece("a", (1,)))
    handle.fail(MemoryError("no room"))
    pieces = iter(handle)
    assert next(pieces).text == "a"
    with pytest.raises(MemoryError, match="no room"):
        next(pieces)
    with pytest.raises(MemoryError, match="no room"):
        handle.result()


def test_result_times_out_and_comes():
    handle = Handle("r9", 3)
    with pytest.raises(TimeoutError, match=r"r9 is not finished after 0\.01 s"):
        handle.result(0.01)
    threading.Timer(0.02, handle.finish, [output()]).start()
    assert handle.result(5).text == "ab"


def test_the_first_end_counts_and_later_pieces_do_not():
    handle, heard = Handle("r", 3), []
    handle.listen(heard.append)
    assert handle.finish(output())
    assert not handle.finish(output("x")) and not handle.fail(RuntimeError())
    handle.push(Piece("late", (1,)))
    assert heard == [output()]


def test_cancelling_wakes_the_engine_once():
    calls = []
    handle = Handle("r", 3, calls.append)
    handle.cancel()
    handle.cancel()
    assert calls == [handle] and handle.cancelled.is_set() and not handle.done
    handle.finish(output(reason="cancelled"))
    done = Handle("r", 3, calls.append)
    done.finish(output())
    done.cancel()
    assert len(calls) == 1 and not done.cancelled.is_set()


def test_a_done_handle_keeps_no_engine_alive():
    class Engine:
        def wake(self, handle) -> None:
            pass

    engine = Engine()
    handle, gone = Handle("r", 3, engine.wake), weakref.ref(engine)
    handle.finish(output())
    del engine
    gc.collect()
    assert gone() is None


def test_a_listener_hears_what_was_there_first_and_everything_once():
    """However the threads meet: those that push while it is being told leave it to the one that tells."""
    for wait in (0, 0.0005, 0.002):
        handle, heard, inside = Handle("r", 3), [], threading.Lock()

        def listener(news, heard=heard, inside=inside) -> None:
            assert inside.acquire(blocking=False), "two calls at a time"
            heard.append(news)
            time.sleep(0)
            inside.release()

        def engine(handle=handle) -> None:
            for i in range(500):
                handle.push(Piece("", (i,)))
            handle.finish(output())

        thread = threading.Thread(target=engine)
        thread.start()
        time.sleep(wait)
        handle.listen(listener)
        thread.join()
        assert handle.result(5)
        deadline = time.monotonic() + 5
        while len(heard) < 501 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert [one.token_ids[0] for one in heard[:-1]] == list(range(500)) and heard[-1] == output()


def test_a_listener_may_call_the_handle_and_may_fail(caplog):
    handle, heard = Handle("r4", 3), []

    def listener(news) -> None:
        heard.append(news)
        handle.cancel()
        raise RuntimeError("loop is closed")

    handle.listen(listener)
    handle.push(Piece("a", (1,)))
    handle.push(Piece("b", (2,)))
    handle.finish(output(reason="cancelled"))
    assert heard == [Piece("a", (1,))] and handle.cancelled.is_set() and handle.done
    assert "listener of request r4" in caplog.text


def test_errors_of_submitting():
    assert Busy("full", 2.5).retry_after == 2.5 and str(Busy("full")) == "full"
    assert isinstance(Closed("over"), RuntimeError)


def test_samples_are_counted_as_prometheus_counts():
    counter = SampleCounter([0.1, 1])
    for value in (0.05, 0.1, 0.5, 1.0, 7):
        counter.add(value)
    samples = counter.samples()
    assert samples == Samples((0.1, 1.0), (2, 2, 1), pytest.approx(8.65)) and samples.count == 5
    with pytest.raises(ValueError, match="ascending"):
        SampleCounter([1, 0.1])
    with pytest.raises(ValueError, match="one more than the 1 bounds"):
        Samples((1.0,), (1,))


def test_samples_from_many_threads():
    counter = SampleCounter([0.5])
    threads = [threading.Thread(target=lambda: [counter.add(1.0) for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.samples() == Samples((0.5,), (0, 8000), 8000.0)


def test_text_that_was_held_back_comes_with_the_end():
    """What may become a stop string is shown once no token follows."""
    tokenizer = byte_level()
    ids = tokenizer("to be", add_special_tokens=False)["input_ids"]
    stream = Detokenizer(tokenizer).stream(stop=("bees",))
    request = Request(Handle("r", 1), [1], Sampling(), time.perf_counter(), 0, text=stream, tokens=ids)
    teller = Teller(Counts(), lambda: None, lambda request: None)
    for at, token in enumerate(ids, 1):
        teller.tell(request, token, "length" if at == len(ids) else None)
    teller.stop()
    teller.run()
    assert merged(list(request.handle)) == Piece("to be", tuple(ids))
    assert (request.handle.result().text, request.handle.result().finish_reason) == ("to be", "length")
