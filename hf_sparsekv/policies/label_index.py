"""Labels of tokens: their keys in a few channels, by which whatever selects tokens scores them.

Which channels is calibrated on a layer's first tokens, or read from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_sparsekv_config.labels import LabelConfig

from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..ops.selection.partial_sums import PartialSums
from ..ops.selection.token_score import token_score
from ..ops.storage.seal import Index
from ..predictor.channels import ChannelStats, LabelChannels
from ..tensors import sent
from .memory import LayerShape, Request


class RowChannels(NamedTuple):
    """The parameters of one row's labels.

    Args:
        channels: int32 ``[H, r]``, label channels.
        norms: float32 ``[H, 2, r]``, their centres and spreads.
    """

    channels: Tensor
    norms: Tensor

    def clone(self) -> RowChannels:
        """A copy in memory of its own."""
        return RowChannels(self.channels.clone(), self.norms.clone())


class LabelIndex(State):
    """Labels of the tokens in full blocks, in the pool's fields ``codes`` and ``qparams``.

    Attributes:
        channels: int32 ``[batch, H, r]``; None while they are being calibrated.
        norms: float32 ``[batch, H, 2, r]``, centre and spread of each of them, which labels are relative to. None
            while calibrating.
        stats: what calibration has seen; None once there are channels.
        r: channels of a label.
        first_only: calibrate on the first ``calibration_tokens`` tokens alone, whatever passes they come in. Otherwise
            on whole passes, up to the one that reaches as many tokens.

    Raises:
        ValueError: (:meth:`start`) the channel file, or ``label_channels``, does not fit the model.
    """

    TENSORS: ClassVar = {
        "channels": Held(dropped=True, file="channels"),
        "norms": Held(dropped=True, file="norms"),
    }
    PARTS: ClassVar = ("stats",)
    first_only = False
    stats: Any  # ChannelStats | None: never None while calibrating
    norms: Any  # Tensor | None: never None once there are channels

    def __init__(
        self,
        config: LabelConfig,
        layer_idx: int,
        fixed: LabelChannels | None,
    ) -> None:
        super().__init__()
        self.config, self.layer_idx, self.fixed = config, layer_idx, fixed
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.stats = ChannelStats()

    def start(self, store: LayerStore) -> None:
        """Claim the fields; take the channels of a file."""
        pool, heads, dim = store.pool, store.heads, store.key_dim
        self._batch = store.batch
        r = self.r = self.config.label_channels or default_channels(dim)
        if r > dim:
            raise ValueError(f"label_channels={r} exceeds the model's head dimension {dim}")
        if "codes" not in pool.fields:
            pool.add_field("codes", (heads, store.block_size, r // 2), torch.uint8)
            pool.add_field("qparams", (heads, store.block_size, 2), torch.float16)
        if self.fixed is not None:
            if self.layer_idx >= len(self.fixed.ranking):
                raise ValueError(
                    f"the channel file has {len(self.fixed.ranking)} layers, none for layer {self.layer_idx}: "
                    "calibrate this model with `hf-sparsekv calibrate`"
                )
            ranking = self.fixed.ranking[self.layer_idx]
            if ranking.shape != (heads, dim):
                raise ValueError(
                    f"the channel file has {tuple(ranking.shape)} (KV heads, channels) in layer {self.layer_idx}, "
                    f"the model {(heads, dim)}: with tensor parallelism leave channel_file out; otherwise calibrate "
                    "this model with `hf-sparsekv calibrate`"
                )
            if bool((ranking < 0).any()):
                raise ValueError(f"the channel file has no channels for layer {self.layer_idx}: calibrate again")
            channels = sent(ranking[:, :r], ranking.dtype, store.device)
            self.channels, self.stats = channels.expand(store.batch, -1, -1).contiguous(), None
            norms = self.fixed.norms[self.layer_idx].to(store.device).expand(store.batch, -1, -1, -1)
            self.norms = _of_channels(norms, self.channels)

    # ------------------------------------------------------------------ calibration

    @property
    def calibrating(self) -> bool:
        """There are no channels, hence no labels, yet."""
        return self.channels is None

    @property
    def goes_on(self) -> bool:
        """One more token does not end calibration, and changes no tensor's shape: such a step can be captured."""
        return self.stats.tokens + 1 < self.config.calibration_tokens and not self.stats.keys_only

    @property
    def wanted(self) -> int | None:
        """How many of a pass's first columns calibration reads; None: all."""
        return self.config.calibration_tokens - self.stats.tokens if self.first_only and self.calibrating else None

    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None) -> bool:
        """Calibrate on new tokens, see :meth:`.base.Policy.observe`. True if that has given the channels."""
        if not self.calibrating:
            return False
        self.stats.update(q, k, valid)
        return self.stats.tokens >= self.config.calibration_tokens and self.finish()

    def finish(self) -> bool:
        """End calibration with what has been seen so far. True if that has given the channels."""
        if not self.calibrating:
            return False
        self.channels, norms, self.stats = self.stats.ranking(self.r), self.stats.norms(), None
        self.norms = _of_channels(norms, self.channels)
        return True

    def open_rows(self, other: LabelIndex) -> None:
        """Rows that join bring their channels."""
        if self.channels is None:
            shape = (self._batch, *other.channels.shape[1:])
            self.channels, self.stats = other.channels.new_zeros(shape), None
            self.norms = other.norms.new_zeros(self._batch, *other.norms.shape[1:])

    def of_row(self, row: int) -> RowChannels:
        """The parameters of a row's labels."""
        return RowChannels(self.channels[row], self.norms[row])

    def give(self, row: int, one: RowChannels) -> None:
        """Use ``one`` for a row's labels from now on. Labels of its full blocks stay."""
        self.channels[row].copy_(one.channels)
        self.norms[row].copy_(one.norms)

    # ------------------------------------------------------------------ labels

    def sealing(self, store: LayerStore, index: Index) -> Index:
        """``index`` with the place of these fields, for the kernels that seal blocks."""
        if self.calibrating:
            return index
        fields = store.pool.fields
        codes, qparams = fields["codes"], fields["qparams"]
        return replace(index, channels=self.channels, norms=self.norms, codes=codes, qparams=qparams)

    def scores(
        self,
        q: Tensor,
        store: LayerStore,
        blocks: Tensor | None = None,
        out: Tensor | None = None,
        reduce: str | None = None,
        fill: bool = True,
        sums: PartialSums | None = None,
    ) -> Tensor:
        """Scores of all tokens in full blocks, or in ``blocks``, for ``q [batch, Hq, Dk]``: ``[batch, H, n]``.

        ``store`` may be the only row several times (:class:`..kv.query_rows.QueryRows`).

        ``reduce``: instead of the configuration's; ``"none"`` gives each query head's, ``[batch, Hq, n]``. ``fill``:
        False if no scores after a row's sealed tokens are read, which are then anything. ``sums``: what a kernel may
        add up as well.
        """
        fields, reduce = store.pool.fields, reduce or self.config.token_reduce
        labels = fields["codes"], fields["qparams"], self.channels_of(store)
        norms = self.norms if len(self.norms) == store.batch else self.norms.expand(store.batch, -1, -1, -1)
        how = {"sinks": store.sinks, "norms": norms, "out": out, "fill": fill, "sums": sums}
        return token_score(q, *labels, store.rows, store.table, blocks, reduce, **how)

    def channels_of(self, store: LayerStore) -> Tensor:
        """The channels of its rows: of one row, if it is that several times."""
        return self.channels if len(self.channels) == store.batch else self.channels.expand(store.batch, -1, -1)

    def nbytes_read(self, store: LayerStore, blocks: int) -> int:
        """Bytes that scoring ``blocks`` blocks, of all rows together, of each KV head reads."""
        return store.heads * blocks * store.block_size * token_bytes(self.r)

    # ------------------------------------------------------------------ files

    def from_file(self, found: dict[str, Tensor], device: torch.device, lengths: Sequence[int]) -> None:
        super().from_file(found, device, lengths)
        if not self.calibrating:
            self.stats = None


