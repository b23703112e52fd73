"""Opens an engine: makes the model sparse, creates rows, reserves memory for all requests, compiles and captures.

All ranks of a tensor parallel model open in the same way, with as many blocks as fit on every rank.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..attention.flash_4 import flash_attention_4, takes
from ..attention.rotary import Switch, fixed_rotary
from ..cache import SparseCache
from ..cache_name import over
from ..checking.exact import Exact
from ..cuda_graph.optimize import runner_of
from ..cuda_graph.prompts import EAGER, PIECES, QUICK, SIZES
from ..generating import settings_of, sparse
from ..layers.sparse_prompt import least_new
from ..offload.host_limit import DEFAULT_SHARE, host_memory_limit
from ..ranks import Ranks, ranks_of
from ..row_batch import RowBatch, positions
from ..row_batch.sharing import begin_with
from ..row_batch.verifying import take_back, verify
from ..row_trial import why_not
from ..tensors import no_autocast
from ..transformers_compat import check_exact, has_indexer
from .first_prompt import compile_sparse_prompts, shapes
from .in_flight import MOST
from .prefix import Channels

SHARE = 0.9  # share of the free memory at the start that keys and values get; the rest is for prompts
CPU_SHARE = 0.5


@dataclass(frozen=True)
class Opened:
    """The parts of an open engine.

    Args:
        serving: limits and scheduling.
        cache: the cache of all requests.
        rows: the rows of the cache, all free.
        blocks: most blocks of all requests together.
        max_length: most tokens of a prompt and its answer: as asked for, or less if memory holds less.
        limit: which of these two limits it is, for messages.
        vocabulary: logits of a row.
    """

    serving: ServingConfig
    cache: SparseCache
    rows: RowBatch
    blocks: int
    max_length: int
    limit: str
    vocabulary: int


@no_autocast  # an engine's threads have none either
def opened(
    model: PreTrainedModel,
    config: SparseConfig | str | None,
    offload: OffloadConfig | bool | None,
    serving: ServingConfig | None,
    stack: contextlib.ExitStack,
) -> Opened:
    """Prepare ``model`` until ``stack`` is closed. Arguments and errors are those of :class:`.Engine`."""
    serving = ServingConfig() if serving is None else serving
    if not isinstance(serving, ServingConfig):
        raise TypeError(f"serving must be a ServingConfig or None, got {type(serving).__name__}")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"an engine serves models of transformers, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on {', '.join(sorted(map(str, devices)))}: an engine serves a model that "
            "is on one device; run one engine a GPU for more requests"
        )
    settings = settings_of(config, offload)
    ranks = ranks_of(model)
    if ranks is not None and settings.offload is not None and settings.offload.max_host_bytes is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))  # ranks that share this machine's memory
        limit = int(DEFAULT_SHARE * host_memory_limit() / here)
        settings = replace(settings, offload=replace(settings.offload, max_host_bytes=limit))
    text = model.config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    context = None if context is not None and context < 1 else context  # XLNet's is -1: no limit
    max_length = serving.max_length or context
    if max_length is None:
        raise ValueError("the model's configuration names no context: give ServingConfig(max_length=...)")
    if context is not None and max_length > context:
        raise ValueError(f"max_length={max_length} is over the model's context of {context} tokens")
    if serving.flash_attention_4:
        stack.enter_context(flash_attention_4())
    was_training = model.training
    _say_what_is_fixed(model, stack.enter_context(fixed_rotary(model, max_length)), max_length)
    stack.enter_context(sparse(model, settings.config, offload=settings.offload))
    model.eval()
    stack.callback(model.train, was_training)
    cache = settings.cache(model)
    if serving.exact:
        _check_exact(cache, ranks)
        check_exact(model.config)
    if cache.config.prefill is not None:
        _check_prompts(cache.config, serving, max_length)
    rows = cache.rows(serving.max_rows, max_length)
    stack.callback(cache.reset)
    row, vocabulary = first_row(model, rows, max_length)
    if serving.flash_attention_4 and not any(takes(one.dtype, one.dk, one.dv) for one in shapes(model, cache)):
        raise ValueError(
            "no prompt of this model could be read by FlashAttention 4, which takes heads of up to 256 channels "
            "(multiples of 8) in 16 bits: leave flash_attention_4 out"
        )
    why = why_not(model, max_length)
    if ranks is not None and ranks.any(why is not None):  # all ranks or none
        why = why or "another rank of the model cannot serve it, and says why"
    if why is not None:
        raise ValueError(why)
    if has_indexer(model.config) and serving.prefix_cache:
        warnings.warn(
            "requests of this model share no prefixes: the keys of its indexer are in no block, so each prompt is read "
            "whole. Give ServingConfig(prefix_cache=False) if that is known",
            stacklevel=4,
        )
    beside = -(-rows.calibration_tokens // cache.config.block_size)
    blocks = reserve(model, cache, serving, max_length, ranks, beside)
    if runner_of(model) is None:
        rows.leave(row)
    else:
        launch_once(model, rows, row)
        capture_all(model, rows, row, serving.exact)
        capture_prompts(model, rows)
    held = (blocks - 1) * cache.config.block_size
    compile_sparse_prompts(model, cache, serving.chunk, min(max_length, held))
    limit = "the memory holds" if held < max_length else "max_length allows"
    return Opened(serving, cache, rows, blocks, min(max_length, held), limit, vocabulary)


def _check_prompts(config: SparseConfig, serving: ServingConfig, max_length: int) -> None:
    """Raise ``ValueError`` if prompts are read in pieces too short to be sparse; warn if all prompts are too short."""
    least = least_new(config)
    if serving.chunk < least:
        raise ValueError(
            f"prefill={config.prefill} asks for sparse prompts, but chunk={serving.chunk} reads pieces of fewer than "
            f"{least} tokens, which are exact: give ServingConfig(chunk=8192) or more, or leave prefill out"
        )
    if max_length <= max(config.prefill_below, least):
        warnings.warn(
            f"no prompt of this engine is sparse: they have fewer than max_length={max_length} tokens, and are exact "
            f"up to prefill_below={config.prefill_below}. Leave prefill out, or give another of these",
            stacklevel=5,
        )


def _check_exact(cache: SparseCache, ranks: Ranks | None) -> None:
    """Raise ``ValueError`` if requests cannot be exact."""
    Exact().check(cache)
    if len(cache.sparse_layers) < len(cache.layers):
        raise ValueError(
            "exact=True of an engine is for models whose layers all attend to their whole past: sliding windows and "
            "states of rows cannot take drafts back"
        )
    if ranks is not None:
        raise ValueError("exact=True is not for tensor parallel models: each rank would draft by its own times")
    if cache.foresight is not None:
        raise ValueError(
            "exact=True of an engine is not for methods that expect queries of the layer before: rows that take drafts "
            "back would leave them without. Use TokenConfig() or ProgressiveConfig()"
        )
    if cache.config.max_draft < 1:
        raise ValueError("exact=True needs room for drafts: give max_draft=1 or more")


def _say_what_is_fixed(model: PreTrainedModel, fixed: list[Switch], max_length: int) -> None:
    """Warn if short requests get other rotary factors than in ``generate()``."""
    if fixed:
        tokens = max(one.tokens for one in fixed)
        warnings.warn(
            f"the rotary factors of {type(model).__name__} (rope_type={fixed[0].kind!r}) depend on the context: this "
            f"engine uses those of max_length={max_length} for all requests. generate() uses others up to {tokens} "
            f"tokens: give ServingConfig(max_length={tokens}) if no request needs more",
            stacklevel=4,
        )


def reserve(
    model: PreTrainedModel,
    cache: SparseCache,
    serving: ServingConfig,
    max_length: int,
    ranks: Ranks | None,
    beside: int = 0,
) -> int:
    """Reserve memory for all requests in the batch once, because pools that grow would move. Returns the blocks.

    ``beside``: additional blocks that no request may use. Calibrating a row (:meth:`Work.calibrate`) needs them.

    Raises:
        ValueError: there is not enough memory, on some rank.
    """
    pools, size = list(cache.block_pools.values()), cache.config.block_size
    most = serving.max_rows * (-(-max_length // size) + 1)
    device = sum(pool.nbytes()[0] / pool.capacity for pool in pools)
    host = sum(pool.nbytes()[1] / pool.capacity for pool in pools)
    if model.device.type == "cuda":
        free = SHARE * torch.cuda.mem_get_info(model.device)[0]
        if serving.prefix_cache and cache.row_batch is not None:
            free -= cache.row_batch.more_bytes  # as many snapshots as rows
    else:
        free = CPU_SHARE * psutil.virtual_memory().available / (1 if ranks is None else ranks.size)
        device += host
    fits = [int(free / device)] if device else []  # offloaded blocks may have nothing on the device
    if host:
        fits.append(int(0.98 * (cache.budget.limit - cache.budget.used) / host))
    if ranks is not None:
        fits = ranks.least(fits)
    fits = [blocks - beside for blocks in fits]
    blocks = min(most, *fits)
    if serving.max_tokens is not None:
        asked = -(-serving.max_tokens // size) + serving.max_rows
        if asked > min(fits):
            raise ValueError(
                f"max_tokens={serving.max_tokens} asks for {asked} blocks of {size} tokens, {min(fits)} fit "
                "the memory that is free: ask for fewer, offload, or free some"
            )
        blocks = min(most, asked)
    if blocks < 2:
        raise ValueError("no memory is free for keys and values: use a smaller model, or offload")
    for pool in pools:
        pool.reserve(blocks + beside)
    return blocks


def first_row(model: PreTrainedModel, rows: RowBatch, max_length: int) -> tuple[int, int]:
    """Create the layers' memory with a row of a few full blocks. Returns the row and the number of logits.

    Raises:
        ValueError: the model does not support continuous batching.
    """
    config = rows.cache.config
    # Leaves room for one step of each width: see capture_all().
    length = max(1, min(config.window + config.max_draft + 2 * config.block_size, max_length - len(rows.widths)))
    ids = _some_ids(model, length)
    first = rows.prefill(model, ids)
    return rows.join(first), first.logits.shape[-1]


def _some_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    return torch.arange(length, device=model.device)[None] % model.get_input_embeddings().num_embeddings


def launch_once(model: PreTrainedModel, rows: RowBatch, row: int) -> None:
    """Launch what requests do beside steps and short prompts, so that none waits for a compiler; ``row`` stays.

    The second piece of a prompt reads full blocks back, a row is calibrated again, and working sets are counted. Blocks
    that do not follow each other, as those of requests that left do, go to host memory by a kernel.
    """
    config = rows.cache.config
    length = max(config.window + config.max_draft + 2 * config.block_size, rows.calibration_tokens)
    length = min(length, rows.max_length)
    ids = _some_ids(model, length)
    read = rows.prefill(model, ids, max(3, length - config.block_size))
    try:
        if rows.calibration_tokens:
            rows.calibrate(row, read)
    finally:
        rows.drop(read)
    rows.working_sets()
    for layer in rows.cache.sparse_layers:
        layer.store.pool.launch_once()


def capture_all(model: PreTrainedModel, rows: RowBatch, row: int, exact: bool = False) -> None:
    """Capture every kind of step in every width, so that no request waits for a capture; ``row`` leaves.

    There are three kinds of steps: dense because the context is short, dense because that is as fast, and sparse. Long
    contexts are made by repeating one block. They leave room for one step of each width.

    ``exact``: verifications too, and steps that attend to everything.
    """
    config, blocks, channels = rows.cache.config, rows.blocks(row), rows.channels(row)
    budget = config.budget // config.block_size
    most = (rows.max_length - len(rows.widths)) // config.block_size
    lengths = sorted({min(budget + 2, most), most}) if len(blocks) else ()
    longer = [begin_with(rows.cache, np.repeat(blocks[:1], n), channels, rows.drop) for n in lengths]
    for cache in longer:
        rows.adopt(cache)
    if len(blocks) and rows.cache.offload_config is None and not (rows.alike_tokens is None or rows.keeps_more):
        capture_pieces(model, rows, np.repeat(blocks[:1], 2), channels)
    _all_widths(model, rows, row, exact)
    for cache in longer:
        _all_widths(model, rows, rows.join(cache))


def capture_prompts(model: PreTrainedModel, rows: RowBatch) -> None:
    """Capture the prompts that are read between two steps, so that no request waits for a capture."""
    for size in SIZES:
        if size > min(QUICK, rows.max_length):
            break
        ids = torch.zeros(1, size, dtype=torch.long, device=model.device)
        for _ in range(EAGER + 1):
            rows.drop(rows.prefill(model, ids))


@torch.no_grad()
def capture_pieces(model: PreTrainedModel, rows: RowBatch, blocks: np.ndarray, channels: Channels) -> None:
    """Capture the prompt pieces that follow shared full blocks, so that no request waits for a capture."""
    past = len(blocks) * rows.cache.config.block_size
    for size in PIECES:
        if past + size > rows.max_length:
            break
        ids = torch.zeros(1, size, dtype=torch.long, device=model.device)
        for _ in range(EAGER + 1):
            cache = rows.begin(blocks, channels)
            try:
                where = positions(past, past + size, model.device)
                model(input_ids=ids, position_ids=where, **over(model, cache), use_cache=True, logits_to_keep=1)
            finally:
                rows.drop(cache)


def _all_widths(model: PreTrainedModel, rows: RowBatch, row: int, exact: bool = False) -> None:
    """Capture steps of each width with copies of ``row``. All rows leave."""
    tokens = torch.zeros(rows.max_rows, dtype=torch.long, device=model.device)
    while len(rows.rows) < rows.max_rows:
        rows.fork(row)
    for last in reversed(range(rows.max_rows)):
        if last + 1 == rows.width:
            if exact:
                _exact_passes(model, rows, tokens)
            rows.step(model, tokens)
        rows.leave(last)


def _exact_passes(model: PreTrainedModel, rows: RowBatch, tokens: torch.Tensor) -> None:
    """Capture verifications, and a step that attends to everything. The rows keep their tokens."""
    before = {row: rows.lengths[row] for row in rows.active}
    counts = [int(row in before) for row in range(rows.max_rows)]
    for n in sorted({min(n, rows.cache.config.max_draft + 1) for n in (4, MOST + 1)}):
        verify(rows, model, tokens[:, None].repeat(1, n), counts)
        take_back(rows, before)
    rows.step(model, tokens, exactly=True)
    take_back(rows, before)
