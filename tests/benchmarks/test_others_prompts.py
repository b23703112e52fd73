"""Lists of blocks as other kernels take them, in the probe of sparse prompts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import fake_flash_4
import pytest
import torch

from benchmarks.drawn_lists import drawn_lists
from benchmarks.probes import others_prompts
from hf_sparsekv.attention.flash_4 import causal_mask
from hf_sparsekv.ops._prompts import BLOCK, TILE
from hf_sparsekv.ops.attention.block_attention.reference import block_attention

HEADS, KV_HEADS, DIM = 4, 2, 16


def drawn(q: int, n: int):
    generator = torch.Generator().manual_seed(1)
    shapes = (HEADS, q), (KV_HEADS, n), (KV_HEADS, n)
    tensors = [torch.randn(1, heads, rows, DIM, generator=generator) for heads, rows in shapes]
    return tensors, drawn_lists(HEADS, q, n, 0.4, "cpu")


def attended(query, key, value, chosen):
    """Softmax attention to the keys that ``chosen`` ``[Hq, q, n]`` marks."""
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
    return (query @ key.mT * DIM**-0.5).masked_fill(~chosen, float("-inf")).softmax(-1) @ value


def forward(query, key, value, index, q2k_block_nums, sparse_block_size, kv_splits):
    """As documented: the first so many ids of each tile of queries, without a causal mask."""
    q, n = query.shape[2], key.shape[2]
    chosen = torch.zeros(HEADS, q, n, dtype=torch.bool)
    assert index.dtype == q2k_block_nums.dtype == torch.int32 and index.is_contiguous()
    assert index.shape[:3] == q2k_block_nums.shape == (1, HEADS, -(-q // sparse_block_size))
    for head, tile in torch.cartesian_prod(torch.arange(HEADS), torch.arange(index.shape[2])).tolist():
        rows = slice(tile * sparse_block_size, (tile + 1) * sparse_block_size)
        for block in index[0, head, tile, : q2k_block_nums[0, head, tile]].tolist():
            chosen[head, rows, block * sparse_block_size : (block + 1) * sparse_block_size] = True
    return {"o_tensor": attended(query, key, value, chosen)}


@pytest.mark.parametrize("q, n", [(512, 512), (320, 832), (384, 484)])
@pytest.mark.parametrize("keys", [BLOCK, TILE])
def test_equal_lists_give_equal_results(q, n, keys, monkeypatch):
    """Ours at the lists of whole blocks, theirs at lists of their own tiles and at a packed mask."""
    (query, key, value), (ids, counts) = drawn(q, n)
    mask = others_prompts.whole_blocks(ids, counts, n, n - q, keys)
    mine = others_prompts.lists_of(mask.repeat_interleave(keys // BLOCK, -1))
    expected = block_attention(query, key, value, *mine, DIM**-0.5, n - q)[:, :, TILE:]

    cudnn = SimpleNamespace(BSA=SimpleNamespace(block_sparse_attention_forward=forward), __spec__="there")
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    fake_flash_4.install(monkeypatch)
    causal_mask.cache_clear()
    named = dict(others_prompts.block_kernels(query, key, value, mask, keys))
    lists = [run for name, run in named.items() if "lists" in name]
    assert len(lists) == 1 + len(others_prompts.SPLITS) and len(named) == len(lists) + 2 * (keys == TILE)
    for run in lists:
        torch.testing.assert_close(run()[:, :, TILE:], expected)
    causal_mask.cache_clear()

    bits = others_prompts.packed(mask)
    assert bits.dtype == torch.uint8 and bits.shape == (1, HEADS, -(-q // TILE), -(-n // keys // 8))
    column, tile = torch.arange(n) // keys, torch.arange(q) // TILE
    column = column.clamp_max(bits.shape[3] * 8 - 1)
    chosen = (bits[0][:, tile][..., column // 8] >> (column % 8).to(torch.uint8)) & 1
    torch.testing.assert_close(attended(query, key, value, chosen.bool())[:, :, TILE:], expected)


@pytest.mark.parametrize("q, n", [(512, 512), (320, 832), (384, 484)])
def test_ranges_cover_the_same_blocks(q, n):
    _, (ids, counts) = drawn(q, n)
    mask = others_prompts.whole_blocks(ids, counts, n, n - q, TILE)
    mask[0] = True  # the last block, which may be a part, too
    ends = others_prompts.endpoints(mask, q, n).long()
    assert ends.shape[::2] == (HEADS, q) and ends.shape[1] % 2 == 1 and ends.is_contiguous()
    assert (ends.diff(dim=1) >= 0).all() and not ends[:, 0].any() and ends.max() == n
    column = torch.arange(n)[:, None, None, None]
    covered = ((ends[:, 1::2] <= column) & (column < ends[:, 2::2])).any(2).movedim(0, 2)
    expected = mask.repeat_interleave(TILE, 1)[:, :q].repeat_interleave(TILE, 2)[..., :n]
    assert torch.equal(covered, expected)


@pytest.mark.parametrize("keys", [BLOCK, TILE])
def test_whole_blocks_are_listed_ones(keys):
    """Blocks of the lists' own size, all that are seen whole; larger ones at about the density that was drawn."""
    q = n = 4096
    _, (ids, counts) = drawn(q, n)
    mask = others_prompts.whole_blocks(ids, counts, n, 0, keys)
    assert mask.any(-1).all()
    for tile in range(1, q // TILE):
        seen = tile * TILE // keys
        assert not mask[:, tile, seen:].any()
        for head in range(HEADS):
            drawn_ids = set(ids[0, head, tile, : counts[0, head, tile]].tolist())
            latter = {(block + 1) * keys // BLOCK - 1 for block in mask[head, tile].nonzero().flatten().tolist()}
            assert latter == {
                block for block in drawn_ids if block < seen * keys // BLOCK and (block + 1) % (keys // BLOCK) == 0
            }
