"""A layer whose model chooses its tokens (DeepSeek Sparse Attention): prompts and steps use its indices.

Other layers (:mod:`.sparse_layer`) choose by a policy, and keep no keys of an indexer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicIndexedLayer

from ..attention.handle import Step
from ..attention.indices import columns_of_blocks, visible
from ..attention.masks import columns_of, is_whole
from ..attention.mla import passes_on
from ..policies.indexed import EVERYTHING, IndexedPolicy, chosen_tokens
from ..types import AttentionParams
from .cache_state import CacheState
from .kinds import LayerKind, Place, layer_kind
from .sparse_layer import SparseLayer

passes_on(__name__)


@layer_kind("indexed")
class IndexedLayer(SparseLayer):
    """One layer of a model with an indexer.

    A forward pass calls :meth:`update` with keys and values, then the attention function with the indices. Before that,
    :meth:`update_indexer` gets the indexer's keys, unless the layer uses the indices of an earlier one.

    Attributes:
        index_at: the column that the next key of each of ``policy.indexers`` belongs to.
        size: columns that an index stands for: of a block, where heads choose blocks (MiniMax M3); else 1.
        asked_first: the indexer is called before :meth:`update` (Qwen4-Exp).
        choice: the indexer's result for the attention of this pass, which does not get it. Columns as ``Step.indices``,
            and the mask that hides some.
    """

    in_columns = True
    policy: IndexedPolicy
    index_at: list[int]
    size = 1
    asked_first = False
    choice: tuple[Tensor, Tensor] | None = None

    def __init__(self, owner: CacheState, index: int, topk: int) -> None:
        super().__init__(owner, index)
        self.policy = IndexedPolicy(owner.config, index, owner.shared.offloaded, topk)

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        text = place.text
        if isinstance(stock, DynamicIndexedLayer):
            layer: Any = cls.at(place.cache, place.index, chosen_tokens(text))
            layer.asked_first = not hasattr(text, "index_topk")
            return layer
        if not hasattr(stock, "update_index"):
            return None
        layer = cls.at(place.cache, place.index, chosen_tokens(text))
        layer.size = text.index_block_size
        return layer

    def why_eager(self, cache: CacheState) -> str | None:
        if self.asked_first and self is cache.sparse_layers[0] and self.indexer_position_ids is None:
            return "the cache does not know the positions of its tokens, which the model asks for"
        return None

    def why_no_rows(self) -> str | None:
        if self.size > 1:
            return (
                "this model's indexer counts its blocks from position 0, which rows that come and go cannot promise: "
                "use generate(), with texts of one length or one by one"
            )
        if self.asked_first:
            return (
                "this model keeps the positions of all tokens of a batch, as many of each row, which rows that come "
                "and go do not have: use generate(), with a padded batch for several texts"
            )
        return None

    def __deepcopy__(self, memo: dict) -> IndexedLayer:
        new: Any = super().__deepcopy__(memo)
        new.asked_first, new.size = self.asked_first, self.size
        return new

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions ``[3, batch, length]`` of what is cached, if the model keeps them here (Qwen4-Exp).

        The model appends those of new tokens and gives all of them back. In a captured step the length is that of the
        memory, and the step's own is moved to its column.
        """
        length, held = self.get_seq_length(), self.policy.positions
        if self.captured is not None or held is None:
            return held
        return held[..., :length] if length else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        if self.captured is None:
            self.policy.keep_positions(positions)
            return
        assert self.policy.positions is not None
        own = positions[..., -1:].contiguous()
        column = (self._span()[0] - 1).long().expand(own.shape)
        for held in (positions, self.policy.positions):
            held.scatter_(2, column, own)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        handles = super().update(key_states, value_states, *args, **kwargs)
        assert self.pending is not None
        self.index_at = [self.pending.past] * self.policy.indexers
        return handles

    def update_indexer(self, keys: Tensor, place: int = 0) -> Tensor:
        """Keys ``[batch, n, D]`` of the next ``n`` columns of this pass, of an indexer: those of all columns so far.

        ``place``: 0 for the layer's own indexer, else that of a :class:`Borrower`.
        """
        if self._by_rows:
            held = self.policy.keep_key(keys, self._span()[0] - 1)
            return held if self.captured is not None else held[:, : self._longest]
        if self.asked_first:
            self.index_at = [self.get_seq_length()]
        first = self.index_at[place]
        self.index_at[place] += keys.shape[1]
        return self.policy.keep_keys(keys, first, place)

    def update_index(self, keys: Tensor) -> Tensor:
        """:meth:`update_indexer` as MiniMax M3 calls it, ``[batch, 1, n, D]``."""
        return self.update_indexer(keys[:, 0])[:, None]

    def step_mask(self) -> Tensor | None:
        """Columns that an indexer may choose, bool ``[batch, 1, n]``; None: the model's own mask says it.

        Only a captured step, and continuous batching, have one.
        """
        if not self._by_rows or self.policy.index_keys is None:
            return None
        n = self._longest if self.captured is None else self.policy.index_keys.shape[1]
        return self._seen(torch.arange(n, device=self.store.device))[:, None]

    @property
    def _by_rows(self) -> bool:
        """The rows say which columns are tokens, and no mask does: of a captured step, of rows that come and go."""
        return self.captured is not None or (self.store is not None and self.store.table_of_rows.managed)

    @property
    def _longest(self) -> int:
        """Columns of the longest of the rows that come and go, with the step's own."""
        return max(self.store.held.lengths) + 1

    def _span(self) -> tuple[Tensor, Tensor]:
        """Columns after each row's last token (the step's own) and of its first token, int32 ``[batch, 1]``.

        Padding is in front. Rows that come and go have none: their columns are their tokens.
        """
        store, captured = self.store, self.captured is not None
        if not store.table_of_rows.managed:
            end, first = store.step_rows.window(EVERYTHING).split(1, dim=1)
            return end, first
        before = store.step_rows.past[:, None] if captured else store.held.on[store.device][:, :1]
        return before + 1, torch.zeros_like(before)

    def captured_span(self) -> tuple[Tensor, Tensor] | None:
        """:meth:`_span` of a captured step; None: it is none."""
        return None if self.captured is None else self._span()

    def _seen(self, columns: Tensor) -> Tensor:
        """Which of the columns ``[batch or 1, n]`` are those of tokens."""
        end, first = self._span()
        return (columns >= first) & (columns < end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        sizes = super().get_mask_sizes(query_length)
        if self.store is not None and self.store.table_of_rows.managed:  # columns are all steps that there ever were
            return query_length, 0  # the mask is not read
        return sizes

    def _attend(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
    ) -> Tensor:
        if self.choice is not None:
            (step.indices, mask), self.choice = self.choice, None
        if step.indices is None:
            raise ValueError(
                "this model's indexer has chosen tokens, but the attention function did not get its indices: leave "
                "past_key_values out"
            )
        if step.indices.ndim == 4:
            return self._attend_to_blocks(step, query, mask, params, dropout)
        if self._by_rows:  # the mask is that of the step that was captured, or says nothing of rows
            chosen = step.indices[:, 0].long()
            self.policy.chosen = (chosen - self._span()[1]).masked_fill(~self._seen(chosen), -1)
            return super()._attend(step, query, None, params, dropout)
        step.shown = mask
        if query.shape[2] == 1:
            self.policy.chosen = visible(step.indices, mask)[:, 0]
        return super()._attend(step, query, self._columns(step, mask, query), params, dropout)

    def _attend_to_blocks(
        self, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
    ) -> Tensor:
        """As :meth:`_attend`, where each KV head has chosen blocks of columns, all of tokens."""
        assert step.indices is not None
        step.size = self.size
        if self._by_rows:
            mask = None  # see there
        elif mask is not None and not is_whole(mask):
            raise ValueError(
                "this model's indexer counts its blocks from the first column, which padding would shift: give texts "
                "of one length, without padding, or one by one"
            )
        if query.shape[2] == 1:
            columns = columns_of_blocks(step.indices[:, :, 0], self.size)
            end = self._span()[0][..., None] if self._by_rows else step.length
            self.policy.chosen = columns.masked_fill(columns >= end, -1)
        return super()._attend(step, query, mask, params, dropout)

    def _columns(self, step: Step, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """The mask of this pass as other models give it: by columns, where it was made here."""
        columns, known = columns_of(mask), self.owner.under_way
        if columns is mask and known is not None and known.begins_with(step.before, query.shape[2]):
            columns = known.mask  # accelerate copies 4-D masks to other devices, and only the first layers see ours
            columns = columns if columns is None else columns.to(query.device)
        return columns


_Dummy: Any = getattr(cache_utils, "DummyLayer", object)  # of later releases than transformers 5.17


@layer_kind("borrower")
class Borrower(LayerKind, _Dummy):
    """A layer that has an indexer, and attends to the latents of another one (Mistral Large 4): it stores nothing.

    Args:
        source: the layer that stores them. It keeps the keys of this indexer, too.
        place: which of those that ``source`` keeps.
    """

    def __init__(self, source: IndexedLayer, place: int) -> None:
        super().__init__()
        self.source, self.place = source, place

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        sources = getattr(place.text, "kv_source_layers", None)  # whose latents a layer attends to
        if sources is None or sources[place.index] == place.index or not isinstance(stock, DynamicIndexedLayer):
            return None
        source = place.before[sources[place.index]]
        nth = 1 + sum(isinstance(other, Borrower) and other.source is source for other in place.before)
        source.policy.indexers = nth + 1
        return cls(source, nth)

    def why_no_rows(self) -> str | None:
        return "rows that come and go are not for layers that attend to what another one has stored"

    def update_indexer(self, keys: Tensor) -> Tensor:
        """See :meth:`IndexedLayer.update_indexer`."""
        return self.source.update_indexer(keys, self.place)

    def step_mask(self) -> None:
        """The model's own mask: no step of such a model is captured, and its rows do not come and go."""
