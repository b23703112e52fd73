"""The runner: replaces ``model.forward`` and decides what one call does.

A decode step over a sparse cache is replayed, captured if there is no graph of it yet, or run eagerly with a warning.
It alone changes the model, and holds the parts of a captured step together.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from typing import Any

import torch
from transformers import GenerationMixin

from ..attention.mla import absorb, absorbs, is_mla, restore
from ..attention.rotary import PassRotary
from ..attention.tap import QueryTap
from ..cache_name import NAMES, cache_name
from ..experts import interface as experts
from ..fusion.fuse import Fusion
from ..kv.forward_pass import drafts_of
from ..kv.rows import Drafts, Rows
from ..layers.cache_state import CacheState, new_rows
from ..layers.step import prepare
from ..layers.together import check_complete
from ..model_watch import ModelWatch
from ..policies.plan import Plan
from ..ranks import ranks_of
from ..untraced import untraced
from .capture import Capturer, Wanted, kernel_kind
from .captured_step import CapturedStep, autocast_of, held_addresses
from .eligibility import Eligibility
from .inputs import graph_inputs, valid_rows
from .late_stop import defer, wait
from .prompts import Prompts
from .recorder import Recorder
from .replay import Replayer, Steady

_MAX_GRAPHS = 8  # per cache: plans x shapes that alternate; the least recently used one is evicted first
_KINDS = 5  # kinds of steps of one width: dense as all is selected or as it is as fast, sparse, two of verifications
_UNCOPIED = "_sparsekv_uncopied"  # an optimised model's attribute


class _Uncopied:
    """Raises where an optimised model is copied with all that it has.

    The forwards that replace the model's own are functions over its modules. A copy would call these: it would compute
    with the weights of the model that it was made from.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimised model cannot be copied, because the copy would compute with this model's weights: call "
            "hf_sparsekv.unoptimize(model) before, or copy it outside of sparse()"
        )


