"""Copies of listed blocks: the kernel against the definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_sparsekv.ops import _device, _dispatch
from hf_sparsekv.ops.storage.block_copy import block_copy as public
from hf_sparsekv.ops.storage.block_copy import config as defaults
from hf_sparsekv.ops.storage.block_copy import triton as copying
from hf_sparsekv.ops.storage.block_copy.config import Config
from hf_sparsekv.ops.storage.block_copy.reference import block_copy as reference
from hf_sparsekv.ops.storage.block_copy.triton import block_copy
from hf_sparsekv.ops.storage.quantise.reference import dequantise, quantise

SMALL = Config(programs=3, warps=1, tile=256)  # so that a small case takes several blocks and tiles a program


def make(place, num_blocks: int, heads: int, size: int, width: int, pages: int, n: int, host: bool = False):
    """Blocks, poisoned pages, and a list of ``n`` copies with poison behind it."""
    kv = place.randn(num_blocks, heads, size, width)
    if host:
        kv = kv.cpu().pin_memory()
    sources = place.randperm(num_blocks * heads)[:n]
    copies = torch.stack((sources, place.randperm(pages)[:n]), dim=1)
    copies = torch.cat((copies, place.nan(3, 2, dtype=torch.int32)))
    number = torch.tensor([n], dtype=torch.int32, device=place.device)
    return kv, place.nan(pages, size, width), copies, number


def expect(kv, pages, copies, n) -> torch.Tensor:
    expected = pages.cpu().clone()
    for source, page in copies[: int(n)].tolist():
        expected[page] = kv[source // kv.shape[1], source % kv.shape[1]].cpu()
    return expected


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "copy", [reference, block_copy, partial(block_copy, config=SMALL)], ids=["reference", "kernel", "small"]
)
@pytest.mark.parametrize(
    "size, width, n",
    [(4, 8, 7), (16, 64, 5), (5, 6, 4), (3, 7, 6), (1, 1, 3), (16, 40, 9), (4, 8, 0), (64, 576, 5)],
)
def test_blocks(place, copy, size, width, n):
    """Runs that are a multiple of 16 bytes, and others down to single elements."""
    kv, pages, copies, number = make(place, 6, 2, size, width, 11, n)
    expected = expect(kv, pages, copies, number)
    copy(kv, pages, copies, number)
    assert same(pages, expected)


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "copy", [reference, block_copy, partial(block_copy, config=SMALL)], ids=["reference", "kernel", "small"]
)
@pytest.mark.parametrize(
    "size, width, split, n", [(4, 8, 4, 7), (16, 64, 40, 5), (5, 7, 3, 4), (64, 96, 96, 5), (4, 8, 4, 0)]
)
def test_codes(place, copy, size, width, split, n):
    """Pages get what codes stand for, in their own dtype."""
    kv, pages, copies, number = make(place, 6, 2, size, width, 11, n)
    codes, scales = quantise(kv, split)
    expected = expect(dequantise(codes, scales, split, place.dtype), pages, copies, number)
    copy(codes, pages, copies, number, scales=scales, split=split)
    assert same(pages, expected)


def test_codes_and_scales_must_fit(place32):
    kv, pages, *listed = make(place32, 5, 2, 4, 8, 12, 9)
    codes, scales = quantise(kv, 4)
    for given in ((kv, scales), (codes, scales[:4]), (codes, scales.transpose(0, 1).contiguous().transpose(0, 1))):
        with pytest.raises(ValueError, match="int8 codes"):
            block_copy(given[0], pages, *listed, scales=given[1], split=4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_other_dtypes(place32, dtype):
    kv, pages, copies, number = make(place32, 5, 2, 3, 5, 12, 9)
    kv, pages = (kv * 50).to(dtype), torch.zeros_like(pages, dtype=dtype)
    expected = expect(kv, pages, copies, number)
    block_copy(kv, pages, copies, number, config=SMALL)
    assert same(pages, expected)


def test_blocks_and_frames_must_fit(place32):
    kv, pages, *listed = make(place32, 5, 2, 4, 8, 12, 9)
    given = ((kv, pages.half()), (kv, pages[:, :3].contiguous()), (kv.transpose(0, 1), pages))
    for tensors, message in zip(given, ("differ", "differ", "contiguous")):
        with pytest.raises(ValueError, match=message):
            block_copy(*tensors, *listed)


@pytest.mark.gpu
@pytest.mark.parametrize("copy", [reference, public])
@pytest.mark.parametrize("size, width", [(64, 256), (64, 576), (16, 128), (5, 7)])
def test_from_pinned_memory(place, copy, size, width):
    if place.device == "cpu":
        pytest.skip("needs the device")
    kv, pages, copies, number = make(place, 100, 4, size, width, 500, 333, host=True)
    expected = expect(kv, pages, copies, number)
    copy(kv, pages, copies, number)
    torch.cuda.synchronize()
    assert same(pages, expected)


@pytest.mark.parametrize("there", ["the blocks", "the pages"])
def test_the_kernel_runs_where_the_list_is(monkeypatch, there):
    """Either side may be pinned host memory: copies back to the host go by the kernel as well."""
    kv, pages = torch.randn(3, 2, 4, 8), torch.zeros(6, 4, 8)
    copies, number = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    host, asked, ran = kv if there == "the blocks" else pages, [], []

    def on_device(t: torch.Tensor) -> bool:
        asked.append(t)
        return t is not host

    monkeypatch.setattr(_dispatch, "use_triton", on_device)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: True)
    monkeypatch.setattr(copying, "block_copy", lambda *args, **named: ran.append(args))
    public.kernel.cache_clear()
    public(kv, pages, copies, number)
    public.kernel.cache_clear()
    assert len(ran) == 1
    assert all(t is not host for t in asked)


@pytest.mark.gpu
@pytest.mark.parametrize("size, width", [(32, 256), (5, 7)])
def test_to_pinned_memory(place, size, width):
    """Blocks of a prompt go to wherever host memory is free, and nothing waits for the device."""
    if place.device == "cpu":
        pytest.skip("needs the device")
    kv, pages, copies, number = make(place, 100, 4, size, width, 500, 333)
    pages = pages.cpu().pin_memory()
    expected = expect(kv, pages, copies, number)
    public(kv, pages.clone().pin_memory(), copies, number)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        public(kv, pages, copies, number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert same(pages, expected)


@pytest.mark.gpu
def test_captured():
    """The list and its length are read when the copy runs."""
    kv = torch.randn(64, 2, 16, 64).pin_memory()
    pages = torch.zeros(100, 16, 64, device="cuda")
    copies = torch.zeros(50, 2, dtype=torch.int32, device="cuda")
    number = torch.zeros(1, dtype=torch.int32, device="cuda")
    block_copy(kv, pages, copies, number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_copy(kv, pages, copies, number)
    generator = torch.Generator().manual_seed(0)
    for n in (0, 1, 50, 17):
        sources, to = torch.randperm(128, generator=generator)[:n], torch.randperm(100, generator=generator)[:n]
        copies[:n] = torch.stack((sources, to), dim=1).int().cuda()
        number.fill_(n)
        expected = expect(kv, pages, copies, number)
        graph.replay()
        assert torch.equal(pages.cpu(), expected)


def test_programs_and_warps(monkeypatch):
    """More programs for small blocks, and many where both sides are on the device: an H200, as without any."""
    monkeypatch.setattr(_device, "gpu_of", lambda t: _device.H200)
    with FakeTensorMode():  # no GPU is needed to have such tensors
        for nbytes, here, there, programs in (
            (16384, "cpu", "cuda", 16),
            (16383, "cpu", "cuda", 32),
            (16383, "cuda", "cpu", 32),
            (16384, "cuda", "cuda", 1056),
            (4096, "cuda", "cuda", 1056),
        ):
            kv = torch.empty(2, 1, 1, nbytes, dtype=torch.uint8, device=here)
            pages = torch.empty(2, 1, nbytes, dtype=torch.uint8, device=there)
            assert defaults.config(kv, pages) == Config(programs, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a GPU")
@pytest.mark.parametrize("tokens, programs", [(4, 3), (2, 5)], ids=["large", "small"])
def test_what_is_launched(monkeypatch, tokens, programs):
    """The default for the size of the blocks, or what is given."""
    launched, kernel = [], copying.block_copy_kernel

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **options):
                launched.append((*grid, options["num_warps"]))
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(copying, "block_copy_kernel", Kernel())
    for name, value in (("SMALL", 128), ("PROGRAMS", 3), ("PROGRAMS_SMALL", 5), ("WARPS", 2)):
        monkeypatch.setattr(defaults, name, value)
    kv, pages = torch.randn(4, 2, tokens, 8), torch.zeros(8, tokens, 8)
    copies = torch.arange(8, dtype=torch.int32)[:, None].expand(8, 2).contiguous()
    number = torch.tensor([8], dtype=torch.int32)
    block_copy(kv, pages, copies, number)
    block_copy(kv, pages, copies, number, config=Config(4, 8))
    assert launched == [(programs, 2), (4, 8)]
    assert torch.equal(pages, kv.flatten(0, 1))
