"""Capturing a decode step: trial runs on state that is put back, of which the last one is recorded.

Apart from the runner because it alone changes a cache and restores it; it runs once for each kind of step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import SparseCache
from ..cache_name import over, without_cache
from ..kv.rows import Drafts
from ..layers.replay import DraftRows, Replay
from ..layers.sliding import SlidingRing
from ..policies.plan import Plan
from ..ranks import Ranks
from .captured_step import CapturedStep, Saved, gathered_experts, uncached_autocast
from .recorder import Recorder, Sides


def kernel_kind(cache: SparseCache) -> tuple:
    """What decides, beside shapes and plans, which kernels a step uses."""
    stores = [layer.store for layer in cache.sparse_layers]
    pools = [store.pages is not None and store.pages.pool is not None for store in stores]
    widths = {store.block_table.shape[1] for store in stores}
    return type(cache), cache.config, cache.offload_config, stores[0].dtype, tuple(pools), frozenset(widths)


class Wanted(NamedTuple):
    """A step that is to be captured, from its call.

    Args:
        ids, positions, rest: what the model's forward takes.
        plans: of all layers.
        kind: by which it is known whether its kernels are compiled.
        valid: which rows get a token, bool ``[batch, 1]``; None: all.
        drafts: of a pass over drafts.
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

    def capture(self, forward: Callable, cache: SparseCache, wanted: Wanted) -> CapturedStep:
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

    def _capture(self, forward: Callable, cache: SparseCache, wanted: Wanted) -> CapturedStep:
        """Run the step on state that is put back: once to compile, unless its kind has run, and to capture."""
        ids, positions, rest, plans, kind, valid, drafts = wanted
        layers = cache.sparse_layers
        table = cache.row_table
        masked = (table.rows.valid is not None or table.managed) and drafts is None
        count = None if drafts is None else torch.full((1,), drafts.tokens, dtype=torch.int32, device=ids.device)
        if masked:  # of rows that get no token trial steps change nothing
            valid = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.clone()
        ids, positions = ids.clone(), positions.clone()
        rings = [layer for layer in cache.layers if isinstance(layer, SlidingRing)]
        saved = [Saved(layer) for layer in layers]
        cache_ref = weakref.ref(cache)  # weak, or its graphs would keep the cache alive
        changes = cache.changes

        low_priority = all(layer.policy.low_priority for layer in layers)

        def run(sides: Sides | None):
            cache = cache_ref()
            replay = Replay(valid, sides and sides[low_priority], cache.shared)
            steps = table.steps(ids.device)
            if len(ids) < table.batch:
                steps = steps.first(len(ids))
                for state in saved:
                    state.first_rows(len(ids))
            for layer, plan in zip(layers, plans):
                layer.replay, layer.plan, layer.store.capturing = replay, plan, True
            for ring in rings:
                ring.replay = replay
            try:
                if drafts is None:
                    steps.begin(valid if valid is None else valid[:, 0], table.block_size, table.recent, table.managed)
                else:
                    begun = steps.begin_drafts(count, ids.shape[1], table.block_size, table.recent)
                    replay.drafts = DraftRows(drafts.taken, drafts.queries.padded(ids.shape[1]), *begun)
                with gathered_experts(self.model), uncached_autocast():
                    out = forward(input_ids=ids, position_ids=positions, **over(self.model, cache), **rest)
                replay.join()
                return type(out)(**without_cache(out))
            except BaseException:
                replay.come_back()
                raise
            finally:
                for state in saved:
                    state.put_back_rows()
                for ring in rings:
                    ring.replay = None

        try:
            with cache.trial():
                # What fails for want of a compiled kernel is run and tried again. Ranks would do that each for itself.
                warm = kind in self._warm and self.ranks is None
                while True:
                    if not warm:
                        self.recorder.warm_up(run, ids.device)
                    for state in saved:
                        state.put_back_host()
                    try:
                        graph, output = self.recorder.record(run, ids.device, saved)
                        break
                    except RuntimeError as error:
                        if not warm or isinstance(error, torch.OutOfMemoryError):
                            raise
                        warm = False  # something had to be compiled after all
                        for state in saved:
                            state.put_back_host()
                self._warm.add(kind)
                queries = [layer.query for layer in layers]
        finally:
            for state in saved:
                state.put_back_host("stopped while a trial step was taken back")
            cache.resume()
            for state in saved:
                state.put_back_device()
            for ring in rings:
                ring.replay = None
            for layer in layers:
                layer.broken = None
        cache.changes = changes  # trial steps are none: all is as it was
        return CapturedStep(graph, ids, positions, valid, output, queries, plans, count)
