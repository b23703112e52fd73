"""FlashAttention 4 for prompts: what it is given, when, and, on a GPU that has it, what it gives."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import fake_flash_4
import pytest
import torch
from inside import sparse_slabs, users_of_flash_4
from models import build

from hf_sparsekv import Engine, Sampling, ServingConfig, TokenConfig, flash_attention_4
from hf_sparsekv.attention import flash_4, parts
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.sparse_prompt import PromptAudit, sparse_attention
from hf_sparsekv.ops._prompts import BLOCK, TILE, blocks_of, tiles_of
from hf_sparsekv.ops.attention.block_attention import reference
from hf_sparsekv.types import AttentionParams

there = flash_4.installed("flash_attn.cute")
with_flash_4 = pytest.mark.skipif(not there, reason="FlashAttention 4 (flash-attn-4) is not installed")
SHAPES = {
    "one tile": (100, 0),
    "odd length": (301, 0),
    "whole tiles": (384, 0),
    "after whole blocks": (256, 640),
    "after an odd past": (200, 333),
    "one query after a past": (1, 200),
    "last query of a block": (257, 127),
}


def tensors(q, n, heads=(4, 2), dk=16, dv=16, batch=1, dtype=torch.float32, device="cpu"):
    """Query, key and value as projections lie; some keys matter to all."""
    generator = torch.Generator(device).manual_seed(0)

    def made(tokens, heads, dim):
        t = torch.randn(batch, tokens, heads, dim, dtype=torch.float32, device=device, generator=generator)
        return t.to(dtype).transpose(1, 2)

    query, key, value = made(q, heads[0], dk), made(n, heads[1], dk), made(n, heads[1], dv)
    key[:, :, ::29] *= 4
    return query, key, value


def lists(batch, heads, q, past, share, device="cpu", wider=0):
    """Ids and counts: a share of the whole blocks that a tile sees and all partial ones; a tile of one head has none.

    ``wider``: so many more places than there are blocks.
    """
    generator = torch.Generator(device).manual_seed(1)
    tiles, nb = tiles_of(q), blocks_of(past + q)
    first = past + torch.arange(tiles, device=device)[:, None] * TILE
    last, block = (first + TILE).clamp_max(past + q) - 1, torch.arange(nb, device=device)
    chosen = torch.rand(batch, heads, tiles, nb, device=device, generator=generator) < share
    chosen = (chosen | (block >= (first + 1) // BLOCK)) & (block <= last // BLOCK)
    chosen[-1, -1, tiles // 2] = False
    ids = torch.where(chosen, block, nb).sort(-1).values
    ids = torch.nn.functional.pad(ids.masked_fill(ids == nb, -1), (0, wider), value=-1)
    return ids.int(), chosen.sum(-1, dtype=torch.int32)


@pytest.fixture
def fake(monkeypatch):
    """FlashAttention 4, as it is defined, and a GPU for it."""
    fake_flash_4.install(monkeypatch)
    flash_4.causal_mask.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    flash_4.causal_mask.cache_clear()


@pytest.mark.quick
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("later", [0, 70], ids=["", "keys behind"])
def test_chosen_blocks(name, later, fake):
    """Two rows, each head with lists of its own; keys behind the queries are not seen."""
    q, past = SHAPES[name]
    query, key, value = tensors(q, past + q + later, dk=24, dv=16, batch=2)
    ids, counts = lists(2, 4, q, past, 0.4, wider=3)
    expected = reference.block_attention(query, key, value, ids, counts, 0.3, past)
    out = torch.full((2, q + 5, 4, 16), 9.0).transpose(1, 2)
    flash_4.block_attention(query, key, value, ids, counts, 0.3, past, out[:, :, 2 : q + 2])
    torch.testing.assert_close(out[:, :, 2 : q + 2], expected)
    assert (out[:, :, :2] == 9).all() and (out[:, :, q + 2 :] == 9).all()


@pytest.mark.parametrize("padded", [False, True])
def test_sparse_prompts_take_it(padded, fake, monkeypatch):
    """In slabs of queries; rows with padding are for our kernel."""
    sparse_slabs(monkeypatch, 1)
    query, key, value = tensors(4200, 4700)
    start = torch.tensor([5], dtype=torch.int32) if padded else None
    audits = PromptAudit(), PromptAudit()
    expected = sparse_attention(query, key, value, AttentionParams(0.3), 0.8, audits[0], start=start)
    calls, real = [], flash_4.block_attention
    monkeypatch.setattr(flash_4, "serves", lambda query, value: True)
    monkeypatch.setattr(flash_4, "block_attention", lambda *given: calls.append(given[0].shape[2]) or real(*given))
    found = sparse_attention(query, key, value, AttentionParams(0.3), 0.8, audits[1], start=start)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(audits[0].table, audits[1].table)
    assert sum(calls) == (0 if padded else 4200) and len(calls) != 1


@pytest.mark.parametrize(("q", "n"), [(1100, 1100), (700, 1500)])
def test_exact_prompts_take_it(q, n, fake, monkeypatch):
    """Whole and with a past, at once; no plan of cuDNN's is made ahead."""
    monkeypatch.setattr(flash_4, "serves", lambda query, value: True)
    query, key, value = tensors(q, n, dk=24, batch=2)
    refuse = lambda *given: pytest.fail("another kernel")  # noqa: E731
    found = parts.chunk_attention(query, key, value, 0.3, refuse, refuse)
    torch.testing.assert_close(found, exact_attention(query, key, value, AttentionParams(0.3)), atol=1e-5, rtol=1e-5)
    assert parts.make_plans(query[:1, :, :1], key[:1, :, :1], value[:1, :, :1], 9000) == 0


