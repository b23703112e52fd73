"""Rows that come and go: one batch that decodes, prompts beside it that join when they are read.

    rows = cache.rows(max_rows=8, max_length=131072)
    first = rows.prefill(model, ids)  # [1, n]; other rows may decode meanwhile
    row = rows.join(first)
    logits = rows.step(model, tokens)  # tokens [max_rows]: of each row its next one
    rows.leave(row)

A row has its own length, position and blocks; rows that are held or empty get no token. All share the block pools, and
a step is one captured graph, whatever the rows hold (:func:`..optimize`): of the first rows, as many as it takes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .attention.rotary import unfixed
from .cache_name import over
from .config import SparseConfig
from .kv.row_table import RowTable
from .kv.row_views import RowViews
from .kv.rows import Rows
from .layers.sparse_layer import SparseLayer
from .policies.base import Policy
from .policies.row_tokens import RowTokens, expected_working_set
from .telemetry.working_set import STEPS
from .tensors import no_autocast, no_inference_mode, sent


class Batch(Protocol):
    """What rows need of the cache that decodes them, and of caches that are prefilled for it."""

    config: SparseConfig
    layers: list[CacheLayerMixin]
    row_table: RowTable
    changes: int
    model_config: PreTrainedConfig | None
    row_batch: RowBatch | None

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that are ours."""
        ...

    def get_seq_length(self) -> int:
        """Columns cached."""
        ...

    def beside(self) -> Batch:
        """An empty cache over the same block pools."""
        ...

    def joined_rows(self) -> Rows:
        """What all layers hold; from here on they follow the table."""
        ...

    def bind(self, model_config) -> None:
        """Make the layers that the model's configuration asks for."""
        ...

    def make_policy(self, layer_idx: int) -> Policy:
        """The selection policy of one layer."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class Prefilled(NamedTuple):
    """A prompt that has been read.

    Args:
        cache: one row, over the pools of the batch that it was made for.
        logits: ``[1, vocabulary]`` of its last token.
    """

    cache: Batch
    logits: Tensor


class WorkingSets:
    """What :meth:`RowBatch.working_sets` finds: the device is still counting, perhaps."""

    def __init__(self, sizes: Tensor) -> None:
        self._sizes, self._counted = sizes, None
        if sizes.is_cuda:
            self._sizes = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
            self._sizes.copy_(sizes, non_blocking=True)
            self._counted = torch.cuda.Event()
            self._counted.record(torch.cuda.current_stream(sizes.device))

    @property
    def ready(self) -> bool:
        """:meth:`read` does not wait."""
        return self._counted is None or self._counted.query()

    def read(self) -> list[int]:
        """Tokens of each of the ``max_rows`` rows; waits until they are counted."""
        if self._counted is not None:
            self._counted.synchronize()
        return self._sizes.tolist()


class RowBatch:
    """The rows of a cache, made by :meth:`..SparseCache.rows`.

    Attributes:
        cache: what decodes them. Give it to the model as ``past_key_values`` only through :meth:`step`.
        max_rows: rows that there is room for.
        max_length: tokens of a row that there is room for.
        width: rows that a step runs: the first ones, enough for the last active one (:func:`width`).
    """

    def __init__(self, cache: Batch, max_rows: int, max_length: int) -> None:
        for name, value in (("max_rows", max_rows), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if cache.row_batch is not None:
            raise ValueError("this cache has rows already: use them, or reset() it")
        if cache.get_seq_length():
            raise ValueError(f"rows() needs an empty cache, this one holds {cache.get_seq_length()} tokens: reset() it")
        _check_kinds(cache)
        self.cache, self.max_rows, self.max_length = cache, max_rows, max_length
        self._active: list[bool] = [False] * max_rows
        self._there: list[bool] = [False] * max_rows
        self._made: list[Batch] = []  # prefilled, and not joined yet
        self._policy = cache.make_policy(cache.config.dense_layers)
        self._views = RowViews()
        self._tokens: RowTokens | None = None  # copies of chosen tokens on the device, if any are kept
        cache.row_table.open(max_rows, max_length)
        self._valid: tuple[Tensor | None, torch.device] | None = None
        self._model: weakref.ref[nn.Module] | None = None  # the one that was looked at
        self.width = 1

    # ------------------------------------------------------------------ who is there

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that have joined and not left."""
        return tuple(row for row, there in enumerate(self._there) if there)

    @property
    def active(self) -> tuple[int, ...]:
        """Of these, rows that are not held: those that a step decodes."""
        return tuple(row for row, active in enumerate(self._active) if active)

    @property
    def widths(self) -> tuple[int, ...]:
        """All that :attr:`width` can be."""
        return tuple(sorted({width(rows, self.max_rows) for rows in range(1, self.max_rows + 1)}))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each of the ``max_rows`` rows."""
        begun = self.cache.layers and self.cache.sparse_layers[0].store is not None
        return (self.cache.joined_rows() if begun else self.cache.row_table.rows).lengths

    def _row(self, row: int) -> int:
        self._check()
        if not (0 <= row < self.max_rows and self._there[row]):
            raise ValueError(f"there is no row {row}: rows that are there: {list(self.rows)}")
        return row

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
        if self._model is None or self._model() is not model:
            if (why := no_positions(model) or unfixed(model, self.max_length)) is not None:
                raise ValueError(f"rows of {type(model).__name__} cannot come and go: {why}")
            self._model = weakref.ref(model)
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ValueError(f"input_ids must be one row [1, n], got {list(input_ids.shape)}: prefill row by row")
        n = input_ids.shape[1]
        if not 0 < n <= self.max_length:
            raise ValueError(f"a prompt of {n} tokens does not fit rows of 1 to {self.max_length}")
        cache, at = self.cache.beside(), 0
        for part in input_ids.tensor_split([*range(chunk or n, n - 1, chunk or n)], dim=1):
            where = positions(at, at := at + part.shape[1], part.device)
            logits = model(
                input_ids=part, position_ids=where, **over(model, cache), use_cache=True, logits_to_keep=1
            ).logits
        try:
            self._check_layers(cache)
        except ValueError:
            self.drop(cache)
            raise
        self.adopt(cache)
        return Prefilled(cache, logits[:, -1])

    @staticmethod
    def _check_layers(cache: Batch) -> None:
        """A prompt has come to all layers, and all are ours."""
        _check_kinds(cache)
        if cache.model_config is None:
            raise ValueError(
                "rows that come and go need a model that attends by attn_implementation='sparsekv': this one reads the "
                "keys and values itself"
            )
        empty = [layer.index for layer in cache.sparse_layers if layer.store is None]
        if empty:
            total = len(cache.layers)
            raise ValueError(
                f"the model's configuration names {total} layers, and its decoder has stored keys in "
                f"{total - len(empty)}: layers {empty} hold nothing. Set num_hidden_layers to what the decoder has"
            )

    @torch.no_grad()
    def adopt(self, cache: Batch) -> None:
        """A cache that :meth:`..SparseCache.beside` gave was filled with one row, by whatever means: it may join."""
        for layer in cache.sparse_layers:
            layer.end_calibration()
        self._open(cache)
        self._made.append(cache)

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
        cache = self.cache.beside()
        cache.bind(self.cache.model_config)
        for layer, mine, one in zip(cache.sparse_layers, self.cache.sparse_layers, channels):
            layer.open(1, mine)
            if one is not None:
                layer.policy.labels.channels[0].copy_(one)
        cache.row_table.begin(ids)
        try:
            for layer in cache.sparse_layers:
                layer.store.read_sinks()
        except BaseException:
            self.drop(cache)
            raise
        return cache

    def channels(self, row: int) -> tuple[Tensor | None, ...]:
        """Label channels of a row in each layer, int32 ``[H, r]``; None where there are no labels. Copies."""
        self._row(row)
        labels = [layer.policy.labels for layer in self.cache.sparse_layers]
        return tuple(None if one is None else one.channels[row].clone() for one in labels)

    @property
    def calibration_tokens(self) -> int:
        """Tokens that a row's label channels are to be calibrated on.

        0: rows have none, or those of a file, or no row has so many tokens.
        """
        labels = self._policy.labels
        online = labels is not None and labels.fixed is None
        wanted = self.cache.config.calibration_tokens if online else 0
        return wanted if wanted <= self.max_length else 0

    @property
    def alike_tokens(self) -> int | None:
        """Rows may share full blocks if their first so many tokens are the same: label channels are of these.

        0: channels depend on no tokens, or are never asked for. None: on a row's whole prompt, because none is as long
        as ``calibration_tokens``; rows must not share blocks then.
        """
        labels = self._policy.labels
        if labels is None or labels.fixed is not None or self.max_length <= self._policy.whole_tokens:
            return 0
        return self.calibration_tokens or None

    @property
    def whole_tokens(self) -> int:
        """A row of no more tokens attends to all of them, so that its label channels do not matter yet.

        0 over 8-bit codes: labels that are made anew are those of rounded keys, so :meth:`calibrate` is best called as
        early as ``generate()`` calibrates.
        """
        offload = self.cache.offload_config
        return 0 if offload is not None and offload.kv_dtype == "int8" else self._policy.whole_tokens

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
        cache = self._read(prefilled, "calibrate")
        self.cache.joined_rows()
        self.cache.row_table.unshare(row)
        found = [layer.policy.labels for layer in cache.sparse_layers]
        channels = [None if labels is None else labels.channels[0] for labels in found]
        for layer, one in zip(self.cache.sparse_layers, channels):
            if one is not None:
                layer.policy.labels.channels[row].copy_(one)
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
        return table.host[self._row(row), : self.cache.joined_rows().sealed[row]].copy()

    def drop(self, prefilled: Prefilled | Batch) -> None:
        """A prompt, read or half read, is not wanted: its blocks are free, its cache is over."""
        cache = prefilled.cache if isinstance(prefilled, Prefilled) else prefilled
        self._made = [made for made in self._made if made is not cache]
        cache.row_table.clear()
        for layer in cache.sparse_layers:
            layer.broken = "its prompt was dropped"

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
        cache = self._read(prefilled, "join")
        row = self._free()
        room = self._share(room)
        mine, theirs = self.cache.sparse_layers, cache.sparse_layers
        self.cache.joined_rows()
        cache.joined_rows()
        found: list[tuple[Tensor, Tensor, int]] = []
        for layer, other in zip(mine, theirs):
            layer.join_row(row, other)
            layer.add_rows(other, found)
        self._views.copy(found, row)
        if self._tokens is not None:
            self._tokens.begin(row, room)
        self.cache.row_table.take(row, cache.row_table)
        self._made = [made for made in self._made if made is not cache]
        cache.row_table.clear()
        for layer in theirs:
            layer.broken = "its row has joined a batch"
        self._there[row] = self._active[row] = True
        self._changed()
        return row

    def _read(self, prefilled: Prefilled | Batch, wanted: str) -> Batch:
        """The cache of a prompt that has been read and has not joined, for method ``wanted``."""
        cache = prefilled.cache if isinstance(prefilled, Prefilled) else prefilled
        if not any(cache is made for made in self._made):
            raise ValueError(f"{wanted}() takes what prefill() of these rows gave, once: other caches have other pools")
        return cache

    def leave(self, row: int) -> None:
        """A row is over: its blocks are free, and its slots.

        Raises:
            ValueError: it is not there.
        """
        self._row(row)
        self.cache.joined_rows()
        self.cache.row_table.leave(row)
        self._there[row] = self._active[row] = False
        self._changed()
        if self._tokens is not None:
            self._tokens.end(row)

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
        new = self._free()
        self.cache.joined_rows()
        self._copy_row(new, row)
        if self._tokens is not None:
            self._tokens.begin(new, self._share(None), row)
        self.cache.row_table.copy_row(new, row)
        self._there[new] = self._active[new] = True
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
        new = to
        if to is None:
            new = self._there.index(False) if False in self._there[: self._row(row)] else None
            if new is None:
                raise ValueError(f"no row before row {row} is free")
        elif self._row(row) == to or not 0 <= to < self.max_rows or self._there[to]:
            raise ValueError(f"row {row} cannot take place {to}: rows that are there: {list(self.rows)}")
        self.cache.joined_rows()
        self._copy_row(new, row)
        if self._tokens is not None:
            self._tokens.move(new, row)
        self.cache.row_table.move_row(new, row)
        for which in (self._there, self._active):
            which[new], which[row] = which[row], False
        self._changed()
        return new

    def _copy_row(self, row: int, source: int) -> None:
        """What layers keep of row ``source`` beside its blocks, row ``row`` has, too."""
        found: list[tuple[Tensor, Tensor, int]] = []
        for layer in self.cache.sparse_layers:
            layer.store.wait_for_copies()
            layer.add_rows(layer, found)
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
        if self._tokens is not None and rows.sealed != before.sealed:
            self._tokens.forget(row)  # these may become other tokens
        self._changed()  # first: if it stops half-way, layers are found to hold different tokens
        for layer in self.cache.sparse_layers:
            layer.crop_row(row, rows)
        self.cache.row_table.trim([rows])

    def _free(self) -> int:
        free = [row for row, there in enumerate(self._there) if not there]
        if not free:
            raise ValueError(f"all {self.max_rows} rows are taken: leave() one first, or make more of them")
        return free[0]

    def hold(self, row: int) -> None:
        """A row waits: it keeps its blocks and is not decoded. Raises ValueError if it is not there, or held."""
        if not self._active[self._row(row)]:
            raise ValueError(f"row {row} is held already")
        self._active[row] = False
        self._changed()

    def resume(self, row: int) -> None:
        """A held row goes on. Raises ValueError if it is not there, or not held."""
        if self._active[self._row(row)]:
            raise ValueError(f"row {row} is not held")
        self._active[row] = True
        self._changed()

    def _changed(self) -> None:
        self.cache.changes += 1
        self._valid = None
        self.width = width(max(self.active, default=0) + 1, self.max_rows)

    def _open(self, like: Batch) -> None:
        """Make the layers' stores for all rows, unless they are there."""
        if not self.cache.layers:
            self.cache.bind(like.model_config)
        layers = self.cache.sparse_layers
        new = [(layer, other) for layer, other in zip(layers, like.sparse_layers) if layer.store is None]
        for layer, other in new:
            layer.open(self.max_rows, other)
        self._device = layers[0].store.device
        copying = [layer for layer in layers if layer.policy.wanted_copies(self.max_length)]
        if new and copying:
            self._tokens = RowTokens.open([layer.policy for layer in copying], [layer.store for layer in copying])

    # ------------------------------------------------------------------ room for copies of chosen tokens

    @property
    def slots(self) -> int:
        """Slots for copies of chosen tokens, of each layer and KV head, all rows together.

        Known when the first prompt has been read. 0 where nothing is offloaded, or blocks are chosen, not tokens.
        """
        return 0 if self._tokens is None else self._tokens.lanes.slots

    @property
    def free_slots(self) -> int:
        """Of :attr:`slots`, those that no row has."""
        return 0 if self._tokens is None else self._tokens.lanes.free

    def room(self, row: int) -> int:
        """Slots that a row has. Raises ValueError if it is not there."""
        self._row(row)
        return 0 if self._tokens is None else self._tokens.lanes.held[row][1]

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
        room = self._whole(tokens)
        if room != self.room(row):
            if self._tokens is None:
                raise ValueError(
                    f"row {row} was to get room for {tokens} tokens: these rows keep no copies (slots is 0)"
                )
            self._tokens.give(row, room)

    def _whole(self, tokens: int) -> int:
        """``tokens`` rounded up to whole blocks."""
        if tokens < 0:
            raise ValueError(f"room for {tokens} tokens was asked for: give 0 or more")
        size = self.cache.config.block_size
        return -(-tokens // size) * size

    def _share(self, wanted: int | None) -> int:
        """The room of a new row. Raises ValueError if there is not so much."""
        if wanted is None:
            return 0 if self._tokens is None else min(self._tokens.even, self.free_slots)
        room = self._whole(wanted)
        if room > self.free_slots:
            raise ValueError(f"{room} slots were asked for, {self.free_slots} of {self.slots} are free")
        return room

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
        if self._tokens is None:
            return WorkingSets(torch.zeros(self.max_rows, dtype=torch.int32))
        expected = [self.expected_working_set(n) if there else 0 for n, there in zip(self.lengths, self._there)]
        return WorkingSets(self._tokens.working_sets(steps, expected))

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
            if not all(self._active):
                made = sent(self._active, torch.bool, device)[:, None]
                self.cache.row_table.tokens_are(made, self._active)
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
        if not self.active:
            raise ValueError("no row is active: join() or resume() one first")
        lengths = self.cache.joined_rows().lengths
        full = [row for row in self.active if lengths[row] >= self.max_length]
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


def _check_kinds(cache: Batch) -> None:
    """All layers that the cache knows of are ours."""
    if len(cache.sparse_layers) < len(cache.layers):
        raise ValueError(
            "rows that come and go need a model whose layers all attend to their whole past: sliding windows and "
            "linear attention keep no rows of their own"
        )


def positions(start: int, end: int, device: torch.device) -> Tensor:
    """Positions of a row's tokens ``start`` to ``end - 1``, int64 ``[1, n]``.

    Given with every pass: what a model counts without them may begin elsewhere (RoBERTa behind its padding's index).
    """
    return torch.arange(start, end, device=device)[None]


def no_positions(model: nn.Module) -> str | None:
    """Why rows of ``model`` cannot have positions of their own; None: its forward takes ``position_ids``."""
    generating = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
    given = inspect.signature(type(generating).forward).parameters
    if "position_ids" in given or not isinstance(generating, GenerationMixin):
        return None
    return (
        "the model's forward takes no position_ids: it counts positions by itself, the same for all rows of a batch, "
        "which have different lengths. Use generate()"
    )


def width(rows: int, most: int) -> int:
    """How many rows a step runs that is to serve the first ``rows`` of ``most``: 1, 2, 4, 8, 16, 24, 32, ...

    Each is a captured graph of its own, over the same memory.
    """
    few = next((n for n in (1, 2, 4) if n >= rows), -(-rows // 8) * 8)
    return min(few, most)