def calibrate_all(labels: Sequence[LabelIndex], stats: ChannelStats) -> None:
    """Give the labels of several layers, which have seen nothing, their parts of ``stats``.

    ``stats`` holds the layers' rows in order. One call replaces ten small launches a layer.
    """
    first, batch = labels[0], labels[0]._batch
    whole = [slice(i * batch, (i + 1) * batch) for i in range(len(labels))]
    if stats.tokens < first.config.calibration_tokens:
        for one, rows in zip(labels, whole):
            one.stats = stats.of_rows(rows)
        return
    channels = stats.ranking(first.r)
    norms = _of_channels(stats.norms(), channels)
    for one, rows in zip(labels, whole):
        one.channels, one.norms, one.stats = channels[rows], norms[rows], None


def _of_channels(norms: Tensor, channels: Tensor) -> Tensor:
    """From norms ``[batch, H, 2, Dk]`` of all channels, the norms of ``channels [batch, H, r]``."""
    return norms.gather(-1, channels.long()[:, :, None].expand(-1, -1, 2, -1))


def label_bytes(request: Request, layer: LayerShape) -> int:
    """Bytes of a block's labels, all KV heads."""
    config = request.config
    channels = config.label_channels or default_channels(layer.query_dim)
    return layer.heads * config.block_size * token_bytes(channels)


def token_bytes(channels: int) -> int:
    """Bytes of a token's label, of a KV head."""
    return channels // 2 + 4  # 4: scale and zero point


def default_channels(dim: int) -> int:
    """Label channels of keys of ``dim`` channels: half of them, but 64 if there are as many, and at most 128.

    All 64 of the real model's keys find what 16 bits find: at 90 % of the mass 17 % are read, with 32 channels 25 %
    (docs/studies/by-need.md). 128 of an MLA row's 576 as AsyncTLS has it.
    """
    return min(128, max(2, min(dim // 2 * 2, max(64, dim // 4 * 2))))
