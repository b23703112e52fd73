"""``optimize(model)``: decode by replaying one captured CUDA graph of the whole forward pass.

Eager decode of an 8B model takes some 50 ms a token on an H200 up to 128k tokens (transformers' own, ``hf_dynamic`` in
benchmarks/results/step.csv), because Python launches some thousand kernels; the same forward replayed takes as long as
the GPU needs. What is captured is transformers' own forward with our attention: every buffer it touches has a fixed
address, and the rows of the cache live on the device, where a step takes them further and seals what becomes old. What
is left to the host is the next token, and a look whether the next step is like this one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin

from ..attention.mla import absorb, absorbs, is_mla, restore
from ..attention.rotary import PassRotary
from ..attention.tap import QueryTap
from ..cache import SparseCache
from ..cache_name import NAMES, cache_name, output_name, over, without_cache
from ..fusion.fuse import Fusion, fuse, why_not
from ..kv.rows import Drafts, Rows
from ..layers.replay import DraftRows, Replay
from ..layers.sliding import SlidingRing
from ..layers.sparse_layer import SparseLayer
from ..model_watch import ModelWatch
from ..policies.plan import Plan
from ..ranks import ranks_of
from .captured_step import CapturedStep, Saved, autocast_of, gathered_experts, uncached_autocast
from .late_stop import defer, wait
from .mask_watch import MaskWatch

_STATIC = ("input_ids", "position_ids", "attention_mask", *NAMES)
_OF_DRAFTS = ("logits_to_keep", "use_cache", "return_dict")  # what else a pass that is captured may be told
_changing = threading.RLock()  # one thread at a time changes models
_MAX_GRAPHS = 8  # per cache: plans x shapes that alternate; what was not needed for longest goes first
_RESTLESS = 3  # steps before each of which the model has changed: the next ones run eagerly
_KINDS = 3  # of steps that one width of rows alternates between: all there is, as quick as choosing, chosen

Sides = tuple[torch.cuda.Stream, torch.cuda.Stream]  # for look-ahead: of the step's priority, of lower priority


class Steady(NamedTuple):
    """What a step was that is expected again.

    Args:
        step: the graph.
        changes, moves: of the cache and its table, which say whether anybody has touched them.
        room: blocks that all pools have room for.
        layers, rings: of the cache.
        rest: the call's further arguments.
        sealed: full blocks of each row when the step was planned; None: however many they have, it stays as it is.
        tokens: of a pass over drafts, how many were looked at; with fewer it is the same.
        autocast: what it computed in, if it was on.
    """

    step: CapturedStep
    changes: int
    moves: int
    room: int
    layers: list[SparseLayer]
    rings: list[SlidingRing]
    rest: dict
    sealed: tuple[int, ...] | None
    tokens: int = 1
    autocast: torch.dtype | None = None


def draft_width(tokens: int, most: int) -> int:
    """Tokens that a captured pass over drafts has room for: 4, 8, 16, 32 and so on, at most ``most``.

    Not always ``most``: up to 16 rows the fused layers have kernels of their own, and mixtures of experts read weights
    for each token.
    """
    return min(most, max(4, 1 << (tokens - 1).bit_length()))


class StepRunner:
    """Replaces ``model.forward``: replays decode steps over a sparse cache, runs everything else as it was.

    One graph per cache, batch, addresses, plans and autocast. A second cache of the same shape is captured anew, which
    takes about as long as one eager step. So is everything once the model has changed
    (:class:`..model_watch.ModelWatch`).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.original = model.forward
        self.had_own = "forward" in model.__dict__
        self.signature = inspect.signature(self.original)
        self.graphs: weakref.WeakKeyDictionary[SparseCache, dict] = weakref.WeakKeyDictionary()
        self.watches: weakref.WeakKeyDictionary[SparseCache, MaskWatch] = weakref.WeakKeyDictionary()
        # The last step of each cache, and how much had changed before it; what is known of it if the next is the same.
        self.last: weakref.WeakKeyDictionary[SparseCache, tuple[CapturedStep, int]] = weakref.WeakKeyDictionary()
        # By how many tokens it has room for: 1, or those of a pass over drafts.
        self.steady: weakref.WeakKeyDictionary[SparseCache, dict[int, Steady]] = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()
        self.captures = self.replays = 0
        self.ranks = ranks_of(model)
        self.fusion: Fusion | None = None
        self.absorbed: list[torch.nn.Module] = []  # MLA modules that were changed
        self.tap = QueryTap(model)
        self.watch = ModelWatch(model)
        self.restless = 0  # steps, one after another, before which the model has changed
        self.rotary = PassRotary(model)
        of_any_name = (name for name, one in self.signature.parameters.items() if one.kind is one.VAR_KEYWORD)
        self._rest = next(of_any_name, "kwargs")  # Gemma 3's are lm_kwargs
        self._cache_name = cache_name(model)
        (self._other_name,) = {*NAMES} - {self._cache_name}
        self._cannot: str | None = None
        self._drafts_cannot = False
        generating = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
        self._counts_positions = "position_ids" not in inspect.signature(type(generating).forward).parameters
        self._said: set[str] = set()
        self._warm: set[Hashable] = set()  # kinds of steps whose kernels are compiled
        self._found: tuple[set[torch.device], bool] | None = None  # see _weights()
        self._captures_on: tuple[torch.cuda.Stream, Sides] | None = None

    # ------------------------------------------------------------------ installing

    def install(self) -> None:
        runner = self

        @functools.wraps(self.original)  # generate() inspects the signature
        def forward(*args, **kwargs):
            return runner(*args, **kwargs)

        forward._sparsekv_runner = self
        self.model.forward = forward
        self.absorbed = [module for module in self.model.modules() if is_mla(module) and not absorbs(module)]
        for module in self.absorbed:
            absorb(module)
        self.rotary.install()
        self.tap.install()
        defer(self.model)
        self.watch.begin()

    def remove(self) -> None:
        self._forget()
        self.watch.end()
        for module in self.absorbed:
            restore(module)
        wait(self.model)
        self.tap.remove()
        self.rotary.remove()
        if self.fusion is not None:
            self.fusion.undo()
            self.fusion = None
        # At the end: if an interrupt comes before, a second call finds the runner and does the rest.
        if self.had_own:
            self.model.forward = self.original
        else:
            self.model.__dict__.pop("forward", None)

    # ------------------------------------------------------------------ a call

    def _eagerly(self, *args, **kwargs):
        """The model's own forward. What it changes of the model is how it works: tensor parallel ones swap weights."""
        with self.watch.ignoring():
            return self.original(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        if self._other_name in kwargs and self._cache_name not in kwargs:
            kwargs[self._cache_name] = kwargs.pop(self._other_name)
        cache = kwargs.get(self._cache_name)
        if not args and isinstance(cache, SparseCache) and (known := self.steady.get(cache)):
            with self.lock:
                out = self._again(kwargs, cache, known)
            if out is not None:
                return out
        given = self.signature.bind(*args, **kwargs).arguments
        given.update(given.pop(self._rest, {}))
        cache = given.get(self._cache_name)
        new = self._new_tokens(given, cache) if isinstance(cache, SparseCache) else 0
        if isinstance(cache, SparseCache):
            with self.lock:
                changed = not self.watch.check()
                if changed:
                    self._forget()
                if new:
                    self.restless = self.restless + 1 if changed else 0
                    self.watch.refresh()
        if not new:
            if isinstance(cache, SparseCache):
                self.watches.pop(cache, None)  # what it saw belongs to the tokens before
            return self._eagerly(*args, **kwargs)
        reason = self._why_not(given, cache)
        if self._talks and self.ranks.any(reason is not None):  # they sum in each layer: all or none
            reason = reason or "another rank of the model runs them eagerly"
        if reason:
            if reason not in self._said:
                self._said.add(reason)
                warnings.warn(f"decode steps run eagerly: {reason}", stacklevel=4)
            return self._eagerly(*args, **kwargs)
        self.tap.hooks.meet(cache)
        layers = cache.sparse_layers
        if any(layer.broken for layer in layers):
            return self._eagerly(*args, **kwargs)  # which says so
        cache._check_complete()
        rows = cache.joined_rows()
        if new > 1:
            with self.lock:
                out = self._verify(given, cache, rows)
            if out is None:
                self.watches.pop(cache, None)
                out = self._eagerly(*args, **kwargs)
            return out
        cache.row_table.ready(rows)
        for layer in layers:  # before page tables are made that name what pools have room for
            layer.store.fit(rows)
        asked = cache.row_table.asked(rows, cache.new_rows(given["input_ids"].device))
        plans = tuple([layer.prepare(asked) for layer in layers])
        if not all(plan.captured for plan in plans):  # this step changes what the next ones are
            return self._eagerly(*args, **kwargs)
        with self.lock:
            return self._step(given, cache, plans)

    def _forget(self) -> None:
        """The model has changed: what was captured, and what was found out, is of another one."""
        for held in (self.graphs, self.last, self.steady):
            held.clear()
        self._cannot = self._found = None
        self._drafts_cannot = False

    @property
    def _talks(self) -> bool:
        """The model is tensor parallel, and its steps can be captured if all ranks capture them."""
        return self.ranks is not None and self.ranks.captures

    def _new_tokens(self, given: dict, cache: SparseCache) -> int:
        """How many tokens of each row of a filled cache are to be decoded: 1, or of one row several drafts; else 0."""
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or cache.model_config is None or not cache.get_seq_length():
            return 0
        new = ids.shape[1]
        if new == 1:
            return 1
        few = len(ids) == 1 and 1 < new <= cache.config.max_draft + 1 and cache.row_batch is None and not self._talks
        return new if few and cache.drafted(new) else 0

    def _why_not(self, given: dict, cache: SparseCache) -> str | None:
        """Why this step cannot be captured, in words."""
        ids, mask = given["input_ids"], given.get("attention_mask")
        if self._cannot:
            return self._cannot
        devices, brought = self._weights()
        if brought:
            return (
                "some of the model's weights are offloaded, to host memory or to disk (device_map): their layers bring "
                "them anew in every step, which a replay cannot"
            )
        if self._counts_positions:
            return "the model's forward takes no position_ids: it counts positions on the host, which a replay cannot"
        if (grows := self.rotary.why_not()) is not None:
            return grows
        if self.ranks is not None and not self._talks:
            return "the model is tensor parallel by other means than NCCL, whose sums no graph can hold"
        if not self._on_gpu(ids):
            return "the model is not on a CUDA device"
        if torch.is_grad_enabled():
            return "gradients are enabled; call the model under torch.no_grad()"
        config = getattr(self.model, "config", None)
        if config is not None and (used := config.get_text_config(decoder=True)._attn_implementation) != "sparsekv":
            return f"the model's attention is {used!r} now; call model.set_attn_implementation('sparsekv')"
        if self.model.training:
            return "the model is in training mode; call model.eval()"
        if self.restless > _RESTLESS:  # until nothing has
            return "something changes the model before each step: its modules, their hooks or attributes"
        if devices != {ids.device}:
            return "the weights lie on several devices, or not all on the GPU"
        cache.use_rings()
        if any(not isinstance(layer, SparseLayer | SlidingRing) for layer in cache.layers) or not cache.sparse_layers:
            return (
                "the model has layers that cannot be captured (linear attention, chunks of attention, or sliding ones "
                "that keep their past)"
            )
        if any(layer.store.device != ids.device or layer.store.batch != ids.shape[0] for layer in cache.sparse_layers):
            return "the cache lies on several devices, or has another batch size"
        if any(not self._on_gpu(layer.store.pool.kv) for layer in cache.sparse_layers):
            return "offloaded blocks lie in memory that is not pinned, which a captured step cannot read"
        for layer in cache.sparse_layers:
            if layer.policy.sealing(layer.store) is None:  # which rows have a full block, the device knows
                return (
                    f"{type(layer.policy).__name__} keeps something of full blocks, index(), and has no sealing() that "
                    "says where"
                )
        rings = any(isinstance(layer, SlidingRing) for layer in cache.layers)
        if rings and not cache.row_table.padded_in_front(cache.sparse_layers[0].store.held):
            return (
                "rows have padding between their tokens, which sliding layers would take for tokens in a captured step"
            )
        if getattr(cache.model_config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            return "layers of the model share their keys and values"
        if mask is not None and mask.ndim != 2:
            return "a 4-D attention mask was passed"
        for name, value in given.items():
            if name not in _STATIC and isinstance(value, Tensor | list | dict):
                return f"{name} was passed"
        if given.get("output_hidden_states") or given.get("output_attentions"):
            return "hidden states or attentions were asked for"
        if given.get("return_dict") is False:
            return "return_dict=False was passed"
        return None

    @staticmethod
    def _on_gpu(t: Tensor) -> bool:
        """A kernel can read ``t`` where it is."""
        return t.is_cuda or t.is_pinned()

    def _weights(self) -> tuple[set[torch.device], bool]:
        """Where the weights lie, and whether some are brought for each call, by accelerate's hooks.

        Looked up once, and again for each capture.
        """
        if self._found is None:
            devices = {p.device for p in self.model.parameters()}
            self._found = devices, any(map(_brings_weights, self.model.modules()))
        return self._found

    def _verify(self, given: dict, cache: SparseCache, rows: Rows):
        """A pass over drafts of one row, if it can be captured; else None."""
        layers, table, new = cache.sparse_layers, cache.row_table, given["input_ids"].shape[1]
        more = (value for name, value in given.items() if name not in _STATIC and name not in _OF_DRAFTS)
        if (
            self._drafts_cannot
            or len(layers) < len(cache.layers)  # sliding layers go back to earlier tokens as transformers' own
            or any(value not in (None, False) for value in more)  # which may not fit tokens that are not there
            or not self._all_tokens(given.get("attention_mask"), new)
            or not any(layer.policy.drafts != "exact" for layer in layers)
            or not all(layer.captures_drafts(new) for layer in layers)
        ):
            return None
        (drafts,) = table.drafts(rows, new, True)
        for layer in layers:
            layer.store.fit(rows)
        plans = tuple([layer.prepare(drafts.taken.after, drafts=True) for layer in layers])
        return self._step(given, cache, plans, drafts) if all(plan.captured for plan in plans) else None

    @staticmethod
    def _all_tokens(mask: Tensor | None, new: int) -> bool:
        """No padding among the last ``new`` columns."""
        return mask is None or bool(mask[:, -new:].all())

    def _step(self, given: dict, cache: SparseCache, plans: tuple[Plan, ...], drafts: Drafts | None = None):
        """A step, or a pass over ``drafts``, by its graph, which is captured if there is none.

        If it cannot be: the step eagerly; of drafts None.
        """
        layers, table = cache.sparse_layers, cache.row_table
        ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        rows, new = table.rows, ids.shape[1]
        if drafts is not None:
            mask = None  # it has been looked at
        valid = self._valid(cache, rows, mask, ids.device)
        masked = rows.valid is not None or table.managed
        rings = [layer for layer in cache.layers if isinstance(layer, SlidingRing)]
        if rings and valid is not None:
            return self._eagerly(**given)  # a ring keeps columns, which are tokens from the first one on
        watch = None if mask is None or rows.valid is not None else self._watch(cache, mask)
        if positions is None:
            positions = torch.arange(rows.columns, rows.columns + new, device=ids.device)[None]
        ids, positions, rest, keep = self._inputs(given, cache, positions)
        width = ids.shape[1]
        steps = table.steps(ids.device)
        for ring in rings:
            steps.window(ring.sliding_window)
        addresses: list[int] = [table.on(ids.device).data_ptr(), *steps.addresses]
        for layer in layers:
            layer.store.add_addresses(addresses)
            layer.policy.add_addresses(addresses)
        key = (
            ids.shape,
            positions.shape,
            masked,
            plans,
            tuple(rest.items()),
            tuple(addresses),
            tuple(ring.addresses for ring in rings),
            autocast := autocast_of(ids.device),
        )
        graphs = self.graphs.setdefault(cache, {})
        step = graphs.pop(key, None)
        if self._talks and self.ranks.any(step is None):
            # Addresses are each rank's own: one may have what another one has not. A capture runs the step once, and
            # registers buffers with NCCL, which the others wait for: all or none.
            step = None
        if step is None:
            kind = (*self._kind(cache), *key[:4], autocast)
            mine = valid if valid is None else valid[: len(ids)]
            step = self._first_capture(graphs, ids, positions, cache, rest, plans, kind, mine, drafts)
            if step is None:
                return self._eagerly(**given) if drafts is None else None
        graphs[key] = step  # the last one: the first one goes first
        before = self.last.get(cache)
        each = any(layer.policy.each_step for layer in layers) or any(plan.learns for plan in plans)
        room = min(layer.store.pool.capacity for layer in layers)
        held = rows if drafts is None else drafts.taken.after
        now = Steady(step, cache.changes, table.moves, room, layers, rings, rest, held.sealed, new, autocast)
        if drafts is not None:  # what a pass does follows from the rows alone
            self._keep(cache, width, now)
            return self._replay(step, cache, now, rows, None, None, ids, positions, None, drafts, keep)
        if before is not None and before[0] is step and before[1] == cache.changes and not each:
            # Planned twice alike. More blocks change a plan at some number of them, and not back behind it.
            self._keep(cache, width, now)
        self.last[cache] = step, cache.changes
        out = self._replay(step, cache, now, rows, valid, watch, ids, positions, mask)
        if each:
            cache.settle()
        return out

    def _keep(self, cache: SparseCache, width: int, now: Steady) -> None:
        """Expect the step again. More blocks change a plan at some number of them, and not back behind it."""
        stays = self._planned(cache, cache.row_table.rows.filled(cache.row_table.capacity), now)
        self.steady.setdefault(cache, {})[width] = now._replace(sealed=None) if stays else now

    def _again(self, given: dict, cache: SparseCache, known: dict[int, Steady]):
        """The same step as an earlier one, if nothing has changed that decides what it is; else None.

        A step of some 5 ms has no time for a host that looks at every layer.
        """
        table = cache.row_table
        ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not 0 < (new := ids.shape[1]) <= cache.config.max_draft + 1:
            return None
        if positions is None:
            return self._unsteady(cache)
        ids, positions, rest, keep = self._inputs(given, cache, positions)
        steady = known.get(width := ids.shape[1])
        if steady is None or new > steady.tokens:
            return None
        step = steady.step
        if (
            not self.watch.same()  # the long way forgets all that is captured
            or cache not in self.graphs
            or any(layer.broken for layer in steady.layers)  # after an error: the long way says so
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
            if len(ids) > 1 or not cache.drafted(new) or not self._all_tokens(mask, new):
                return None
            mask = None
        valid = self._valid(cache, rows, mask, ids.device)
        if (valid is not None and not table.managed) or (
            (ids.shape, positions.shape) != (step.input_ids.shape, step.position_ids.shape)
        ):
            return self._unsteady(cache)
        held = rows
        if new > 1:
            (drafts,) = table.drafts(rows, new, True)
            held = drafts.taken.after
        else:
            table.ready(rows)
        if table.ids.used > steady.room or table.moves != steady.moves:
            return self._unsteady(cache)
        if steady.sealed not in (None, held.sealed):  # more to choose from: is it still the same step?
            if not self._planned(cache, held, steady):
                return self._unsteady(cache)
            known[width] = steady = steady._replace(sealed=held.sealed)
        watch = None if mask is None or rows.valid is not None else self._watch(cache, mask)
        return self._replay(step, cache, steady, rows, valid, watch, ids, positions, mask, drafts, keep)

    @staticmethod
    def _planned(cache: SparseCache, rows: Rows, steady: Steady) -> bool:
        """Of these rows it is the same step."""
        asked = cache.row_table.asked(rows, cache.new_rows(steady.step.input_ids.device))
        drafts = steady.step.count is not None
        return all(layer.planned(asked, drafts) == plan for layer, plan in zip(steady.layers, steady.step.plans))

    def _unsteady(self, cache: SparseCache) -> None:
        self.steady.pop(cache, None)

    @staticmethod
    def _inputs(given: dict, cache: SparseCache, positions: Tensor) -> tuple[Tensor, Tensor, dict, object]:
        """Ids and positions as a graph takes them, what else was given, and how many logits are asked for (0: all).

        Of rows that come and go those that the step runs; of drafts the last one as often as there is room.
        """
        ids, rest = given["input_ids"], {name: value for name, value in given.items() if name not in _STATIC}
        if cache.row_batch is not None:
            n = cache.row_batch.width
            return ids[:n], positions[:n], rest, 0
        if (new := ids.shape[1]) == 1:
            return ids, positions, rest, 0
        more = draft_width(new, cache.config.max_draft + 1) - new
        if more:
            ids, positions = (torch.cat((t, t[..., -1:].expand(*t.shape[:-1], more)), dim=-1) for t in (ids, positions))
        return ids, positions, rest, rest.pop("logits_to_keep", 0)

    @staticmethod
    def _valid(cache: SparseCache, rows: Rows, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Which rows get a token, bool ``[batch, 1]``; None: all."""
        if cache.row_batch is not None:
            return cache.row_batch.valid(device)
        if rows.valid is None or mask is None or cache.going_on:
            return None
        last = mask[:, -1:].bool()
        return None if bool(last.all()) else last

    def _replay(
        self,
        step: CapturedStep,
        cache: SparseCache,
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
        """Replay the step, or the pass over ``drafts``, of whose logits the last ``keep`` are asked for (0: all)."""
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
            step.count.fill_(drafts.tokens)
        try:
            # From the replay on the device is a step ahead of what the host keeps. Set beforehand: an interrupt that
            # comes during the replay is raised behind it, and a second one may come while the first is handled.
            for layer in layers:
                layer.broken = "stopped after a captured step"
            steps.held = None
            step.graph.replay()
            self.replays += 1
            if watch is not None:
                watch.look(mask)
            cache.replayed(step.plans, step.queries, taken, queries)
            for ring in steady.rings:
                ring.advance()
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
        return type(step.output)(**out)

    @staticmethod
    def _kind(cache: SparseCache) -> tuple:
        """What decides, beside shapes and plans, which kernels a step uses."""
        stores = [layer.store for layer in cache.sparse_layers]
        pools = [store.pages is not None and store.pages.pool is not None for store in stores]
        widths = {store.block_table.shape[1] for store in stores}
        return type(cache), cache.config, cache.offload_config, stores[0].dtype, tuple(pools), frozenset(widths)

    def _watch(self, cache: SparseCache, mask: Tensor) -> MaskWatch:
        """Who looks at the masks of this cache's steps; what it has seen so far is in order."""
        watch = self.watches.get(cache)
        if watch is None or watch.holes.shape[0] != mask.shape[0]:
            watch = self.watches[cache] = MaskWatch(mask)
        watch.check(cache)
        return watch

    # ------------------------------------------------------------------ capture

    def _first_capture(
        self,
        graphs: dict,
        ids: Tensor,
        positions: Tensor,
        cache: SparseCache,
        rest: dict,
        plans: tuple[Plan, ...],
        kind: Hashable,
        valid: Tensor | None,
        drafts: Drafts | None,
    ) -> CapturedStep | None:
        """:meth:`_capture` of a step that is not among the cache's ``graphs``, where it has room then.

        None, and a warning says why, if the model's forward cannot be captured.
        """
        most = _MAX_GRAPHS if cache.row_batch is None else max(_MAX_GRAPHS, _KINDS * len(cache.row_batch.widths))
        while len(graphs) >= most:
            graphs.pop(next(iter(graphs)))
        self._found = None
        steps = cache.row_table.steps(ids.device)
        steps.load(cache.row_table.rows)
        try:
            with self.watch.ignoring():
                step = self._capture_alike(ids, positions, cache, rest, plans, kind, valid, drafts)
        except torch.OutOfMemoryError:  # may fit another time
            raise
        except RuntimeError as error:  # the model's own code does what no graph can hold
            if drafts is not None:  # of several tokens, at least
                self._drafts_cannot = True
                warnings.warn(f"drafts are verified eagerly ({_first_line(error)})", stacklevel=5)
                return None
            self._cannot = f"the model's forward cannot be captured ({_first_line(error)})"
            self._said.add(self._cannot)
            warnings.warn(f"decode steps run eagerly: {self._cannot}", stacklevel=5)
            return None
        finally:
            steps.held = None  # the trial steps moved it
        self.captures += 1
        return step

    def _capture_alike(self, *args) -> CapturedStep:
        """:meth:`_capture`; of a tensor parallel model on all ranks, or on none.

        Raises:
            RuntimeError: the model's forward cannot be captured, here or on another rank.
        """
        if not self._talks:
            return self._capture(*args)
        try:
            step = self._capture(*args)
        except Exception:
            self.ranks.any(True)
            raise
        if self.ranks.any(False):
            raise RuntimeError("on another rank")
        return step

    def _capture(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SparseCache,
        rest: dict,
        plans: tuple[Plan, ...],
        kind: Hashable,
        valid: Tensor | None,
        drafts: Drafts | None = None,
    ) -> CapturedStep:
        """Run the step on state that is put back: once to compile, unless its kind has run, and to capture."""
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
                    out = self.original(input_ids=ids, position_ids=positions, **over(self.model, cache), **rest)
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
                warm = kind in self._warm and not self._talks
                while True:
                    if not warm:
                        self._warm_up(run, ids.device)
                    for state in saved:
                        state.put_back_host()
                    try:
                        graph, output = self._record(run, ids.device, saved)
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

    def _streams(self, device: torch.device) -> tuple[torch.cuda.Stream, Sides]:
        """What all steps are captured on: cuBLAS keeps a workspace of 32 MB for each stream that it has seen.

        And the side streams for look-ahead, of equal or lower priority (``Policy.low_priority``).
        """
        if self._captures_on is None or self._captures_on[0].device != device:
            main, equal = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
            self._captures_on = main, (equal, torch.cuda.Stream(device))
        return self._captures_on

    def _warm_up(self, run: Callable, device: torch.device) -> None:
        """Run once, which compiles the kernels. (Nothing to do for tests without a GPU.)"""
        if device.type == "cuda":
            main, sides = self._streams(device)
            main.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(main):
                run(sides)
            torch.cuda.current_stream(device).wait_stream(main)

    def _record(self, run: Callable, device: torch.device, saved: list[Saved]) -> tuple[torch.cuda.CUDAGraph, object]:
        """Capture ``run``. (Tests without a GPU put an imitation here.)"""
        main, sides = self._streams(device)
        main.wait_stream(torch.cuda.current_stream(device))
        graph, pool, first = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), None
        how = {"pool": pool, "stream": main, "capture_error_mode": "thread_local"}
        try:
            # The outer one, because torch's own raises before it puts the stream back if the capture has failed.
            with torch.cuda.stream(main), torch.cuda.graph(graph, **how):
                try:
                    output = run(sides)
                except RuntimeError as error:
                    first = error
                    raise
        except BaseException as error:
            _forget(pool, device, main)
            if first is not None and isinstance(error, RuntimeError):
                raise first from None  # the later one, at the end of the capture, says only that something failed
            raise
        finally:
            first = None  # its traceback holds this frame, and with it what the capture has allocated
        return graph, output


def _forget(pool: tuple[int, int], device: torch.device, stream: torch.cuda.Stream) -> None:
    """Have torch forget a capture that failed with a CUDA error (a layer that waits for the GPU).

    ``CUDAGraph.capture_end`` raises before it does so (torch 2.11). The allocator would take a capture to be under way
    from then on: it would keep all memory that another stream has used, and ask a graph that is gone. So would the
    generator, and refuse to draw ("Offset increment outside graph capture"), until a capture has ended.
    """
    with contextlib.suppress(AttributeError, RuntimeError):  # of a capture that has ended it knows nothing any more
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    ended = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
    with contextlib.suppress(RuntimeError), torch.cuda.stream(stream), ended:
        torch.zeros(1, device=device)


def _first_line(error: BaseException) -> str:
    """Of its message; of one without, as of NotImplementedError, its name."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _brings_weights(module: torch.nn.Module) -> bool:
    """Whether the module's weights lie elsewhere between its calls."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # several, one after another
    return any(getattr(one, "offload", False) for one in hooks) or any(
        p.is_meta for p in module.parameters(recurse=False)
    )


def _say_what_stays(fusion: Fusion | None) -> None:
    """Warn about linear layers whose weights ``fuse`` has left as they are."""
    if fusion is not None and fusion.quantised:
        kinds = ", ".join(f"{n} {name}" for name, n in fusion.quantised.items())
        warnings.warn(
            f"quantised linear layers stay as they are ({kinds}): their projections are not joined, and their own "
            "library multiplies; norms, rotary embedding and activations are fused",
            stacklevel=3,
        )


def optimize(model: torch.nn.Module, fused: bool | None = None) -> torch.nn.Module:
    """Make ``model`` decode by replaying captured steps whenever it runs over one of our caches.

    Prefill, other caches and whatever cannot be captured run as before; the reason is said once. The logits of a step
    are valid until the next step (``generate()`` copies what it needs).

    Args:
        model: a causal language model loaded with ``attn_implementation="sparsekv"``.
        fused: run norms, rotary embedding and activations as few kernels, and parallel projections as one product, on
            this model only (:func:`hf_sparsekv.fusion.fuse.fuse`). Results change by rounding. ``None``: where the
            architecture is known and Triton is there.

    Returns:
        The model itself.

    Raises:
        ValueError: the model uses another attention implementation, or ``fused=True`` is not possible.
    """
    if model.config._attn_implementation != "sparsekv":
        raise ValueError(
            f"optimize() needs attn_implementation='sparsekv', the model has {model.config._attn_implementation!r}: "
            "call model.set_attn_implementation('sparsekv') first"
        )
    with _changing:
        if (runner := runner_of(model)) is not None:
            runner.watch.touch()
            return model
        runner = StepRunner(model)
        try:
            if fused is not False:
                reason = why_not(model)
                if reason is None:
                    runner.fusion = fuse(model)
                elif fused:
                    raise ValueError(f"fused=True is not possible: {reason}")
            runner.install()
        except BaseException:
            runner.remove()
            raise
        _say_what_stays(runner.fusion)
        return model


def unoptimize(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`optimize`."""
    with _changing:
        runner = runner_of(model)
        if runner is not None:
            runner.remove()
        return model


def runner_of(model: torch.nn.Module) -> StepRunner | None:
    """The runner that :func:`optimize` installed, with its counts ``captures`` and ``replays``."""
    return getattr(model.__dict__.get("forward"), "_sparsekv_runner", None)


@contextlib.contextmanager
def unnoticed(model: torch.nn.Module) -> Iterator[None]:
    """Inside, what this thread does to ``model`` is no change: hooks that do nothing in captured steps come or go."""
    runner = runner_of(model)
    with contextlib.nullcontext() if runner is None else runner.watch.ignoring():
        yield