@pytest.mark.parametrize(
    ("what", "serves"),
    [
        ({}, True),
        ({"dtype": torch.float16, "channels": (192, 128)}, True),
        ({"used": False}, False),
        ({"dtype": torch.float32}, False),
        ({"channels": (100, 96)}, False),
        ({"channels": (96, 100)}, False),
        ({"channels": (320, 256)}, False),
        ({"capability": (10, 0)}, False),
        ({"capability": (8, 0)}, False),
        ({"cuda": False}, False),
    ],
    ids=str,
)
def test_what_it_serves(what, serves, fake, monkeypatch):
    case: dict = {
        "used": True,
        "dtype": torch.bfloat16,
        "channels": (128, 128),
        "capability": (9, 0),
        "cuda": True,
    } | what
    query, value = (
        SimpleNamespace(is_cuda=case["cuda"], dtype=case["dtype"], shape=(1, 4, 256, dim), device="cuda:0")
        for dim in case["channels"]
    )
    with flash_attention_4() if case["used"] else nullcontext():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
        assert flash_4.serves(query, value) is serves
    assert not flash_4.serves(query, value)


def test_it_is_in_use_while_any_context_is_open(fake):
    uses = []
    with pytest.raises(KeyError), flash_attention_4():
        with flash_attention_4():
            thread = threading.Thread(target=lambda: uses.append(users_of_flash_4()))
            thread.start()
            thread.join()
        uses.append(users_of_flash_4())
        raise KeyError
    assert [*uses, users_of_flash_4()] == [2, 1, 0]


def test_an_engine_uses_it_until_it_closes(fake):
    net, serving = build("llama", "sparsekv"), ServingConfig(max_length=64, flash_attention_4=True)
    with pytest.raises(ValueError, match="no prompt of this model could be read by FlashAttention 4"):
        Engine(net, None, TokenConfig(), None, serving)
    assert users_of_flash_4() == 0
    with Engine(net.bfloat16(), None, TokenConfig(), None, serving) as engine:
        assert users_of_flash_4() == 1
        engine.submit([1, 2, 3], Sampling(max_tokens=2, temperature=0)).result(60)
    assert users_of_flash_4() == 0


