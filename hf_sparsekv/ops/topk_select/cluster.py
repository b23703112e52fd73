"""Selection from long rows by clusters of thread blocks: ``cluster.cu`` says how.

Its blocks and threads were measured on an H200 with 8 to 256 lists (rows times KV heads) of 2k to 256k entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _cuda, _device
from .config import Config

THREADS = 512
MOST, LEAST = 8, 2  # blocks that share a list; eight are the most that every GPU with clusters runs
BLOCKS = 132  # in all, to aim for on an H200: one for each processor
MOST_LISTS = 65535  # that a grid has room for
SHORTEST, SHORT = 4096, 64  # it pays for more entries than these, and than so many for each list
LOG_BINS, LIST = 8, 128  # bins of a pass, and scores of a bin that a block hands out
MARGIN = 1.0  # deviations by which the first guess of a threshold lies below the score that it is of


def serves(scores: Tensor, config: Config) -> bool:
    """Whether :func:`select_clusters` selects from ``scores [batch, H, n]``."""
    return _kernel(scores, config)[0] is not None


def select_clusters(scores, block_ids, k, block_size, rows, tokens, out, config) -> bool:
    """Select as ``triton.block_select`` and ``token_select`` do, where that serves: whether it has."""
    kernel, blocks = _kernel(scores, config)
    if kernel is None or any(t is not None and t.dtype != torch.int32 for t in (block_ids, out)):
        return False
    batch, heads, n = scores.shape
    of = (None, 0, 0) if block_ids is None else (block_ids, *block_ids.stride()[:2])
    args = scores, *scores.stride()[:2], *of, out, *out.stride()[:2], rows, heads, n, tokens, k, block_size or 1
    kernel.launch((blocks, batch * heads), THREADS, _held(n, blocks), scores, *args)
    return True


def _kernel(scores: Tensor, config: Config) -> tuple[_cuda.Kernel | None, int]:
    """The kernel, and how many blocks share a list; ``None`` where it cannot run, or does not pay."""
    batch, heads, n = scores.shape
    blocks = _blocks(batch * heads, n, scores, config) if scores.is_cuda and scores.dtype == torch.float32 else 0
    if not blocks:
        return None, 0
    # Many lists want two blocks on a processor, which halves their registers; long ones have room for one.
    two = blocks == LEAST and 2 * _held(n, blocks) <= _device.shared_memory(scores)
    defined = {"THREADS": THREADS, "CLUSTER": blocks, "RESIDENT": 1 + two}
    defined |= {"LOG_BINS": LOG_BINS, "LIST": LIST, "MARGIN": MARGIN}
    kernel = _cuda.load(scores, __package__, "cluster.cu", "topk_select_cluster_kernel", **defined)
    return kernel if kernel is not None and _held(n, blocks) <= kernel.shared_bytes else None, blocks


def _blocks(lists: int, n: int, where: Tensor, config: Config) -> int:
    """A power of two; 0 where clusters do not pay, or there are no lists, or too many."""
    if not 0 < lists <= MOST_LISTS:
        return 0
    if config.clusters is not None:
        return int(config.clusters)
    if n <= SHORTEST or n < SHORT * lists:
        return 0
    each = min(_device.programs(BLOCKS, where) // lists, n // THREADS)
    return max(LEAST, min(MOST, 1 << max(each, 1).bit_length() - 1))


def _held(n: int, blocks: int) -> int:
    """Bytes of a block's part of ``n`` entries, as many times 32 for each warp: a score in 4, where it was in 2."""
    return 6 * THREADS * -(-n // (blocks * THREADS))
