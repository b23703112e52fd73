"""The fused layers on a real GPU: kernels instead of references."""

from __future__ import annotations

import pytest
import torch
from test_fused import VARIANTS, logits, made

from hf_sparsekv.fusion.fuse import fuse

pytestmark = pytest.mark.gpu


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("small_batch", [False, True], ids=["", "small_batch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant, small_batch, dtype):
    """As close to float32 as transformers' own code is in the same dtype."""
    exact = logits(made(variant).cuda().double().float())
    model = made(variant).cuda().to(dtype)
    stock = logits(model).float()
    fusion = fuse(model, small_batch=small_batch)
    assert fusion.skipped == []
    ours = logits(model).float()
    size = exact.norm()
    error, baseline = (ours - exact).norm() / size, (stock - exact).norm() / size
    print(f"{variant} {dtype}: error {error:.2e}, unfused {baseline:.2e}, apart {(ours - stock).norm() / size:.2e}")
    assert error < 1.3 * baseline + 2e-5
    fusion.undo()
    assert torch.equal(logits(model).float(), stock)


@pytest.mark.parametrize("small_batch", [False, True], ids=["", "small_batch"])
def test_capture(small_batch):
    """A captured forward pass gives what the eager one gives."""
    model = made("qwen3").cuda().to(torch.bfloat16)
    fuse(model, small_batch=small_batch)
    ids = torch.randint(2, 90, (2, 1), device="cuda")
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model(ids, use_cache=False).logits
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, want)


def test_memory():
    """Joining and parting leave as much memory allocated as before."""
    model = made("llama").cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fusion = fuse(model)
    assert torch.cuda.memory_allocated() <= before
    fusion.undo()
    assert torch.cuda.memory_allocated() <= before
