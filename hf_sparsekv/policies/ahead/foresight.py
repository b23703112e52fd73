"""An expected query, from the residual stream that the preceding layer reads, before that layer ends.

Hooks on the model (:mod:`....attention.hooks`) write here, and the state follows rows, crops and captures.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...kv.state import Held, State
from ...kv.store import LayerStore
from ...tensors import no_inference_mode


class Foresight(State):
    """The stream that this layer's query is expected to be of. Its policy has ``foresee(q, store, plan)``.

    If a step's plan asks for it, the layer before begins the step, and expects ``q [batch, Hq, Dk]`` of this one. A
    captured step runs ``foresee()`` beside the layer before; the attention comes after it.

    State, with :attr:`source` ``"in_delta"``: what the layer before added to the residual stream for each row's last
    token. Zero where that is not known: in a new or loaded cache, after a crop, and after steps that were not foreseen.

    Attributes:
        source: where the stream comes from, set by the hooks on the model. None: from nowhere.
        stream_like: the stream's width and type.
    """

    TENSORS: ClassVar = {"added": Held(trial=True)}  # [batch, 1, hidden], of the stream's dtype
    HOST: ClassVar = {"added_at": None}  # columns cached with the token that `added` belongs to

    added: Tensor | None
    added_at: int | None

    def __init__(self) -> None:
        super().__init__()
        self.source: str | None = None
        self.stream_like: tuple[int, torch.dtype] | None = None

    @property
    def by_delta(self) -> bool:
        """The query is of the layer before's input and of what that added to it for the token before."""
        return self.source == "in_delta"

    def prepare(self, store: LayerStore) -> None:
        """A foreseen step is about to be captured or replayed."""
        if self.by_delta:
            assert self.stream_like is not None
            width, dtype = self.stream_like
            self._fit_added((store.batch, 1, width), dtype, store)

    @no_inference_mode
    def _fit_added(self, shape: tuple[int, ...], dtype: torch.dtype, store: LayerStore) -> None:
        """A step is about to read :attr:`added`: zeros, unless it belongs to the last token."""
        if self.added is None or tuple(self.added.shape) != shape or self.added.device != store.device:
            self.added = torch.zeros(shape, dtype=dtype, device=store.device)
        elif self.added_at != store.length:
            self.added.zero_()
        self.added_at = store.length

    def expected(self, stream: Tensor, store: LayerStore) -> Tensor:
        """The preceding layer's expected output, ``[batch, 1, hidden]``, if its input is ``stream``."""
        if not self.by_delta:
            return stream
        if not store.capturing:
            self._fit_added(tuple(stream.shape), stream.dtype, store)
        assert self.added is not None
        return stream + self.added.to(stream.dtype)

    @no_inference_mode
    def note_added(
        self,
        before: Tensor,
        after: Tensor,
        length: int | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """The layer before has ended, for the last of ``length`` tokens: its input and output ``[batch, 1, hidden]``.

        After steps that were foreseen, and after several tokens. A captured step runs it beside the rest, without
        ``length``, which is the host's (:meth:`replayed`). ``mask [batch, columns]``: 0 for padding. ``valid``: bool
        ``[batch, 1]``, rows that have a token; nothing is noted of the others.
        """
        added = after - before
        if mask is not None:
            added = added * (mask[:, -1, None, None] != 0)  # nothing is known of a row that ends with padding
        if self.added is None or self.added.shape != added.shape or self.added.device != added.device:
            self.added = torch.empty_like(added)
        self.added.copy_(added if valid is None else torch.where(valid[..., None], added, self.added))
        if length is not None:
            self.added_at = length

    def replayed(self, store: LayerStore, foreseen: bool) -> None:
        """After replays of steps that were ``foreseen``, or not."""
        self.added_at = store.length if foreseen else None

    def join_row(self, row: int, other: Foresight, store: LayerStore) -> None:
        """Row ``row`` is about to become the only one of ``other``: what is declared of it is copied after this."""
        if other.added is not None:
            shape = (store.batch, *other.added.shape[1:])
            if self.added is None or self.added.shape != shape or self.added_at != store.length:
                self._fit_added(shape, other.added.dtype, store)
            if other.added_at is None:
                other.added.zero_()
        elif self.added is not None:
            other.added = torch.zeros_like(self.added[:1])

    def crop_row(self, row: int) -> None:
        """The last tokens of a row were removed, or another one comes in its place."""
        if self.added is not None:
            self.added[row].zero_()

    def cropped(self) -> None:
        """The last tokens are about to be removed."""
        self.added_at = None
