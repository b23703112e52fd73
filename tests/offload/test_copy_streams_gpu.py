"""Blocks on their way to the host and back on a GPU, with copy streams that lag behind."""

from __future__ import annotations

import pytest
import torch
from caches import FULL, TIGHT, two_level
from inside import attention_of, sealed_pieces
from lazy_copy_streams import chunks_of, logits, slow
from models import build, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig
from hf_sparsekv.offload.copy_streams import CopyStream


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sizes", "late_lanes"),
    [
        ("llama", (700,), True),
        ("llama", (300, 250, 150), True),
        ("llama", (515, 64, 121), False),
        ("gemma3", (515, 64, 121), True),
    ],
)
def test_on_a_gpu(monkeypatch, name, sizes, late_lanes):
    """The same with a copy stream that lags behind by 10 ms: what is not waited for would be missing."""
    if late_lanes:
        make = CopyStream.__init__

        def late(self, *args):
            make(self, *args)
            slow(self, 20_000_000)

        monkeypatch.setattr(CopyStream, "__init__", late)
    sealed_pieces(monkeypatch, 5 * 2 * 2 * 16 * 32 * 4)
    ids = prompt(2, 760)["input_ids"].cuda()
    chunks = chunks_of(ids, *sizes)
    ours, net = build(name, "sparsekv").cuda(), build(name, attention_of(reference(name))).cuda()
    cache = two_level(**FULL)
    found = logits(ours, cache, chunks)
    want = logits(net, DynamicCache(config=net.config), chunks)
    torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-3)
    assert cache.offload_config == OffloadConfig()


@pytest.mark.gpu
def test_memory_of_a_prompt_is_bounded():
    """A prompt's blocks never lie on the GPU for all layers at once."""
    net = build("llama", "sparsekv", num_hidden_layers=16).cuda()
    layer = 2 * 16384 * 2 * 16 * 2 * 4  # bytes of keys and values: rows, tokens, heads, channels, both, float32
    ids = prompt(2, 64)["input_ids"].cuda().repeat(1, 256)
    cache = two_level(**TIGHT)
    with torch.no_grad():
        net.model(ids[:, :128], past_key_values=two_level(**TIGHT))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        net.model(ids, past_key_values=cache)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - cache.memory_bytes()["device"]
    assert cache.memory_bytes()["host"] >= 16 * layer
    assert kept < 2 * layer, f"{kept / layer:.1f} layers' KV left on the device"
