"""Which layers of a captured step are sealed together, and that none is forgotten."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.kv import step_seals
from hf_sparsekv.kv.step_seals import Due, StepSeals
from hf_sparsekv.ops.seal import Index, LayerBlocks, places_of


def layer(dim: int = 8, dtype=torch.float32, rows: int = 2) -> LayerBlocks:
    recent = torch.randn(3, 2, 4 + 2 * 16, 2 * dim, dtype=dtype)[:rows]
    return LayerBlocks(recent, torch.zeros(9, 2, 16, 2 * dim, dtype=dtype), Index(dim))


def due(*layers: LayerBlocks, seed: int = 0) -> list[Due]:
    """Full rings, of which the oldest block is due in each row."""
    rows = torch.tensor([[64 + seed, 32], [80 + seed, 48]], dtype=torch.int32)
    after = rows + torch.tensor([0, 16], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(1, 8).expand(2, 8).contiguous()
    table[1] = 8 - table[1]
    return [Due(one, rows, after, 4, table) for one in layers]


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Layers of each launch."""
    seen, together, alone = [], step_seals.seal_layers, step_seals.seal
    monkeypatch.setattr(step_seals, "seal_layers", lambda *args: seen.append(len(args[0])) or together(*args))
    monkeypatch.setattr(step_seals, "seal", lambda *args: seen.append(1) or alone(*args))
    return seen


def sealed(each: list[Due]) -> bool:
    """Blocks 2 and 3 hold what the ring had of them."""
    blocks = [(0, 2, 0), (1, 5, 16)]  # row, block that the table names, where in the ring
    return all(
        torch.equal(one.layer.kv[block], one.layer.recent_kv[row, :, 4 + at : 4 + at + 16])
        for one in each
        for row, block, at in blocks
    )


def test_layers_alike_are_sealed_at_once(launches):
    layers = [layer(), layer(4), layer(), layer(dtype=torch.float16), layer()]
    seals, asked = StepSeals(layers), due(*layers)
    seals.launch(asked)
    assert launches == [3, 1, 1] and sealed(asked)
    seals.launch([])
    assert launches == [3, 1, 1]


def test_what_was_not_foreseen_is_sealed_alone(launches):
    """Other layers than those that were, and rows of another batch beside them."""
    layers = [layer(), layer()]
    seals, asked = StepSeals(layers), due(*layers, layer())
    seals.launch(asked)
    assert launches == [1, 1, 1] and sealed(asked)
    asked = due(layers[0]) + due(layers[1], seed=1)
    seals.launch(asked)
    assert launches[3:] == [1, 1]


def test_fewer_rows_of_the_same_layers_are_the_same_kind(launches):
    """A step of the first rows is captured with views of them."""
    recent = torch.randn(3, 2, 36, 16)
    layers = [LayerBlocks(recent, torch.zeros(9, 2, 16, 16), Index(8)), layer(rows=3)]
    asked = due(*(LayerBlocks(one.recent_kv[:2], one.kv, one.index) for one in layers))
    StepSeals(layers).launch(asked)
    assert launches == [2] and sealed(asked)


def test_places_are_in_elements_and_none_where_a_kernel_cannot_go():
    memory = torch.zeros(40000)
    at = [memory[first : first + 3 * 2 * 36 * 16].view(3, 2, 36, 16) for first in (0, 16000, 8200)]
    kv = torch.zeros(9, 2, 16, 16)
    layers = [LayerBlocks(recent, kv, Index(8)) for recent in at]
    assert places_of(layers[:2]).tolist() == [[0] * 8, [16000] + [0] * 7]
    assert places_of(layers) is None, "8200 is no multiple of 16"
    assert places_of(layers[1:2]).tolist() == [[0] * 8]
