"""Sliding-window layers at fixed addresses, so that a hybrid model's decode step can be captured.

transformers' own sliding layers concatenate and slice: new tensors every step. :class:`SlidingRing` holds the same
tokens in a ring. Outside a captured step it answers as the stock layer does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..attention.handle import KVHandle, Step
from ..attention.mla import Absorbed, calling_module, may_be_mla, passes_on
from ..kv.inspected import Inspected
from ..kv.step_rows import StepRows
from ..ops.attention.sparse_decode import sparse_decode
from ..ops.storage.append import append
from ..tensors import no_inference_mode, sent, take_rows
from ..types import AttentionParams
from .cache_state import CacheState, Owned, new_rows
from .kinds import LayerKind, Place, layer_kind

passes_on(__name__)


@layer_kind("sliding")
class Sliding(LayerKind, DynamicSlidingWindowLayer):
    """transformers' own layer, until a step is captured over it.

    Attributes:
        chunked: a token sees those of its chunk of ``sliding_window`` tokens, in place of a window.
    """

    chunked = False

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        if type(stock) is not DynamicSlidingWindowLayer:
            return None
        made, kinds = cls.over(stock), getattr(place.text, "layer_types", None) or []
        made.chunked = kinds[place.index : place.index + 1] == ["chunked_attention"]  # the same class there
        return made

    def for_steps(self, cache: CacheState, index: int) -> Any:
        return SlidingRing(self, cache, index) if self.is_initialized and not self.record_past else self

    def why_eager(self, cache: CacheState) -> str | None:
        return "sliding layers keep their past, for tokens that are taken back (activate_past_recording())"

    def why_no_rows(self) -> str | None:
        return None

    def snapshot(self) -> Any:
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        return keys.clone(), values.clone()

    @no_inference_mode
    def restore(self, held: Any, tokens: int) -> None:
        keys, values = held
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.cumulative_length = keys.clone(), values.clone(), tokens

    def for_rows(self, cache: CacheState, index: int, rows: int) -> Any:
        return RowRing(self.for_steps(cache, index), cache, index, rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """As transformers' own, which keeps a window that is a view of what it returns.

        Of 128k tokens of Gemma 3 12B, all layers' would keep 40 GB.
        """
        found = super().update(key_states, value_states, *args, **kwargs)
        if key_states.shape[2] > self.sliding_window and not self.record_past:
            assert self.keys is not None and self.values is not None  # after an update
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return found

    def can_take_back(self, tokens: int) -> bool:
        return not (self.record_past or self.chunked) and tokens < self.sliding_window


class SlidingRing(Owned, Sliding):
    """The last ``sliding_window`` tokens of a layer; column ``c`` at ``c % sliding_window``.

    The next token sees one of them less, so one token can be taken back; more after :meth:`keep_back`. In MLA layers a
    token is a latent with its rotary part.

    Args:
        stock: the filled layer to take over.
        owner: the cache.
        index: the layer's index.
    """

    in_columns = True

    @no_inference_mode
    def __init__(self, stock: Sliding, owner: CacheState, index: int) -> None:
        super().__init__(stock.sliding_window)
        self.owner, self.index, self.chunked = owner, index, stock.chunked
        keys, values = stock.keys, stock.values
        assert keys is not None and values is not None
        self.dtype, self.device, self.is_initialized = keys.dtype, stock.device, True
        self._sliding_window_tensor = stock._sliding_window_tensor
        batch, heads, _, key_dim = keys.shape
        self.key_dim, self.value_dim = key_dim, values.shape[3]
        size = self.sliding_window
        self.ring = keys.new_zeros(batch, heads, size, self.key_dim + self.value_dim)
        self.attended = torch.zeros(batch, heads, dtype=torch.int64, device=keys.device)  # the kernel wants one
        self.no_block_table = torch.empty(batch, 0, dtype=torch.int32, device=keys.device)
        block = 64 if may_be_mla(owner.model_config) else 1  # over latents the kernels' tiles are within one
        self.no_blocks = keys.new_empty(0, heads, block, self.key_dim + self.value_dim)
        self.cumulative_length = self.written = stock.cumulative_length
        self._kept: tuple[int, Tensor] | None = None  # a column, and what is overwritten from it on
        self._write(keys, values, self.cumulative_length - keys.shape[2])
        self.replay, self._refreshed = None, False  # what is made of an MLA module's projection

    def __deepcopy__(self, memo: dict) -> Sliding:
        """A stock layer: it becomes a ring again when a step of the copy is captured."""
        new = Sliding(self.sliding_window)
        new.chunked = self.chunked
        memo[id(self)] = new
        keys, values = self._last
        new.lazy_initialization(keys, values)
        new.keys, new.values = keys, values
        new.cumulative_length = self.cumulative_length
        return new

    # ------------------------------------------------------------------ as the stock layer

    @property
    def _last(self) -> tuple[Tensor, Tensor]:
        """A copy of the last ``sliding_window - 1`` columns (or all), in order: ``[batch, H, n, Dk]`` and ``Dv``."""
        n = min(self.cumulative_length, self.sliding_window - 1)
        at = torch.arange(self.cumulative_length - n, self.cumulative_length, device=self.device) % self.sliding_window
        return self.ring[:, :, at].split((self.key_dim, self.value_dim), dim=-1)

    keys, values = Inspected(lambda layer: layer._last[0]), Inspected(lambda layer: layer._last[1])  # type: ignore

    @no_inference_mode
    def _write(self, k: Tensor, v: Tensor, start: int) -> None:
        n = min(k.shape[2], self.sliding_window)
        skip = k.shape[2] - n
        self.written = start + k.shape[2]
        at = torch.arange(start + skip, start + k.shape[2], device=self.device) % self.sliding_window
        self.ring[:, :, at] = torch.cat((k[:, :, skip:], v[:, :, skip:]), dim=-1).detach()

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        module = calling_module(key_states, value_states) if may_be_mla(self.owner.model_config) else None
        absorbed = None if module is None else Absorbed(module)
        if absorbed is not None and (key_states.shape[2] > 1 or not self._refreshed):
            absorbed.refresh(key_states)
            self._refreshed = True
        if self.answers_by_handle:
            step = Step(self, key_states, value_states, self.cumulative_length, absorbed)  # type: ignore[arg-type]
            return KVHandle(step, "k"), KVHandle(step, "v")
        keys, values = (torch.cat(both, 2) for both in zip(self._last, (key_states, value_states)))
        self._write(key_states, value_states, self.cumulative_length)
        self.cumulative_length += key_states.shape[2]
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        remove = int(tokens_to_remove)
        if remove > 0:
            remove = min(0, remove - self.cumulative_length)
        if remove == 0:
            return
        keep = max(0, self.cumulative_length + remove)
        if self._bring_back(keep):
            return
        if self.written > self.sliding_window and keep < self.written - 1:  # the ring has one column more than is asked
            raise RuntimeError(
                "a sliding-window layer past its window can be cropped by one token only: call "
                "cache.activate_past_recording() before the prompt"
            )
        self.cumulative_length = keep

    @no_inference_mode
    def keep_back(self, tokens: int) -> None:
        """The next ``tokens`` tokens, at most a window, can be taken back by :meth:`crop`, until its next call."""
        first = self.cumulative_length
        at = torch.arange(first, first + tokens, device=self.device) % self.sliding_window
        self._kept = first, self.ring[:, :, at]

    @no_inference_mode
    def _bring_back(self, keep: int) -> bool:
        """Hold the first ``keep`` columns again, if all that was overwritten after them was kept."""
        kept, self._kept = self._kept, None
        if kept is None or not kept[0] <= keep <= self.written <= kept[0] + kept[1].shape[2]:
            return False
        first, held = kept
        at = torch.arange(keep, self.written, device=self.device)
        self.ring[:, :, at % self.sliding_window] = held[:, :, at - first]
        self.cumulative_length = self.written = keep
        return True

    def _map_rows(self, index: Tensor) -> None:
        self._kept = None
        for name in ("ring", "no_block_table", "attended"):
            setattr(self, name, take_rows(getattr(self, name), index))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(torch.arange(self.ring.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(torch.arange(self.ring.shape[0])[indices.cpu()])

    # ------------------------------------------------------------------ in a captured step

    def for_steps(self, cache: CacheState, index: int) -> Any:
        return self

    def why_eager(self, cache: CacheState) -> str | None:
        return None

    def begin_capture(self, replay: Any, rows: int) -> None:
        self.replay = replay

    def end_capture(self) -> None:
        self.replay = None

    def addresses(self, steps: StepRows) -> tuple[int, ...]:
        steps.window(self.sliding_window, self.chunked)
        return (self.ring.data_ptr(),)

    @property
    def answers_by_handle(self) -> bool:
        """:meth:`attend` attends, not the model."""
        return self.replay is not None

    def step_rows(self, n: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first ``n`` rows of a step: columns before it, what is seen, and which rows get a token.

        The first two are as in :class:`..StepRows`; the last is bool ``[n, 1]``, or None: all.
        """
        rows = self.owner.row_table.steps(self.device)
        return rows.columns[:n], rows.window(self.sliding_window, self.chunked)[:n], None

    def attend(self, step: Step, query: Tensor, mask, params: AttentionParams, dropout: float = 0.0) -> Tensor:
        """``query [batch, Hq, 1, Dk]`` over the ring and the new token."""
        n = len(query)
        columns, seen, valid = self.step_rows(n)
        if not step.committed:
            append(step.k, step.v, valid, self.ring[:n], columns, 0)
            step.committed = True
        q = query if step.absorbed is None else step.absorbed.queries(query)
        out = sparse_decode(
            q[:, :, 0],
            self.no_blocks,
            seen,
            self.no_block_table[:n],
            None,
            self.ring[:n],
            granularity="all",
            value_dim=self.value_dim if step.absorbed is None else self.key_dim,
            sinks=0,
            scale=params.scale,
            softcap=params.softcap,
            sink_logits=params.sink_logits,
            attended=self.attended[:n],
        )
        out = out[:, :, None]
        return out if step.absorbed is None else step.absorbed.outputs(out)

    def advance(self) -> None:
        self.cumulative_length += 1
        self.written = self.cumulative_length


