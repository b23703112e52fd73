"""Where the kernels are compared with the references: the interpreter without a GPU, the device with one."""

from __future__ import annotations

import os

import pytest
import torch
from places import Place

pytest.importorskip("triton")


def _places() -> list:
    interpreted = pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off where there is a GPU"
    )
    cpu = [("cpu", torch.float32, interpreted), ("cpu", torch.float16, interpreted)]
    gpu = [("cuda", dtype, pytest.mark.gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    return [
        pytest.param((device, dtype), id=f"{device}-{str(dtype)[6:]}", marks=mark) for device, dtype, mark in cpu + gpu
    ]


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Place:
    """One device and dtype of those that are tested; bf16 on the device only: the interpreter gets it wrong."""
    return Place(*request.param)


@pytest.fixture(params=[p for p in _places() if p.values[0][1] == torch.float32], ids=lambda where: where[0])
def place32(request: pytest.FixtureRequest) -> Place:
    """Float32 alone, for what does not depend on the dtype."""
    return Place(*request.param)


@pytest.fixture(params=[p for p in _places() if p.values[0][1] == torch.float16], ids=lambda where: where[0])
def place16(request: pytest.FixtureRequest) -> Place:
    """Float16 alone, for what counts elements: few bytes each."""
    return Place(*request.param)


@pytest.fixture
def released():
    """Gigabytes of a GPU go back at once."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
