"""Selection from long rows by clusters of thread blocks: ``cluster.cu`` says how.

Its blocks and threads were measured on an H200 with 8 to 256 lists (rows times KV heads) of 2k to 256k entries.
"""

from __future__ import annotations

from .. import _cuda, _device
from .config import Config

THREADS = 512
MOST, LEAST = 8, 2  # blocks that share a list; eight are the most that every GPU with clusters runs
BLOCKS = 132  # in all, to aim for on an H200: one for each processor
SHORTEST, SHORT = 4096, 64  # entries from which on it pays, and for each list, if there are many
LOG_BINS, LIST = 8, 128  # bins of a pass, and scores of a bin that a block hands out
MARGIN = 0.7  # deviations by which the first guess of a threshold lies below the score that it is of


def load(scores, config: Config) -> _cuda.Kernel | None:
    """The kernel for rows of ``scores [batch, H, n]``; ``None`` where it does not serve or pay."""
    batch, heads, n = scores.shape
    lists = batch * heads
    if config.clusters is False or not scores.is_cuda:
        return None
    if config.clusters is None and n < max(SHORTEST, SHORT * lists):
        return None
    defined = {"THREADS": THREADS, "CLUSTER": _blocks(scores, config), "LOG_BINS": LOG_BINS, "LIST": LIST}
    name = "topk_select_cluster_kernel"
    kernel = _cuda.load(scores, __package__, "cluster.cu", name, MARGIN=MARGIN, **defined)
    return kernel if kernel is not None and _held(scores, config) <= kernel.shared_bytes else None


def _blocks(scores, config: Config) -> int:
    """Blocks that share a list: a power of two."""
    if config.clusters:
        return config.clusters
    each = _device.programs(BLOCKS, scores) // (scores.shape[0] * scores.shape[1])
    return max(LEAST, min(MOST, 1 << max(each, 1).bit_length() - 1))


def _held(scores, config: Config) -> int:
    """Bytes of a block's part of a row: of each warp as many times 32 scores, in 4 bytes, and where each was, in 2."""
    return 6 * THREADS * -(-scores.shape[2] // (_blocks(scores, config) * THREADS))


def select_clusters(kernel, scores, blocks, out, rows, k, tokens, block_size, config):
    """Launch ``kernel``, see :func:`load`; the rest as for the other selections."""
    batch, heads, n = scores.shape
    of = (None, 0, 0) if blocks is None else (blocks, blocks.stride(0), blocks.stride(1))
    args = scores, scores.stride(0), scores.stride(1), *of, out, out.stride(0), out.stride(1), rows
    grid = _blocks(scores, config), batch * heads
    args += heads, n, tokens, k, block_size or 1
    kernel.launch(grid, THREADS, _held(scores, config), scores, *args)