class RowRing(SlidingRing):
    """Rings of ``rows`` rows; token ``i`` of a row is at ``i % sliding_window``.

    Args:
        like: a ring of one row that is to join.
        owner, index: the cache, and the layer's place in it.
        rows: how many there is room for.
    """

    @no_inference_mode
    def __init__(self, like: SlidingRing, owner: CacheState, index: int, rows: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, like.sliding_window)
        self.owner, self.index, self.chunked = owner, index, like.chunked
        self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
        self.key_dim, self.value_dim = like.key_dim, like.value_dim
        self.ring = like.ring.new_zeros(rows, *like.ring.shape[1:])
        self.attended = torch.zeros(rows, self.ring.shape[1], dtype=torch.int64, device=self.device)
        self.no_block_table = torch.empty(rows, 0, dtype=torch.int32, device=self.device)
        self.no_blocks = like.no_blocks
        self.replay, self._refreshed = None, False

    def __deepcopy__(self, memo: dict) -> Any:
        raise TypeError("a cache of rows that come and go cannot be copied: copy what rows.prefill() gives")

    def get_seq_length(self) -> int:
        return self.owner.row_table.rows.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a mask that is built and not read: rows have lengths of their own."""
        seen = min(self.get_seq_length(), self.sliding_window - 1)
        return seen + query_length, self.get_seq_length() - seen

    @property
    def answers_by_handle(self) -> bool:
        return True

    def step_rows(self, n: int) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.replay is not None:
            columns, seen, _ = super().step_rows(n)
            return columns, seen, self.replay.valid
        lengths, size = self.owner.row_table.rows.lengths[:n], self.sliding_window
        first = [at - at % size if self.chunked else max(0, at + 1 - size) for at in lengths]
        seen = sent([(at + 1, begin) for at, begin in zip(lengths, first)], torch.int32, self.device)
        return sent(lengths, torch.int32, self.device), seen, new_rows(self.owner, self.device)

    def add_rows(self, other: Any, found: list[tuple[Tensor, Tensor, int]]) -> None:
        if other is not self:
            other = other.for_steps(self.owner, self.index) if other.is_initialized else None
        if other is not None:  # else nothing was read into it
            found.append((self.ring, other.ring, 0))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("rows with sliding-window layers cannot give tokens back")

    def advance(self) -> None:
        """Nothing: the table has the rows."""
