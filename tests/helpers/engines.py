"""Prompts and settings for engines over a tiny model, and that nothing is left of a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

from caches import FULL, SMALL
from inside import references_of
from models import prompt

from hf_sparsekv import Engine, Sampling, ServingConfig
from hf_sparsekv.serving.prefill import chunks

LENGTH = 400
WHOLE = {**SMALL, **FULL}
BUDGET = {**SMALL, "dense_below": 0, "token_budget": 32}
SERVING = ServingConfig(max_rows=4, max_length=LENGTH, chunk=64, prefill_ms=0.5)


def ids_of(n: int, seed: int) -> list[int]:
    """A prompt of ``n`` tokens."""
    return prompt(1, n, seed=seed)["input_ids"][0].tolist()


def pieces(config, n: int) -> list[int]:
    """A prompt of ``n`` tokens in pieces that label channels are calibrated on as an engine does: its first tokens."""
    first = min(getattr(config, "calibration_tokens", 0), n)
    return [first, *chunks(n - first, SERVING.chunk, first)] if first else [*chunks(n, SERVING.chunk)]


def greedy(tokens: int, **settings) -> Sampling:
    """The likeliest tokens, so many."""
    return Sampling(max_tokens=tokens, temperature=0, **settings)


def inside(engine: Engine) -> SimpleNamespace:
    """Parts of an engine: tests look into it here, and nowhere else."""
    loop = engine._loop
    return SimpleNamespace(
        loop=loop,
        cache=engine._cache,
        rows=engine._rows,
        blocks=engine._blocks,
        detokenizer=engine._detokenizer,
        threads=loop._threads,
        grammars=engine._grammars,
    )


def before_each(owner, name: str, look: Callable[[], object]) -> None:
    """Call ``look`` before each call of a method of this object."""
    plain = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: (look(), plain(*args, **named))[1])


def before_steps(engine: Engine, look: Callable[[], object]) -> None:
    """Call ``look`` before each step of the engine's rows."""
    before_each(inside(engine).loop, "_step", look)


def quiet(engine: Engine) -> None:
    """Nothing is left of any request."""
    until = time.monotonic() + 10
    loop = inside(engine).loop
    while not loop.idle and time.monotonic() < until:
        time.sleep(0.01)
    assert (loop.idle, loop.blocks.used, loop.rows.rows, loop.order.reading) == (True, 0, (), None)
    table = loop.rows.cache.row_table
    pinned, kept = (0, 0) if (index := loop.blocks.index) is None else (index.pinned, len(index))
    assert (table.blocks.host == -1).all() and pinned == 0
    assert references_of(table.ids).sum() == kept  # blocks that somebody has


def once(plain, error: BaseException):
    """A function that fails the first time."""
    failures = []

    def call(*args, **kwargs):
        if not failures:
            failures.append(1)
            raise error
        return plain(*args, **kwargs)

    return call
