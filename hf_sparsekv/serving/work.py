"""The loop's operations on the model, its rows and the tokens of the next step: all work on the GPU.

The loop decides, and this carries it out. So a subclass can serve a tensor parallel model, whose other ranks repeat the
same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv_config.serving import ServingConfig

from ..attention.parts import make_plans
from ..cache_name import over
from ..checking.clock import Clock
from ..cuda_graph.optimize import unnoticed
from ..cuda_graph.prompts import paused_passes
from ..layers.cache_state import CacheState
from ..layers.sparse_prompt import least_new
from ..ranks import ranks_of
from ..row_batch import RowBatch, positions
from ..row_batch.verifying import verify
from ..telemetry.prompt_stats import PromptStats, audit_tables, prompt_stats
from ..tensors import sent
from .prefill import Pace, Reading, Segments
from .prefix import Channels


class Work:
    """Operations on one model and its rows.

    Args:
        model: in ``eval()`` mode, prepared for sparse decoding.
        rows: the rows of its cache.
        serving: limits and scheduling.

    Attributes:
        tokens: each row's next token, int64 ``[max_rows]``.
        reading: the prefill in progress, if there is one.
        alone: whether an error in a prefill ends only that request.
        keeps_snapshots: windows and states of prompts are kept for others that begin alike.
    """

    alone = keeps_snapshots = True

    @staticmethod
    def check(model: torch.nn.Module) -> None:
        """Raise ValueError for a model of several ranks."""
        if (ranks := ranks_of(model)) is not None:
            name = "TensorParallelEngine" if ranks.rank == 0 else "follow"
            raise ValueError(
                f"this is rank {ranks.rank} of a tensor parallel model: call hf_sparsekv_serve.ranks.{name}() here, "
                "with the same arguments"
            )

    def __init__(self, model: torch.nn.Module, rows: RowBatch, serving: ServingConfig) -> None:
        self.model, self.rows, self.serving = model, rows, serving
        self.device: torch.device = model.device  # type: ignore[assignment]
        self.tokens = torch.zeros(rows.max_rows, dtype=torch.long, device=self.device)
        self.clock = Clock(self.device)
        text = model.config.get_text_config(decoder=True)
        config = rows.cache.config
        sparse = () if config.prefill is None else (config.prefill_below, least_new(config))
        self.pace = Pace(text, *sparse)
        layers = decoder_layers(model, text.num_hidden_layers)
        self.segments = Segments(layers, partial(unnoticed, model))  # its hooks do nothing in captured steps
        self.reading: Reading | None = None
        self._moved = 0  # bytes over the link of prefills that have ended
        self._read_there: list[Tensor] = []  # further bytes of these, in counters on the device
        try:
            self._make_plans()
        except BaseException:
            self.segments.close()
            raise

    def _make_plans(self) -> None:
        """Start cuDNN and make its plans in the prefill thread, or the first prompts would wait for them."""
        layer = self.rows.cache.sparse_layers[0]
        store = layer.store
        if store is None or store.latent or not self.serving.layer_segments:
            return
        shapes = (layer.q_heads, store.split), (store.heads, store.split), (store.heads, store.width - store.split)
        like = [torch.empty(1, n, 1, dim, dtype=store.dtype, device=self.device) for n, dim in shapes]
        longest = min(self.serving.chunk, self.rows.max_length)

        @torch.no_grad()
        def make() -> None:
            make_plans(like[0], like[1], like[2], longest)

        self.segments.open(make, self.device)
        self.segments.run(1 << 30)

    # ------------------------------------------------------------------ a prompt

    def begin(
        self,
        ids: Sequence[int],
        blocks: np.ndarray,
        channels: Channels | None,
        told: int | None = None,
        held: Any = None,
    ) -> None:
        """Begin the prefill of a prompt of tokens ``ids``.

        Args:
            blocks: int32 ``[n]``, ids of full blocks with its cached prefix, which is not read again.
            channels: the label channels of these blocks, from :meth:`channels`; None if there are none.
            told: likeliest tokens whose log probabilities are told beside those of the prompt's. None: of none.
            held: windows and states after these blocks, where the model has such layers.
        """
        cache = self.rows.begin(blocks, channels, held) if len(blocks) else self.rows.cache.beside()
        try:
            self.reading = Reading(
                self.model,
                cache,
                sent([ids], torch.long, self.device),
                self.segments,
                self.pace,
                self.clock,
                self.serving.chunk,
                self.serving.layer_segments,
                told,
                self._border(len(ids), len(blocks)),
                self.rows.snapshot,
            )
        except BaseException:
            self.rows.drop(cache)
            raise

    def _border(self, tokens: int, shared: int) -> int:
        """After how many tokens of a prompt windows and states are kept for others: full blocks of it; 0: never."""
        rows = self.rows
        kept = rows.keeps_more and self.keeps_snapshots and self.serving.prefix_cache
        if not kept or rows.alike_tokens is None:
            return 0
        full = (tokens - rows.cache.row_table.recent) // (size := rows.cache.config.block_size)
        return full * size if full > shared else 0

    def read(self, n: int) -> bool:
        """Continue the prefill by ``n`` layers, or tokens (:meth:`.Reading.share`). True: it is complete."""
        return self.reading.read(n)

    @torch.no_grad()
    def overtake(
        self, ids: Sequence[int], blocks: np.ndarray, channels: Channels | None, held: Any = None
    ) -> tuple[int, Tensor]:
        """Read a prompt in one pass, even while another prefill is paused, and let it :meth:`join`.

        Args:
            ids, blocks, channels, held: as in :meth:`begin`.

        Returns:
            Its row, and the logits ``[1, vocabulary]`` of its last token.
        """
        cache = self.rows.begin(blocks, channels, held) if len(blocks) else self.rows.cache.beside()
        try:
            past, began = cache.get_seq_length(), self.clock.mark()
            new = sent([ids[past:]], torch.long, self.device)
            where = positions(past, len(ids), self.device)
            with paused_passes():  # rows wait: no time for a capture
                out = self.model(
                    input_ids=new, position_ids=where, **over(self.model, cache), use_cache=True, logits_to_keep=1
                )
            self.pace.note(self.clock, len(ids) - past, past, self.pace.layers, began, self.clock.mark(), learns=False)
            self.rows.adopt(cache)
            row = self.rows.join(cache, room=0)
        except BaseException:
            self._count_link(cache)
            self.rows.drop(cache)
            raise
        self._count_link(cache)
        return row, out.logits[:, -1]

    def give_up(self) -> None:
        """Drop the prompt in prefill."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()
            self._count_link(reading.cache)
            self.rows.drop(reading.cache)

    def join(self) -> int:
        """Move the prefilled prompt into a row, without room for copies. Returns the row."""
        cache = self.reading.cache
        self.rows.adopt(cache)
        row = self.rows.join(cache, room=0)
        self._count_link(cache)
        self.reading = None
        return row

    # ------------------------------------------------------------------ the link

    def _count_link(self, cache: CacheState) -> None:
        """Count the bytes that an ended prompt's cache has moved. It does not wait for the device."""
        for layer in cache.sparse_layers:
            if layer.store is None or layer.store.pool.host is None:
                continue
            counters = layer.store.counters
            self._moved += counters.to_host_bytes + counters.to_device_bytes
            if counters.steps:  # a single token was left to read after the cached prefix: a decode step
                self._read_there.append(counters.from_host.sum() * layer.store.stored_bytes)

    def link_bytes(self) -> int:
        """Bytes of keys and values that rows and prompts have moved between host and device. Waits for the device."""
        if self.rows.cache.offload_config is None:
            return 0
        read, self._read_there = self._read_there, []
        self._moved += sum(int(each) for each in read)
        stats = self.rows.cache.stats()
        return self._moved + stats.host_to_device_bytes + stats.device_to_host_bytes

    # ------------------------------------------------------------------ sparse prompts

    def prompts(self) -> tuple[PromptStats, ...]:
        """Coverage of the sparse prompts of all rows so far. Waits for the device."""
        if self.rows.cache.config.prefill is None:
            return ()
        return prompt_stats(self.audits())

    def audits(self) -> dict[int, Tensor]:
        """Tables of the layers' audits, of all query heads."""
        return audit_tables(self.rows.cache.sparse_layers)

    # ------------------------------------------------------------------ rows

    def leave(self, row: int) -> None:
        """End a row."""
        self.rows.leave(row)

    def hold(self, row: int) -> None:
        """Pause a row."""
        self.rows.hold(row)

    def resume(self, row: int) -> None:
        """Continue a held row."""
        self.rows.resume(row)

    def give(self, row: int, tokens: int) -> None:
        """Give a row room for copies of so many tokens."""
        self.rows.give(row, tokens)

    @torch.no_grad()
    def calibrate(self, row: int, ids: Sequence[int]) -> None:
        """Give a row the label channels of its first tokens ``ids``, which are prefilled again for that."""
        read = self.rows.prefill(self.model, sent([ids], torch.long, self.device), self.serving.chunk)
        try:
            self.rows.calibrate(row, read)
        finally:
            self._count_link(read.cache)
            self.rows.drop(read)

    def move(self, row: int, to: int) -> None:
        """Move a row and its next token to the free place ``to``."""
        self.rows.move(row, to)
        self.tokens[to : to + 1].copy_(self.tokens[row : row + 1])

    # ------------------------------------------------------------------ blocks that are kept

    def channels(self, row: int) -> Channels:
        """Label channels of a row, to begin other prompts with."""
        return self.rows.channels(row)

    def share(self, ids: np.ndarray) -> None:
        """Add a reference to each of these blocks, int32 ``[n]``."""
        self.rows.cache.row_table.ids.share(ids)

    def drop(self, ids: np.ndarray) -> None:
        """Remove a reference from each of these blocks, int32 ``[n]``."""
        self.rows.cache.row_table.ids.drop(ids)

    # ------------------------------------------------------------------ steps

    def step(self) -> Tensor:
        """Run a step of all active rows. Returns logits ``[n, vocabulary]`` of the first rows."""
        return self.rows.step(self.model, self.tokens)

    def dense_step(self) -> Tensor:
        """As :meth:`step`, but it attends to everything."""
        return self.rows.step(self.model, self.tokens, exactly=True)

    def verify(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """As :func:`..row_batch.verifying.verify`."""
        return verify(self.rows, self.model, ids, counts)

    def tokens_are_there(self) -> None:
        """Called when :attr:`tokens` has been written after a step or a join."""

    # ------------------------------------------------------------------ the end

    def watch(self, lost: Callable[[RuntimeError], None]) -> None:
        """Call ``lost`` if another process ends that the operations need. Here there is none."""

    def failed(self) -> None:
        """Called when a step has failed, after which cached state cannot be relied on."""

    def close(self) -> None:
        """Restore the model."""
        self.segments.close()


def decoder_layers(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The model's decoder layers, in order.

    Raises:
        ValueError: they were not found.
    """
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers")