class StepRunner:
    """Replaces ``model.forward``: replays decode steps over a sparse cache, runs everything else as it was.

    One graph per cache, batch, addresses, plans and autocast. A second cache of the same shape has its steps
    captured again, and so have all caches when the model changes (:class:`..model_watch.ModelWatch`). A capture takes
    about as long as one eager step.

    Args:
        model: the model.
        recorder: what captures; tests without a GPU give an imitation.
    """

    def __init__(self, model: torch.nn.Module, recorder: Recorder | None = None) -> None:
        self.model = model
        self.original = model.forward
        self.had_own = "forward" in model.__dict__
        self.signature = inspect.signature(self.original)
        self.lock = threading.RLock()
        self.captures = 0
        self.fusion: Fusion | None = None
        self.absorbed: list[torch.nn.Module] = []  # MLA modules that were changed
        self.experts = experts.chosen(model)
        self.tap = QueryTap(model)
        self.watch = ModelWatch(model)
        self.rotary = PassRotary(model)
        of_any_name = (name for name, one in self.signature.parameters.items() if one.kind is one.VAR_KEYWORD)
        self._rest = next(of_any_name, "kwargs")  # Gemma 3's are lm_kwargs
        self._cache_name = cache_name(model)
        (self._other_name,) = {*NAMES} - {self._cache_name}
        generating = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
        counts_positions = "position_ids" not in inspect.signature(type(generating).forward).parameters
        self._said: set[str] = set()
        ranks = ranks_of(model)
        self.ranks = ranks if ranks is not None and ranks.captures else None  # all of them capture a step, or none
        recorder = Recorder() if recorder is None else recorder
        self.eligibility = Eligibility(model, counts_positions, self.rotary, ranks, recorder.readable)
        self.capturer = Capturer(model, self.ranks, recorder)
        self.replayer = Replayer(self.watch)
        self.graphs, self.steady = self.replayer.graphs, self.replayer.steady
        keeps = "logits_to_keep" in self.signature.parameters
        self.prompts = Prompts(model, self.original, self.eligibility, recorder, self.watch, keeps)

    @property
    def replays(self) -> int:
        """How many steps were replayed."""
        return self.replayer.replays

    # ------------------------------------------------------------------ installing

    def install(self) -> None:
        runner = self

        @functools.wraps(self.original)  # generate() inspects the signature
        @untraced
        def forward(*args, **kwargs):
            return runner(*args, **kwargs)

        forward._sparsekv_runner = self
        self.model.forward = forward
        self.model.__dict__[_UNCOPIED] = _Uncopied()
        self.absorbed = [module for module in self.model.modules() if is_mla(module) and not absorbs(module)]
        for module in self.absorbed:
            absorb(module)
        experts.use_ours(self.model)
        self.rotary.install()
        self.tap.install()
        defer(self.model)
        self.watch.begin()

    def remove(self) -> None:
        self._forget()
        self.prompts.close()
        self.watch.end()
        for module in self.absorbed:
            restore(module)
        experts.put_back(self.model, self.experts)
        wait(self.model)
        self.tap.remove()
        self.rotary.remove()
        if self.fusion is not None:
            self.fusion.undo()
            self.fusion = None
        self.model.__dict__.pop(_UNCOPIED, None)
        # Last: after an interrupt, a second call finds the runner and does the rest.
        if self.had_own:
            self.model.forward = self.original
        else:
            self.model.__dict__.pop("forward", None)

    # ------------------------------------------------------------------ a call

    def _eagerly(self, *args, **kwargs):
        """Run the model's own forward. Its changes of the model do not count: tensor parallel models swap weights."""
        with self.watch.ignoring():
            return self.original(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        if self._other_name in kwargs and self._cache_name not in kwargs:
            kwargs[self._cache_name] = kwargs.pop(self._other_name)
        cache = kwargs.get(self._cache_name)
        if not args and isinstance(cache, CacheState) and (known := self.steady.get(cache)):
            with self.lock:
                out = self.replayer.again(kwargs, cache, known)
            if out is not None:
                return out
        given = self.signature.bind(*args, **kwargs).arguments
        given.update(given.pop(self._rest, {}))
        cache = given.get(self._cache_name)
        if not isinstance(cache, CacheState):
            return self._eagerly(*args, **kwargs)
        new = self.eligibility.new_tokens(given, cache)
        with self.lock:
            changed = not self.watch.check()
            if changed:
                self._forget()
            if new:
                self.eligibility.restless = self.eligibility.restless + 1 if changed else 0
            if new or self.prompts.is_short(given):
                self.watch.refresh()
        if not new:
            self.replayer.watches.pop(cache, None)  # it has watched earlier tokens
            with self.lock:
                out = self.prompts.run(given, cache)
            if out is None:
                out = self._eagerly(*args, **kwargs)
                self.prompts.learn(cache)
            return out
        reason = self.eligibility.why_not(given, cache)
        if self.ranks and self.ranks.any(reason is not None):  # they sum in each layer: all or none
            reason = reason or "another rank of the model runs them eagerly"
        if reason:
            if reason not in self._said:
                self._said.add(reason)
                warnings.warn(f"decode steps run eagerly: {reason}", stacklevel=5)
            return self._eagerly(*args, **kwargs)
        self.tap.hooks.meet(cache)
        layers = cache.sparse_layers
        if any(layer.broken for layer in layers):
            return self._eagerly(*args, **kwargs)  # it raises the error
        check_complete(cache.layers)
        rows = cache.joined_rows()
        if new > 1:
            with self.lock:
                out = self._verify(given, cache, rows)
            if out is None:
                self.replayer.watches.pop(cache, None)
                out = self._eagerly(*args, **kwargs)
            return out
        cache.row_table.ready(rows)
        for layer in layers:  # before page tables are made that name what pools have room for
            layer.store.fit(rows)
        asked = cache.row_table.asked(rows, new_rows(cache, given["input_ids"].device))
        plans = tuple([prepare(layer.store, layer.policy, layer.next_step, asked) for layer in layers])
        if not all(plan.captured for plan in plans):  # this step changes what the next ones are
            return self._eagerly(*args, **kwargs)
        with self.lock:
            return self._step(given, cache, plans)

    def _forget(self) -> None:
        """Forget all captured steps and findings, because the model has changed."""
        self.replayer.forget()
        self.eligibility.forget()
        self.prompts.forget()

    def _verify(self, given: dict, cache: CacheState, rows: Rows):
        """Run a captured pass over drafts, of one row or in exact mode; None: it cannot be captured."""
        layers, new = cache.sparse_layers, given["input_ids"].shape[1]
        if not self.eligibility.drafts(given, cache, new):
            return None
        drafts = drafts_of(cache.row_table, rows, new)
        for layer in layers:
            layer.store.fit(rows)
        after = drafts.taken.after
        plans = tuple([prepare(layer.store, layer.policy, layer.next_step, after, drafts=True) for layer in layers])
        return self._step(given, cache, plans, drafts) if all(plan.captured for plan in plans) else None

    def _step(self, given: dict, cache: CacheState, plans: tuple[Plan, ...], drafts: Drafts | None = None):
        """Run a step, or a pass over ``drafts``, by its graph; capture the graph if there is none.

        If it cannot be captured, a step runs eagerly, and a pass over drafts returns None.
        """
        layers, table = cache.sparse_layers, cache.row_table
        ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        rows, new = table.rows, ids.shape[1]
        if drafts is not None:
            mask = None  # checked already
        valid = valid_rows(cache, rows, mask, ids.device) if drafts is None else None
        masked = rows.valid is not None or table.managed
        others = [layer for layer in cache.layers if layer not in layers]
        if valid is not None and not table.managed and any(layer.in_columns for layer in cache.layers):
            return self._eagerly(**given)  # they keep columns, which are tokens from the first one on
        watch = None if mask is None or rows.valid is not None else self.replayer.mask_watch(cache, mask)
        if positions is None:
            positions = torch.arange(rows.columns, rows.columns + new, device=ids.device)[None]
            if layers[0].in_columns:
                positions = positions.expand(len(ids), -1)  # those that the model keeps are of each row
        ids, positions, rest, keep = graph_inputs(given, cache, positions)
        width = ids.shape[1]
        autocast = autocast_of(ids.device)
        shape = ids.shape, positions.shape, masked, plans, autocast, drafts is not None and drafts.at_once
        key = *shape, tuple(rest.items()), held_addresses(cache, others, ids.device)
        graphs = self.graphs.setdefault(cache, {})
        step = graphs.pop(key, None)
        if self.ranks and self.ranks.any(step is None):
            # Each rank has its own addresses, so some ranks may have a graph that others lack. A capture runs the step
            # once and registers buffers with NCCL, for which the others wait: so all ranks capture, or none.
            step = None
        if step is None:
            kind = *kernel_kind(cache), *shape
            mine = valid if valid is None else valid[: len(ids)]
            step = self._first_capture(graphs, cache, Wanted(ids, positions, rest, plans, kind, mine, drafts))
            if step is None:
                return self._eagerly(**given) if drafts is None else None
        graphs[key] = step  # the last one: the first one goes first
        each = any(layer.policy.launch.each_step for layer in layers) or any(plan.learns for plan in plans)
        room = min(layer.store.pool.capacity for layer in layers)
        held = rows if drafts is None else drafts.taken.after
        now = Steady(step, cache.changes, table.moves, room, layers, others, rest, held.sealed, new, autocast)
        if drafts is not None:  # a draft pass depends on the rows alone
            self.replayer.expect(cache, width, now)
            return self.replayer.replay(step, cache, now, rows, None, None, ids, positions, None, drafts, keep)
        if self.replayer.planned_twice(cache, step) and not each:
            self.replayer.expect(cache, width, now)
        out = self.replayer.replay(step, cache, now, rows, valid, watch, ids, positions, mask)
        if each:
            cache.replays.settle(layers)
        return out

    def _first_capture(self, graphs: dict, cache: CacheState, wanted: Wanted) -> CapturedStep | None:
        """Capture a step that is not among the cache's ``graphs``, where it has room then.

        None, and a warning says why, if the model's forward cannot be captured.
        """
        most = _MAX_GRAPHS if cache.row_batch is None else max(_MAX_GRAPHS, _KINDS * len(cache.row_batch.widths))
        while len(graphs) >= most:
            graphs.pop(next(iter(graphs)))
        self.eligibility.look_again()
        steps = cache.row_table.steps(wanted.ids.device)
        steps.load(cache.row_table.rows)
        try:
            with self.watch.ignoring():
                step = self.capturer.capture(self.original, cache, wanted)
        except torch.OutOfMemoryError:  # may fit another time
            raise
        except RuntimeError as error:  # the model's own code cannot be captured
            if wanted.drafts is not None:  # of several tokens, at least
                self.eligibility.drafts_cannot = True
                warnings.warn(f"drafts are verified eagerly ({_first_line(error)})", stacklevel=6)
                return None
            self.eligibility.cannot = f"the model's forward cannot be captured ({_first_line(error)})"
            self._said.add(self.eligibility.cannot)
            warnings.warn(f"decode steps run eagerly: {self.eligibility.cannot}", stacklevel=6)
            return None
        finally:
            steps.held = None  # the trial steps moved it
        self.captures += 1
        return step


def _first_line(error: BaseException) -> str:
    """First line of an error's message; the error's name if it has none, as NotImplementedError."""
    return next(iter(str(error).splitlines()), type(error).__name__)
