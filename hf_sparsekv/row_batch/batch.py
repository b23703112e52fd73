"""The rows of a cache: joining, waiting, forking, leaving, and their steps.

Its parts (places, slots, prompts, shared blocks) change together here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from ..cache_name import over
from ..kv.row_views import RowViews
from ..layers.cache_state import CacheState
from ..layers.joining import add_rows, crop_row, end_calibration, join_row
from ..policies.indexed import IndexedPolicy
from ..policies.label_index import RowChannels
from ..policies.row_tokens import expected_working_set
from ..telemetry.working_set import STEPS
from ..tensors import no_autocast, no_inference_mode, sent
from .model import check_layers, check_new, open_layers
from .others import OtherLayers, Snapshot
from .places import Places, width
from .prefilled import Prefilled
from .prompts import Prompts, read_prompt
from .sharing import Channels, begin_with, calibration_of, channels_of, check_sharing, give_channels, reindex_blocks
from .slots import Slots, WorkingSets


class RowBatch:
    """Continuous batching over one cache, made by :meth:`..SparseCache.rows`.

    Attributes:
        cache: the cache that decodes the rows. Give it to the model as ``past_key_values`` only through :meth:`step`.
        max_rows: most rows at a time.
        max_length: most tokens of a row.
        width: rows that a step runs: the first ones, up to the last active one, rounded up (:func:`.width`).
        widths: all values that ``width`` can have.
        calibration_tokens: tokens that a row's label channels should be calibrated on. 0: rows have no channels, take
            them from a file, or never have so many tokens.
        alike_tokens: rows may share full blocks if their first ``alike_tokens`` tokens are the same, because these
            determine the label channels. 0: channels depend on no tokens, or are never used. None: rows must not share
            blocks: channels depend on the whole prompt (``calibration_tokens`` are too many), or there is an indexer.
        whole_tokens: a row of at most so many tokens attends to all of them, so its label channels do not matter yet.
            0 for 8-bit KV: labels that are recomputed come from rounded keys, so it is best to call :meth:`calibrate`
            as early as ``generate()`` calibrates.
    """

    def __init__(self, cache: CacheState, max_rows: int, max_length: int) -> None:
        check_new(cache, max_rows, max_length)
        self.cache, self.max_rows, self.max_length = cache, max_rows, max_length
        self._policy = cache.shared.of_layer(cache.config.dense_layers)
        self.calibration_tokens, self.alike_tokens, self.whole_tokens = calibration_of(
            cache, self._policy.labels, max_length
        )
        self.widths = tuple(sorted({width(rows, max_rows) for rows in range(1, max_rows + 1)}))
        self._places = Places(max_rows)
        self._prompts = Prompts(max_length)
        self._slots = Slots(cache.config.block_size)
        self._others = OtherLayers(cache)
        self._views = RowViews()
        cache.row_table.open(max_rows, max_length)
        self._valid: tuple[Tensor | None, torch.device] | None = None
        self.width = 1

    # ------------------------------------------------------------------ who is there

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that have joined and not left."""
        return self._places.rows

    @property
    def active(self) -> tuple[int, ...]:
        """Rows that a step decodes: those in :attr:`rows` that are not held."""
        return self._places.actives

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each of the ``max_rows`` rows."""
        begun = any(getattr(layer, "store", None) is not None for layer in self.cache.layers)
        return (self.cache.joined_rows() if begun else self.cache.row_table.rows).lengths

    def _row(self, row: int) -> int:
        self._check()
        return self._places.check(row)

    def _check(self) -> None:
        if self.cache.row_batch is not self:
            raise RuntimeError("the cache of these rows was reset: make new ones with cache.rows()")

    # ------------------------------------------------------------------ coming and going

    @torch.no_grad()
    def prefill(self, model: nn.Module, input_ids: Tensor, chunk: int | None = None) -> Prefilled:
        """Read a prompt, ``input_ids [1, n]``, into a cache of its own over the same pools.

        Other rows may decode between two prefills, and between a prefill and its :meth:`join`.

        Not every model supports continuous batching: :func:`..check_rows` tries it once, on made-up input.

        Args:
            chunk: tokens that a forward pass reads. The last pass may read one more, because a single token would be a
                decode step. None: all in one pass.

        Raises:
            ValueError: the input is not a single row, or is longer than :attr:`max_length`; or rows of this model would
                change each other's positions.
            MemoryError: host memory cannot hold the prompt.
        """
        self._check()
        self._prompts.check(model, input_ids)
        cache = self.cache.beside()
        logits = read_prompt(model, cache, input_ids, chunk)
        try:
            check_layers(cache)
        except ValueError:
            self.drop(cache)
            raise
        self.adopt(cache)
        return Prefilled(cache, logits[:, -1])

    @torch.no_grad()
    def adopt(self, cache: CacheState) -> None:
        """Let a cache from :meth:`..SparseCache.beside` join, after it was filled with one row in any way."""
        for layer in cache.sparse_layers:
            end_calibration(layer.store, layer.policy)
        new = open_layers(self.cache, cache, self.max_rows)
        self._device = (layers := self.cache.sparse_layers)[0].store.device
        if new:
            self._others.open(cache, self.max_rows)
            if isinstance(policy := layers[0].policy, IndexedPolicy):  # there are no labels
                self._policy, self.calibration_tokens, self.alike_tokens, self.whole_tokens = policy, 0, None, 0
            self._slots.open(layers, self.max_length)
        self._prompts.add(cache)

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def begin(self, ids: np.ndarray, channels: Channels, held: Snapshot | None = None) -> CacheState:
        """Create a cache of one row whose prefix is full blocks of other rows, which it shares.

        Prefill the rest of the prompt into it, then :meth:`adopt` and :meth:`join` it. At least one row must have
        joined before.

        Args:
            ids: ids of blocks 0 .. n - 1, int32 ``[n]``. Each needs a reference: from the block table of a row in the
                batch, or one that the caller took.
            channels: the result of :meth:`channels` for the row that wrote the blocks. The new row would get the same
                channels alone if both begin with the same :attr:`alike_tokens` tokens.
            held: the result of :meth:`snapshot` after these blocks, where :attr:`keeps_more`.
        """
        self._check()
        check_sharing(self._policy, self.keeps_more and held is None)
        cache = begin_with(self.cache, ids, channels, self.drop)
        if held is not None:
            self._others.restore(cache, held, len(ids) * cache.config.block_size)
        return cache

    @property
    def keeps_more(self) -> bool:
        """Layers keep a window or a state: rows share blocks only up to where a :meth:`snapshot` was made."""
        return bool(self._others)

    @property
    def more_bytes(self) -> int:
        """Bytes of the windows and states of all rows."""
        return self._others.nbytes

    @no_inference_mode
    def snapshot(self, cache: CacheState) -> Snapshot:
        """Copies of the windows and states of a prompt that is being read, between two passes."""
        return self._others.snapshot(cache)

    def channels(self, row: int) -> tuple[RowChannels | None, ...]:
        """Copies of a row's label channels in each layer; None where there are no labels."""
        return tuple(None if one is None else one.clone() for one in channels_of(self.cache, self._row(row)))

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def calibrate(self, row: int, prefilled: Prefilled | CacheState) -> None:
        """Give a row the label channels of a prefilled prompt, and recompute the labels of its full blocks.

        Channels of a prompt shorter than :attr:`calibration_tokens` suit a long answer badly. ``generate()`` goes on
        calibrating with the answer. To do the same, :meth:`prefill` as many tokens of prompt and answer. Afterwards the
        row shares no blocks.

        Args:
            prefilled: a prefilled prompt, as for :meth:`join`. It does not change: :meth:`drop` it afterwards.

        Raises:
            ValueError: there is no such row, or ``prefilled`` belongs to another batch or has ended. Nothing has
                changed.
            MemoryError: of the device or the host. Labels and channels may belong to different tokens then: the row
                has to :meth:`leave`.
        """
        self._row(row)
        cache = self._prompts.read(prefilled, "calibrate")
        self.cache.joined_rows()
        self.cache.row_table.blocks.unshare(row)
        give_channels(self.cache, row, channels := channels_of(cache, 0))
        reindex_blocks(self.cache, self.blocks(row), channels, self.drop)

    def blocks(self, row: int) -> np.ndarray:
        """Ids of a row's full blocks, int32 ``[n]``."""
        table = self.cache.row_table
        return table.blocks.host[self._row(row), : self.cache.joined_rows().sealed[row]].copy()

    def drop(self, prefilled: Prefilled | CacheState) -> None:
        """Drop a prompt, read or partly read: free its blocks and end its cache."""
        cache = prefilled.cache if isinstance(prefilled, Prefilled) else prefilled
        self._prompts.end(cache, "its prompt was dropped")

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def join(self, prefilled: Prefilled | CacheState, room: int | None = None) -> int:
        """Move a prefilled prompt into a free row, which decodes from the next step on. Its own cache ends.

        Args:
            room: tokens of room for copies, as in :meth:`give`. None: an even share of the slots, or all that are
                free if these are fewer.

        Returns:
            The row.

        Raises:
            ValueError: all rows are taken, the prompt was not prefilled for this batch, it has joined already, or there
                is not so much room. Nothing has changed.
        """
        self._check()
        cache = self._prompts.read(prefilled, "join")
        row = self._places.free()
        room = self._slots.share(room)
        mine, theirs = self.cache.sparse_layers, cache.sparse_layers
        self.cache.joined_rows()
        cache.joined_rows()
        found: list[tuple[Tensor, Tensor, int]] = []
        for layer, other in zip(mine, theirs):
            join_row(layer, row, other)
            add_rows(layer, other, found)
        self._others.add_rows(cache, found)
        self._views.copy(found, row)
        if self._slots.tokens is not None:
            self._slots.tokens.begin(row, room)
        self.cache.row_table.take(row, cache.row_table)
        self._prompts.end(cache, "its row has joined a batch")
        self._places.set(row, True)
        self._changed()
        return row

    def leave(self, row: int) -> None:
        """End a row: free its blocks and its slots.

        Raises:
            ValueError: there is no such row.
        """
        self._row(row)
        self.cache.joined_rows()
        self.cache.row_table.leave(row)
        self._places.set(row, False)
        self._others.leave(row)
        self._changed()
        if self._slots.tokens is not None:
            self._slots.tokens.end(row)

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def fork(self, row: int) -> int:
        """Start a new row as a copy of this one, for a second answer or a beam. They share full blocks.

        The new row has as many slots as :meth:`join` would give, with the same copies as this row as far as they fit.

        Returns:
            The new row, which is active.

        Raises:
            ValueError: there is no such row, or all rows are taken.
        """
        self._row(row)
        new = self._places.free()
        self.cache.joined_rows()
        self._copy_row(new, row)
        self._others.resume(row, to=new)
        if self._slots.tokens is not None:
            self._slots.tokens.begin(new, self._slots.share(None), row)
        self.cache.row_table.copy_row(new, row)
        self._places.set(new, True)
        self._changed()
        return new

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def move(self, row: int, to: int | None = None) -> int:
        """Move a row with all its state to place ``to``, or to the first free place before it.

        Rows that leave make gaps, and a step runs all rows up to the last active one: see :attr:`width`.

        Returns:
            The row's new number.

        Raises:
            ValueError: there is no such row, ``to`` is taken or out of range, or no place before the row is free.
        """
        self._check()
        new = self._places.target(row, to)
        self.cache.joined_rows()
        self._copy_row(new, row)
        if self._slots.tokens is not None:
            self._slots.tokens.move(new, row)
        self.cache.row_table.move_row(new, row)
        self._places.move(new, row)
        self._others.move(new, row)
        self._changed()
        return new

    def _copy_row(self, row: int, source: int) -> None:
        """Copy to row ``row`` what layers keep of row ``source`` besides its blocks."""
        found: list[tuple[Tensor, Tensor, int]] = []
        for layer in self.cache.sparse_layers:
            layer.store.writer.wait()
            add_rows(layer, layer, found)
        self._others.add_rows(self.cache, found)
        self._views.copy(found, row, source)

    @torch.no_grad()
    def crop(self, row: int, length: int) -> None:
        """Keep the first ``length`` tokens of a row.

        Raises:
            ValueError: there is no such row, it holds fewer tokens, it would hold none (:meth:`leave` then), or the
                model has sliding windows or states.
        """
        held = self.lengths[self._row(row)]
        if not 0 < length <= held:
            raise ValueError(f"row {row} holds {held} tokens, so {length} cannot be kept: keep 1 to {held}")
        if length == held:
            return
        if self._others:
            raise ValueError("rows of this model cannot give tokens back: some of its layers keep a window or a state")
        before = self.cache.joined_rows()
        rows = self.cache.row_table.cropped_row(row, length)
        if self._slots.tokens is not None and rows.sealed != before.sealed:
            self._slots.tokens.forget(row)  # their blocks may be overwritten with other tokens
        self._changed()  # first: after an error half-way, the check of the layers' lengths fails
        for layer in self.cache.sparse_layers:
            crop_row(layer, row, rows)
        self.cache.row_table.trim([rows])

    def hold(self, row: int) -> None:
        """Pause a row: it keeps its blocks and is not decoded. Raises ValueError if it does not exist or is held."""
        self._places.hold(self._row(row), True)
        self._others.hold(row)
        self._changed()

    def resume(self, row: int) -> None:
        """Continue a held row. Raises ValueError if it does not exist or is not held."""
        self._places.hold(self._row(row), False)
        self._others.resume(row)
        self._changed()

    def _changed(self) -> None:
        self.cache.changes += 1
        self._valid = None
        self.width = self._places.width

    # ------------------------------------------------------------------ room for copies of chosen tokens

    @property
    def slots(self) -> int:
        """Slots for copies of selected tokens in each layer and KV head, of all rows together.

        Known after the first prefill. 0 where nothing is offloaded, or the method selects blocks instead of tokens.
        """
        return self._slots.total

    @property
    def free_slots(self) -> int:
        """Slots that belong to no row."""
        return self._slots.free

    def room(self, row: int) -> int:
        """Slots of a row. Raises ValueError if there is no such row."""
        return self._slots.of(self._row(row))

    @no_autocast
    @no_inference_mode
    def give(self, row: int, tokens: int) -> None:
        """Give a row room for copies of ``tokens`` tokens, in each layer and KV head, from the next step on.

        The room is rounded up to whole blocks. It decides how much of the row's selection is read over the link, never
        what is selected. Copies stay on the device; if not all fit any more, the most recently selected stay. No graph
        is captured again, and the call does not wait for the device.

        Args:
            tokens: tokens of room. 0: the row keeps no copies and reads its selection from host memory.

        Raises:
            ValueError: there is no such row, ``tokens`` is negative, or not so many slots are free. Nothing has
                changed.
        """
        self._slots.give(self._row(row), tokens)

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def working_sets(self, steps: int = STEPS) -> WorkingSets:
        """Start counting the working set of each row. It launches a few kernels and does not wait for them.

        A working set is room, equal in all layers and KV heads. It holds nearly all (31 of 32) tokens which the row's
        last ``steps`` steps selected. Only tokens with a copy on the device are counted. A head whose room is full has
        selected more tokens, so :meth:`expected_working_set` replaces its count if it is larger. The result still grows
        in a row's first steps, and in the first steps with more room.

        Raises:
            ValueError: ``steps`` is not positive.
        """
        self._check()
        if steps < 1:
            raise ValueError(f"steps must be positive, got {steps}")
        if (copies := self._slots.tokens) is None:
            return WorkingSets(torch.zeros(self.max_rows, dtype=torch.int32))
        expected = [self.expected_working_set(n) if there else 0 for n, there in zip(self.lengths, self._places.there)]
        return WorkingSets(copies.working_sets(steps, expected))

    def expected_working_set(self, length: int) -> int:
        """Estimate the working set of a row of ``length`` tokens before its first step.

        It is 3.2 selections, as measured over 12 steps, and at most the row's tokens.
        """
        return expected_working_set(self._policy, length)

    # ------------------------------------------------------------------ steps

    @no_inference_mode
    def valid(self, device: torch.device) -> Tensor | None:
        """Mask of the rows that get a token, bool ``[max_rows, 1]``; None: all. The same tensor until it changes."""
        if self._valid is None or self._valid[1] != device:
            made = None
            if not all(active := self._places.active):
                made = sent(active, torch.bool, device)[:, None]
                self.cache.row_table.tokens_are(made, active)
            self._valid = made, device
        return self._valid[0]

    @torch.no_grad()
    def step(self, model: nn.Module, tokens: Sequence[int] | Tensor, exactly: bool = False) -> Tensor:
        """Decode one token of each active row.

        Args:
            model: the model that read the prompts.
            tokens: each row's token, ``[max_rows]``. Values for inactive rows are ignored.
            exactly: the step attends to everything.

        Returns:
            Logits ``[width, vocabulary]`` of the first rows (:attr:`width`), valid until the next step. Logits of
            inactive rows are meaningless.

        Raises:
            ValueError: no row is active, one has reached :attr:`max_length`, or there are not as many tokens as rows.
        """
        self._check()
        if not (active := self.active):
            raise ValueError("no row is active: join() or resume() one first")
        lengths = self.cache.joined_rows().lengths
        full = [row for row in active if lengths[row] >= self.max_length]
        if full:
            raise ValueError(f"rows {full} hold max_length={self.max_length} tokens: leave() or hold() them first")
        device = self._device
        ids = tokens if isinstance(tokens, Tensor) else sent(tokens, torch.long, device)
        ids = ids.to(device).view(-1, 1)
        if len(ids) != self.max_rows:
            raise ValueError(f"{len(ids)} tokens were given for {self.max_rows} rows: give one for each, active or not")
        positions = sent(lengths, torch.long, device)[:, None]
        with self.cache.row_table.exactness.exactly() if exactly else nullcontext():
            out = model(input_ids=ids, position_ids=positions, **over(model, self.cache), use_cache=True)
        return out.logits[: self.width, -1]
