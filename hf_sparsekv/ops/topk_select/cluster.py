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
STRETCH = 2 * THREADS  # entries that a block has at least, and a multiple of them: 64 a warp
SHORTEST, SHORT = 4096, 64  # entries from which on it pays, and for each list, if there are many
LOG_BINS, LIST = 8, 128  # bins of a pass, and scores of a bin that a block hands out
MARGIN = 1.0  # deviations by which the first guess of a threshold lies below the score that it is of


def blocks_of(lists: int, n: int, where: Tensor, config: Config) -> int:
    """Blocks that share each of ``lists`` lists of ``n`` entries, a power of two; 0 where clusters do not pay."""
    if config.clusters is False or not where.is_cuda:
        return 0
    if config.clusters:
        return config.clusters
    if n < max(SHORTEST, SHORT * lists):
        return 0
    each = min(_device.programs(BLOCKS, where) // lists, n // STRETCH)
    return max(LEAST, min(MOST, 1 << max(each, 1).bit_length() - 1))


def held(n: int, blocks: int) -> int:
    """Bytes of a block's part of ``n`` entries: a score in 4 bytes, and where it was in 2."""
    return 6 * STRETCH * -(-n // (blocks * STRETCH))


def load(where: Tensor, name: str, n: int, blocks: int, **defined: float) -> _cuda.Kernel | None:
    """A kernel of ``cluster.cu`` for ``n`` entries; ``None`` where it cannot run."""
    if not blocks:
        return None
    defined |= {"THREADS": THREADS, "CLUSTER": blocks, "LOG_BINS": LOG_BINS, "LIST": LIST, "MARGIN": MARGIN}
    kernel = _cuda.load(where, __package__, "cluster.cu", name, **defined)
    return kernel if kernel is not None and held(n, blocks) <= kernel.shared_bytes else None


def serves(scores: Tensor, config: Config) -> bool:
    """Whether :func:`select_clusters` selects from ``scores [batch, H, n]``."""
    return _kernel(scores, config)[0] is not None


def _kernel(scores: Tensor, config: Config) -> tuple[_cuda.Kernel | None, int]:
    batch, heads, n = scores.shape
    blocks = blocks_of(batch * heads, n, scores, config)
    return load(scores, "topk_select_cluster_kernel", n, blocks), blocks


def select_clusters(scores, block_ids, k, block_size, rows, tokens, out, config) -> bool:
    """Select, if it serves, as ``triton.block_select`` and ``token_select`` do: whether it has."""
    kernel, blocks = _kernel(scores, config)
    if kernel is None:
        return False
    batch, heads, n = scores.shape
    of = (None, 0, 0) if block_ids is None else (block_ids, *block_ids.stride()[:2])
    args = scores, *scores.stride()[:2], *of, out, *out.stride()[:2], rows, heads, n, tokens, k, block_size or 1
    kernel.launch((blocks, batch * heads), THREADS, held(n, blocks), scores, *args)
    return True


MOST_HEADS, WIDTHS = 16, (16, 32)  # of a group, and bytes of a token's codes, that labels are scored with


def select_by_labels(q, codes, qparams, channels, rows, block_table, k, reduce, sinks, out, config) -> Tensor | None:
    """Score and select in one launch, see ``label_select``; ``None`` where that does not serve."""
    batch, q_heads, _ = q.shape
    heads, size, width = codes.shape[1:]
    n, group = block_table.shape[1] * size, q_heads // heads
    whole = qparams is not None and q.dtype in (torch.float16, torch.bfloat16) and width in WIDTHS
    if not whole or group > MOST_HEADS or size < 16 or size & (size - 1) or not k:
        return None
    pairs = qparams.view(torch.int32)  # scale and zero point are read as one word
    places = (codes.data_ptr(), *codes.stride()[:2], pairs.data_ptr())
    if codes.stride()[2:] != (width, 1) or pairs.stride()[2:] != (1, 1) or any(place % 4 for place in places):
        return None
    blocks = blocks_of(batch * heads, n, q, config)
    defined = {
        "WIDTH": width,
        "GROUP": group,
        "MEAN": int(reduce == "mean"),
        "BFLOAT16": int(q.dtype == torch.bfloat16),
    }
    kernel = load(q, "label_select_cluster_kernel", n, blocks, **defined)
    if kernel is None:
        return None
    if out is None:
        out = torch.empty(batch, heads, k, dtype=torch.int32, device=q.device)
    args = q, *q.stride(), codes, *codes.stride()[:2], pairs, *pairs.stride()[:2], channels, *channels.stride()[:2]
    args += block_table, block_table.stride(0), out, *out.stride()[:2], rows, heads, n, k, size.bit_length() - 1, sinks
    kernel.launch((blocks, batch * heads), THREADS, held(n, blocks), q, *args)
    return out
