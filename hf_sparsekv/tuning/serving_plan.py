"""Number of rows that an engine can decode at a time, by their length, from a model's sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .plan import MemoryPlan, ModelShape, plan_memory

CHUNK = 16_384  # tokens of a prompt that are read at once (ServingConfig.chunk)
MOST = 4096  # rows; larger numbers are not tried


@dataclass(frozen=True)
class RowsThatFit:
    """Rows of ``context`` tokens that fit at a time.

    Args:
        context: tokens of each row, prompt and answer.
        dense: rows with full attention, all keys and values on the GPU.
        sparse: rows with all keys and values and the selection's index on the GPU.
        offloaded: rows with full blocks in host memory and the working set of each row on the GPU.
        bound_by: the memory that limits ``offloaded``, ``"GPU"`` or ``"host"``.
    """

    context: int
    dense: int
    sparse: int
    offloaded: int
    bound_by: str


def rows_that_fit(
    model: ModelShape, config: SparseConfig, offload: OffloadConfig | None, *, context: int, gpu: int, host: int
) -> RowsThatFit:
    """Rows of ``context`` tokens that fit the memory, while a prompt is read in chunks.

    Args:
        model: from :func:`.plan.model_shape`.
        config, offload: as for the cache; ``offload`` None: its defaults.
        gpu, host: bytes available.

    Raises:
        ValueError: ``context`` is not positive.
    """
    read = plan_memory(model, config, None, context=min(context, CHUNK)).prefill
    if model.topk and context > CHUNK:  # the mask of a chunk has the columns of those before
        read += CHUNK * (context - CHUNK)
    offload = OffloadConfig() if offload is None else offload

    def most(need: Callable[[MemoryPlan], int], have: int, place: OffloadConfig | None) -> int:
        low, high = 0, MOST
        while low < high:
            rows = (low + high + 1) // 2
            if need(plan_memory(model, config, place, context=context, batch=rows)) <= have:
                low = rows
            else:
                high = rows - 1
        return low

    room = gpu - model.weights - read
    on_gpu = most(lambda p: p.cache_device + p.stock - p.device_pages + p.working_set, room, offload)
    in_host = most(lambda p: p.cache_host, host, offload)
    return RowsThatFit(
        context=context,
        dense=most(lambda p: p.dense_kv, room, None),
        sparse=most(lambda p: p.cache_device + p.stock, room, None),
        offloaded=min(on_gpu, in_host),
        bound_by="GPU" if on_gpu <= in_host else "host",
    )


@dataclass(frozen=True)
class Spreading:
    """A way to use several GPUs of a machine, and the rows that fit all of them together.

    Args:
        replicas: engines side by side.
        ranks: GPUs of each, over which its model is tensor parallel.
        fit: rows of all replicas.
    """

    replicas: int
    ranks: int
    fit: RowsThatFit


def share_of(model: ModelShape, ranks: int, table: int, vocabulary: int) -> ModelShape | None:
    """Sizes of a rank's share of a tensor parallel model; None: so many ranks cannot share it.

    Args:
        table: bytes of the input embeddings, which every rank has whole.
        vocabulary: number of tokens, which the output layer is divided by.
    """
    heads = [layer.heads for layer in model.layers if layer.heads]
    parts = (*heads, model.query_heads, model.intermediate, vocabulary)
    if any(part % ranks for part in parts) or any(layer.latent or layer.kind == "other" for layer in model.layers):
        return None
    return replace(
        model,
        weights=table + (model.weights - table) // ranks,
        layers=tuple(replace(layer, heads=layer.heads // ranks) for layer in model.layers),
        intermediate=model.intermediate // ranks,
        query_heads=model.query_heads // ranks,
    )


def spreadings(
    model: ModelShape,
    config: SparseConfig,
    offload: OffloadConfig | None,
    *,
    context: int,
    gpus: int,
    gpu: int,
    host: int,
    table: int,
    vocabulary: int,
) -> list[Spreading]:
    """All ways to use ``gpus`` GPUs alike, replicas first. Host memory is divided evenly.

    Args:
        gpu: bytes of each GPU.
        host: bytes of the machine's host memory for all of them.
        model, config, offload, context: as :func:`rows_that_fit`.
        table, vocabulary: as :func:`share_of`.
    """
    found = []
    for ranks in (n for n in range(1, gpus + 1) if gpus % n == 0):
        share = model if ranks == 1 else share_of(model, ranks, table, vocabulary)
        if share is not None:
            replicas = gpus // ranks
            one = rows_that_fit(share, config, offload, context=context, gpu=gpu, host=host // gpus)
            times = {name: replicas * getattr(one, name) for name in ("dense", "sparse", "offloaded")}
            found.append(Spreading(replicas, ranks, replace(one, **times)))
    return found
