"""Number of rows that an engine can decode at a time, by their length, from a model's sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config import OffloadConfig, SparseConfig
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
