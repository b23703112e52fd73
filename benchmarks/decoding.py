"""Decode steps to measure: through ``generate()``, and one by one without its loop."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_sparsekv.cache_name import generate_over, over
from hf_sparsekv.cuda_graph.optimize import runner_of

from .shapes import text_config

LEFT_OUT = 5  # runs that do not count
WARM_UP = 8  # tokens: captures, compilation, clocks of the device
_SYNC = "called a synchronizing CUDA operation"  # what torch's sync debug mode says
_CAPTURE_TRIES = 4


class Clock:
    """When things happened: events on the GPU, so that looking at the clock does not make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list = []

    def mark(self) -> None:
        """Now; on a GPU when it gets here."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def between(self) -> list[float]:
        """Milliseconds from each mark to the next."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(self.marks)]
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.marks)]


@dataclass(frozen=True)
class Generated:
    """One ``generate()`` call.

    Args:
        first_ms: to the first token, with the prefill if there was one.
        tpot_ms: of each later token, warm-up left out.
        set_up_ms: what the tokens of the warm-up took beyond the usual: captures, compilation.
        tokens: the new ones, ``[batch, n]``.
    """

    first_ms: float
    tpot_ms: list[float]
    set_up_ms: float
    tokens: torch.Tensor


def generate(
    model,
    cache,
    batch: int,
    tokens: int,
    *,
    prompt: int | None = None,
    sample: bool = False,
    eos: bool = False,
    compiled: bool = False,
    each: Callable[[], None] | None = None,
) -> Generated:
    """Generate over a filled cache, or read a prompt first.

    Args:
        cache: filled; or empty if ``prompt`` is given.
        tokens: new tokens per row.
        prompt: tokens to read.
        sample: draw from the 50 likeliest instead of taking the likeliest.
        eos: look for an end of the answer after each token, as real models do; it never comes.
        compiled: let generate() compile the model if the cache allows it.
        each: called after each forward pass, the prompt's too.
    """
    length = prompt or int(cache.get_seq_length()) + 1
    vocabulary = text_config(model).vocab_size
    generator = torch.Generator(model.device).manual_seed(0)
    ids = torch.randint(0, min(1000, vocabulary), (batch, length), device=model.device, generator=generator)
    clock = Clock(model.device)

    def passed(*_: object) -> None:
        clock.mark()
        if each is not None:
            each()

    def asked(input_ids, *_: object, **__: object):
        passed()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    torch.manual_seed(0)
    # A criterion of our own would make the loop wait for each token; what is compiled would have to contain the hook.
    hook = None if compiled else model.register_forward_hook(passed)
    clock.mark()
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **generate_over(cache),
            max_new_tokens=tokens,
            do_sample=sample,
            stopping_criteria=[asked] if compiled else None,
            pad_token_id=0,
            eos_token_id=vocabulary if eos else None,
            disable_compile=not compiled,
        )
    finally:
        if hook is not None:
            hook.remove()
    first, *rest = clock.between()
    skip = min(WARM_UP, len(rest) // 2)
    usual = statistics.median(rest[skip:]) if rest else 0.0
    return Generated(first, rest[skip:], sum(rest[:skip]) - skip * usual, out[:, length:])


class Steps:
    """Decode steps as ``generate()`` makes them, without its loop: what a step is given is there before it begins.

    Args:
        room: steps that may be made.
        after: called after each step.
    """

    def __init__(self, model, cache, batch: int, room: int, after: Callable[[], None] | None = None) -> None:
        self.after = after
        self.model, self.cache, self.length = model, cache, int(cache.get_seq_length())
        end = self.length + room
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.mask = torch.ones(batch, end, dtype=torch.long, device=model.device)
        self.positions = torch.arange(end, device=model.device).repeat(batch, 1)

    @torch.no_grad()
    def __call__(self):
        now, self.length = self.length, self.length + 1
        out = self.model(
            input_ids=self.ids,
            attention_mask=self.mask[:, : self.length],
            position_ids=self.positions[:, now : self.length],
            **over(self.model, self.cache),
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        if self.after is not None:
            self.after()
        return out


def seconds(run: Callable[[], object]) -> float:
    """How long the host and the GPU take together."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def capture_seconds(model, step: Steps) -> float:
    """Seconds from the first decode step to the end of the one that was captured, its kernels' compilation included.

    Raises:
        RuntimeError: no step was captured; says why.
    """
    runner = runner_of(model)
    before, total = runner.captures, 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(_CAPTURE_TRIES):
            total += seconds(step)
            if runner.captures > before:
                return total
    reasons = "; ".join(str(w.message) for w in caught if "eagerly" in str(w.message))
    raise RuntimeError(f"no decode step was captured: {reasons or 'no reason was given'}")


@contextmanager
def synchronisations() -> Iterator[Callable[[], Counter]]:
    """Where the host waits for the GPU: gives a function that counts so far, by file and line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def so_far() -> Counter:
            return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in caught if _SYNC in str(w.message))

        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield so_far
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _each(totals: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(totals)]


def count_steps(step: Steps, steps: int) -> tuple[list[int], list[int], Counter]:
    """Run decode steps: each one's allocations of torch's CUDA allocator and host waits, and where the host waited."""
    allocated, waited = [], []
    with synchronisations() as so_far:
        for at in range(steps + 1):
            allocated.append(torch.cuda.memory_stats()["allocation.all.allocated"])
            waited.append(so_far().total())
            if at < steps:
                step()
        places = so_far()
    return _each(allocated), _each(waited), places


def generate_syncs(model, cache, batch: int, tokens: int, after: Callable[[], None]) -> list[int]:
    """How often the host waits for the GPU in each token that ``generate()`` makes."""
    totals: list[int] = []

    def each() -> None:
        totals.append(so_far().total())
        after()

    with synchronisations() as so_far:
        generate(model, cache, batch, tokens, each=each)
    return _each(totals)


def timed(
    run: Callable[[], object], repeat: int = 30, before: Callable[[], object] | None = None, device: str = "cuda"
) -> list[float]:
    """Milliseconds of each of ``repeat`` runs, the first ones left out. ``before`` each of them, untimed."""
    clock = Clock(torch.device(device))
    for _ in range(repeat):
        if before is not None:
            before()
        clock.mark()
        run()
        clock.mark()
    return clock.between()[::2][LEFT_OUT:]


def in_a_row_ms(step: Steps, steps: int) -> list[float]:
    """Milliseconds from the end of each step to that of the next, while the host runs ahead; but the first ones."""
    clock = Clock(step.model.device)
    for _ in range(WARM_UP + steps):
        step()
        clock.mark()
    return clock.between()[WARM_UP - 1 :]


def replay_ms(model, cache) -> list[float]:
    """Milliseconds of the captured forward alone, the same step each time. The cache's contents are void afterwards."""
    step = list(runner_of(model).graphs[cache].values())[-1]
    rows, device = cache.joined_rows(), model.device
    steps = cache.row_table.steps(device)
    steps.load(rows)
    steps.held = None  # a replay takes them further
    return timed(step.graph.replay, before=lambda: steps.after.copy_(rows.on[device]), device=device.type)


def free() -> None:
    """Give back what the last variant has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
