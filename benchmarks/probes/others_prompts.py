"""Attention to chosen blocks by others' kernels: cuDNN's three, FlashAttention 4, and 3 as vLLM builds it.

Apart from the probe because their packages are optional: each is imported when it is asked for. cuDNN's kernels have no
causal mask beside a list of blocks. So they get blocks that all queries of a tile see whole, and ours gets the same.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_sparsekv.attention.flash_4 import causal_mask, installed
from hf_sparsekv.ops._prompts import BLOCK, TILE

Run = Callable[[], Tensor]
SPLITS = (1, 2)  # of a list, for keys that do not fit into the L2 cache


def _vllm() -> None:
    if os.environ["VLLM"] not in sys.path:
        sys.path.append(os.environ["VLLM"])


def flash_3(query: Tensor, key: Tensor, value: Tensor) -> Run:
    """Dense causal attention of one ragged row; the variable VLLM names the folder that has vLLM 0.26."""
    _vllm()
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    rows = [t[0].transpose(0, 1) for t in (query, key, value)]
    q, n = query.shape[2], key.shape[2]
    at = [torch.tensor([0, length], dtype=torch.int32, device=query.device) for length in (q, n)]
    options = {"max_seqlen_q": q, "cu_seqlens_q": at[0], "max_seqlen_k": n, "cu_seqlens_k": at[1]}
    return lambda: flash_attn_varlen_func(*rows, **options, causal=True, fa_version=3).transpose(0, 1)[None]


def flash_4(query: Tensor, key: Tensor, value: Tensor) -> Run:
    """Dense causal attention of the last queries."""
    from flash_attn.cute.interface import _flash_attn_fwd

    rows = [t.transpose(1, 2) for t in (query, key, value)]
    return lambda: _flash_attn_fwd(*rows, causal=True)[0].transpose(1, 2)


def whole_blocks(ids: Tensor, counts: Tensor, n: int, past: int, keys: int) -> Tensor:
    """Those of the listed blocks that a tile's first query sees whole, bool ``[Hq, tiles, ceil(n / keys)]``.

    A tile that has none gets the first block, so that no list is empty: compare only later tiles.

    Args:
        ids, counts: lists of one row, as attention takes them.
        keys: of a block: ``BLOCK``, or twice as many, which are chosen if their latter half is.
    """
    heads, tiles = counts.shape[1:]
    nb, many = -(-n // BLOCK), keys // BLOCK
    listed = torch.arange(ids.shape[-1], device=ids.device) < counts[0, ..., None]
    mask = torch.zeros(heads, tiles, nb + many, dtype=torch.bool, device=ids.device)
    mask.scatter_(-1, ids[0].masked_fill(~listed, nb + many - 1).long(), True)
    seen = (past + torch.arange(tiles, device=ids.device) * TILE + 1) // BLOCK
    mask = mask[..., : nb + -nb % many]  # what is not listed was put after it
    mask = (mask & (torch.arange(mask.shape[-1], device=ids.device) < seen[:, None]))[..., many - 1 :: many]
    mask[..., 0] |= ~mask.any(-1)
    return mask


def lists_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ids ``[1, Hq, tiles, most]``, zeros after those that count, and counts, int32."""
    counts = mask.sum(-1, dtype=torch.int32)
    nb = mask.shape[-1]
    ids = torch.where(mask, torch.arange(nb, dtype=torch.int32, device=mask.device), nb).sort(-1).values
    ids = ids[..., : int(counts.max())]
    return ids.masked_fill(ids == nb, 0).contiguous()[None], counts[None]


def packed(mask: Tensor) -> Tensor:
    """Eight blocks a byte, the first in the lowest bit: uint8 ``[1, Hq, tiles, ceil(blocks / 8)]``."""
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (bits * (1 << torch.arange(8, device=mask.device))).sum(-1).to(torch.uint8)[None]


