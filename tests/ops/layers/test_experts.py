"""The experts' kernels with tiles other than the usual ones: several groups of steps, and what does not fill them."""

from __future__ import annotations

import pytest
import torch
from operators import BY_NAME

pytest.importorskip("triton")

from hf_sparsekv.ops.layers.experts import experts
from hf_sparsekv.ops.layers.experts.reference import experts as reference
from hf_sparsekv.ops.layers.experts.triton import Tile, experts_down, experts_up
from hf_sparsekv.ops.layers.route import route

TILES = [Tile(2, 256, 1), Tile(4, 1024, 2), Tile(8, 1024, 1, 128)]


@pytest.mark.few
@pytest.mark.parametrize("shape", [(40, 521), (521, 18)], ids=["down", "up"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("k", [1, 4, 6])
def test_tiles_agree(place, tile, k, shape):
    """One to three groups of steps of each kernel, neither inputs nor outputs a multiple."""
    given = BY_NAME["experts"].call(place, 2, 7, k, *shape, "silu")
    (want,) = BY_NAME["experts"].expected(given)
    x, index, weights, gate_up, down, activation = given.values()
    middle = experts_up(x, index, gate_up, activation, tile)
    place.close(experts_down(middle, index, weights, down, tile), want)


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
        return index, weights, experts(x, index, weights, gate_up, down, "silu")

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
        given = x, index, weights, gate_up, down, "silu"
        torch.testing.assert_close(out.float(), reference(*given).float(), rtol=2e-2, atol=2e-2)
    assert len(seen) > 1
