"""Replaying captured steps: the fast path for a step like the previous one, and the launch of a graph.

This is the hot path: the host's work of every steady step is in this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.drafts import are_drafts
from ..cache_name import output_name
from ..kv.forward_pass import drafts_of
from ..kv.rows import Drafts, Rows
from ..layers.cache_state import CacheState, FullLayer, new_rows
from ..layers.kinds import LayerKind
from ..layers.step import planned
from ..model_watch import ModelWatch
from .captured_step import CapturedStep, autocast_of
from .inputs import all_tokens, graph_inputs, valid_rows
from .mask_watch import MaskWatch


class Steady(NamedTuple):
    """A step that is expected again, and the conditions for that.

    Args:
        step: the graph.
        changes, moves: change counters of the cache and of its table.
        room: blocks that all pools have room for.
        layers, others: the cache's layers, those that select and those that do not.
        rest: the call's further arguments.
        sealed: full blocks of each row when the step was planned. None: the plan does not depend on them any more.
        tokens: most drafts that were checked for this step; with fewer it is the same.
        autocast: the dtype of autocast, if it was on.
    """

    step: CapturedStep
    changes: int
    moves: int
    room: int
    layers: Sequence[FullLayer]
    others: list[LayerKind]
    rest: dict
    sealed: tuple[int, ...] | None
    tokens: int = 1
    autocast: torch.dtype | None = None


class Replayer:
    """Replays captured steps of one model.

    Args:
        watch: reports changes of the model.

    Attributes:
        graphs: captured steps of each cache, by everything that determines a step.
        steady: the expected next step of each cache, by its tokens a row (1, or the padded number of drafts) and
            whether it attends to everything in exact mode.
        watches: the mask watch of each cache.
        replays: how many graphs were launched.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self.watch = watch
        self.graphs: weakref.WeakKeyDictionary[CacheState, dict[Hashable, CapturedStep]] = weakref.WeakKeyDictionary()
        self.steady: weakref.WeakKeyDictionary[CacheState, dict[tuple[int, bool], Steady]] = weakref.WeakKeyDictionary()
        self.watches: weakref.WeakKeyDictionary[CacheState, MaskWatch] = weakref.WeakKeyDictionary()
        # The last planned step of each cache, and how much had changed before it.
        self._last: weakref.WeakKeyDictionary[CacheState, tuple[CapturedStep, int]] = weakref.WeakKeyDictionary()
        self.replays = 0

    def forget(self) -> None:
        """Forget all captured steps, because the model has changed."""
        for held in (self.graphs, self._last, self.steady):
            held.clear()

    def again(self, given: dict, cache: CacheState, known: dict[tuple[int, bool], Steady]):
        """Replay an earlier step if nothing has changed that determines it; else return None.

        A step takes some 5 ms, so the host has no time to check every layer.
        """
        table = cache.row_table
        ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not 0 < (new := ids.shape[1]) <= cache.config.max_draft + 1:
            return None
        if positions is None:
            return self._unsteady(cache)
        ids, positions, rest, keep = graph_inputs(given, cache, positions)
        steady = known.get(kind := (ids.shape[1], table.exactness.everything))
        if steady is None or new > steady.tokens:
            return None
        step = steady.step
        if (
            not self.watch.same()  # the slow path forgets all captured steps
            or cache not in self.graphs
            or any(layer.broken for layer in steady.layers)  # after an error: the slow path reports it
            or cache.changes != steady.changes
            or table.moves != steady.moves
            or (mask is not None and mask.ndim != 2)
            or not isinstance(keep, int)
            or any(isinstance(value, Tensor | list | dict) for value in rest.values())
            or rest != steady.rest
            or torch.is_grad_enabled()
            or autocast_of(ids.device) is not steady.autocast
        ):
            return self._unsteady(cache)
        rows, drafts = table.rows, None
        if new > 1:
            whole = cache.going_on or all_tokens(mask, new)
            if (len(ids) > 1 and not table.exactness.everything) or not are_drafts(cache, new) or not whole:
                return None
            mask = None
        valid = valid_rows(cache, rows, mask, ids.device)
        if (valid is not None and not table.managed) or (
            (ids.shape, positions.shape) != (step.input_ids.shape, step.position_ids.shape)
        ):
            return self._unsteady(cache)
        held = rows
        if new > 1:
            drafts = drafts_of(table, rows, new)
            held = drafts.taken.after
        else:
            table.ready(rows)
        if table.ids.used > steady.room or table.moves != steady.moves:
            return self._unsteady(cache)
        if steady.sealed not in (None, held.sealed):  # more to choose from: is it still the same step?
            if not _planned(cache, held, steady):
                return self._unsteady(cache)
            known[kind] = steady = steady._replace(sealed=held.sealed)
        watch = None if mask is None or rows.valid is not None else self.mask_watch(cache, mask)
        return self.replay(step, cache, steady, rows, valid, watch, ids, positions, mask, drafts, keep)

    def planned_twice(self, cache: CacheState, step: CapturedStep) -> bool:
        """Whether ``step``, which was planned now, is the one planned before, and the cache has not changed since."""
        before, now = self._last.get(cache), (step, cache.changes)
        self._last[cache] = now
        return before is not None and before[0] is step and before[1] == now[1]

    def expect(self, cache: CacheState, width: int, now: Steady) -> None:
        """Expect the step again: always if a full cache has the same plan, else until another block is full.

        A plan changes at some number of blocks, and never changes back with more.
        """
        stays = _planned(cache, cache.row_table.rows.filled(cache.row_table.blocks.capacity), now)
        kind = width, cache.row_table.exactness.everything
        self.steady.setdefault(cache, {})[kind] = now._replace(sealed=None) if stays else now

    def _unsteady(self, cache: CacheState) -> None:
        self.steady.pop(cache, None)

    def replay(
        self,
        step: CapturedStep,
        cache: CacheState,
        steady: Steady,
        rows: Rows,
        valid: Tensor | None,
        watch: MaskWatch | None,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        drafts: Drafts | None = None,
        keep: int = 0,
    ):
        """Replay the step, or the pass over ``drafts``. Return the last ``keep`` of its logits (0: all)."""
        table, layers = cache.row_table, steady.layers
        taken, queries = table.step(rows, valid) if drafts is None else drafts.taken, None
        steps = table.steps(ids.device)
        steps.load(rows)
        step.input_ids.copy_(ids)
        step.position_ids.copy_(positions)
        if step.valid is not None:
            step.give(valid)
        if drafts is not None:
            queries = drafts.queries
            step.give_counts(drafts)
        try:
            # After the replay the device is one step ahead of the host's state, so the layers count as broken. Set
            # this first: an interrupt during the replay is raised after it, and a second one may follow.
            for layer in layers:
                layer.broken = "stopped after a captured step"
            steps.held = None
            known = table.exactness.inexact_from  # looked at here: a call in each step takes longer
            if step.selects and (known is None or rows.columns < known):
                table.exactness.selected(rows.columns)
            step.graph.replay()
            self.replays += 1
            if watch is not None:
                watch.look(mask)
            cache.replays.add(layers, step.plans, step.queries, taken, cache.config.sinks, queries)
            table.rows = taken.after  # what layers hold that follow the table
            for other in steady.others:
                other.advance()
            steps.held = taken.after
            for layer in layers:
                layer.broken = None
        except BaseException as error:
            for layer in layers:
                layer.broken = f"{type(error).__name__} after a captured step"
            raise
        out = {**step.output, output_name(type(step.output)): cache}
        if drafts is not None:
            out["logits"] = out["logits"][:, max(0, drafts.tokens - keep) if keep else 0 : drafts.tokens]
        if out["logits"].dtype == torch.float32:  # transformers' loop for drafts keeps these as scores
            out["logits"] = out["logits"].clone()
        return type(step.output)(**out)

    def mask_watch(self, cache: CacheState, mask: Tensor) -> MaskWatch:
        """The watch of this cache's masks, after a check of the masks so far."""
        watch = self.watches.get(cache)
        if watch is None or watch.holes.shape[0] != mask.shape[0]:
            watch = self.watches[cache] = MaskWatch(mask)
        watch.check(cache)
        return watch


def _planned(cache: CacheState, rows: Rows, steady: Steady) -> bool:
    """Whether these rows have the same step."""
    asked = cache.row_table.asked(rows, new_rows(cache, steady.step.input_ids.device))
    drafts = steady.step.count is not None
    of_layers = zip(steady.layers, steady.step.plans)
    return all(planned(layer.store, layer.policy, asked, drafts) == plan for layer, plan in of_layers)
