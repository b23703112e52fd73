"""Memory that a method will take, before there is a cache: ``Shared.needs(request)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_sparsekv_config.sparse import OffloadConfig

from ..kv.block_ids import bucket
from ..kv.block_table import table_width
from ..kv.ring import ring_tokens
from ..offload.device_pool import BOOKKEEPING
from ..offload.page_table import SELECTIONS

# Blocks chosen within 12 steps, in units of one step's selection. Recorded real model: 2.0 with an eighth of the blocks
# chosen, 2.4 with a sixteenth (benchmarks/results/attention_statistics.csv).
REUSED = 2.4


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's cache per row.

    Args:
        kind: ``"full"`` (attends to its whole past, made sparse), ``"sliding"`` or ``"other"``.
        heads, key_dim, value_dim: shape of a cached token; 0 for ``"other"``.
        latent: both parts together are the key (MLA).
        window: tokens that a sliding layer keeps.
        state: bytes of a layer whose cache does not grow (linear attention).
        index_dim: numbers of the key that the layer's own indexer keeps of a token; 0: it has none.
        stock: numbers of a token that transformers' own cache keeps; 0: no others than ours.
    """

    kind: str
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    state: int = 0
    latent: bool = False
    index_dim: int = 0
    stock: int = 0

    @property
    def width(self) -> int:
        """Numbers that are cached for a token and head."""
        return self.key_dim + self.value_dim

    @property
    def query_dim(self) -> int:
        """Channels of a key, as a selection sees it."""
        return self.width if self.latent else self.key_dim


@dataclass(frozen=True)
class Request:
    """A cache to be.

    Args:
        config, offload: what it is made with.
        layers: shapes of its sparse layers.
        context, batch: tokens a row, and rows.
        item: bytes of a number in the cache.
        query_heads: of a layer.
    """

    config: Any  # of the method's own class
    offload: OffloadConfig | None
    layers: tuple[LayerShape, ...]
    context: int
    batch: int
    item: int
    query_heads: int

    @property
    def _blocks_a_row(self) -> int:
        return -(-(self.config.max_length or self.context) // self.config.block_size)

    def room(self, blocks: int) -> int:
        """Storage for so many blocks; what is announced by ``max_length`` gets no room to grow."""
        return blocks if self.config.max_length is not None else bucket(blocks)

    @property
    def block_capacity(self) -> int:
        """Physical blocks of a layer, all rows."""
        return self.room(self._blocks_a_row * self.batch)

    @property
    def table(self) -> int:
        """Entries of a row's block table."""
        return table_width(self.room(self._blocks_a_row))

    @property
    def table_bytes(self) -> int:
        """Bytes of the block table, which all layers share."""
        return self.batch * self.table * 4

    @property
    def recent_tokens(self) -> int:
        """Sinks and recent tokens of a row."""
        return self.config.sinks + ring_tokens(self.config)

    @property
    def full_blocks(self) -> int:
        """Full blocks of a row, once the context is cached."""
        return (self.context - self.config.window - self.config.max_draft) // self.config.block_size

    def token(self, layer: LayerShape) -> int:
        """Bytes of a token's keys and values, all KV heads."""
        return layer.heads * layer.width * self.item

    def stored(self, layer: LayerShape) -> int:
        """As :meth:`token`, as host memory has them if the cache is offloaded (``OffloadConfig.kv_dtype``)."""
        coded = self.offload is not None and self.offload.kv_dtype is not None
        return layer.heads * layer.width if coded else self.token(layer)

    @property
    def blocks(self) -> int:
        """Bytes of the keys and values of all physical blocks, all layers."""
        return self.block_capacity * self.config.block_size * sum(map(self.stored, self.layers))


@dataclass
class Memory:
    """Bytes that the sparse layers of a cache take, beside recent tokens and the block table, which all methods have.

    Args:
        blocks: keys and values of the physical blocks; in host memory if the cache is offloaded.
        bounds, labels: what is kept of blocks and of tokens to select them by.
        means: of the tokens of blocks, which stand for those that are not chosen.
        index_keys: of the model's own indexer.
        tables: smaller tensors on the device.
        device_pages: device copies of what is chosen.
        working_set: estimate of the blocks that steps choose within 12 steps.
        second: all that a second device takes.
    """

    blocks: int
    bounds: int = 0
    labels: int = 0
    means: int = 0
    index_keys: int = 0
    tables: int = 0
    device_pages: int = 0
    working_set: int = 0
    second: int = 0

    def fetch(self, request: Request, chosen: int, listed: int) -> None:
        """Add a device pool for ``chosen`` blocks a step, row and KV head; one call may bring ``listed``."""
        layers, batch, size = request.layers, request.batch, request.config.block_size
        assert request.offload is not None
        budget = request.offload.device_pool
        for width in {layer.width for layer in layers}:
            rows = [batch * layer.heads for layer in layers if layer.width == width]
            each = size * width * request.item + BOOKKEEPING
            pages = SELECTIONS * len(layers) * rows[0] * chosen if budget is None else int(budget) // each
            self.device_pages += pages * each + (8 * listed * sum(set(rows)) if pages else 0)  # lists of copies
        step = sum(layer.heads * layer.width for layer in layers)
        self.working_set = int(REUSED * batch * chosen * size * step * request.item)
        if self.device_pages:
            self.tables += sum(request.block_capacity * layer.heads * 4 for layer in layers)


def mean_bytes(request: Request) -> int:
    """Bytes of the running means of all physical blocks, all layers."""
    return request.block_capacity * sum(map(request.token, request.layers))
