"""Captured steps, imitated or on a GPU, and what they must have in common with eager ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from caches import ALL, HOST_RANK, LATE, TIGHT
from models import build, model, prompt
from transformers.generation.streamers import BaseStreamer

from hf_sparsekv import QueryTap, optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.cuda_graph.recorder import Recorder
from hf_sparsekv.cuda_graph.runner import StepRunner
from hf_sparsekv.layers.sliding import SlidingRing


class Event:
    """An event of a CPU, which has always happened."""

    def __init__(self, **given) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Told(BaseStreamer):
    """A streamer that keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, value) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.heard.append([])


def calls_of(runner: StepRunner, method: str) -> list:
    """Arguments of each call of a runner's method, from here on: ``_step`` plans a pass, ``_verify`` verifies."""
    original, given = getattr(runner, method), []
    setattr(runner, method, lambda *args: given.append(args) or original(*args))
    return given


class Again:
    """A graph of what knows no cache: each replay runs it again."""

    def __init__(self, run, output, watch) -> None:
        self.run, self.output, self.watch = run, output, watch

    def replay(self) -> None:
        # In a thread of its own: on a GPU a replay calls no hooks, which may pause the thread that reads prompts.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._replay).result()

    @torch.no_grad()
    def _replay(self) -> None:
        with self.watch.ignoring():
            self.output.logits.copy_(self.run(None).logits)


class ImitatedGraphs(Recorder):
    """Graphs without a GPU: each replay recomputes the step with the host's state frozen as it was at the capture.

    A decision of the host that a replay does not know of therefore shows here as it would on a GPU.
    """

    watch = None  # of the model; Imitation sets it

    @staticmethod
    def readable(t):
        return True

    def record(self, run, device, saved):
        output = run(None)
        if not saved:
            return Again(run, output, self.watch), output
        queries = [state.query for state in saved]
        rings = [ring for ring in saved[0].layer.owner.layers if isinstance(ring, SlidingRing)]
        frozen = [ring.cumulative_length for ring in rings]
        cache = saved[0].layer.owner
        table, held = cache.row_table, cache.row_table.rows
        watch = self.watch

        class Graph:
            def replay(self):
                with watch.ignoring():  # on a GPU a replay runs nothing of the model
                    self.run()

            def run(self):
                now = [type(state)(state.layer) for state in saved]
                lengths = [ring.cumulative_length for ring in rings]
                rows, table.rows = table.rows, held
                host = cache.changes, cache._joined, cache.replays.pending  # no replay on a GPU changes these
                cache.replays.pending = {}
                for state in saved:
                    state.put_back_host()
                for ring, length in zip(rings, frozen):
                    ring.cumulative_length = length
                try:
                    output.logits.copy_(run(None).logits)
                    for state, query in zip(saved, queries):
                        query.copy_(state.query)
                finally:
                    table.rows = rows
                    cache.changes, cache._joined, cache.replays.pending = host
                    for state in now:
                        state.put_back_host()
                    for ring, length in zip(rings, lengths):
                        ring.cumulative_length = length

        return Graph(), output


class Imitation(StepRunner):
    """Replays steps of a model without a GPU, by ``graphs``."""

    def __init__(self, model, graphs=None):
        self.recorder = ImitatedGraphs() if graphs is None else graphs
        super().__init__(model, self.recorder)
        self.recorder.watch = self.watch


def same_counts(*caches) -> None:
    """The same was done, but for what a second device copies."""
    stats = [cache.stats() for cache in caches]
    if stats[0].hit_rate is not None and stats[1].hit_rate is not None:
        # A second device writes two buffers in turn, but only one in captured steps: what is chosen differs from the
        # choice two steps before by at most twice of what it differs by from the last one.
        second = getattr(caches[0].shared, "peer", None) is not None
        eager, captured = (one.host_to_device_bytes for one in stats)
        assert stats[0].hit_rate == pytest.approx(stats[1].hit_rate, abs=0.12 if second else 0.02)
        assert 0.94 * captured <= eager <= (2 if second else 1.06) * captured
        if stats[0].working_set_bytes is not None:
            assert stats[0].working_set_bytes == pytest.approx(stats[1].working_set_bytes, rel=0.05)
        unlike = {"hit_rate": None, "host_to_device_bytes": 0, "working_set_bytes": None}
        stats = [replace(one, **unlike, needed=0, found=0) for one in stats]
    for one, other in zip(*(each.walks for each in stats)):  # masses are sums, whose roundings depend on their shapes
        masses = [[w.mass or 0.0, w.least_mass or 0.0] for w in (one, other)]
        assert masses[0] == pytest.approx(masses[1], rel=1e-5)
    bare = [tuple(replace(w, mass=None, least_mass=None) for w in each.walks) for each in stats]
    assert replace(stats[0], walks=bare[0]) == replace(stats[1], walks=bare[1])


def imitated(name: str = "llama", make=None, **changes) -> tuple[torch.nn.Module, Imitation]:
    """A new model whose decode steps are replayed, and what replays them. It is what ``make()`` gives, if that is."""
    net = build(name, "sparsekv", **changes) if make is None else make()
    runner = Imitation(net)
    runner.install()
    return net, runner


def check_imitated(caches, inputs: dict, tokens: int, name: str = "llama", **changes):
    """Replays over the second cache give the text and the counters of eager steps over the first; as ``imitated``."""
    net, runner = imitated(name, **changes)
    go = {"do_sample": False, "max_new_tokens": tokens}
    expected = model(name).generate(**inputs, past_key_values=caches[0], **go)
    assert torch.equal(net.generate(**inputs, past_key_values=caches[1], **go), expected)
    same_counts(*caches)
    return net, runner


def through_modes(cache: str, name: str, padded: bool) -> None:
    """Through calibration, sealing, growth and changes of mode."""
    inputs = prompt(2, 90, (0, 70)) if padded else {"input_ids": prompt(2, 90)["input_ids"][:, :20]}
    caches = ALL[cache](**TIGHT), ALL[cache](**TIGHT)
    tokens = 90 if cache in LATE and not padded else 60
    _, runner = check_imitated(caches, inputs, tokens, name)
    least = tokens - (20 if cache in HOST_RANK else 10)  # a second device calibrates eagerly
    assert runner.replays > least
    assert runner.captures < 12


def pair(name: str, dtype: torch.dtype = torch.float32):
    """The same model eager and optimised, on the GPU. Not fused: its rounding could turn a selection."""
    eager = build(name, "sparsekv").cuda().to(dtype)
    QueryTap(eager).install()
    fast = optimize(build(name, "sparsekv").cuda().to(dtype), fused=False)
    return eager, fast


def on_gpu(*args, **kwargs) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in prompt(*args, **kwargs).items()}


def check(
    name: str, cache: str, inputs: dict, settings: dict = TIGHT, captured: bool = True, dtype=torch.float32, **generate
) -> None:
    """Same text and counters, and the steps were really replayed."""
    eager, fast = pair(name, dtype)
    generate = {"do_sample": False, "max_new_tokens": 100, **generate}
    caches = ALL[cache](**settings), ALL[cache](**settings)
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
