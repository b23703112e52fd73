"""The experts' kernels with tiles other than the usual ones: several groups of steps, and what does not fill them."""

from __future__ import annotations

import pytest
from operators import BY_NAME

pytest.importorskip("triton")

from hf_sparsekv.ops.experts.triton import Tile, experts_down, experts_up

TILES = [Tile(2, 256, 1), Tile(4, 1024, 2), Tile(8, 1024, 1, 128)]


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
