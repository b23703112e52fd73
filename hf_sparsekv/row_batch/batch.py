"""The rows of a cache: joining, waiting, forking, leaving, and their steps.

Apart from its parts (places, slots, prompts, shared blocks) because here they change together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..cache_name import over
from ..kv.row_views import RowViews
from ..layers.joining import add_rows, crop_row, end_calibration, join_row
from ..policies.row_tokens import expected_working_set
from ..telemetry.working_set import STEPS
from ..tensors import no_autocast, no_inference_mode, sent
from .model import check_kinds, check_layers, open_layers
from .places import Places, width
from .prompts import Prompts, read_prompt
from .protocol import Batch, Prefilled
from .sharing import begin_with, calibration_of, channels_of, give_channels
from .slots import Slots, WorkingSets


class RowBatch:
    """The rows of a cache, made by :meth:`..SparseCache.rows`.

    Attributes:
        cache: what decodes them. Give it to the model as ``past_key_values`` only through :meth:`step`.
        max_rows: rows that there is room for.
        max_length: tokens of a row that there is room for.
        width: rows that a step runs: the first ones, enough for the last active one (:func:`.width`).
        widths: all that it can be.
        calibration_tokens: tokens that a row's label channels are to be calibrated on. 0: rows have none, or those of a
            file, or no row has so many tokens.
        alike_tokens: rows may share full blocks if their first so many tokens are the same: label channels are of
            these. 0: channels depend on no tokens, or are never asked for. None: on a row's whole prompt, because none
            is as long as ``calibration_tokens``; rows must not share blocks then.
        whole_tokens: a row of no more tokens attends to all of them, so that its label channels do not matter yet. 0
            over 8-bit codes: labels that are made anew are those of rounded keys, so :meth:`calibrate` is best called
            as early as ``generate()`` calibrates.
    """

    def __init__(self, cache: Batch, max_rows: int, max_length: int) -> None:
        for name, value in (("max_rows", max_rows), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if cache.row_batch is not None:
            raise ValueError("this cache has rows already: use them, or reset() it")
        if cache.get_seq_length():
            raise ValueError(f"rows() needs an empty cache, this one holds {cache.get_seq_length()} tokens: reset() it")
        check_kinds(cache)
        self.cache, self.max_rows, self.max_length = cache, max_rows, max_length
        self._policy = cache.make_policy(cache.config.dense_layers)
        self.calibration_tokens, self.alike_tokens, self.whole_tokens = calibration_of(
            cache, self._policy.labels, max_length
        )
        self.widths = tuple(sorted({width(rows, max_rows) for rows in range(1, max_rows + 1)}))
        self._places = Places(max_rows)
        self._prompts = Prompts(max_length)
        self._slots = Slots(cache.config.block_size)
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
        """Of these, rows that are not held: those that a step decodes."""
        return self._places.actives

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each of the ``max_rows`` rows."""
        begun = self.cache.layers and self.cache.sparse_layers[0].store is not None
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

        Rows that are there may decode between two prefills, and between a prefill and its :meth:`join`.

        Not every model can share a batch: :func:`..check_rows` tries it on made-up input, once, beforehand.

        Args:
            chunk: read so many tokens a forward pass, in the last perhaps one more, as one alone is a decode step.
                None: all at once.

        Raises:
            ValueError: it is no single row, or longer than :attr:`max_length`; or rows of this model would change each
                other's positions.
            MemoryError: host memory does not hold it.
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
    def adopt(self, cache: Batch) -> None:
        """A cache that :meth:`..SparseCache.beside` gave was filled with one row, by whatever means: it may join."""
        for layer in cache.sparse_layers:
            end_calibration(layer.store, layer.policy)
        new = open_layers(self.cache, cache, self.max_rows)
        layers = self.cache.sparse_layers
        self._device = layers[0].store.device
        if new:
            self._slots.open(layers, self.max_length)
        self._prompts.add(cache)

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def begin(self, ids: np.ndarray, channels: Sequence[Tensor | None]) -> Batch:
        """A cache of one row beside this batch that begins with full blocks of other rows, which it shares.

        Fill it with what follows, :meth:`adopt` and :meth:`join` it. Some row must have joined before.

        Args:
            ids: int32 ``[n]``, of blocks 0 .. n - 1. They must have a reference: of the table of a row that is there,
                or one that was taken.
            channels: what :meth:`channels` gave for the row that they were made with. They are those that the new
                row has alone if both begin with the same :attr:`alike_tokens` tokens.
        """
        self._check()
        return begin_with(self.cache, ids, channels, self.drop)

    def channels(self, row: int) -> tuple[Tensor | None, ...]:
        """Label channels of a row in each layer, int32 ``[H, r]``; None where there are no labels. Copies."""
        return tuple(None if one is None else one.clone() for one in channels_of(self.cache, self._row(row)))

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def calibrate(self, row: int, prefilled: Prefilled | Batch) -> None:
        """A row gets the label channels of a prompt that has been read, and new labels of its full blocks.

        Prompts shorter than :attr:`calibration_tokens` say little of what a long answer needs: read as many tokens of
        prompt and answer with :meth:`prefill`, as ``generate()`` goes on calibrating with the answer. Blocks that the
        row shares it has for itself behind this.

        Args:
            prefilled: as :meth:`join` takes it. It stays as it is: :meth:`drop` it.

        Raises:
            ValueError: the row is not there, or ``prefilled`` is of other rows, or over. Nothing has changed.
            MemoryError: of the device or the host. Labels and channels may be of different tokens then: the row has
                to :meth:`leave`.
        """
        self._row(row)
        cache = self._prompts.read(prefilled, "calibrate")
        self.cache.joined_rows()
        self.cache.row_table.blocks.unshare(row)
        give_channels(self.cache, row, channels := channels_of(cache, 0))
        if len(blocks := self.blocks(row)):
            same = self.begin(blocks, channels)
            try:
                for layer in same.sparse_layers:
                    layer.store.reindex(layer.policy, own=False)
            finally:
                self.drop(same)

    def blocks(self, row: int) -> np.ndarray:
        """Ids of a row's full blocks, int32 ``[n]``."""
        table = self.cache.row_table
        return table.blocks.host[self._row(row), : self.cache.joined_rows().sealed[row]].copy()

    def drop(self, prefilled: Prefilled | Batch) -> None:
        """A prompt, read or half read, is not wanted: its blocks are free, its cache is over."""
        cache = prefilled.cache if isinstance(prefilled, Prefilled) else prefilled
        self._prompts.end(cache, "its prompt was dropped")

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def join(self, prefilled: Prefilled | Batch, room: int | None = None) -> int:
        """A prompt that has been read takes a row, which decodes from the next step on; its own cache is over.

        Args:
            room: as :meth:`give`; None: an even share of the slots, or what is left of them.

        Returns:
            The row.

        Raises:
            ValueError: all rows are taken, or it was not prefilled for this batch, or has joined already, or there is
                not so much room. Nothing has changed.
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
        self._views.copy(found, row)
        if self._slots.tokens is not None:
            self._slots.tokens.begin(row, room)
        self.cache.row_table.take(row, cache.row_table)
        self._prompts.end(cache, "its row has joined a batch")
        self._places.set(row, True)
        self._changed()
        return row

    def leave(self, row: int) -> None:
        """A row is over: its blocks are free, and its slots.

        Raises:
            ValueError: it is not there.
        """
        self._row(row)
        self.cache.joined_rows()
        self.cache.row_table.leave(row)
        self._places.set(row, False)
        self._changed()
        if self._slots.tokens is not None:
            self._slots.tokens.end(row)

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def fork(self, row: int) -> int:
        """Another row begins as a copy of this one, for a second answer or a beam: full blocks are shared.

        It has as many slots of its own as :meth:`join` gives, and holds what this row does, as far as that fits.

        Returns:
            The new row, active.

        Raises:
            ValueError: the row is not there, or all are taken.
        """
        self._row(row)
        new = self._places.free()
        self.cache.joined_rows()
        self._copy_row(new, row)
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
        """A row takes place ``to``, or the first one that is free before it: blocks, held or not and all.

        Rows that have left leave holes, and a step runs all rows up to the last active one: see :attr:`width`.

        Returns:
            Its number from here on.

        Raises:
            ValueError: the row is not there, or ``to`` is taken or no place, or none before the row is free.
        """
        self._check()
        new = self._places.target(row, to)
        self.cache.joined_rows()
        self._copy_row(new, row)
        if self._slots.tokens is not None:
            self._slots.tokens.move(new, row)
        self.cache.row_table.move_row(new, row)
        self._places.move(new, row)
        self._changed()
        return new

    def _copy_row(self, row: int, source: int) -> None:
        """What layers keep of row ``source`` beside its blocks, row ``row`` has, too."""
        found: list[tuple[Tensor, Tensor, int]] = []
        for layer in self.cache.sparse_layers:
            layer.store.wait_for_copies()
            add_rows(layer, layer, found)
        self._views.copy(found, row, source)

    @torch.no_grad()
    def crop(self, row: int, length: int) -> None:
        """Keep the first ``length`` tokens of a row.

        Raises:
            ValueError: the row is not there, or holds fewer tokens, or would hold none: :meth:`leave` then.
        """
        held = self.lengths[self._row(row)]
        if not 0 < length <= held:
            raise ValueError(f"row {row} holds {held} tokens, of which {length} cannot be kept: keep 1 to {held}")
        if length == held:
            return
        before = self.cache.joined_rows()
        rows = self.cache.row_table.cropped_row(row, length)
        if self._slots.tokens is not None and rows.sealed != before.sealed:
            self._slots.tokens.forget(row)  # these may become other tokens
        self._changed()  # first: if it stops half-way, layers are found to hold different tokens
        for layer in self.cache.sparse_layers:
            crop_row(layer, row, rows)
        self.cache.row_table.trim([rows])

    def hold(self, row: int) -> None:
        """A row waits: it keeps its blocks and is not decoded. Raises ValueError if it is not there, or held."""
        self._places.hold(self._row(row), True)
        self._changed()

    def resume(self, row: int) -> None:
        """A held row goes on. Raises ValueError if it is not there, or not held."""
        self._places.hold(self._row(row), False)
        self._changed()

    def _changed(self) -> None:
        self.cache.changes += 1
        self._valid = None
        self.width = self._places.width

    # ------------------------------------------------------------------ room for copies of chosen tokens

    @property
    def slots(self) -> int:
        """Slots for copies of chosen tokens, of each layer and KV head, all rows together.

        Known when the first prompt has been read. 0 where nothing is offloaded, or blocks are chosen, not tokens.
        """
        return self._slots.total

    @property
    def free_slots(self) -> int:
        """Of :attr:`slots`, those that no row has."""
        return self._slots.free

    def room(self, row: int) -> int:
        """Slots that a row has. Raises ValueError if it is not there."""
        return self._slots.of(self._row(row))

    @no_autocast
    @no_inference_mode
    def give(self, row: int, tokens: int) -> None:
        """A row has room for copies of ``tokens`` tokens from the next step on, in each layer and KV head.

        In whole blocks, so it may be up to ``block_size - 1`` more. Room decides how much of what a row chooses is read
        over the link, never what it chooses. What the row holds stays; where not all of it fits any more, what was
        chosen last. Nothing is captured anew and nothing waits for the device.

        Args:
            tokens: 0: the row has none, and reads what it chooses in host memory.

        Raises:
            ValueError: the row is not there, ``tokens`` is negative, or not so many slots are free. Nothing has
                changed.
        """
        self._slots.give(self._row(row), tokens)

    @no_autocast
    @no_inference_mode
    @torch.no_grad()
    def working_sets(self, steps: int = STEPS) -> WorkingSets:
        """Begin to count what each row needs room for; launches a few kernels, and waits for nothing.

        Of the tokens that a row's last ``steps`` steps have chosen nearly all (31 of 32) fit so much room, the same in
        every layer and KV head. Those that it still holds are counted; where a layer's head holds as many as it has
        room for, it has chosen more, and :meth:`expected_working_set` stands for them. In a row's first steps, and the
        first ones with more room, the result still grows.

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
        """What a row of ``length`` tokens is likely to need room for, before a step of it is known.

        As many selections as 12 steps were measured to amount to (3.2), and no more than the row has tokens.
        """
        return expected_working_set(self._policy, length)

    # ------------------------------------------------------------------ steps

    @no_inference_mode
    def valid(self, device: torch.device) -> Tensor | None:
        """Which rows get a token, bool ``[max_rows, 1]``; None: all. The same tensor until that changes."""
        if self._valid is None or self._valid[1] != device:
            made = None
            if not all(active := self._places.active):
                made = sent(active, torch.bool, device)[:, None]
                self.cache.row_table.tokens_are(made, active)
            self._valid = made, device
        return self._valid[0]

    @torch.no_grad()
    def step(self, model: nn.Module, tokens: Sequence[int] | Tensor) -> Tensor:
        """Decode one token of each active row.

        Args:
            model: what the prompts were read with.
            tokens: ``[max_rows]``, each row's token; what stands for rows that are not active does not matter.

        Returns:
            Logits ``[width, vocabulary]`` of the first rows (:attr:`width`), valid until the next step. Those of rows
            not active mean nothing.

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
        out = model(input_ids=ids, position_ids=positions, **over(model, self.cache), use_cache=True)
        return out.logits[: self.width, -1]
