"""Selection from long rows by clusters of thread blocks; ``cluster.cu`` explains the kernel.

Its blocks and threads were measured on an H200 with 8 to 256 lists (rows times KV heads) of 2k to 256k entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _cuda, _device
from .config import Config

THREADS = 512
LEAST = 2  # blocks that share a list
SHORTEST, SHORT = 4096, 64  # faster only above SHORTEST entries, and from SHORT * lists entries on
LOG_BINS, LIST = 8, 128  # bins of a pass, and scores of a bin that a block hands out
MARGIN = 1.0  # standard deviations by which the first guess of a threshold is below the estimated score


def serves(scores: Tensor, config: Config) -> bool:
    """Whether :func:`select_clusters` selects from ``scores [batch, H, n]``."""
    return _kernel(scores, config)[0] is not None


def select_clusters(scores, block_ids, k, block_size, rows, tokens, out, config) -> bool:
    """Select as ``triton.block_select`` and ``token_select`` do, if this kernel can; returns whether it has."""
    kernel, blocks = _kernel(scores, config)
    if kernel is None or any(t is not None and t.dtype != torch.int32 for t in (block_ids, out)):
        return False
    batch, heads, n = scores.shape
    of = (None, 0, 0) if block_ids is None else (block_ids, *block_ids.stride()[:2])
    args = scores, *scores.stride()[:2], *of, out, *out.stride()[:2], rows, heads, n, tokens, k, block_size or 1
    kernel.launch((blocks, batch * heads), THREADS, _held(n, blocks), scores, *args)
    return True


def _kernel(scores: Tensor, config: Config) -> tuple[_cuda.Kernel | None, int]:
    """The kernel, and how many blocks share a list; ``None`` where it cannot run, or is not faster."""
    batch, heads, n = scores.shape
    blocks = _blocks(batch * heads, n, scores, config) if scores.is_cuda and scores.dtype == torch.float32 else 0
    if not blocks:
        return None, 0
    # With many lists two blocks share an SM, which halves their registers; long lists have room for one only.
    two = blocks == LEAST and 2 * _held(n, blocks) <= _device.shared_memory(scores)
    defined = {"THREADS": THREADS, "CLUSTER": blocks, "RESIDENT": 1 + two}
    defined |= {"LOG_BINS": LOG_BINS, "LIST": LIST, "MARGIN": MARGIN}
    kernel = _cuda.load(scores, __package__, "cluster.cu", "topk_select_cluster_kernel", **defined)
    return kernel if kernel is not None and _held(n, blocks) <= kernel.shared_bytes else None, blocks


def _blocks(lists: int, n: int, where: Tensor, config: Config) -> int:
    """Blocks per list, a power of two; 0 where clusters are not faster, or there are no lists, or too many."""
    if not 0 < lists <= _device.MOST_LISTS:
        return 0
    if config.clusters is not None:
        return int(config.clusters)
    if n <= SHORTEST or n < SHORT * lists:
        return 0
    room = max(1, n // THREADS)  # blocks that have an entry for each thread
    return max(LEAST, min(_device.cluster_blocks(lists, where), 1 << room.bit_length() - 1))


def _held(n: int, blocks: int) -> int:
    """Bytes of a block's part of ``n`` entries, padded to 32 per warp: a score takes 4, its position 2."""
    return 6 * THREADS * -(-n // (blocks * THREADS))
