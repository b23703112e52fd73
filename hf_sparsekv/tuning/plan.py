"""What a model and a cache will allocate, worked out from the model's configuration alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from ..attention.mla import is_mla
from ..config import OffloadConfig, PredictiveConfig, ProgressiveConfig, TwoLevelConfig
from ..kv.pool import bucket
from ..kv.store import ring_tokens
from ..offload.device_pool import BOOKKEEPING
from ..offload.page_table import SELECTIONS
from ..policies.block_metadata import SIDES
from ..policies.label_index import default_channels
from ..policies.predictive import PredictivePolicy, room_for
from ..policies.progressive import ProgressivePolicy, ahead, expected
from ..policies.two_level import method
from ..predictor.query import make_predictor
from .crossover import dense_tokens

AnyConfig = TwoLevelConfig | ProgressiveConfig | PredictiveConfig

# The one way through a mixture of experts that neither looks at values nor insists on a dtype.
_META_SAFE = {"experts_implementation": "batched_mm"}


# Selections of one step that the blocks chosen within 12 steps amount to: 2.0 with an eighth of the blocks chosen, 2.4
# with a sixteenth, on the recorded real model (benchmarks/results/attention_statistics.csv).
REUSED = 2.4


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches per row.

    Args:
        kind: ``"full"`` (attends to its whole past, made sparse), ``"sliding"`` or ``"other"``.
        heads, key_dim, value_dim: shape of a cached token; 0 for ``"other"``.
        latent: both parts together are the key (MLA).
        window: tokens that a sliding layer keeps.
        state: bytes of a layer whose cache does not grow (linear attention).
    """

    kind: str
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    state: int = 0
    latent: bool = False

    @property
    def width(self) -> int:
        """Numbers that are cached for a token and head."""
        return self.key_dim + self.value_dim

    @property
    def query_dim(self) -> int:
        """Channels of a key, as a selection sees it."""
        return self.width if self.latent else self.key_dim


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: bytes of weights, what each layer caches, widths for the prefill estimate, query heads."""

    model_type: str
    dtype: torch.dtype
    weights: int
    layers: tuple[LayerShape, ...]
    hidden: int
    intermediate: int
    query_heads: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes for ``batch`` rows of ``context`` tokens.

    The parts from ``blocks`` to ``tables`` belong to the layers that the cache manages itself; their sum is what
    ``cache.memory_bytes()`` reports once ``context`` tokens are cached (or with ``max_length=context``).

    Args:
        weights: the model's parameters.
        dense_kv: keys and values as transformers' ``DynamicCache`` keeps them, all layers.
        blocks: keys and values of the block slots; in host memory if ``offloaded``, except those of ``kept``.
        kept: of these, in dense layers that stay on the device (``OffloadConfig.keep_dense``).
        frames: device copies of chosen blocks (``OffloadConfig.device_pool``): the default size, or the bytes given. A
            share of free memory is not known beforehand and counts as 0. Where a second device chooses, both copies of
            the chosen tokens.
        bounds: least and largest key of each block, which blocks are chosen by.
        labels: quantised label channels, which tokens are chosen by.
        near: sinks and recent tokens.
        tables: slot tables, flags and counts.
        stock: sliding and other layers, which stay transformers' own.
        prefill: estimate of the activations of a prompt of ``context`` tokens read in one piece.
        working_set: estimate of the blocks that decode steps choose within 12 steps (``offload/working_set.py``), all
            rows: what ``frames`` should hold at least. For a progressive cache, which reads as much as it takes, that
            of a sixteenth of the blocks a step.
        second: all that a second device takes which chooses (``PredictiveConfig.cache_rank``): blocks, labels, queries;
            not a part of the others.
        dense_tokens: tokens a row up to which the sparse layers attend densely because that is as quick
            (``config.dense_below``); 0 for never.
    """

    model: ModelShape
    context: int
    batch: int
    offloaded: bool
    weights: int
    dense_kv: int
    blocks: int
    bounds: int
    labels: int
    near: int
    tables: int
    stock: int
    prefill: int
    kept: int = 0
    frames: int = 0
    working_set: int = 0
    second: int = 0
    dense_tokens: int = 0

    @property
    def cache_device(self) -> int:
        """Device bytes of the layers that the cache manages itself."""
        blocks = self.kept if self.offloaded else self.blocks
        return self.bounds + self.labels + self.near + self.tables + blocks + self.frames

    @property
    def cache_host(self) -> int:
        """Host bytes of the layers that the cache manages itself."""
        return self.blocks - self.kept if self.offloaded else 0

    @property
    def device_total(self) -> int:
        """Device bytes with our cache, the prefill estimate included."""
        return self.weights + self.cache_device + self.stock + self.prefill

    @property
    def dense_total(self) -> int:
        """Device bytes with transformers' own cache, the prefill estimate included."""
        return self.weights + self.dense_kv + self.prefill


