"""Two-level selection: blocks by a bound on their scores, then tokens by label channels (AsyncTLS section 4)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attention.exact import AttentionSpec
from ..config import OffloadConfig, TwoLevelConfig
from ..kv.lasting import lasting, take_rows
from ..kv.store import LayerStore
from ..ops.seal import Index, quantise_labels
from ..ops.token_score import token_score
from ..ops.topk_select import block_select, token_select
from ..predictor.channels import ChannelStats, LabelChannels
from .base import Policy
from .block_metadata import BlockMetadata, bounds_bytes
from .memory import LayerShape, Memory, Request
from .registry import register
from .shared import Labelled


@register(
    "two_level",
    TwoLevelConfig,
    about="blocks by a bound on their scores, tokens in them by labels (AsyncTLS)",
    presets={"block_only": {"level": "block"}, "token_only": {"level": "token"}},
)
class TwoLevelPolicy(Policy):
    """State: the label channels of each row, and with ``lag`` the blocks chosen in the previous step."""

    config: TwoLevelConfig

    def __init__(
        self, config: TwoLevelConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded)
        self.lag = lags(config, offloaded)
        self.coarse, self.fine = config.level != "token", config.level != "block"
        self.metadata = BlockMetadata(config)
        self.method = method(config, offloaded)
        self.fetches = offloaded and self.coarse
        self.fixed = channels  # from a file
        self.reset()

    @classmethod
    def share(cls, config: TwoLevelConfig, offload: OffloadConfig | None) -> Labelled:
        return Labelled(cls, config, offload)

    @classmethod
    def crossover(cls, config: TwoLevelConfig, offloaded: bool) -> str:
        return method(config, offloaded)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        config, memory = request.config, Memory(blocks=request.blocks)
        if config.level != "block":
            memory.labels = sum(request.slots * label_bytes(request, layer) for layer in request.layers)
        if config.level != "token":
            memory.bounds = bounds_bytes(request)
            if request.offload is not None and request.sealed > config.coarse_blocks:
                memory.fetch(request, config.coarse_blocks, config.coarse_blocks)
        return memory

    def reset(self) -> None:
        self.channels: Tensor | None = None  # int32 [batch, H, r]
        self.previous: Tensor | None = None  # BlockIds of the previous step; None: all blocks
        self._held: Tensor | None = None  # where they are kept: a captured step knows the address
        self._places: Tensor | None = None  # and where those blocks lie
        self.placed = False  # the places are known
        self.stats = ChannelStats(self.config.channel_importance)

    @lasting
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        pool, heads, dim = store.pool, store.heads, store.key_dim
        self._key_dim = dim
        if self.lag:
            shape = (store.batch, heads, self.config.coarse_blocks)
            self._held = torch.full(shape, -1, dtype=torch.int32, device=store.device)
            self._places = torch.full_like(self._held, -1) if self.fetches else None
        if self.coarse:
            self.metadata.start(store)
        if not self.fine:
            return
        r = self.config.label_channels or default_channels(dim)
        if r > dim:
            raise ValueError(f"label_channels={r} exceeds the model's head dimension {dim}")
        self.r = r
        if "codes" not in pool.fields:
            if self.config.label_bits == 4:
                pool.add_field("codes", (heads, store.block_size, r // 2), torch.uint8)
                pool.add_field("qparams", (heads, store.block_size, 2), torch.float16)
            else:
                pool.add_field("codes", (heads, store.block_size, r), store.dtype)
        if self.fixed is not None:
            if self.layer_idx >= len(self.fixed.ranking):
                raise ValueError(
                    f"the channel file has {len(self.fixed.ranking)} layers, none for layer {self.layer_idx}: "
                    "calibrate this model with `hf-sparsekv calibrate`"
                )
            ranking = self.fixed.ranking[self.layer_idx].to(store.device)
            if ranking.shape != (heads, dim):
                raise ValueError(
                    f"the channel file has {tuple(ranking.shape)} (KV heads, channels) in layer {self.layer_idx}, "
                    f"the model {(heads, dim)}: with tensor parallelism leave channel_file out; otherwise calibrate "
                    "this model with `hf-sparsekv calibrate`"
                )
            if bool((ranking < 0).any()):
                raise ValueError(f"the channel file has no channels for layer {self.layer_idx}: calibrate again")
            self.channels = ranking[:, :r].expand(store.batch, -1, -1).contiguous()

    # ------------------------------------------------------------------ channels

    @property
    def observes(self) -> bool:
        return self._calibrating

    @lasting
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        if not self._calibrating:
            return
        self.stats.update(q, k, valid)
        if self.stats.tokens >= self.config.calibration_tokens:
            self.channels = self.stats.ranking()[..., : self.r].contiguous()
            if store.sealed:
                store.reindex(self)  # blocks that were sealed before there were channels

    # ------------------------------------------------------------------ index

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        fields = {}
        if self.coarse:
            fields.update(self.metadata.index(kv[..., : self._key_dim], flags))
        if self.fine and self.channels is not None:
            fields.update(self._labels(kv))
        return fields

    def _labels(self, kv: Tensor) -> dict[str, Tensor]:
        n, _, _, size, _ = kv.shape
        at = self.channels.long()[None, :, :, None].expand(n, -1, -1, size, -1)
        labels = kv[..., : self._key_dim].gather(-1, at)
        if self.config.label_bits == 16:
            return {"codes": labels}
        codes, qparams = quantise_labels(labels)
        return {"codes": codes, "qparams": qparams}

    def sealing(self, store: LayerStore) -> Index:
        fields = store.pool.fields
        index = Index(store.key_dim)
        if self.coarse:
            index = self.metadata.sealing(store, index)
        if self.fine and self.channels is not None:
            labels = {"codes": fields["codes"], "qparams": fields.get("qparams")}
            index = replace(index, channels=self.channels, **labels)
        return index

    # ------------------------------------------------------------------ a step

    def mode(self, store: LayerStore) -> tuple[str, bool, bool] | str | None:
        """``(what is attended, whether blocks are chosen for the next step, whether this one's go by place)``.

        ``"dense"``: everything; ``"every"``: a selection among all blocks; ``"chosen"``: among chosen blocks.
        """
        if self._calibrating:
            goes_on = self.stats.tokens + 1 < self.config.calibration_tokens and not self.stats.keys_only
            return "calibrating" if goes_on else None
        attends = self._attends(store)
        placed = self.placed and self.lag and attends == "chosen"
        return "dense" if attends == "quick" else attends, self.looks_ahead(store), placed

    @property
    def _calibrating(self) -> bool:
        return self.fine and self.channels is None

    def _attends(self, store: LayerStore) -> str:
        """As in :meth:`mode`; ``"quick"``: everything, because that is as quick as selecting."""
        config = self.config
        many = self.coarse and store.sealed > config.coarse_blocks
        if self._calibrating or store.sealed * store.block_size <= config.token_budget:
            return "dense"
        if not self.fine and not many:
            return "dense"
        if self.below_crossover(store):
            return "quick"
        chosen = self.previous is not None if self.lag else many
        return "chosen" if chosen else "every" if self.fine else "dense"

    def attend(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        config, attends = self.config, self._attends(store)
        if attends in ("dense", "quick"):
            return store.attend(q, None, "all", spec)
        blocks = places = None
        if attends == "chosen":
            if self.lag:
                blocks, places = self.previous, self._places if self.placed else None
            else:
                blocks = self._choose_blocks(q, store)
                if self._enter(store):
                    places = store.residents.fetch(blocks, store.table, keep=0)
            store.count_blocks(blocks)
            if self.watch is not None:
                self.watch.mark(blocks)
        placed = places is not None
        if not self.fine:
            return store.attend(q, blocks, "block", spec, placed, places)
        fields = store.pool.fields
        scores = token_score(
            q,
            fields["codes"],
            fields.get("qparams"),
            self.channels,
            fields["flags"],
            store.table,
            blocks,
            config.token_reduce,
        )
        tokens = token_select(scores, places if placed else blocks, config.token_budget, store.block_size)
        if self.watch is not None and attends == "every":
            self.watch.mark_tokens(tokens, store.block_size)
        return store.attend(q, tokens, "token", spec, placed)

    def _enter(self, store: LayerStore) -> bool:
        """Whether chosen blocks are brought to the device; makes room for them."""
        return self.fetches and store.residents.enter(store.batch * store.heads * self.config.coarse_blocks)

    def prepare(self, store: LayerStore) -> None:
        if self.fetches and (self.looks_ahead(store) or self._attends(store) == "chosen"):
            self._enter(store)

    def account(self, store: LayerStore) -> None:
        config, attends = self.config, self._attends(store)
        if attends in ("dense", "quick"):
            store.count_step("all")
            store.counters.crossover += attends == "quick"
            return
        store.count_step("token" if self.fine else "block")
        if attends == "chosen" and not self.lag:
            store.count_index(self.metadata.nbytes(store))
        if self.fine:
            blocks = config.coarse_blocks if attends == "chosen" else store.sealed
            store.count_index(store.batch * store.heads * blocks * store.block_size * self._label_bytes(store))

    def looks_ahead(self, store: LayerStore) -> bool:
        """While steps are dense nothing is chosen for the next; sealing the block that ends it chooses anew."""
        many = self.lag and not self._calibrating and store.sealed > self.config.coarse_blocks
        return many and not self.below_crossover(store)

    def replayed(self, store: LayerStore, looked: bool) -> None:
        if self._calibrating:
            self.stats.tokens += 1
        elif looked:
            self.previous, self.placed = self._held, self._places is not None and store.residents.pool is not None
            store.count_index(self.metadata.nbytes(store))
        elif not self.looks_ahead(store):
            self.previous = None  # as look_ahead() does

    def look_ahead(self, q: Tensor, store: LayerStore, again: bool = False) -> None:
        if not self.looks_ahead(store):
            self.previous = None
            return
        self._held.copy_(self._choose_blocks(q, store))
        self.placed = self._enter(store)
        if self.placed:
            store.residents.fetch(self._held, store.table, 1, not again, self._places)
        if not again:
            store.count_index(self.metadata.nbytes(store))
        self.previous = self._held

    def _choose_blocks(self, q: Tensor, store: LayerStore) -> Tensor:
        """``BlockIds [batch, H, coarse_blocks]`` for this query."""
        return block_select(self.metadata.scores(q, store), self.config.coarse_blocks)

    def _label_bytes(self, store: LayerStore) -> int:
        return self.r // 2 + 4 if self.config.label_bits == 4 else self.r * store.dtype.itemsize

    # ------------------------------------------------------------------ capture

    @property
    def addresses(self) -> tuple[int, ...]:
        tensors = (self.channels, self._held, self._places, self.stats.q)
        return tuple(0 if t is None else t.data_ptr() for t in tensors)

    def save(self) -> dict:
        return {
            "previous": self.previous,
            "tokens": self.stats.tokens,
            "placed": self.placed,
            "places": None if self._places is None else self._places.clone(),
            "held": None if self._held is None else self._held.clone(),
            "stats": None if self.stats.q is None else (self.stats.q.clone(), self.stats.k.clone()),
        }

    def restore_host(self, saved: dict) -> None:
        self.previous, self.stats.tokens = saved["previous"], saved["tokens"]
        self.placed = saved["placed"]

    def restore_device(self, saved: dict) -> None:
        if saved["held"] is not None:
            self._held.copy_(saved["held"])
        if saved["places"] is not None:
            self._places.copy_(saved["places"])
        if saved["stats"] is not None:
            for held, value in zip((self.stats.q, self.stats.k), saved["stats"]):
                held.copy_(value)

    # ------------------------------------------------------------------ files

    def to_file(self, about: dict, store: LayerStore) -> dict[str, Tensor]:
        tensors = {}
        if self.channels is not None:
            about["channels"], tensors["channels"] = self.channels.shape[2], self.channels
        elif self.fine:
            about["stats_tokens"] = self.stats.tokens
            if self.stats.q is not None:
                about["query_heads"] = self.stats.q.shape[1]
                tensors |= {"stats_q": self.stats.q, "stats_k": self.stats.k}
        if self.previous is not None:
            about["previous"], tensors["previous"] = self.previous.shape[2], self.previous
        return tensors

    def file_fits(self, about: dict) -> dict[str, bool]:
        tokens, heads = about["stats_tokens"], about["query_heads"]
        return super().file_fits(about) | {
            "channels": (about["channels"] is not None) == (self.fine and tokens is None),
            "stats_tokens": tokens is None or (self.fine and tokens < self.config.calibration_tokens),
            "query_heads": (heads is not None) == bool(tokens) and (heads or 0) % about["heads"] == 0,
            "previous": about["previous"] is None or self.coarse,
        }

    @classmethod
    def reserves(cls, config: TwoLevelConfig, offloaded: bool) -> int:
        return config.coarse_blocks if lags(config, offloaded) else 0

    def from_file(self, about: dict, held: dict[str, Tensor], store: LayerStore) -> None:
        channels, tokens = held.pop("channels", None), about["stats_tokens"]
        if self.fine and (tokens is None if channels is None else channels.shape[2] != self.r):
            raise ValueError("channels")
        known = self.channels  # of a channel file
        if channels is not None and known is not None and not torch.equal(channels, known.cpu()):
            raise ValueError("channels")
        if channels is not None:
            self.channels = channels.to(store.device)
        if tokens is not None:
            self.stats.tokens = tokens
        if "stats_q" in held:
            self.stats.q, self.stats.k = (held.pop(name).to(store.device) for name in ("stats_q", "stats_k"))
        # Without them (no lag then, or another num_blocks) one step chooses among all blocks.
        previous = held.pop("previous", None)
        if previous is not None and self.lag and self._held.shape == previous.shape:
            self.previous = self._held.copy_(previous)

    # ------------------------------------------------------------------ rows

    def reopened(self) -> None:
        self.previous = None  # one step chooses among all blocks

    @lasting
    def map_rows(self, index: Tensor) -> None:
        if self.channels is not None:
            self.channels = take_rows(self.channels, index)
        if self._held is not None:
            self._held = take_rows(self._held, index)
            self.previous = None if self.previous is None else self._held
        if self._places is not None:
            self._places = take_rows(self._places, index)
        self.stats.map_rows(index)

    def copy(self) -> TwoLevelPolicy:
        new = super().copy()
        new.stats = self.stats.copy()
        new.placed = False  # the copy has frames of its own, with nothing in them yet
        for name in ("channels", "_held", "_places"):  # changed in place when rows are reordered
            if getattr(self, name) is not None:
                setattr(new, name, getattr(self, name).clone())
        new.previous = None if self.previous is None else new._held
        return new


def label_bytes(request: Request, layer: LayerShape) -> int:
    """Bytes of a block's labels, all KV heads."""
    config = request.config
    channels = config.label_channels or default_channels(layer.query_dim)
    code = channels // 2 + 4 if config.label_bits == 4 else channels * request.item
    return layer.heads * config.block_size * code


def default_channels(dim: int) -> int:
    """Label channels of keys of ``dim`` channels: a quarter (AsyncTLS: 32 of 128), and 128 of an MLA row's 576."""
    return min(128, max(2, dim // 8 * 2))


def lags(config: TwoLevelConfig, offloaded: bool) -> bool:
    """Tokens are chosen within the blocks of the previous step."""
    return config.level != "token" and (offloaded if config.lag is None else config.lag)


def method(config: TwoLevelConfig, offloaded: bool) -> str:
    """What the table of crossovers calls the selection."""
    if config.level != "two_level":
        return f"{config.level}_only"
    return "two_level:lag" if lags(config, offloaded) else "two_level"