def endpoints(mask: Tensor, q: int, n: int) -> Tensor:
    """Of each query's ranges of keys, ascending, after an empty one: int32 ``[Hq, 1 + 2 * most, q]``.

    Args:
        mask: of blocks of ``TILE`` keys.
    """
    edges = torch.nn.functional.pad(mask, (1, 1)).diff(dim=-1)
    at = torch.arange(edges.shape[-1], dtype=torch.int32, device=mask.device) * TILE
    at = torch.where(edges, at, n).clamp_max(n).sort(-1).values[..., : int(edges.sum(-1).max())]
    at = torch.nn.functional.pad(at, (1, 0)).transpose(1, 2)
    return at.repeat_interleave(TILE, 2)[..., :q].contiguous()


def listed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, keys: int, splits: int) -> Run:
    """cuDNN's kernel in CuTe that takes lists; its tiles of queries are as long as its blocks of keys."""
    from cudnn import BSA

    ids, counts = lists_of(mask.repeat_interleave(TILE // keys, 1)[:, : -(-query.shape[2] // keys)])
    options = {"q2k_block_nums": counts, "sparse_block_size": keys, "kv_splits": splits}
    return lambda: BSA.block_sparse_attention_forward(query, key, value, ids, **options)["o_tensor"]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Run:
    """cuDNN's own engine, with a bit for each 128 queries and 128 keys."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.uint8: cudnn.data_type.UINT8}
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=kinds[query.dtype], intermediate_data_type=single, compute_data_type=single, handle=handle
    )
    given = query, key, value, packed(mask)
    q, k, v, blocks = (
        graph.tensor(uid=uid, dim=tuple(t.shape), stride=t.stride(), data_type=kinds[t.dtype])
        for uid, t in enumerate(given)
    )
    unified = cudnn.attention_implementation.UNIFIED
    scale = query.shape[3] ** -0.5
    o, _ = graph.sdpa(q=q, k=k, v=v, generate_stats=False, attn_scale=scale, block_mask=blocks, implementation=unified)
    out = torch.empty_like(query)
    o.set_uid(4).set_output(True).set_dim(tuple(out.shape)).set_stride(out.stride())
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=query.device)

    def run() -> Tensor:
        graph.execute(dict(enumerate((*given, out))), space, handle)
        return out

    return run


def ranged(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Run:
    """cuDNN's kernel in CuTe that takes ranges of keys, of which it makes lists of tiles of 128 x 128."""
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    rows = [t.transpose(1, 2) for t in (query, key, value)]
    ends = endpoints(mask, query.shape[2], key.shape[2])
    plan = create_mask_plan(ends, *rows, pack_gqa=False, build_backward=False)
    return lambda: flex_attn_func(*rows, mask_plan=plan).transpose(1, 2)


def listed_whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, keys: int) -> Run:
    """FlashAttention 4's kernel, which takes lists of whole and of partial blocks: here all are whole."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    ids, counts = lists_of(mask)
    none = torch.zeros_like(counts), torch.zeros_like(ids)
    blocks = BlockSparseTensorsTorch(*none, counts, ids, block_size=(TILE, keys))
    rows = [t.transpose(1, 2) for t in (query, key, value)]
    options = {"mask_mod": causal_mask(), "block_sparse_tensors": blocks}
    return lambda: _flash_attn_fwd(*rows, **options)[0].transpose(1, 2)


def block_kernels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, keys: int) -> Iterator[tuple[str, Run]]:
    """Names and calls; the first call builds, and may refuse."""

    def later(build: Callable[..., Run], *args: object) -> Run:
        made = functools.cache(lambda: build(query, key, value, mask, *args))
        return lambda: made()()

    if installed("flash_attn.cute"):
        yield "FlashAttention 4, lists", later(listed_whole, keys)
    if not installed("cudnn"):
        return
    for splits in SPLITS:
        yield f"cuDNN, lists, {splits} split(s)", later(listed, keys, splits)
    if keys == TILE:
        yield "cuDNN, block mask", later(masked)
        yield "cuDNN, ranges", later(ranged)
