"""One full-attention layer of a sparse cache, as transformers and the attention function see it.

Each kind of pass has a module with a function ``run``: :mod:`.prompt`, :mod:`.step`, :mod:`.drafts`. A step that is
being captured runs :class:`.captured.CapturedLayer` instead of the last two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..attention.gradient import NoGradient
from ..attention.handle import KVHandle, Step
from ..attention.masks import check_4d
from ..attention.mla import Absorbed, absorb, calling_module, may_be_mla, passes_on
from ..kv.inspected import Inspected
from ..kv.read_back import materialise
from ..kv.rows import Rows
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.watch import BlockWatch
from ..tensors import any_autocast, lowered, no_autocast
from ..types import AttentionParams
from . import drafts, prompt
from . import step as steps
from .beginning import begin_pass
from .cache_state import BYPASSED, CacheState, FullLayer, end_pass, is_first, new_rows, warn_once
from .captured import CapturedLayer
from .checks import check_tokens, fits, moves_itself
from .kinds import Place, layer_kind
from .next_step import NextStep
from .sparse_prompt import PromptAudit
from .step import asked, asking, foresee, planned

passes_on(__name__)


@no_autocast
def _inspected(layer: SparseLayer, which: int) -> Tensor | None:
    """All cached keys, or values, on the device."""
    return None if layer.store is None else materialise(layer.store)[which]


@layer_kind("full")
class SparseLayer(FullLayer, CacheLayerMixin):
    """One full-attention layer of a sparse cache: a store, a policy, and the bookkeeping that transformers asks for.

    Attributes:
        owner, index: the cache, and the layer's place in it.
        store: what is cached; None before the first attention.
        policy: selects what a step attends to. ``q_heads``: of the model.
        latent: MLA: rows are latents and their rotary part, see ``attention/mla.py``.
        broken: why the layer is incomplete after an error; None: it is not.
        pending: from :meth:`update` to the attention of the same pass: its tokens.
        next_step: how the next decode step begins.
        captured: while a step is being captured: this layer's part of it.
        audit: what sparse prompts have covered.
    """

    keys, values = Inspected(partial(_inspected, which=0)), Inspected(partial(_inspected, which=1))  # type: ignore
    selects = True
    is_sliding = False
    is_compileable = False  # True would make generate() compile the model unasked
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: CacheState, index: int) -> None:
        self.owner, self.index = owner, index
        self.store: LayerStore = None  # type: ignore[assignment]  # the first attention makes it
        self.policy: Policy = owner.shared.of_layer(index)
        self.latent, self.q_heads = False, 0
        self.broken: str | None = None
        self.pending: Step | None = None
        self.next_step, self.audit = NextStep(), PromptAudit()
        self.captured: CapturedLayer | None = None

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        return cls.at(place.cache, place.index, dense=place.indexed) if type(stock) is DynamicLayer else None

    @classmethod
    def at(cls, cache: CacheState, index: int, *args: Any, dense: bool = False) -> SparseLayer:
        """The cache's layer ``index`` if it is of this class, else a new one.

        ``dense``: it attends to everything. ``args``: of the class's constructor.
        """
        known = cache.layers[index] if index < len(cache.layers) else None
        if isinstance(known, cls):
            return known
        layer = cls(cache, index, *args)
        if dense:
            layer.policy = cache.shared.dense(index)
        if cache.joins and layer.policy.labels is not None:
            # Rows may share blocks, labels included: channels may depend on nothing but the tokens that they share.
            layer.policy.labels.first_only = True
        if cache.watched:
            layer.policy.watch = BlockWatch()
        return layer

    def why_eager(self, cache: CacheState) -> str | None:
        return None

    def can_take_back(self, tokens: int) -> bool:
        return True

    def why_no_rows(self) -> str | None:
        return None

    def __deepcopy__(self, memo: dict) -> SparseLayer:
        new = object.__new__(type(self))
        memo[id(self)] = new
        if self.store is not None:
            self.store.writer.wait()  # a side stream may still be choosing blocks
        # Whoever copies the cache may have named another policy (:mod:`..checking.exact_copy`).
        new.policy = memo[id(self.policy)] if id(self.policy) in memo else self.policy.copy()
        new.index, new.broken, new.latent = self.index, self.broken, self.latent
        new.q_heads, new.pending, new.captured, new.next_step = self.q_heads, None, None, NextStep()
        table = copy.deepcopy(self.owner.row_table, memo)
        copy_streams = copy.deepcopy(self.owner.copy_streams, memo)
        pools = copy.deepcopy(self.owner.device_pools, memo) if new.policy.fetches else None
        new.store = self.store if self.store is None else self.store.copy(table, pools, copy_streams)
        new.owner, new.audit = copy.deepcopy((self.owner, self.audit), memo)
        return new

    def __repr__(self) -> str:
        return f"SparseLayer({self.index}, {self.get_seq_length()} tokens)"

    # ------------------------------------------------------------------ new tokens

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
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
        if autocast := any_autocast():
            dtype = _dtype(self.store)
            key_states, value_states = lowered(key_states, dtype), lowered(value_states, dtype)
        if self.broken or self.pending is not None:
            self._check_complete()
        before, module = check_tokens(self.store, self.index, key_states, value_states), None
        past = 0 if before is None else before.columns
        if self.latent if past else may_be_mla(self.owner.model_config):
            module = calling_module(key_states, value_states)
        if past == 0:
            self.latent = module is not None
        step = self.pending = Step(self, key_states, value_states, past, autocast=autocast, before=before)
        if module is not None:
            absorb(module)
            step.absorbed = Absorbed(module)
            if key_states.shape[2] > 1 and self.captured is None:
                step.absorbed.refresh(key_states)
        return KVHandle(step, "k"), KVHandle(step, "v")

    def _check_complete(self) -> None:
        if self.pending is not None and not self.pending.committed:
            self.broken = f"tokens given to layer {self.index} were never attended to"
        if self.broken:
            raise RuntimeError(
                f"this cache is incomplete after an error ({self.broken}): call reset() and prefill again"
            )

    def begin(self, step: Step, q_heads: int, valid: Tensor | None = None) -> None:
        """Have a store for the layer's first tokens, those of ``step``."""
        if self.store is not None and self.store.length:
            return
        owner = self.owner
        if self.store is not None and not fits(self.store, step.k, step.v, self.latent):
            self.drop()  # before the new one is made: the budget may not hold both
            if owner.device_pools is not None and is_first(owner, self):
                prompt.leave_device_pools(owner)
        store = self.store
        if store is None:
            store = prompt.new_store(self.policy, owner, self.index, step, self.latent, valid)
        else:
            store.held = owner.row_table.start(store.batch, step.k.shape[2])
        self.policy.start(store, q_heads)
        self.store, self.q_heads = store, q_heads

    def attend(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float = 0.0
    ) -> Tensor:
        """Store the step's tokens and attend, ``query [batch, Hq, q, Dk]`` to ``[batch, Hq, q, Dv]``.

        Layers that share their KV call this with the same step; only the first stores.
        """
        self.pending = None  # nothing may keep a prompt's keys and values alive
        try:
            if not step.autocast:
                return self._attend(step, query, mask, params, dropout)
            out = no_autocast(self._attend)(step, lowered(query, step.k.dtype), mask, params, dropout)
        except BaseException as error:
            if step.touched:
                self.broken = f"{type(error).__name__} in layer {self.index}"
            self.owner.under_way = None
            raise
        return out.to(query.dtype)  # what follows may be made for the model's dtype

    def _attend(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
    ) -> Tensor:
        """Have what attends in this way run: a prompt, drafts, a step, or what a captured step is made of."""
        if mask is not None and mask.ndim == 4:
            mask = check_4d(mask, query.shape[2], step.length)
        own, captured = not step.committed, self.captured
        if own:
            self.policy.params = params
            if captured is None:
                owner, k = self.owner, step.k
                known = owner.under_way
                mine = known if known is not None and known.before is step.before and known.mask is mask else None
                if mine is None or mine.columns != k.shape[2] or mine.device not in (None, k.device):
                    mine = begin_pass(owner, self.store, step, mask)
                step.under_way = mine
        columns_only = params.sliding_window is None and (mask is None or mask.ndim == 2)
        if step.past and columns_only and query.shape[2] == 1:
            if dropout:
                raise ValueError("attention dropout is not supported over a sparse cache: call model.eval()")
            run = steps.run if captured is None else captured.run_step
        elif step.past and own and self._attends_as_drafts(step, query, params, dropout):
            run = drafts.run if captured is None else captured.run_drafts
        else:
            return prompt.run(self, step, query, mask, params, dropout)
        with torch.no_grad():
            if step.absorbed is None:
                out = run(self, step, query, params)
            else:
                out = step.absorbed.outputs(run(self, step, step.absorbed.queries(query), params))
        return NoGradient.apply(out, query) if torch.is_grad_enabled() else out

    def _attends_as_drafts(self, step: Step, query: Tensor, params: AttentionParams, dropout: float) -> bool:
        """Each of these tokens attends as a decode step of its own."""
        if dropout or params.sliding_window is not None:
            return False
        if self.captured is not None:
            return self.captured.replay.drafts is not None
        return step.under_way.drafts and drafts.attend_as_steps(self.store, self.policy, query.shape[2])

    @no_autocast
    @torch.no_grad()
    def commit(self, step: Step, query: Tensor | None, valid: Tensor | None) -> None:
        """Store the tokens of a prompt, or of a piece of it.

        Args:
            query: ``[batch, Hq, q, Dk]``; None: keys stand for queries.
            valid: bool ``[batch, q]``, False for padding; None: there is none.
        """
        step.touched = True
        self.begin(step, (step.k if query is None else query).shape[1], valid)
        prompt.store_columns(self.store, self.policy, step, query, valid)
        step.committed = True
        self.owner.passed(self.index)

    def foresee(self, expected: Callable[[], tuple[Tensor, AttentionParams]], stream: Tensor) -> None:
        """The layer before has begun a decode step, and ``expected()`` is what it expects this one to ask.

        Args:
            expected: gives the query ``[batch, Hq, Dk]``, and with what parameters the layer will attend.
            stream: what it reads, ``[batch, 1, hidden]``: kept until that is done.
        """
        store, policy = self.store, self.policy
        query = asking(policy, expected, _dtype(store))
        if self.captured is not None:
            self.captured.foresee(store, policy, query, stream)
        elif store is not None and store.length and not self.broken and stream.shape[0] == store.batch:
            # Else there is no step, or one that update() refuses.
            self.next_step.begin(store, policy)
            foresee(store, policy, asked(store, self.owner), query)

    @no_autocast
    @torch.no_grad()
    def note_added(self, before: Tensor, after: Tensor, mask: Tensor | None = None) -> None:
        """The layer before has ended: what it added to the stream for each row's last token.

        Steps that choose for their own query, or attend to everything, do not read it. The first step that does begins
        without it (:class:`..policies.ahead.foresight.Foresight`).

        Args:
            before, after: its input and output ``[batch, n, hidden]``, or their last columns.
            mask: ``[batch, columns]``, 0 for padding; of several tokens, to leave out rows that end with padding.
        """
        store, policy = self.store, self.policy
        before, after = before.detach(), after.detach()
        if self.captured is not None:
            self.captured.note_added(policy, before, after, self.owner.row_table.managed)
            return
        past, new = 0 if store is None else store.length, after.shape[1]
        if self.broken or (past and after.shape[0] != store.batch):
            return  # update() refuses it
        if new == 1 and not (past and planned(store, policy, asked(store, self.owner)).foresees):
            return
        assert policy.foresight is not None
        waits = new_rows(self.owner, after.device)
        policy.foresight.note_added(before[:, -1:], after[:, -1:], past + new, None if new == 1 else mask, waits)

    @torch.no_grad()
    def fill(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None, absorbed=None) -> None:
        """Cache tokens whose attention has been computed elsewhere: benchmarks, imports from other caches.

        Args:
            query: ``[batch, Hq, q, Dk]``; the last ones suffice if channels come from a file. Over latents (``key``:
                latents, ``value``: their rotary part) absorbed ones, as wide as both, or the model's with ``absorbed``.
            key, value: ``[batch, H, q, D]``. ``valid``: bool ``[batch, q]``, False for padding.
            absorbed: the (refreshed) :class:`..Absorbed` of an MLA module: absorbs as many queries as in a prefill.
        """
        query, key, value = (lowered(x, _dtype(self.store)) for x in (query, key, value))
        self._check_complete()
        if check_tokens(self.store, self.index, key, value) is None:
            self.latent = absorbed is not None or query.shape[3] == key.shape[3] + value.shape[3]
        self.commit(Step(self, key, value, self.get_seq_length(), absorbed), query, valid)
        self.next_step.after_prompt(self.store, self.policy, query, absorbed)
        end_pass(self.owner, self.index)

    @no_autocast
    def materialise(self, step: Step, which: str) -> Tensor:
        """All keys or values for something other than the sparsekv attention function, which applies its own mask."""
        if not step.committed:
            warn_once(self.owner, BYPASSED)
            self.pending = None
            self.commit(step, None, None)  # no query yet: calibrate on the keys alone until one comes
            end_pass(self.owner, self.index)
            self.store.counters.materialised += 1
        key, value = (step.k, step.v) if step.past == 0 else materialise(self.store)
        return (key if which == "k" else value).contiguous()  # as concatenation would give: some models view it

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

    offload = prefetch = moves_itself

    def drop(self) -> None:
        """Have no store, and no memory of one; nothing is cached."""
        if self.store is not None:
            self.store.writer.wait()  # memory in use by copy streams must not be reused before they end
            self.store = self.next_step.query = None  # type: ignore[assignment]

    def reset(self) -> None:
        self.empty()
        self.broken = None

    def empty(self) -> None:
        """Forget all tokens, and what a step that was broken off has left."""
        self.pending = self.captured = self.next_step.query = None
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
        if not keep:
            self.reset()  # the next prompt calibrates again
        elif keep < self.store.length:  # else what is known of the last token stays
            self.shorten(self.store.table_of_rows.cropped(self.store.held, keep))

    @no_autocast
    def shorten(self, rows: Rows) -> None:
        """Hold ``rows``, which are those that are held without last tokens of some."""
        sealed = self.store.held.sealed
        self.policy.cropped()
        self.store.crop_to(rows)
        if rows.sealed != sealed:
            self.policy.reopened()
            self.next_step.query = None

    @no_autocast
    def map_rows(self, index: Tensor, rows: Rows) -> None:
        """Row ``i`` becomes what row ``index[i]`` was, which makes ``rows`` of them."""
        self.store.map_rows(index, rows)
        self.policy.map_rows(index.to(self.store.device))
        self.next_step.map_rows(index)


def _dtype(store: LayerStore | None) -> torch.dtype | None:
    """The dtype of cached tokens; None before the first."""
    return store.dtype if store is not None and store.length else None