def test_what_is_missing_is_told(fake, monkeypatch):
    """A GPU, the package, or in another release what we give it; nothing is in use then."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(RuntimeError, match="torch sees none: leave it out"), flash_attention_4():
            pass
    interface = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(interface, "_flash_attn_fwd", lambda query, key, value, causal, softmax_scale, out: None)
    with (
        pytest.raises(ImportError, match=f"no block_sparse_tensors, mask_mod: install {flash_4.TESTED}"),
        flash_attention_4(),
    ):
        pass
    del interface._flash_attn_fwd
    with pytest.raises(ImportError, match="cannot be imported: cannot import name"), flash_attention_4():
        pass
    monkeypatch.setattr(flash_4, "installed", lambda module: False)
    with pytest.raises(ImportError, match="not installed: pip install"), flash_attention_4():
        pass
    assert users_of_flash_4() == 0


def test_modules_of_packages_that_are_missing():
    assert (
        flash_4.installed("torch.nn")
        and not flash_4.installed("torch.no_such")
        and not flash_4.installed("no_such.one")
    )


@pytest.fixture
def used():
    with flash_attention_4():
        yield


@with_flash_4
@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(32, 32), (48, 40), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_chosen_blocks_on_a_gpu(dims, dtype, used):
    for name, (q, past) in SHAPES.items():
        for heads, batch in (((4, 2), 2), ((1, 1), 1), ((14, 2), 1)):
            query, key, value = tensors(q, past + q, heads, *dims, batch, dtype, "cuda")
            ids, counts = lists(batch, heads[0], q, past, 0.4, "cuda", wider=3)
            out = torch.empty(batch, q + 5, heads[0], dims[1], dtype=dtype, device="cuda").fill_(9).transpose(1, 2)
            mine = out[:, :, 2 : q + 2]
            assert flash_4.serves(query, value)
            flash_4.block_attention(query, key, value, ids, counts, 0.1, past, mine)
            expected = reference.block_attention(query, key, value, ids, counts, 0.1, past)
            off = (mine.float() - expected.float()).norm()
            assert off <= 1e-2 * expected.float().norm(), (name, heads)
            assert (out[:, :, :2] == 9).all() and (out[:, :, q + 2 :] == 9).all()


@with_flash_4
@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@torch.no_grad()
def test_prompts_on_a_gpu(dims, used):
    """Exact ones, whole and in pieces, and sparse ones that choose everything, of keys and values side by side."""
    for q, n in ((300, 300), (1500, 1500), (700, 3001), (2048, 2600)):
        query, key, value = tensors(q, n, (8, 2), *dims, 1, torch.bfloat16, "cuda")
        side = torch.cat((key, value), -1)
        key, value = side[..., : dims[0]], side[..., dims[0] :]
        assert parts.serves(query, key, value) and flash_4.serves(query, value)
        found = exact_attention(query, key, value, AttentionParams(0.1))
        many = query.double()
        keys, values = (t.double().repeat_interleave(4, 1) for t in (key, value))
        seen = torch.arange(n, device="cuda") <= torch.arange(n - q, n, device="cuda")[:, None]
        expected = (many @ keys.mT * 0.1).masked_fill(~seen, -torch.inf).softmax(-1) @ values
        assert (found - expected).norm() < 1e-2 * expected.norm()
        sparse = sparse_attention(query, key, value, AttentionParams(0.1), 1.0, PromptAudit())
        assert (sparse - expected).norm() < 1e-2 * expected.norm()


def counted(monkeypatch, name):
    """A list that grows with each call."""
    calls, real = [], getattr(flash_4, name)
    monkeypatch.setattr(flash_4, name, lambda *given: calls.append(name) or real(*given))
    return calls


@with_flash_4
@pytest.mark.gpu
@torch.no_grad()
def test_requests_wait_for_no_compiler_on_a_gpu(monkeypatch):
    """An engine's start compiles what exact and sparse prompts of all lengths take."""
    from flash_attn.cute.interface import _flash_attn_fwd

    compiled = _flash_attn_fwd.compile_cache.cache
    wide = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    net = build("llama", "sparsekv", num_hidden_layers=4, max_position_embeddings=8192, **wide).cuda().bfloat16()
    serving = ServingConfig(max_rows=2, max_length=8000, chunk=2048, prefix_cache=False, flash_attention_4=True)
    with Engine(net, None, TokenConfig(prefill=0.9, prefill_below=2500), None, serving) as engine:
        before = set(compiled)
        calls = {name: counted(monkeypatch, name) for name in ("causal_attention", "block_attention")}
        for tokens in (3, 20, 700, 2300, 3001, 7000):
            engine.submit([5] * tokens, Sampling(max_tokens=3, temperature=0)).result(60)
    assert before and set(compiled) == before
    assert all(calls.values()), calls
