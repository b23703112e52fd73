"""Labels of few bits for keys some of whose channels have a large mean, as biases of keys do.

Softmax ignores what is the same for all tokens, so such a mean must not cost the steps of other channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from places import Place

from hf_sparsekv.ops.selection.token_score.reference import token_score as reference_score
from hf_sparsekv.ops.selection.token_score.triton import token_score as triton_score
from hf_sparsekv.ops.storage.seal import Index
from hf_sparsekv.ops.storage.seal.reference import seal_range as reference_seal
from hf_sparsekv.ops.storage.seal.triton import seal_range as triton_seal
from hf_sparsekv.predictor.channels import ChannelStats

SIZE, CALIBRATED, TAKEN = 16, 256, 64  # tokens: of a block, calibrated on, chosen
WAYS = {"reference": (reference_seal, reference_score), "triton": (triton_seal, triton_score)}


@dataclass
class Heads:
    """Shapes of a layer: KV heads, query heads of each, channels of a key and of its label."""

    heads: int = 2
    group: int = 4
    dim: int = 64
    labels: int = 32


SHAPES = {
    "GQA of 64": Heads(),
    "GQA of 128": Heads(dim=128, labels=32),
    "all channels": Heads(dim=64, labels=64),
    "latents": Heads(heads=1, group=16, dim=288, labels=128),
}


def made(place, shape: Heads, tokens: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and the prompt's queries of power-law channels, float32 on the CPU."""
    size = torch.arange(1, shape.dim + 1).float().pow(-1)[torch.randperm(shape.dim, generator=place.generator)]
    size *= shape.dim**0.5 / size.norm()
    keys = torch.randn(1, shape.heads, tokens, shape.dim, generator=place.generator) * size
    queries = torch.randn(1, shape.heads * shape.group, tokens, shape.dim, generator=place.generator) * size
    return keys, queries


def scored(way: str, place, keys: torch.Tensor, queries: torch.Tensor, r: int, first: int = CALIBRATED):
    """Scores by the labels of all but the last query's own block, ``[Hq, tokens]``, for the last of the queries."""
    seal_range, score = WAYS[way]
    keys, queries = (x.to(place.dtype).to(place.device) for x in (keys, queries))
    heads, tokens, dim = keys.shape[1:]
    stats = ChannelStats()
    for lo in range(0, first, 100):  # in pieces, as prompts come
        at = slice(lo, min(lo + 100, first))
        stats.update(queries[:, :, at], keys[:, :, at], None)
    channels = stats.ranking(r)
    norms = stats.norms().gather(-1, channels.long()[:, :, None].expand(-1, -1, 2, -1))
    blocks = tokens // SIZE
    codes = torch.zeros(blocks, heads, SIZE, r // 2, dtype=torch.uint8, device=place.device)
    params = torch.zeros(blocks, heads, SIZE, 2, dtype=torch.float16, device=place.device)
    table = torch.arange(blocks, dtype=torch.int32, device=place.device)[None]
    index = Index(dim, channels=channels, norms=norms, codes=codes, qparams=params)
    recent, nowhere = keys.new_zeros(1, heads, 3 * SIZE, dim), keys.new_zeros(blocks, heads, SIZE, 0)
    seal_range(recent, keys, keys[..., :0], 0, 0, blocks, 0, table, nowhere, index)
    rows = torch.tensor([[tokens, tokens]], dtype=torch.int32, device=place.device)
    found = score(queries[:, :, -1], codes, params, channels, rows, table, None, "none", sinks=0, norms=norms)
    return found[0].float().cpu()


def attention(logits: torch.Tensor, values: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Attention of each head to tokens ``taken [Hq, n]``."""
    weights = logits.gather(-1, taken).softmax(-1)
    return (weights[..., None] * values[taken]).sum(1)


def products(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Products of the last query and all keys, ``[Hq, tokens]``."""
    asked = queries[0, :, -1].double().unflatten(0, (keys.shape[1], -1))
    return (asked @ keys[0].double().mT).flatten(0, 1)


def errors(found: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """Errors of scores, less what they have in common, and of attention to the best tokens by them, for these keys."""
    true = products(keys, queries)
    off = found.double() - true
    of_scores = (off - off.mean(-1, keepdim=True)).square().mean() / true.var(-1).mean()
    logits = true * keys.shape[-1] ** -0.5
    best = attention(logits, values, found.topk(TAKEN).indices)
    whole = attention(logits, values, torch.arange(true.shape[1]).expand_as(true))
    return float(of_scores.sqrt()), float((best - whole).norm() / whole.norm())


CONSTANTS = (5.0, 20.0, 100.0, 400.0)


def check(way: str, place: Place, shape: Heads) -> None:
    keys, queries = made(place, shape)
    values = torch.randn(keys.shape[2], 8, generator=place.generator).double()
    least = keys[0, 0].std(0).argsort()[:2]
    found = []
    for constant in (0.0, *CONSTANTS):
        biased = keys.clone()
        biased[..., least[0]] += constant
        biased[..., least[1]] -= constant
        given = biased.to(place.dtype).float(), queries.to(place.dtype).float()
        found.append(errors(scored(way, place, biased, queries, shape.labels), *given, values))
    (scores, attended), *others = found
    for constant, (of_scores, of_attention) in zip(CONSTANTS, others):
        assert of_scores < 1.1 * scores, f"scores with {constant}: {of_scores:.4f} for {scores:.4f}"
        assert of_attention < 1.1 * attended, f"attention with {constant}: {of_attention:.4f} for {attended:.4f}"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_constants_in_keys_change_nothing(shape, dtype):
    """Against keys as the cache has them: a key of bf16 at 400 has steps of 2 itself."""
    check("reference", Place("cpu", dtype), shape)


@pytest.mark.few(shape=(SHAPES["GQA of 64"], SHAPES["latents"]))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_nor_to_kernels(place, shape):
    check("triton", place, shape)


# What a bias of the keys is after their rotation (base 1e6): constant in the slowest pairs, a circle in the others.
PAIRS = {"fast": 4, "middle": 16, "slow": 24, "slowest": 31}


@pytest.mark.parametrize("first", [256, 4096])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_rotated_biases(pair, first):
    """Calibrated on all tokens they cost nothing. The first ones do not say where a channel will be later.

    Then scores of tokens that are far away are off, as a whole: which tokens are best changes little.
    """
    place, shape = Place("cpu", torch.float32), Heads(labels=64)
    keys, queries = made(place, shape, 4096)
    values = torch.randn(keys.shape[2], 8, generator=place.generator).double()
    scores, _ = errors(scored("reference", place, keys, queries, 64, first), keys, queries, values)
    angle = torch.arange(4096) * 1e6 ** (-pair / 32)
    for constant in (20.0, 400.0):
        biased = keys.clone()
        biased[..., pair] += constant * angle.cos()
        biased[..., pair + 32] += constant * angle.sin()
        found = scored("reference", place, biased, queries, 64, first)
        of_scores, of_attention = errors(found, biased, queries, values)
        _, best = errors(products(biased, queries), biased, queries, values)
        assert of_scores < (1.1 if first == 4096 else 8) * scores
        assert of_attention < 1.3 * best
