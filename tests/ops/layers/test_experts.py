"""The experts' kernels in all forms: weights, gates, biases, ways to multiply, and tiles other than the usual ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from operators import BY_NAME
from torch import Tensor

pytest.importorskip("triton")

from hf_sparsekv.ops.layers.experts import Gate, Mxfp4, dequantise, encode, experts
from hf_sparsekv.ops.layers.experts.few import Tile, experts_down, experts_up
from hf_sparsekv.ops.layers.experts.gates import ACTIVATIONS, between
from hf_sparsekv.ops.layers.experts.reference import experts as reference
from hf_sparsekv.ops.layers.experts.together import Tile as Together
from hf_sparsekv.ops.layers.experts.together import experts_together, order
from hf_sparsekv.ops.layers.experts.triton import experts as kernels
from hf_sparsekv.ops.layers.route import route

TILES = [Tile(2, 256, 256, 1), Tile(4, 512, 1024, 2), Tile(8, 256, 1024, 1, 128)]
GPT_OSS = Gate("silu", True, True, 1.702, 7.0, 1.0)


def own(values: Tensor) -> Tensor:
    """A gate that no kernel knows."""
    first, up = values.chunk(2, dim=-1)
    return first.tanh() * up.cos()


def no_gate(values: Tensor) -> Tensor:
    return values.sin()


# Gate, and rows of the first product for each value between.
GATES = {
    "silu": (Gate(), 2),
    "gelu": (Gate("gelu_tanh"), 2),
    "gpt-oss": (GPT_OSS, 2),
    "minimax": (Gate("silu", True, False, 1.702, 7.0, 1.0), 2),
    "limited": (Gate(limit=0.5), 2),
    "limited after": (Gate("silu", limit=0.3, limits_active=True), 2),
    "nemotron": (Gate("relu2", gated=False), 1),
    "erf": (Gate("gelu", gated=False), 1),
    "own": (own, 2),
    "own, no gate": (no_gate, 1),
}
FORMS = ("rows", "columns", "codes")


def weight(place, count: int, n: int, d: int, form: str) -> Tensor | Mxfp4:
    """Weights ``[count, n, d]``: stored by rows, transposed, or in four bits."""
    if form == "codes":
        codes, scales = place.randint(0, 256, count, n, d // 2), place.randint(121, 125, count, n, d // 32)
        return Mxfp4(codes.to(torch.uint8), scales.to(torch.uint8))
    if form == "rows":
        return place.randn(count, n, d) / d**0.5
    return (place.randn(count, d, n) / d**0.5).transpose(1, 2)


def given(place, tokens: int, count: int, k: int, d: int, inner: int, gate: str, form: str, biased: bool) -> tuple:
    """Arguments of ``experts``; some of the chosen experts are none of these."""
    how, rows = GATES[gate]
    up, down = weight(place, count, rows * inner, d, form), weight(place, count, d, inner, form)
    biases = (place.randn(count, rows * inner), place.randn(count, d)) if biased else (None, None)
    index = torch.stack([place.randperm(count + 2)[:k] for _ in range(tokens)]).long() - 1
    return 2 * place.randn(tokens, d), index, place.rand(tokens, k), up, down, how, *biases


CASES = [
    ("silu", "rows", False),
    ("gpt-oss", "columns", True),
    ("gpt-oss", "codes", True),
    ("nemotron", "rows", True),
    ("limited after", "columns", False),
    ("minimax", "codes", False),
    ("own", "rows", True),
    ("own, no gate", "columns", False),
    ("gelu", "codes", False),
    ("limited", "rows", False),
    ("erf", "columns", True),
]


@pytest.mark.parametrize("way", ["few", "together"])
@pytest.mark.parametrize(("gate", "form", "biased"), CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_every_form_agrees(place, gate, form, biased, way):
    """Sizes that no tile divides (codes: blocks of 32), experts that nobody chose and pairs of no expert."""
    d, inner = (64, 96) if form == "codes" else (37, 21)
    args = given(place, 3, 5, 2, d, inner, gate, form, biased)
    place.close(kernels(*args, config=way), reference(*args).cpu())


@pytest.mark.few
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(place32, seed):
    """Ragged counts: some experts get all tokens, some none."""
    generator = torch.Generator().manual_seed(seed)
    tokens, count, k, d, inner = (int(torch.randint(1, most, (), generator=generator)) for most in (40, 9, 5, 5, 5))
    gate, form, biased = CASES[seed % len(CASES)]
    unit = 32 if form == "codes" else 9
    args = list(given(place32, tokens, count, min(k, count + 2), unit * d, unit * inner, gate, form, biased))
    favourite = torch.rand(args[1].shape, generator=generator).to(args[1].device) < 0.6
    args[1] = torch.where(favourite, seed % count, args[1])  # a token may even have an expert twice
    step = 128 if form == "codes" else 32
    tiles = Together(16, 16, step, 4, 1), Together(16, 32, step, 4, 1)
    place32.close(experts_together(*args, tiles=tiles), reference(*args).cpu())
    place32.close(kernels(*args, config="few"), reference(*args).cpu())


@pytest.mark.parametrize(
    ("tokens", "count", "k", "size"), [(1, 4, 2, 16), (33, 3, 2, 16), (700, 5, 3, 32), (9, 70, 6, 16)]
)
def test_the_order_of_pairs(place32, tokens, count, k, size):
    """Each pair is once in a tile of its expert, in order; pairs of no expert are in none."""
    index = torch.stack([place32.randperm(count + 2)[:k] for _ in range(tokens)]).long() - 1
    by = order(index, count, size)
    flat, seen = index.flatten().cpu(), []
    for tile, expert in zip(by.pairs.cpu().view(-1, size), by.experts.tolist()):
        if expert >= 0:
            found = tile[tile < len(flat)]
            assert len(found) and (flat[found] == expert).all() and (tile[len(found) :] == len(flat)).all()
            seen.append((expert, found.tolist()))
    pairs = [pair for _, found in seen for pair in found]
    assert sorted(pairs) == [i for i, one in enumerate(flat.tolist()) if 0 <= one < count]
    assert all(one < other for one, other in pairwise((expert, found[0]) for expert, found in seen))


@pytest.mark.few
@pytest.mark.parametrize("shape", [(40, 521), (521, 18)], ids=["down", "up"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("k", [1, 4, 6])
def test_tiles_agree(place, tile, k, shape):
    """One to three groups of steps of each kernel, neither inputs nor outputs a multiple."""
    args = BY_NAME["experts"].call(place, 2, 7, k, *shape, "silu")
    (want,) = BY_NAME["experts"].expected(args)
    x, index, weights, gate_up, down, gate = list(args.values())[:6]
    middle = experts_up(x, index, gate_up, gate, None, tile)
    place.close(experts_down(middle, index, weights, down, None, tile), want)


# ---------------------------------------------------------------------- gates, codes


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_pass_on_what_is_not_finite(activation):
    """NaN stays, in gates and in ups; infinite values meet the limits."""
    values = torch.tensor([[float("nan"), 1.0, float("inf"), 1.0], [1.0, float("nan"), 1.0, -float("inf")]]).flatten()
    for limit in (7.0, float("inf")):
        out = between(values[None], Gate(activation, limit=limit))
        assert out.isnan()[0, :2].all() and (limit == float("inf") or out[0, 2:].isfinite().all())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Gate("swish"), "activation must be one of"),
        (Gate("relu", alpha=1.702), "alpha is a factor of silu"),
        (Gate(gated=False, limit=7.0), "are of gated experts"),
    ],
)
def test_gates_that_do_not_exist(wrong, said):
    with pytest.raises(ValueError, match=said):
        between(torch.zeros(1, 4), wrong)


def test_codes_of_dequantised_weights_are_found_again():
    """Exactly, also of blocks of zeros, of few values and of the least and largest scales."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 40, 48), generator=generator, dtype=torch.uint8)
    codes[0, :, :16], codes[1, :, :16], codes[2, :, :16] = 0, 0x11, 0x29
    scales = torch.randint(2, 241, (3, 40, 3), generator=generator, dtype=torch.uint8)
    weights = dequantise(Mxfp4(codes, scales), torch.float32)
    found = encode(weights)
    assert found is not None and torch.equal(dequantise(found, torch.float32), weights)
    assert encode(torch.randn(2, 3, 64)) is None  # no four bits hold these
    assert encode(torch.randn(2, 3, 40)) is None  # no blocks of 32


