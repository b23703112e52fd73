"""One full-attention layer of a sparse cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.exact import exact_attention
from ..attention.gradient import NoGradient
from ..attention.handle import KVHandle, Step
from ..attention.masks import check_4d, is_whole, seen_columns
from ..attention.mla import SAMPLE, Absorbed, absorb, calling_module, passes_on
from ..kv.query_rows import QueryRows
from ..kv.rows import Rows
from ..kv.store import LayerStore, Tally
from ..policies.base import Policy
from ..policies.plan import Plan
from ..tensors import any_autocast, as_called, lowered, no_autocast
from ..types import AttentionParams
from .owned import Owned, Owner
from .replay import Replay

passes_on(__name__)


class SparseLayer(Owned, CacheLayerMixin):
    """One full-attention layer of a sparse cache: a store, a policy, and the bookkeeping that transformers asks for."""

    is_sliding = False
    is_compileable = False  # True would make generate() compile the model unasked
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Owner, index: int) -> None:
        self.owner, self.index = owner, index
        self.store: LayerStore | None = None
        self.policy: Policy = owner.make_policy(index)
        self.latent = False  # MLA: rows are latents and their rotary part, see attention/mla.py
        self.pending: Step | None = None
        self.replay: Replay | None = None  # set while a step is being captured
        self.plan: Plan | None = None  # of the step that is being captured
        self.query: Tensor | None = None  # of the captured step
        self.last: Tensor | None = None  # a prompt's last query, whose tokens the first step is to bring
        # In a captured step: waits for what is being chosen beside the layer before; and what that reads.
        self.awaited: tuple[Callable[[], None], Tensor] | None = None
        self.broken: str | None = None
        self.q_heads = 0  # of the model

    def __deepcopy__(self, memo: dict) -> SparseLayer:
        new = object.__new__(SparseLayer)
        memo[id(self)] = new
        if self.store is not None:
            self.store.wait_for_copies()  # a side stream may still be choosing blocks
        new.index, new.broken, new.policy, new.latent = self.index, self.broken, self.policy.copy(), self.latent
        new.q_heads = self.q_heads
        new.pending = new.replay = new.plan = new.query = new.last = new.awaited = None
        table, copy_streams = (copy.deepcopy(held, memo) for held in (self.owner.row_table, self.owner.copy_streams))
        pools = copy.deepcopy(self.owner.device_pools, memo) if self.policy.fetches else None
        new.store = None if self.store is None else self.store.copy(table, pools, copy_streams)
        new.owner = copy.deepcopy(self.owner, memo)
        return new

    def __repr__(self) -> str:
        return f"SparseLayer({self.index}, {self.get_seq_length()} tokens)"

    # ------------------------------------------------------------------ new tokens

    @property
    def is_initialized(self) -> bool:
        return self.store is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The store is made by the first attention, when the number of query heads is known too."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Announce new tokens ``[batch, H, q, D]``.

        Under ``torch.autocast`` they are cached in its dtype, which is what attention would make of them; or in that
        of what is cached already.

        Returns:
            Handles of all keys and values. The tokens are stored when the attention function gets them.

        Raises:
            ValueError: the tensors do not fit what is cached.
            RuntimeError: an earlier error left the layer incomplete.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("sparse caches cannot be traced by torch.compile: run the model eagerly")
        if autocast := any_autocast():
            dtype = self._dtype
            key_states, value_states = lowered(key_states, dtype), lowered(value_states, dtype)
        self._check(key_states, value_states)
        past, module = self.get_seq_length(), calling_module()
        if past == 0:
            self.latent = module is not None
        step = self.pending = Step(self, key_states, value_states, past, autocast=autocast)
        if self.latent and module is not None:
            absorb(module)
            step.absorbed = Absorbed(module)
            if key_states.shape[2] > 1 and self.replay is None:
                step.absorbed.refresh(key_states)
        return KVHandle(step, "k"), KVHandle(step, "v")

    @property
    def _dtype(self) -> torch.dtype | None:
        """Of the tokens that are cached, None before the first."""
        return self.store.dtype if self.store is not None and self.store.length else None

    def _check(self, k: Tensor, v: Tensor) -> None:
        self._check_complete()
        if (store := self.store) is None or store.length == 0:
            return
        if k.shape[0] != store.batch:
            raise ValueError(
                f"the batch size changed from {store.batch} to {k.shape[0]} in mid-cache: use a new cache, or "
                "batch_repeat_interleave() / batch_select_indices() before"
            )
        held = (store.heads, store.split, store.width - store.split)
        if (k.shape[1], k.shape[3], v.shape[3]) != held:
            raise ValueError(
                f"layer {self.index} caches {held[0]} KV heads of {held[1]} + {held[2]} channels, "
                f"got {k.shape[1]} of {k.shape[3]} + {v.shape[3]}: this cache was filled by another model"
            )
        for name, mine, given in (("dtype", store.dtype, k.dtype), ("device", store.device, k.device)):
            if mine != given:
                raise ValueError(
                    f"layer {self.index} caches keys of {name} {mine}, got {given}: keep one {name} "
                    "(inside or outside of torch.autocast), or use a new cache"
                )

    def _check_complete(self) -> None:
        if self.pending is not None and not self.pending.committed:
            self.broken = f"tokens given to layer {self.index} were never attended to"
        if self.broken:
            raise RuntimeError(
                f"this cache is incomplete after an error ({self.broken}): call reset() and prefill again"
            )

    def _begin(self, step: Step, q_heads: int, valid: Tensor | None = None) -> None:
        if self.store is not None and self.store.length:
            return
        if self.store is not None and not self.store.fits(step.k, step.v, self.latent):
            self.drop()  # before the new one is made: the budget may not hold both
            if self.owner.device_pools is not None and self.owner.first(self):
                self.owner.device_pools.clear()  # all layers are made anew
                for layer in self.owner.sparse_layers:
                    if layer.store is not None and layer.store.pages is not None:
                        layer.store.pages.leave()
        store = self.store
        if store is None:
            owner, pools = self.owner, None
            if self.policy.fetches:
                pools = owner.device_pools
                pools.layers = sum(layer.policy.fetches for layer in owner.sparse_layers)
            host = owner.budget if self.policy.offloaded else None
            copy_streams = None if host is None else owner.copy_streams
            made = owner.config, host, owner.row_table, pools, copy_streams, self.latent
            tokens = () if valid is None else owner.row_table.tokens_of(step.k.shape[2], valid)
            blocks = None if valid is None else sum(-(-n // owner.config.block_size) for n in tokens)
            block_pools = owner.block_pools
            pool = None if block_pools is None else block_pools.get(self.index)
            store = self.policy.store_type(step.k, step.v, *made, pool, blocks)
            if block_pools is not None:
                block_pools[self.index] = store.pool
        else:
            store.begin(step.k.shape[2])
        self.policy.start(store, q_heads)
        self.store, self.q_heads = store, q_heads

    def attend(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float = 0.0
    ) -> Tensor:
        """Store the step's tokens and attend, ``query [batch, Hq, q, Dk]`` to ``[batch, Hq, q, Dv]``.

        Layers that share their KV call this with the same step; only the first stores.
        """
        if not step.autocast:
            return self._attended(step, query, mask, params, dropout)
        out = no_autocast(self._attended)(step, lowered(query, step.k.dtype), mask, params, dropout)
        return out.to(query.dtype)  # what follows may be made for the model's dtype

    def _attended(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
    ) -> Tensor:
        try:
            return self._attend(step, query, mask, params, dropout)
        except BaseException as error:
            if not step.committed:
                self.pending = None
            if step.touched:
                self.broken = f"{type(error).__name__} in layer {self.index}"
            raise

    def _attend(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
    ) -> Tensor:
        own = not step.committed
        one = query.shape[2] == 1 and params.sliding_window is None and (mask is None or mask.ndim == 2)
        whole = None
        if mask is not None and mask.ndim == 4:
            whole = mask = check_4d(mask, query.shape[2], step.length)
        exact = exact_attention if (absorbed := step.absorbed) is None else absorbed.attention
        if step.past == 0:
            columns = mask if mask is not None and mask.ndim == 2 else None
            out = exact(query, step.k, step.v, params, columns=columns, mask=whole, dropout=dropout)
            if own:
                self._commit(step, query, self.owner.new_columns(mask, step))
                self._look_ahead(query, absorbed)
            return out
        if own and self.replay is None:
            self._check_past(mask, step.past)
        if one and dropout:
            raise ValueError("attention dropout is not supported over a sparse cache: call model.eval()")
        if one or (own and not dropout and params.sliding_window is None and self._is_drafts(step, mask)):
            with torch.no_grad():
                q = query if absorbed is None else absorbed.queries(query)
                out = self._decode(step, q, mask, params, own) if one else self._verify(step, q, params)
                out = out if absorbed is None else absorbed.outputs(out)
            return NoGradient.apply(out, query) if torch.is_grad_enabled() else out
        if self.replay is not None:
            raise RuntimeError("exact attention over a cached past, which waits for the host")
        store = self.store
        if own:
            key, value = store.materialise(*step.kept)
            self._read_ahead(step, mask)
            self._commit(step, query, self.owner.new_columns(mask, step))
        else:
            key, value = store.materialise()
        columns = store.valid_columns() if store.padded else None
        with torch.no_grad():
            out = exact(query, key, value, params, columns=columns, mask=whole, dropout=dropout)
            store.counters.exact += 1
            store.counters.masked += query.shape[2] == 1 and whole is not None
            if own:
                self._look_ahead(query, absorbed)
        return NoGradient.apply(out, query) if torch.is_grad_enabled() else out

    @torch.no_grad()
    def _look_ahead(self, query: Tensor, absorbed: Absorbed | None = None) -> None:
        """A prompt, or a piece of it, is cached: prepare the first decode step, which its last query stands for.

        What is brought to the device for that alone waits for it: only the last of many pieces needs it.
        """
        policy, store = self.policy, self.store
        plan, last = policy.plan(store), _last(query, absorbed)
        self.last = None
        if not plan.ahead:
            policy.look_ahead(last, store, plan)
        else:
            plan = policy.prepare(store)
            if not policy.brings_only:
                with store.after_saving(last) as last:
                    policy.look_ahead(last, store, plan)
            elif policy.tokens is not None:
                self.last = last.clone()  # a view would keep all of the prompt's queries alive
        self._end()

    def _end(self) -> None:
        """The last layer ends a forward pass of several tokens: free the copy streams' buffers."""
        if self._next is None:
            self.owner.copy_streams.release()

    @property
    def _next(self) -> SparseLayer | None:
        """The one of ours that comes behind this one, None behind the last."""
        behind = self.owner.layers[self.index + 1 :]
        return next((layer for layer in behind if isinstance(layer, SparseLayer)), None)

    def _read_ahead(self, step: Step, mask: Tensor | None) -> None:
        """Begin to read back what the next layer needs for this chunk of a prompt."""
        layer = self._next
        store = None if layer is None else layer.store
        if store is None or store.copy_stream is None or not store.full_blocks or store.length != step.past:
            return
        if not layer._is_drafts(step, mask):
            self.owner.copy_streams.read_ahead(store, step.length)

    def _is_drafts(self, step: Step, mask: Tensor | None) -> bool:
        """The step's tokens are drafts, said to be so, and few enough to attend to a selection as decode steps do.

        Without padding among them, and by a policy that says how, where a decode step does not attend to everything and
        so many of them do not read more than that.
        """
        new, owner = step.k.shape[2], self.owner
        if self.replay is not None:
            return self.replay.drafts is not None
        if not 1 < new <= owner.config.max_draft + 1 or self.policy.drafts == "exact":
            return False
        if (mask is not None and mask.ndim != 2) or not owner.drafted(new) or owner.new_columns(mask, step) is not None:
            return False
        return self._selects_drafts(new)

    def _selects_drafts(self, new: int) -> bool:
        """Each of ``new`` drafts has a selection of its own, and they do not read more than everything."""
        policy, store = self.policy, self.store
        return policy.drafts != "exact" and not policy.plan(store).dense and policy.drafts_read_less(new, store)

    def captures_drafts(self, new: int) -> bool:
        """A pass over so many drafts of the only row may be captured, as far as this layer is concerned."""
        policy = self.policy
        if type(policy) is Policy:  # each query attends to everything, which exact attention reads once
            return not policy.offloaded
        changes = policy.each_step or policy.observes or policy.source == "in_delta"  # the host's work, or of a token
        return policy.drafts == "together" and not changes and self._selects_drafts(new)

    def _verify(self, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
        """Drafts as decode steps, ``query [batch, Hq, q, Dk]`` to ``[batch, Hq, q, Dv]``.

        Each query gets what a step of its own would attend to. Those of one row are decoded together, as rows of a
        batch, if the policy can.
        """
        step.touched = True
        if self.replay is not None:
            return self._verify_together(step, query, params)
        self._begin_step()
        self.policy.begin_drafts()
        if self.policy.drafts == "together" and self.store.batch == 1:
            out = self._verify_together(step, query, params)
        else:
            out = self._verify_each(step, query, params)
        self._end()
        return out

    def _verify_together(self, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
        """:meth:`_verify` of one row, at once; captured (``self.replay`` is set), only what replays must repeat.

        First all tokens are stored, and blocks sealed that the last ones make old: the ring has room for what the first
        ones still find there. What of it a query attends to its own two numbers say.
        """
        store, policy, replay = self.store, self.policy, self.replay
        if replay is None:
            ((_, taken, queries),) = self.owner.row_table.drafts(store.held, step.k.shape[2], True)
            there = due = None
        else:
            taken, queries, there, due = replay.drafts
        if policy.observes:
            store.announce(step.k.shape[2], None)
            policy.observe(query, step.keys, None, store)
        store.append(*step.kept, None, taken)
        self._committed(step)
        store.seal_due(policy, due)
        plan = policy.plan(store) if replay is None else self.plan
        q = query[0].transpose(0, 1)  # [n, Hq, Dk]
        with QueryRows.of(store, queries, there) as rows:
            if plan.dense:
                out = rows.attend(q, None, "all", params)
            else:
                out = policy.attend_drafts(q, store, rows, plan, params)
        if replay is None:
            policy.account(q[-1:], store, plan, store.tally(queries))
        else:
            self.query = q[-1:]
        return out.transpose(0, 1)[None]

    def _verify_each(self, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
        """:meth:`_verify` one token after the other."""
        store, policy, watch, outs = self.store, self.policy, self.policy.watch, []
        (k, v), new = step.kept, step.k.shape[2]
        try:
            for i, (_, taken, _) in enumerate(self.owner.row_table.drafts(store.held, new, False)):
                at = slice(i, i + 1)
                if policy.observes:
                    store.announce(1, None)
                    policy.observe(query[:, :, at], step.keys[:, :, at], None, store)
                store.append(k[:, :, at], v[:, :, at], None, taken)
                if i + 1 == new:
                    self._committed(step)
                plan, q = policy.plan(store), query[:, :, i]
                outs.append(self._selected(q, plan, params))
                store.seal_due(policy)
                policy.look_ahead(q, store, plan)
                tally = store.tally()
                tally.steps, tally.drafts = int(not i), int(i > 0)  # of the pass
                policy.account(q, store, plan, tally)
                if watch is not None:
                    watch.adds = True
        finally:
            if watch is not None:
                watch.adds = False
        return torch.cat(outs, dim=2)

    def _selected(self, q: Tensor, plan: Plan, params: AttentionParams) -> Tensor:
        """Attention of one query per row, ``q [batch, Hq, Dk]`` to ``[batch, Hq, 1, Dv]``, to what the plan says."""
        store = self.store
        out = store.attend(q, None, "all", params) if plan.dense else self.policy.attend(q, store, plan, params)
        return out[:, :, None]

    def _decode(self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, own: bool) -> Tensor:
        """One decode step, ``query [batch, Hq, 1, Dk]`` to ``[batch, Hq, 1, Dv]``.

        Captured (``self.replay`` is set), it only launches what every replay must repeat: what is left to the host is
        :meth:`account`. What it does was decided before it then: :attr:`plan`.
        """
        store, policy, replay, q = self.store, self.policy, self.replay, query[:, :, 0]
        if own:
            step.touched = True
            if replay is None:
                self._begin_step()
            valid = self.owner.new_columns(mask, step) if replay is None else replay.valid
            if policy.observes:
                store.announce(1, valid)
                policy.observe(query, step.keys, valid, store)
            if replay is not None and policy.note is not None:
                replay.on_side_stream(lambda: policy.note(q, valid, store, self.plan))
            store.append(*step.kept, valid)
            self._committed(step)
        plan = policy.plan(store) if replay is None else self.plan
        if self.awaited is not None:
            (wait, _), self.awaited = self.awaited, None
            wait()
        if policy.foresight is not None and policy.warns_unforeseen and not (plan.dense or self.owner.met):
            self.owner.warn_own_queries()
        if not own:  # what comes next is prepared by the layer that stores, for its own query
            return self._selected(q, replace(plan, ahead=False), params)
        out = self._selected(q, plan, params)

        def ahead() -> None:
            store.seal_due(policy)
            policy.look_ahead(q, store, plan)

        if replay is None:
            ahead()
            policy.account(q, store, plan, store.tally())
            return out
        self.query = q
        if plan.ahead or policy.follows:
            replay.fork(ahead, policy.layers_per_launch)
        else:
            replay.late(ahead)
        if self._next is None:
            replay.run_late()
        return out

    def foresee(self, query: Callable[[], Tensor], stream: Tensor) -> None:
        """The layer before has begun a decode step, and ``query()`` is what it expects this one to ask.

        Args:
            query: gives ``[batch, Hq, Dk]``.
            stream: what it reads, ``[batch, 1, hidden]``: kept until that is done.
        """
        self._foresee(as_called(query, self._dtype), stream)

    @no_autocast
    @torch.no_grad()
    def _foresee(self, query: Callable[[], Tensor], stream: Tensor) -> None:
        store, policy, replay = self.store, self.policy, self.replay
        if replay is not None:
            if self.plan.foresees:
                self.awaited = replay.ahead(lambda: policy.foresee(query(), store, self.plan)), stream
            return
        if store is None or not store.length or self.broken or stream.shape[0] != store.batch:
            return  # no step, or one that update() refuses
        self._begin_step()
        with store.at(self._asked()):
            plan = policy.plan(store)
            if plan.foresees:
                policy.foresee(query(), store, plan)

    @no_autocast
    @torch.no_grad()
    def note_added(self, before: Tensor, after: Tensor, mask: Tensor | None = None) -> None:
        """The layer before has ended: what it added to the stream for each row's last token.

        Steps that choose for their own query, or attend to everything, leave it out: nobody reads it, and the first
        that does begins without (:meth:`.base.Policy.note_added`).

        Args:
            before, after: its input and output ``[batch, n, hidden]``, or their last columns.
            mask: ``[batch, columns]``, 0 for padding; of several tokens, to leave out rows that end with padding.
        """
        store, policy, replay = self.store, self.policy, self.replay
        before, after = before.detach(), after.detach()
        if replay is not None:
            if self.plan.foresees:
                waits = replay.valid if self.owner.row_table.managed else None
                replay.behind(lambda: policy.note_added(before, after, valid=waits))
            return
        past, new = 0 if store is None else store.length, after.shape[1]
        if self.broken or (past and after.shape[0] != store.batch):
            return  # update() refuses it
        if new == 1 and not (past and self.planned(self._asked()).foresees):
            return
        waits = self.owner.new_rows(after.device)
        policy.note_added(before[:, -1:], after[:, -1:], past + new, None if new == 1 else mask, waits)

    def _begin_step(self) -> None:
        """A decode step begins: blocks are in place, and there is room for marks of those that it attends to."""
        self.store.wait_for_copies()
        if self.last is not None:
            last, self.last = self.last, None
            plan = self.policy.plan(self.store)
            if plan.ahead:
                self.policy.look_ahead(last, self.store, plan)
        if self.policy.watch is not None:
            self.policy.watch.fit(self.store)

    def _asked(self) -> Rows:
        """The rows as the step that begins finds them; of a batch of which rows come and go, which get a token."""
        return self.owner.row_table.asked(self.store.held, self.owner.new_rows(self.store.device))

    def prepare(self, rows: Rows, drafts: bool = False) -> Plan:
        """A decode step is about to be captured or replayed that finds ``rows``: what it does; see :meth:`planned`."""
        if drafts:
            self.policy.begin_drafts()
        self._begin_step()
        with self.store.at(rows):
            plan = self.policy.prepare(self.store)
        return _unforeseen(plan) if drafts else plan

    def planned(self, rows: Rows, drafts: bool = False) -> Plan:
        """What a decode step does that finds ``rows``; or a pass over drafts that leaves them. Changes nothing."""
        with self.store.at(rows):
            plan = self.policy.plan(self.store)
        return _unforeseen(plan) if drafts else plan

    def account(self, plan: Plan, query: Tensor, tally: Tally) -> None:
        """Steps were replayed, the last one for ``query``: what of them is left to the host."""
        store, policy = self.store, self.policy
        if len(query) < store.batch:  # steps of the first rows: the others have asked for nothing
            query = torch.cat((query, query.new_zeros(store.batch - len(query), *query.shape[1:])))
        store.count_to_host(tally.sealed)
        policy.account(query, store, plan, tally)
        policy.replayed(store, plan, tally)

    @torch.no_grad()
    def _commit(self, step: Step, query: Tensor | None, valid: Tensor | None) -> None:
        step.touched = True
        self._begin(step, (step.k if query is None else query).shape[1], valid)
        if self.policy.observes:
            self.store.announce(step.k.shape[2], valid)
            self.policy.observe(*self._observed(step, query, valid), self.store, step.k.shape[2])
        self.store.extend(*step.kept, valid, self.policy)
        self._committed(step)

    def _observed(self, step: Step, query: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and validity of the step's columns as :meth:`.base.Policy.observe` takes them."""
        labels, part = self.policy.labels, step
        first = None if labels is None else labels.wanted
        if first is not None and first < step.k.shape[2]:
            part = replace(step, k=step.k[:, :, :first], v=step.v[:, :, :first])
            query = None if query is None else query[:, :, :first]
            valid = None if valid is None else valid[:, :first]
        if step.absorbed is not None and query is not None:
            most = max(SAMPLE, getattr(self.owner.config, "calibration_tokens", 0))
            return step.absorbed.observed(query, part.k, part.v, valid, most)
        keys = part.keys
        return keys if query is None else query, keys, valid  # the very same tensor twice: there is no query

    def _committed(self, step: Step) -> None:
        step.committed = True
        self.owner.passed(self.index)
        self.pending = None  # nothing may keep a prompt's keys and values alive

    @torch.no_grad()
    def fill(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None, absorbed=None) -> None:
        """Cache tokens whose attention has been computed elsewhere: benchmarks, imports from other caches.

        Args:
            query: ``[batch, Hq, q, Dk]``; the last ones suffice if channels come from a file. Over latents (``key``:
                latents, ``value``: their rotary part) absorbed ones, as wide as both, or the model's with ``absorbed``.
            key, value: ``[batch, H, q, D]``. ``valid``: bool ``[batch, q]``, False for padding.
            absorbed: the (refreshed) :class:`..Absorbed` of an MLA module: absorbs as many queries as in a prefill.
        """
        query, key, value = (lowered(x, self._dtype) for x in (query, key, value))
        self._check(key, value)
        if self.get_seq_length() == 0:
            self.latent = absorbed is not None or query.shape[3] == key.shape[3] + value.shape[3]
        self._fill(query, key, value, valid, absorbed)

    @no_autocast
    def _fill(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, absorbed) -> None:
        self._commit(Step(self, key, value, self.get_seq_length(), absorbed), query, valid)
        self._look_ahead(query, absorbed)

    def _check_past(self, mask: Tensor | None, past: int) -> None:
        """Hold the tokens that the mask shows, when a pass begins: selection and attention are to agree with it."""
        if mask is None or not self.owner.first(self):
            return
        store = self.store
        if mask.ndim == 4:
            if store.padded and bool((seen_columns(mask, past) & ~store.valid_columns()).any()):
                raise ValueError(
                    "a 4-D attention_mask shows columns that were padding when they were cached, which keep no keys: "
                    "hide them, or start a new cache"
                )
            return
        # Rows with padding may have been left out, or the columns that had it: then only the device knows.
        if is_whole(mask) and not store.padded:
            return
        held, shown = store.valid_columns(), mask[:, :past].bool().expand(store.batch, -1)
        if torch.equal(held, shown) or self.owner.drop_tokens(shown):
            return
        what = "shows padding again" if bool((shown & ~held).any()) else "hides tokens before others that it shows"
        raise ValueError(
            f"attention_mask differs from the one these tokens were cached with: it {what}. A later mask may hide the "
            "last tokens of a row, such as the padding after its answer, and nothing else: pass the same values for "
            "the other cached columns, or start a new cache"
        )

    @no_autocast
    def materialise(self, step: Step, which: str) -> Tensor:
        """All keys or values for something other than the sparsekv attention function, which applies its own mask."""
        if not step.committed:
            self.owner.warn_bypass()
            self._commit(step, None, None)  # no query yet: calibrate on the keys alone until one comes
            self._end()
            self.store.counters.materialised += 1
        key, value = (step.k, step.v) if step.past == 0 else self.store.materialise()
        return (key if which == "k" else value).contiguous()  # as concatenation would give: some models view it

    # ------------------------------------------------------------------ rows that come and go

    def open(self, batch: int, other: SparseLayer) -> None:
        """Make a store for ``batch`` rows, over the block pool of ``other``, which holds the first that is to join."""
        like, self.latent = other.store, other.latent
        nothing = torch.empty(1, dtype=like.dtype, device=like.device)
        k, v = (nothing.expand(batch, like.heads, 1, dim) for dim in (like.split, like.width - like.split))
        self._begin(Step(self, k, v, 0), other.q_heads)
        self.policy.open_rows(other.policy)

    def join_row(self, row: int, other: SparseLayer) -> None:
        """Row ``row`` is about to become the only one of ``other``: :meth:`add_rows` says what is to be copied."""
        other.store.wait_for_copies()
        self.policy.join_row(row, other.policy, self.store)

    def add_rows(self, other: SparseLayer, found: list[tuple[Tensor, Tensor, int]]) -> None:
        """What rows of this and ``other`` are kept in beside the blocks, see :meth:`..kv.state.State.add_rows`."""
        self.store.add_rows(other.store, found)
        self.policy.add_rows(other.policy, found)

    def crop_row(self, row: int, rows: Rows) -> None:
        """The last tokens of a row are removed, which leaves ``rows``."""
        self.store.crop_to(rows)
        self.policy.crop_row(row)

    @no_autocast
    def end_calibration(self) -> None:
        """Have label channels, whatever has been seen so far."""
        labels = self.policy.labels
        if labels is not None and labels.finish() and self.store.full_blocks:
            self.store.reindex(self.policy)

    # ------------------------------------------------------------------ what generate() asks

    def get_seq_length(self) -> int:
        if self.pending is not None and not self.pending.committed:
            return self.pending.length  # includes tokens that update() has announced
        return 0 if self.store is None else self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self._check_complete()  # before a mask of the wrong size fails with a message of its own
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.store is None else self.store.batch

    @property
    @no_autocast
    def keys(self) -> Tensor | None:
        """All cached keys ``[batch, H, length, Dk]`` on the device: a copy, for inspection."""
        return None if self.store is None else self.store.materialise()[0]

    @property
    @no_autocast
    def values(self) -> Tensor | None:
        """All cached values, see :attr:`keys`."""
        return None if self.store is None else self.store.materialise()[1]

    def offload(self) -> None:
        """Nothing to do: where blocks live is the store's business."""

    def prefetch(self) -> None:
        """Nothing to do, see :meth:`offload`."""

    def drop(self) -> None:
        """Have no store, and no memory of one; nothing is cached."""
        if self.store is not None:
            self.store.wait_for_copies()  # memory in use by copy streams must not be reused before they end
            self.store = self.last = None

    def reset(self) -> None:
        self.empty()
        self.broken = None

    def empty(self) -> None:
        """Forget all tokens, and what a step that was broken off has left."""
        self.pending = self.replay = self.last = self.awaited = None
        if self.store is not None:
            self.store.capturing = False
            self.store.reset()  # which waits for what is still being chosen, too
        self.policy.reset()

    @no_autocast
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. (A positive number, transformers' older form: keep as many.)"""
        tokens_to_remove = int(tokens_to_remove)  # generate() may pass a tensor
        if self.store is None or tokens_to_remove == 0:
            return
        keep = tokens_to_remove if tokens_to_remove > 0 else max(0, self.store.length + tokens_to_remove)
        if 0 < self.store.length <= keep:
            return  # what is known of the last token stays
        if keep:
            sealed = self.store.held.sealed
            self.policy.cropped()
            self.store.crop(keep)
            if self.store.held.sealed != sealed:
                self.policy.reopened()
                self.last = None
        else:
            self.reset()  # the next prompt calibrates anew

    @no_autocast
    def shorten(self, rows: Rows) -> None:
        """Hold ``rows``, which are those that are held without last tokens of some."""
        sealed = self.store.held.sealed
        self.policy.cropped()
        self.store.crop_to(rows)
        if rows.sealed != sealed:
            self.policy.reopened()
            self.last = None

    @no_autocast
    def map_rows(self, index: Tensor, rows: Rows) -> None:
        """Row ``i`` becomes what row ``index[i]`` was, which makes ``rows`` of them."""
        self.store.map_rows(index, rows)
        self.policy.map_rows(index.to(self.store.device))
        if self.last is not None:
            self.last = self.last[index.to(self.last.device)]


def _last(query: Tensor, absorbed: Absorbed | None) -> Tensor:
    """The last one of a prompt's queries ``[batch, Hq, q, Dk]`` as a step gets it, ``[batch, Hq, Dk]``."""
    return query[:, :, -1] if absorbed is None else absorbed.queries(query[:, :, -1:])[:, :, 0]


def _unforeseen(plan: Plan) -> Plan:
    """``plan`` without foresight: nobody expects the queries of drafts."""
    return replace(plan, foresees=False) if plan.foresees else plan
