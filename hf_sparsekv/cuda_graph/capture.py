"""Capturing a decode step: trial runs on state that is restored afterwards; the last run is recorded.

It changes a cache and restores it. It runs once for each kind of step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache_name import over, without_cache
from ..kv.rows import Drafts
from ..kv.step_rows import StepRows
from ..layers.cache_state import CacheState, resume, trial_steps
from ..layers.captured import CapturedLayer
from ..layers.kinds import LayerKind
from ..layers.linear_passes import LinearPasses
from ..layers.replay import DraftRows, Replay
from ..policies.plan import Plan
from ..ranks import Ranks
from ..tensors import sent
from .captured_step import CapturedStep, Saved, uncached_autocast
from .recorder import Recorder, Sides


def kernel_kind(cache: CacheState) -> tuple:
    """Everything besides shapes and plans that decides which kernels a step uses."""
    stores = [layer.store for layer in cache.sparse_layers]
    pools = [store.pages is not None and store.pages.pool is not None for store in stores]
    widths = {store.block_table.shape[1] for store in stores}
    return type(cache), cache.config, cache.offload_config, stores[0].dtype, tuple(pools), frozenset(widths)


class Wanted(NamedTuple):
    """A step to be captured, from its call.

    Args:
        ids, positions, rest: arguments of the model's forward.
        plans: plans of all layers.
        kind: key of the kernels that the step needs.
        valid: which rows get a token, bool ``[batch, 1]``; None: all.
        drafts: the drafts of a draft pass.
    """

    ids: Tensor
    positions: Tensor
    rest: dict
    plans: tuple[Plan, ...]
    kind: Hashable
    valid: Tensor | None
    drafts: Drafts | None


class Capturer:
    """Captures steps of one model.

    Args:
        model: the model.
        ranks: the processes that must all capture a step, or none of them; None: this one decides alone.
        recorder: what makes the graphs.
    """

    def __init__(self, model: torch.nn.Module, ranks: Ranks | None, recorder: Recorder) -> None:
        self.model, self.ranks, self.recorder = model, ranks, recorder
        self._warm: set[Hashable] = set()  # kinds of steps whose kernels are compiled

    def capture(self, forward: Callable, cache: CacheState, wanted: Wanted) -> CapturedStep:
        """Capture a step of ``forward`` over ``cache``; of a tensor parallel model on all ranks, or on none.

        Raises:
            RuntimeError: the model's forward cannot be captured, here or on another rank.
        """
        if self.ranks is None:
            return self._capture(forward, cache, wanted)
        try:
            step = self._capture(forward, cache, wanted)
        except Exception:
            self.ranks.any(True)
            raise
        if self.ranks.any(False):
            raise RuntimeError("on another rank")
        return step

    def _capture(self, forward: Callable, cache: CacheState, wanted: Wanted) -> CapturedStep:
        trial = Trial(self.model, forward, cache, wanted)
        try:
            with trial_steps(cache):
                graph, output = self._recorded(trial, wanted.kind)
                queries = [state.query for state in trial.saved]
        finally:
            trial.put_back(cache)
        cache.changes = trial.changes  # trial steps do not count: all state is restored
        return CapturedStep(
            graph, trial.ids, trial.positions, trial.valid, output, queries, wanted.plans, count=trial.count
        )

    def _recorded(self, trial: Trial, kind: Hashable) -> tuple[torch.cuda.CUDAGraph, object]:
        """Run a trial once to compile its kernels, unless its kind has run, and once to capture it."""
        device = trial.ids.device
        # A capture that fails because a kernel is not compiled is tried again after a run. Ranks cannot: each would
        # decide alone.
        warm = kind in self._warm and self.ranks is None
        while True:
            if not warm:
                self.recorder.warm_up(trial.run, device)
            trial.put_back_host()
            try:
                recorded = self.recorder.record(trial.run, device, trial.saved)
                break
            except RuntimeError as error:
                if not warm or isinstance(error, torch.OutOfMemoryError):
                    raise
                warm = False  # something had to be compiled after all
                trial.put_back_host()
        self._warm.add(kind)
        return recorded


class Trial:
    """A step that runs on a cache's state, which is restored afterwards.

    Attributes:
        ids, positions, valid, count: inputs of the step, at the addresses that its graph holds.
        layers, saved: the cache's layers that select, and their saved state.
        others, states: its other layers, and their states with what they held.
        changes: the cache's ``changes`` before the trial.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable, cache: CacheState, wanted: Wanted) -> None:
        ids, valid, drafts = wanted.ids, wanted.valid, wanted.drafts
        self.model, self.forward, self.wanted, self.table = model, forward, wanted, cache.row_table
        self.cache = weakref.ref(cache)  # weak, or its graphs would keep the cache alive
        counts = None if drafts is None else (drafts.counts or (drafts.tokens,))[: len(ids)]
        self.count = None if counts is None else sent(counts, torch.int32, ids.device)
        masked = (self.table.rows.valid is not None or self.table.managed) and drafts is None
        if masked:  # trial steps must not change rows that get no token
            valid = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.clone()
        self.valid, self.ids, self.positions = valid, ids.clone(), wanted.positions.clone()
        self.layers = cache.sparse_layers
        self.others: list[LayerKind] = [layer for layer in cache.layers if layer not in self.layers]
        self.saved = [Saved(layer) for layer in self.layers]
        states = [state[: len(ids)] for layer in self.others for state in layer.states]
        self.states = [(state, state.clone()) for state in states]
        self.passes = LinearPasses()
        self.passes.take(cache.linear_passes)
        self.changes = cache.changes
        self.low_priority = all(layer.policy.launch.low_priority for layer in self.layers)

    def run(self, sides: Sides | None) -> object:
        """The step's forward pass, looking ahead on one of ``sides``; its output without the cache."""
        cache, table, ids, drafts = self.cache(), self.table, self.ids, self.wanted.drafts
        replay = Replay(self.valid, sides and sides[self.low_priority], cache.shared)
        steps = table.steps(ids.device)
        if len(ids) < table.batch:
            steps = steps.first(len(ids))
            for state in self.saved:
                state.first_rows(len(ids))
        for layer, plan in zip(self.layers, self.wanted.plans):
            layer.captured, layer.store.capturing = CapturedLayer(replay, plan), True
        for other in self.others:
            other.begin_capture(replay, len(ids))
        try:
            if drafts is None:
                valid = self.valid if self.valid is None else self.valid[:, 0]
                steps.begin(valid, table.block_size, table.recent, table.managed)
            else:
                replay.drafts = self._begun(steps, drafts)
            with uncached_autocast():
                out = self.forward(
                    input_ids=ids, position_ids=self.positions, **over(self.model, cache), **self.wanted.rest
                )
            for other in self.others:
                other.check_capture()
            replay.join()
            for state in self.saved:
                state.check()
            return type(out)(**without_cache(out))
        except BaseException:
            replay.come_back()
            raise
        finally:
            for state in self.saved:
                state.put_back_rows()
            for other in self.others:
                other.end_capture()

    def _begun(self, steps: StepRows, drafts: Drafts) -> DraftRows:
        """The rows of a pass over drafts, which begins."""
        table, width, count = self.table, self.ids.shape[1], self.count
        assert count is not None
        if drafts.at_once:
            due = steps.begin_at_once(count, width, table.block_size, table.recent)
            return DraftRows(drafts.taken, drafts.queries, steps.now, due, at_once=True)
        begun = steps.begin_drafts(count, width, table.block_size, table.recent)
        return DraftRows(drafts.taken, drafts.queries.padded(width), *begun)

    def put_back_host(self) -> None:
        """Restore the host's state: the next run begins as the first one."""
        for state in self.saved:
            state.put_back_host()

    def put_back(self, cache: CacheState) -> None:
        """Restore all state."""
        for state in self.saved:
            state.put_back_host("stopped while a trial step was taken back")
        resume(cache)
        for state in self.saved:
            state.put_back_device()
        for held, before in self.states:
            held.copy_(before)
        cache.linear_passes.take(self.passes)
        for other in self.others:
            other.end_capture()
        for layer in self.layers:
            layer.broken = None
