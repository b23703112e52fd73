"""Memory that a model and a cache will allocate, computed from the model's configuration alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig
from hf_sparsekv_config.tokens import TokenConfig

from ..attention.indexer import replace_forward
from ..attention.mla import is_mla
from ..attention.pooled_indexer import is_pooled
from ..cache_name import over
from ..policies.crossover import dense_tokens
from ..policies.indexed import chooses, chosen_tokens, in_blocks, needs
from ..policies.memory import LayerShape, Request
from ..policies.registry import method_of
from ..predictor.channels import first_layer
from ..transformers_compat import check_options

# The only implementation of a mixture of experts that neither reads values nor requires a dtype.
_META_SAFE = {"experts_implementation": "batched_mm"}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: bytes of weights, what each layer caches, widths for the prefill estimate, query heads.

    Attributes:
        topk: tokens that the model's own indexer chooses for a query; 0: it has none.
    """

    model_type: str
    dtype: torch.dtype
    weights: int
    layers: tuple[LayerShape, ...]
    hidden: int
    intermediate: int
    query_heads: int = 0
    notes: tuple[str, ...] = ()
    topk: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes for ``batch`` rows of ``context`` tokens.

    The parts from ``blocks`` to ``tables`` belong to the layers that the cache manages itself. Their sum equals
    ``cache.memory_bytes()`` once ``context`` tokens are cached (or with ``max_length=context``).

    Args:
        weights: the model's parameters.
        dense_kv: keys and values as transformers' ``DynamicCache`` keeps them, all layers.
        blocks: keys and values of the physical blocks; in host memory if ``offloaded``, except those of ``kept``.
        kept: the part of ``blocks`` in dense layers that stay on the device (``OffloadConfig.keep_dense``).
        device_pages: device copies of chosen blocks or tokens (``OffloadConfig.device_pool``): the default size, or the
            bytes given. A share of free memory is not known beforehand and counts as 0. Where a second device chooses,
            both copies of the chosen tokens.
        bounds: least and largest key of each block, for the selection of blocks.
        labels: quantised label channels, for the selection of tokens.
        means: means of the keys and values of each block (``tail="mean"``).
        index_keys: keys of the model's own indexer, if it has one.
        scales: scales of codes in host memory (``OffloadConfig.kv_dtype``), on the device.
        recent: sinks and recent tokens.
        tables: the block table, which all layers share, and page tables.
        stock: sliding and other layers, which stay transformers' own.
        prefill: estimate of the activations of a prompt of ``context`` tokens read in one piece.
        working_set: estimate of the blocks that all rows choose within 12 decode steps (``telemetry/working_set.py``).
            ``device_pages`` should hold at least these. A progressive cache reads varying amounts; its estimate assumes
            a sixteenth of the blocks per step.
        second: total of a second device that chooses (``PredictiveConfig.cache_rank``): blocks, labels, queries. Not
            included in the other parts.
        dense_tokens: tokens a row up to which the sparse layers attend densely because that is as fast
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
    recent: int
    tables: int
    stock: int
    prefill: int
    kept: int = 0
    device_pages: int = 0
    working_set: int = 0
    second: int = 0
    dense_tokens: int = 0
    means: int = 0
    scales: int = 0
    index_keys: int = 0

    @property
    def cache_device(self) -> int:
        """Device bytes of the layers that the cache manages itself."""
        blocks = self.kept if self.offloaded else self.blocks
        return (
            self.bounds
            + self.labels
            + self.means
            + self.scales
            + self.index_keys
            + self.recent
            + self.tables
            + blocks
            + self.device_pages
        )

    @property
    def cache_host(self) -> int:
        """Host bytes of the layers that the cache manages itself."""
        return self.blocks - self.kept if self.offloaded else 0

    @property
    def device_total(self) -> int:
        """Device bytes with our cache, including the prefill estimate."""
        return self.weights + self.cache_device + self.stock + self.prefill

    @property
    def dense_total(self) -> int:
        """Device bytes with transformers' own cache, including the prefill estimate."""
        return self.weights + self.dense_kv + self.prefill


def model_shape(config, dtype: torch.dtype | None = None) -> ModelShape:
    """Determine a model's sizes by running two tokens through it on the meta device: no weights, no memory.

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
        indexed = in_blocks(text) or any(hasattr(layer, "update_indexer") for layer in cache.layers)
        if indexed:
            check_options(TokenConfig(), text)
            for module in filter(is_pooled, model.modules()):
                replace_forward(module, _keeps_keys)
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
            model(input_ids=ids, **over(model, cache), use_cache=True)
        modules = [module for module in model.modules() if is_mla(module)]
        if indexed and modules:
            layers = tuple(_latent_shape(*pair) for pair in zip(cache.layers, modules, strict=True))
        else:
            layers = tuple(_layer_shape(layer, bool(modules)) for layer in cache.layers)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot plan for a {config.model_type} model: {reason}") from error
    return ModelShape(
        model_type=config.model_type,
        dtype=dtype,
        weights=sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers()),
        layers=layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        query_heads=first_layer(text).num_attention_heads,
        notes=tuple(notes),
        topk=chosen_tokens(text) if indexed else 0,
    )


def _keeps_keys(indexer, hidden, tables, mask, cache) -> torch.Tensor:
    """In place of a ``forward`` that reads values."""
    cache.update_indexer(hidden.new_empty(*hidden.shape[:2], indexer.index_head_dim), indexer.layer_idx)
    return mask.new_ones((), dtype=torch.bool)


def _latent_shape(layer, module) -> LayerShape:
    """A layer whose model chooses its tokens. ``layer``: transformers' own, after a pass, which may expand."""
    if not hasattr(layer, "update_indexer"):  # sliding
        return _layer_shape(layer, True)
    stock = sum(held.shape[1] * held.shape[3] for held in (layer.keys, layer.values)) + _index_dim(layer)
    sizes = {"key_dim": module.kv_lora_rank, "value_dim": module.qk_rope_head_dim}
    return LayerShape("full", 1, **sizes, latent=True, index_dim=_index_dim(layer), stock=stock)


