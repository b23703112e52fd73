"""FlashAttention 4's interface on a CPU, by the definition: as torch's FlexAttention calls it, one mask of a block."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None


def _listed(counts: Tensor, ids: Tensor, blocks: int) -> Tensor:
    """Bool ``[batch, heads, tiles, blocks]``; only ids that count are looked at."""
    assert counts.dtype == ids.dtype == torch.int32 and ids.shape[:-1] == counts.shape and ids.shape[-1] <= blocks
    chosen = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool)
    counting = torch.arange(ids.shape[-1]) < counts[..., None]
    return chosen.scatter_(-1, ids.masked_fill(~counting, blocks).long(), True)[..., :blocks]


def _flash_attn_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    mask_mod=None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    out: Tensor | None = None,
):
    """``[batch, tokens, heads, D]`` each; a list of blocks alone says what is seen, partial ones by ``mask_mod``."""
    q, k, v = (t.transpose(1, 2).float() for t in (query, key, value))
    (batch, heads, rows, dim), n = q.shape, k.shape[2]
    at, column = torch.arange(rows)[:, None], torch.arange(n)
    if block_sparse_tensors is None:
        seen = (column <= at + n - rows) | torch.tensor(not causal)
    else:
        given = block_sparse_tensors
        tile, block = given.block_size
        blocks = -(-n // block)
        assert given.mask_block_cnt.shape == (batch, heads, -(-rows // tile))
        masks = mask_mod(None, None, at, column, SimpleNamespace(seqlen_q=rows, seqlen_k=n), None)
        spread = [
            _listed(*lists, blocks).repeat_interleave(tile, 2)[:, :, :rows].repeat_interleave(block, 3)[..., :n]
            for lists in (given[:2], given[2:4])
        ]
        assert not (spread[0] & spread[1]).any()  # a block in both would count twice
        seen = (spread[0] & masks) | spread[1]
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    found = (scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)
    return (found.to(query.dtype) if out is None else out.copy_(found)), None


def install(monkeypatch) -> None:
    """Until the test ends, ``import flash_attn.cute...`` finds this."""
    found = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparseTensorsTorch},
        "flash_attn.cute.interface": {"_flash_attn_fwd": _flash_attn_fwd},
        "flash_attn.cute.utils": {"scalar_to_ssa": lambda number, dtype: number},
        "cutlass": {"Int32": int},
        "cutlass.cute": {"jit": lambda function: function},
    }
    for name, attributes in found.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, inside = name.rpartition(".")
        if package:
            setattr(sys.modules[package], inside, module)