def test_transformers_reads_the_same_codes():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.randint(0, 256, (2, 24, 64), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 24, 4), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(codes.view(2, 24, 4, 16), scales)  # [E, d, n]
    assert torch.equal(dequantise(Mxfp4(codes, scales), torch.bfloat16), theirs.transpose(1, 2))


@pytest.mark.parametrize(
    ("codes", "scales", "said"),
    [((2, 4, 24), (2, 4, 1), "a multiple of 32"), ((2, 4, 32), (2, 4, 1), "need scales"), ((2, 4, 32), None, "uint8")],
)
def test_codes_that_do_not_fit(place32, codes, scales, said):
    dtype = torch.uint8 if scales else torch.int8
    wrong = Mxfp4(place32.randint(0, 9, *codes).to(dtype), place32.randint(0, 9, *(scales or (2, 4, 2))).to(dtype))
    args = list(given(place32, 1, 2, 1, 64, 32, "silu", "codes", False))
    args[3] = wrong
    with pytest.raises(ValueError, match=said):
        kernels(*args)


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6])
def test_experts_that_were_chosen_just_before(tokens):
    """In a graph, of which each replay chooses others: the down projection reads them while that of gates runs."""
    made = {"dtype": torch.bfloat16, "device": "cuda"}
    x, logits = torch.empty(tokens, 512, **made), torch.randn(64, 512, **made) / 512**0.5
    gate_up, down = (torch.randn(64, *shape, **made) / shape[-1] ** 0.5 for shape in ((768, 512), (512, 384)))
    how = {"groups": 1, "top_groups": 1, "normalise": True, "scale": 1.0}

    def run():
        _, weights, index = route(x, logits, torch.zeros(64, device="cuda"), 4, **how)
        return index, weights, experts(x, index, weights, gate_up, down, Gate())

    x.normal_()
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, weights, out = run()
    seen = set()
    for _ in range(50):
        x.normal_()
        graph.replay()
        seen.add(tuple(index.flatten().tolist()))
        args = x, index, weights, gate_up, down, Gate()
        torch.testing.assert_close(out.float(), reference(*args).float(), rtol=2e-2, atol=2e-2)
    assert len(seen) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 200, 700, 5000])
@pytest.mark.parametrize(("gate", "form"), [("silu", "rows"), ("gpt-oss", "columns"), ("gpt-oss", "codes")])
def test_every_number_of_tokens(tokens, gate, form):
    """Of bfloat16, each way that is chosen by itself, captured: in a graph, of which each replay chooses others."""
    from places import Place

    place = Place("cuda", torch.bfloat16)
    args = given(place, tokens, 32, 4, 256, 384, gate, form, gate == "gpt-oss")
    kernels(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels(*args)
    for _ in range(3):
        args[0].normal_()
        args[1].copy_(torch.rand(tokens, 34, device="cuda").topk(4, dim=1).indices - 1)
        graph.replay()
        some = slice(None, None, max(1, tokens // 200))  # the definition gathers the weights of each token
        place.close(out[some], reference(*(t[some] for t in args[:3]), *args[3:]).cpu())