def _index_dim(layer) -> int:
    keys = getattr(layer, "indexer_keys", getattr(layer, "idx_keys", None))
    return 0 if keys is None else keys.shape[-1]


def _layer_shape(layer, latent: bool) -> LayerShape:
    from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

    indexed = type(layer) is DynamicIndexedLayer or hasattr(layer, "update_index")
    if (indexed or type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)) and layer.keys is not None:
        _, heads, _, key_dim = layer.keys.shape
        value_dim = layer.values.shape[3]
        if type(layer) is DynamicLayer:
            return LayerShape("full", heads, key_dim, value_dim, latent=latent)
        if indexed:
            own, stock = _index_dim(layer), heads * (key_dim + value_dim) + _index_dim(layer)
            return LayerShape("full", heads, key_dim, value_dim, index_dim=own, stock=stock)
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
    config: SparseConfig,
    offload: OffloadConfig | None,
    *,
    context: int,
    batch: int = 1,
    device: torch.device | None = None,
) -> MemoryPlan:
    """Bytes that ``SparseCache(config, offload)`` will take, and transformers' ``DynamicCache``.

    Args:
        model: from :func:`model_shape`.
        config, offload: as for the cache.
        context: tokens per row, prompt and answer together.
        batch: rows.
        device: the target GPU, if it is present; only ``dense_tokens`` depends on it.

    Raises:
        ValueError: ``context`` or ``batch`` is not positive, or exceeds ``config.max_length``; or the model chooses
            its tokens itself, and ``config`` would, too.
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if config.max_length is not None and config.max_length < context:
        raise ValueError(f"max_length={config.max_length} is less than the context of {context} tokens")
    shared = method_of(config).shared
    offload = shared.place(config, offload)
    item, size = model.dtype.itemsize, config.block_size
    sparse: list[LayerShape] = []
    dense: list[LayerShape] = []
    for index, layer in enumerate(model.layers):
        if layer.kind == "full":
            chosen = layer.latent or layer.index_dim if model.topk else index >= config.dense_layers
            (sparse if chosen else dense).append(layer)
    request = Request(config, offload, tuple(sparse), context, batch, item, model.query_heads)
    if model.topk and chooses(config):
        raise ValueError(
            f"a {model.model_type} model selects tokens by itself, by a trained indexer: plan with the default cache, "
            "without options that choose"
        )
    memory = needs(request, model.topk) if model.topk else shared.needs(request)
    block_capacity, recent_tokens = request.block_capacity, request.recent_tokens
    at_home = offload is not None and offload.keep_dense
    kept = block_capacity * size * sum(map(request.token if at_home else request.stored, dense))
    scales = 0
    if offload is not None and offload.kv_dtype is not None:
        if any(layer.latent for layer in model.layers):
            raise ValueError(f"kv_dtype={offload.kv_dtype!r} is not for latents (MLA), which this model caches")
        coded = sparse if at_home else dense + sparse
        scales = 2 * block_capacity * sum(layer.heads * (2 * layer.key_dim + size) for layer in coded)  # float16
    recent = batch * recent_tokens * sum(map(request.token, dense + sparse))
    others = [layer for layer in model.layers if layer.kind != "full"]
    stock = batch * sum(layer.state + min(layer.window, context) * request.token(layer) for layer in others)
    dense_kv = stock + batch * context * sum(layer.stock * item or request.token(layer) for layer in dense + sparse)

    # A layer holds a few copies of the hidden states, and the MLP's gate, up and product, at the same time.
    prefill = batch * context * (4 * model.hidden + 3 * model.intermediate) * item
    if model.topk:  # the mask that an indexer reads
        prefill += batch * context * context
    return MemoryPlan(
        model=model,
        context=context,
        batch=batch,
        offloaded=offload is not None,
        weights=model.weights,
        dense_kv=dense_kv,
        blocks=kept + memory.blocks,
        bounds=memory.bounds,
        labels=memory.labels,
        means=memory.means,
        recent=recent,
        tables=request.table_bytes + memory.tables,
        stock=stock,
        prefill=prefill,
        kept=kept if at_home else 0,
        scales=scales,
        index_keys=memory.index_keys,
        device_pages=memory.device_pages,
        working_set=memory.working_set,
        second=memory.second,
        dense_tokens=_dense_tokens(model, config, offload, batch, device or torch.device("cpu")),
    )


def _dense_tokens(
    model: ModelShape, config: SparseConfig, offload: OffloadConfig | None, batch: int, device: torch.device
) -> int:
    """Most tokens a row with which every sparse layer still attends densely, recent ones included; 0 for none."""
    layers = [layer for layer in model.layers[config.dense_layers :] if layer.kind == "full" and not model.topk]
    offloaded, item = offload is not None, model.dtype.itemsize
    name = method_of(config).shared.crossover(config)
    in_blocks = [
        dense_tokens(
            config.dense_below,
            f"{name}:mla" if layer.latent else name,
            device,
            offloaded,
            batch,
            layer.heads * layer.width * item,
            group=model.query_heads // layer.heads,
        )
        // config.block_size
        for layer in layers
    ]
    least = min(in_blocks, default=0)
    # The step with this many columns is the last one before the next block is sealed and counts.
    return (least + 1) * config.block_size + config.window + config.max_draft if least else 0
