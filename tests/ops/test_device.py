"""Properties that a GPU reports, and launches that follow from them: on an H200 they are the measured ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from inside import facts_are_asked_again

from hf_sparsekv.ops import _device
from hf_sparsekv.ops._device import H200, SHARED, Gpu, programs
from hf_sparsekv.ops.attention.sparse_decode import config as sparse_decode
from hf_sparsekv.ops.selection.block_score import config as block_score
from hf_sparsekv.ops.selection.token_score import config as token_score

mass_select = pytest.importorskip("hf_sparsekv.ops.selection.mass_select.triton")

# Processors and L2 cache as the driver tells them, memory by data sheets.
OTHERS = {
    "A100": Gpu(108, 40 << 20, SHARED[80], 2.04e12),
    "L40S": Gpu(142, 96 << 20, SHARED[89], 0.864e12),
    "RTX 4090": Gpu(128, 72 << 20, SHARED[89], 1.01e12),
    "B200": Gpu(148, 126 << 20, SHARED[100], 7.7e12),
    "a seventh of an H200": Gpu(16, 8 << 20, SHARED[90], 0.6e12),
}


def launches(monkeypatch, there: Gpu) -> dict[tuple[int, int], dict[str, int]]:
    """Programs and tiles of decode steps of an 8B model and of latents, by rows and blocks of each."""
    monkeypatch.setattr(_device, "gpu_of", lambda t: there)
    found, like = {}, {"dtype": torch.bfloat16, "device": "meta"}
    codes, qparams = torch.empty(4, 8, 64, 16, dtype=torch.uint8), torch.empty(4, 8, 64, 2, dtype=torch.float16)
    kv, latents = torch.empty(4, 8, 64, 256, **like), torch.empty(4, 1, 64, 576, **like)
    for rows in (1, 8):
        recent, recent_latents = torch.empty(rows, 8, 84, 256, **like), torch.empty(rows, 1, 84, 576, **like)
        q, wide = torch.empty(rows, 32, 128, **like), torch.empty(rows, 20, 576, **like)
        for blocks in (512, 2048):
            found[rows, blocks] = {
                "dense": sparse_decode.config(q, kv, recent, 128, "all").programs,
                "tokens": sparse_decode.config(q, kv, recent, 128, "token").programs,
                "latents": sparse_decode.config(wide, latents, recent_latents, 512, "token").programs,
                "labels": token_score.config(q, codes, qparams, blocks, False, True).blocks,
                "mass": mass_select._chunk(rows * 8 * blocks * 64, q),
                "bounds": block_score.config(q, rows, blocks, 128, 576).tile,
            }
    return found


PROGRAMS = {"dense": 528, "tokens": 1056, "latents": 132}
TILES = {  # of programs whose number follows
    (1, 512): {"labels": 1, "mass": 512, "bounds": 16},
    (1, 2048): {"labels": 4, "mass": 2048, "bounds": 16},
    (8, 512): {"labels": 8, "mass": 4096, "bounds": 32},
    (8, 2048): {"labels": 16, "mass": 4096, "bounds": 64},
}


def test_an_h200_launches_what_was_measured(monkeypatch):
    """Launches as they were when its numbers were constants; without a GPU, too."""
    assert launches(monkeypatch, H200) == {at: {**PROGRAMS, **tiles} for at, tiles in TILES.items()}
    monkeypatch.undo()
    assert [programs(n, torch.empty(1)) for n in (132, 512, 1056, 4096)] == [132, 512, 1056, 4096]


@pytest.mark.parametrize("there", OTHERS.values(), ids=OTHERS)
def test_other_gpus_have_as_many_for_each_processor(monkeypatch, there):
    more = there.processors > H200.processors
    for at, found in launches(monkeypatch, there).items():
        assert {what: found[what] for what in PROGRAMS} == {
            what: count * there.processors // H200.processors for what, count in PROGRAMS.items()
        }
        for what, usual in TILES[at].items():  # powers of two between their limits, larger where programs are fewer
            assert found[what] <= usual if more else found[what] >= usual
            assert found[what] & (found[what] - 1) == 0


def test_few_processors_take_larger_tiles(monkeypatch):
    found = launches(monkeypatch, OTHERS["a seventh of an H200"])[1, 512]
    assert (found["labels"], found["mass"], found["bounds"]) == (8, 4096, 32)


def test_facts_of_a_driver(monkeypatch):
    """An L40S, and a driver that says nothing of its memory."""
    triton = pytest.importorskip("triton")
    told = {"multiprocessor_count": 142, "max_shared_mem": 101376, "mem_clock_rate": 9001000, "mem_bus_width": 384}
    utils = SimpleNamespace(get_device_properties=lambda device: told)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=96 << 20))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(_device, "why_not", lambda device: "the GPU has no clusters")
    facts_are_asked_again()
    try:
        found = _device.gpu(torch.device("cuda"))
        assert found == _device.gpu(torch.device("cuda", 3)) == Gpu(142, 96 << 20, 99 << 10, found.bandwidth)
        assert found.bandwidth == pytest.approx(864e9, rel=1e-3), "as its data sheet"
        told["mem_clock_rate"] = 0
        assert _device.gpu(torch.device("cuda", 4)).bandwidth is None
    finally:
        facts_are_asked_again()


@pytest.mark.gpu
def test_facts_of_this_gpu():
    found = _device.gpu(torch.device("cuda"))
    assert found == _device.gpu_of(torch.empty(1, device="cuda"))
    assert found.processors > 0 and found.l2_bytes > 1 << 20 and found.bandwidth > 1e11
    if torch.cuda.get_device_name() == "NVIDIA H200":
        assert (found.processors, found.shared_bytes) == (H200.processors, H200.shared_bytes)
        assert found.bandwidth == pytest.approx(H200.bandwidth, rel=0.05)
