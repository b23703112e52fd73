"""FlashAttention 4 for prompts: exact ones, and sparse ones' chosen blocks.

The package ``flash-attn-4`` (Tri Dao and others) compiles its kernels for a GPU when they are first called, in 2 to 4 s
each. On a Hopper GPU they are faster than cuDNN's, need no plan and take a chunk with its past. They also take lists of
blocks, as torch's FlexAttention gives them, faster than :mod:`..ops.attention.block_attention`
(docs/speed.md).

It is called directly. Torch has a switch of its own (``activate_flash_attention_impl("FA4")``), but what torch 2.11 to
2.13 put behind it expects two results of a function that gives five in 4.0.0b36.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops._dispatch import require_dense_rows
from ..ops._prompts import BLOCK, TILE, blocks_of, tiles_of

TESTED = "4.0.0b36"
HOPPER = 9  # compute capability; on others its tiles do not fit our blocks
_TAKEN = {"softmax_scale", "causal", "mask_mod", "block_sparse_tensors", "out"}  # arguments of theirs that we give


class _Uses:
    """How many contexts are open, in all threads: an engine's reads prompts."""

    def __init__(self) -> None:
        self.lock, self.now = threading.Lock(), 0


_uses = _Uses()


@contextlib.contextmanager
def flash_attention_4() -> Iterator[None]:
    """Read prompts by FlashAttention 4 while the context is open, in all threads of the process.

    It takes heads of up to 256 channels (multiples of 8) in 16 bits, and sparse prompts without padding. Other prompts
    are read as without it, and so are exact ones that are captured (up to 2,048 tokens). Steps are not concerned.

    Raises:
        ImportError: ``flash-attn-4`` is not installed or does not work, or takes other arguments than ours.
        RuntimeError: torch sees no Hopper GPU.
    """
    check()
    with _uses.lock:
        _uses.now += 1
    try:
        yield
    finally:
        with _uses.lock:
            _uses.now -= 1


def check() -> None:
    """Raise, saying what to do, unless there is a FlashAttention 4 that we know, and a GPU for it."""
    if not installed("flash_attn.cute"):
        raise ImportError("FlashAttention 4 is not installed: pip install 'flash-attn-4[cu13]>=4.0.0b36'")
    try:
        taken = inspect.signature(_forward()).parameters
    except Exception as error:  # its compiler raises RuntimeError where it finds no CUDA libraries
        raise ImportError(f"flash-attn-4 is installed and cannot be imported: {error}") from error
    if missing := _TAKEN - taken.keys():
        raise ImportError(
            f"this release of flash-attn-4 has no {', '.join(sorted(missing))}: install {TESTED}, which was tested"
        )
    if HOPPER not in (torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())):
        raise RuntimeError("FlashAttention 4 is for Hopper GPUs (H100, H200) here, and torch sees none: leave it out")


def installed(module: str) -> bool:
    """Whether there is such a module, which may be one of a package."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package
        return False


def _forward() -> Callable[..., Any]:
    """``(query, key, value)``, each ``[batch, tokens, heads, D]``; queries are those of the last tokens."""
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd


def serves(query: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention 4 is in use, and takes these ``[batch, heads, tokens, D]``, with keys like the queries."""
    return (
        _uses.now > 0
        and query.is_cuda
        and takes(query.dtype, query.shape[3], value.shape[3])
        and torch.cuda.get_device_capability(query.device)[0] == HOPPER
    )


def takes(dtype: torch.dtype, dk: int, dv: int) -> bool:
    """Whether there are kernels for heads of ``dk`` and ``dv`` channels."""
    return dtype in (torch.bfloat16, torch.float16) and dk % 8 == dv % 8 == 0 and max(dk, dv) <= 256


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """As :func:`.parts.chunk_attention`: of the last ``q`` columns over all ``n``."""
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    _forward()(*(t.transpose(1, 2) for t in (query, key, value)), softmax_scale=scale, causal=True, out=out)
    return out.transpose(1, 2)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor, counts: Tensor, scale: float, past: int, out: Tensor
) -> Tensor:
    """As :func:`..ops.attention.block_attention.block_attention` defines it, without padding."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    require_dense_rows(query=query, key=key, value=value, ids=ids, out=out)
    end = past + query.shape[2]
    partial_counts, partial_ids = seen_in_part(counts, past, query.shape[2])
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=partial_counts,
        mask_block_idx=partial_ids,
        full_block_cnt=counts - partial_counts,  # lists ascend, so these come first
        full_block_idx=ids[..., : blocks_of(end)],
        block_size=(TILE, BLOCK),
    )
    rows = (t.transpose(1, 2) for t in (query, key[:, :, :end], value[:, :, :end]))
    options = {"mask_mod": causal_mask(), "block_sparse_tensors": blocks}
    _forward()(*rows, softmax_scale=scale, out=out.transpose(1, 2), **options)
    return out


def seen_in_part(counts: Tensor, past: int, rows: int) -> tuple[Tensor, Tensor]:
    """The blocks that a tile's last query sees and its first does not see whole: those at the end of a list.

    Args:
        counts: int32 ``[batch, Hq, tiles]``, of lists as ``block_attention`` takes them.
        past: the column of the first of ``rows`` queries.

    Returns:
        How many of each list they are, int32 ``[batch, Hq, tiles]``, and their ids, ``[batch, Hq, tiles, at most 3]``.
    """
    first = past + torch.arange(tiles_of(rows), device=counts.device) * TILE
    own = (first + 1) // BLOCK
    many = ((first + TILE).clamp_max(past + rows) - 1) // BLOCK - own + 1
    most = min(TILE // BLOCK + 1, blocks_of(past + rows))  # it takes no more ids than there are blocks
    ids = (own[:, None] + torch.arange(most, device=counts.device)).int().expand(*counts.shape, most).contiguous()
    return counts.minimum(many).int(), ids


@cache
def causal_mask() -> Any:
    """A query sees the keys of a partial block up to its own column. Queries are those of the last columns."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def causal(batch, head, query, key, seqlen_info, aux_tensors):
        past = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, cutlass.Int32)
        return key <= query + past

    return causal