def model_shape(config, dtype: torch.dtype | None = None) -> ModelShape:
    """Learn a model's sizes by running two tokens through it on the meta device: no weights, no memory.

    Args:
        config: a transformers configuration of a decoder-only language model.
        dtype: precision of weights and cache. Default: the checkpoint's, or bfloat16.

    Raises:
        ValueError: the model is no decoder-only language model, or cannot run on the meta device.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type} is an encoder-decoder model: sparse caches serve decoder-only models")
    text = config.get_text_config(decoder=True)
    dtype = dtype or getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.bfloat16
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    notes = []
    config = copy.deepcopy(config)  # from_config() writes the dtype into it
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
        name = str(dtype).removeprefix("torch.")
        notes.append(f"the checkpoint is quantised: its weights take less than the {name} figure given here")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_META_SAFE)
        cache = DynamicCache(config=text)
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
            model(input_ids=ids, past_key_values=cache, use_cache=True)
        latent = any(is_mla(module) for module in model.modules())
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot plan for a {config.model_type} model: {reason}") from error
    return ModelShape(
        model_type=config.model_type,
        dtype=dtype,
        weights=sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()),
        layers=tuple(_layer_shape(layer, latent) for layer in cache.layers),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        query_heads=text.num_attention_heads,
        notes=tuple(notes),
    )


def _layer_shape(layer, latent: bool) -> LayerShape:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.keys is not None:
        _, heads, _, key_dim = layer.keys.shape
        value_dim = layer.values.shape[3]
        if type(layer) is DynamicLayer:
            return LayerShape("full", heads, key_dim, value_dim, latent=latent)
        # The token being read completes the window: one less is kept.
        return LayerShape("sliding", heads, key_dim, value_dim, window=layer.sliding_window - 1)
    return LayerShape("other", state=_tensor_bytes(vars(layer)))


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0


def plan_memory(
    model: ModelShape,
    config: AnyConfig,
    offload: OffloadConfig | None,
    *,
    context: int,
    batch: int = 1,
    device: torch.device | None = None,
) -> MemoryPlan:
    """Bytes that ``OffloadedSparseCache(config, offload)`` or ``ProgressiveCache(...)`` will take, and DynamicCache.

    Args:
        model: from :func:`model_shape`.
        config, offload: as for the cache.
        context: tokens per row, prompt and answer together.
        batch: rows.
        device: the GPU that it is planned for, if it is there; only ``dense_tokens`` depends on it.

    Raises:
        ValueError: ``context`` or ``batch`` is not positive, or exceeds ``config.max_length``.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    item = model.dtype.itemsize
    ahead_of_query = isinstance(config, PredictiveConfig)
    if ahead_of_query and config.cache_rank == "host":
        offload = offload or OffloadConfig()
    size = config.block_size
    blocks_a_row = -(-(config.max_length or context) // size)
    if config.max_length is not None and config.max_length < context:
        raise ValueError(f"max_length={config.max_length} is less than the context of {context} tokens")
    exact = config.max_length is not None
    slots = blocks_a_row * batch if exact else bucket(blocks_a_row * batch)
    table = blocks_a_row if exact else bucket(blocks_a_row)
    near_tokens = config.sinks + ring_tokens(config)

    dense_kv = blocks = resident = bounds = labels = near = tables = stock = second = 0
    twins = ahead_of_query and config.cache_rank not in (None, "stream", "host")
    twin_slots = slots if exact else bucket(table * batch)
    fetching: list[LayerShape] = []
    walks = isinstance(config, ProgressiveConfig)
    if ahead_of_query:
        coarse, fine = False, config.scoring == "labels"
    else:
        coarse, fine = walks or config.level != "token", not walks and config.level != "block"
    for index, layer in enumerate(model.layers):
        token = layer.heads * layer.width * item
        if layer.kind != "full":
            kept = layer.state + min(layer.window, context) * token
            stock += batch * kept
            dense_kv += batch * kept
            continue
        dense_kv += batch * context * token
        near += batch * near_tokens * token
        # Per slot: flags and fill; per row: its slot table, the validity of near tokens, a count.
        tables += slots * (size + 4) + (a_row := batch * (table * 4 + near_tokens + 4))
        if index < config.dense_layers:
            blocks += slots * size * token
            resident += slots * size * token * (offload is not None and offload.keep_dense)
            continue
        fetching.append(layer)
        if twins:
            second += twin_slots * (size * token + size + 4) + batch * near_tokens * token + a_row
        else:
            blocks += slots * size * token
        if coarse:
            parts, side = config.bounds_per_block, layer.heads * layer.query_dim * item
            bounds += slots * parts * (SIDES[config.metadata] * side + (4 if parts > 1 else 0))
        if fine:
            channels = config.label_channels or default_channels(layer.query_dim)
            code = channels // 2 + 4 if config.label_bits == 4 else channels * item
            if twins:
                second += twin_slots * layer.heads * size * code
            else:
                labels += slots * layer.heads * size * code

    frames = working_set = 0
    if ahead_of_query:
        queries, copies = _predictive(model, fetching, config, batch)
        if twins:
            second, frames = second + queries, 2 * copies
        else:
            tables += queries
        sealed = (context - config.window - config.max_draft) // size * size
        begun = sealed > config.token_budget and context >= config.start_length
        if offload is not None and begun and (offload.device_pool is None or copies <= offload.device_pool):
            frames = copies
    if offload is not None and coarse:
        sealed = (context - config.window - config.max_draft) // size
        chosen = expected(ahead(table)) if walks else config.coarse_blocks
        if sealed > (0 if walks else chosen):
            listed = ahead(table) if walks else chosen
            frames = _frames(fetching, size, chosen, listed, offload, batch, item)
            step = sum(layer.heads * layer.width for layer in fetching)
            working_set = int(REUSED * batch * chosen * size * step * item)
            tables += sum(slots * layer.heads * 4 for layer in fetching) * (frames > 0)

    # Alive at once in a layer: a few copies of the hidden states, and the MLP's gate, up and product.
    prefill = batch * context * (4 * model.hidden + 3 * model.intermediate) * item
    return MemoryPlan(
        model=model,
        context=context,
        batch=batch,
        offloaded=offload is not None,
        weights=model.weights,
        dense_kv=dense_kv,
        blocks=blocks,
        bounds=bounds,
        labels=labels,
        near=near,
        tables=tables,
        stock=stock,
        prefill=prefill,
        kept=resident,
        frames=frames,
        working_set=working_set,
        second=second,
        dense_tokens=0 if twins else _dense_tokens(model, config, offload, batch, device or torch.device("cpu")),
    )


def _predictive(model: ModelShape, layers: list, config: PredictiveConfig, batch: int) -> tuple[int, int]:
    """Bytes of the latest queries and the ids of chosen tokens, and of copies of these."""
    slots = make_predictor(config.predictor, config.predictor_window, config.predictor_epsilon).slots
    item, room, queries, copies = model.dtype.itemsize, room_for(config), 0, 0
    for layer in layers:
        queries += batch * (model.query_heads * slots * layer.query_dim * item + 8) + 4
        queries += batch * layer.heads * room * 4
        copies += batch * layer.heads * room * (layer.width * item + 12) + 16
    return queries, copies


def _frames(
    layers: list, block_size: int, chosen: int, listed: int, offload: OffloadConfig, batch: int, item: int
) -> int:
    """Bytes of the device pools, one for each width of tokens; ``listed``: blocks that one call may bring."""
    budget, total = offload.device_pool, 0
    for width in {layer.width for layer in layers}:
        rows = [batch * layer.heads for layer in layers if layer.width == width]
        size = block_size * width * item + BOOKKEEPING
        frames = SELECTIONS * len(layers) * rows[0] * chosen if budget is None else int(budget) // size
        total += frames * size + (8 * listed * sum(set(rows)) if frames else 0)  # lists of copies
    return total


def _method(config: AnyConfig, offloaded: bool) -> str:
    """What the table of crossovers calls it."""
    if isinstance(config, TwoLevelConfig):
        return method(config, offloaded)
    return PredictivePolicy.method if isinstance(config, PredictiveConfig) else ProgressivePolicy.method


def _dense_tokens(
    model: ModelShape, config: AnyConfig, offload: OffloadConfig | None, batch: int, device: torch.device
) -> int:
    """Tokens a row with which every sparse layer still attends densely, recent ones included; 0 for none."""
    layers = [layer for layer in model.layers[config.dense_layers :] if layer.kind == "full"]
    offloaded, item = offload is not None, model.dtype.itemsize
    name = _method(config, offloaded)
    in_blocks = [
        dense_tokens(
            config.dense_below,
            f"{name}:mla" if layer.latent else name,
            device,
            offloaded,
            batch,
            layer.heads * layer.width * item,
        )
        // config.block_size
        for layer in layers
    ]
    least = min(in_blocks, default=0)
    # The step with this many columns is the last one before the next block is sealed and counts.
    return (least + 1) * config.block_size + config.window + config.max_draft if least else 0
