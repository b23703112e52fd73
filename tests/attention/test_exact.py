"""Exact attention of several queries: prompts, later chunks, padding, windows, against the definition."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from inside import no_plans_yet

from hf_sparsekv.attention import exact, parts
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.parts import chunk_attention, merge
from hf_sparsekv.ops.attention.prompt_attention import reference
from hf_sparsekv.types import AttentionParams


def tensors(q, n, heads=(4, 2), dim=16, batch=2, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (batch, heads[0], q, dim), (batch, heads[1], n, dim), (batch, heads[1], n, dim)
    return [torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes]


def definition(query, key, value, scale):
    """Causal softmax attention of the last columns, in float32."""
    q, n, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    logits = query.float() @ key.transpose(-1, -2) * scale
    seen = torch.arange(n, device=query.device) <= torch.arange(n - q, n, device=query.device)[:, None]
    return (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value).to(query.dtype)


def on_cpu(query, key, value, causal, scale):
    """torch's own kernel that also gives the log-sum-exp; the last query sees all, as on a GPU."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    q, n = query.shape[2], key.shape[2]
    mask = torch.ones(q, n, dtype=torch.bool).tril(n - q) if causal and q < n else None
    mask = None if mask is None else torch.zeros(q, n, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal and mask is None, attn_mask=mask, scale=scale
    )


@pytest.mark.quick
@pytest.mark.parametrize("long", [1 << 28, 1000], ids=["on the grid", "long"])
@pytest.mark.parametrize(
    ("q", "n"),
    [(1, 2), (7, 8), (33, 33), (33, 100), (64, 65), (50, 1000), (128, 256), (130, 520), (700, 700), (1100, 1100)],
)
@pytest.mark.parametrize("plan", [0, 3e5, 1e9], ids=["plans", "some plans", "no plans"])
def test_parts_are_one(q, n, long, plan, monkeypatch):
    monkeypatch.setattr(parts, "LONG", long)
    monkeypatch.setattr(parts, "PLAN", plan)
    no_plans_yet(monkeypatch)
    query, key, value = tensors(q, n)
    found = chunk_attention(query, key, value, 0.3, on_cpu, on_cpu)
    torch.testing.assert_close(found, definition(query, key, value, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("q", "n", "squares"),
    [
        (1536, 1536, [1536]),
        (1537, 1537, [1024, 640]),
        (2048, 2048, [1024, 1024]),
        (2500, 4000, [1024, 1024, 512]),
        (3073, 3073, [1024, 1024, 1024, 128]),
    ],
)
def test_long_prompts_in_pieces(q, n, squares, monkeypatch):
    """Of so many queries that the L2 cache holds their keys; a half more at the end is one with the last."""
    monkeypatch.setattr(parts, "PLAN", 0)
    monkeypatch.setattr(parts, "SHORT", 0)
    no_plans_yet(monkeypatch)
    query, key, value = tensors(q, n, dim=8, batch=1)
    monkeypatch.setattr(parts, "PIECE", 1024 * 2 * 8 * key.element_size())
    seen = []

    def attend(query, key, value, causal, scale):
        seen.extend([query.shape[2]] * causal)
        return on_cpu(query, key, value, causal, scale)

    found = chunk_attention(query, key, value, 0.3, attend, on_cpu)
    torch.testing.assert_close(found, definition(query, key, value, 0.3), atol=1e-5, rtol=1e-5)
    assert seen == squares


def test_few_lengths_have_plans(monkeypatch):
    """Of prompts, and later pieces of them, of any length, however they lie in memory."""
    monkeypatch.setattr(parts, "PLAN", 0)
    plans, dice = set(), random.Random(0)

    def attend(query, key, value, causal, scale):
        plans.add((causal, *((*t.shape, *t.stride()) for t in (query, key, value))))
        return query, torch.zeros(query.shape[:3])

    for _ in range(400):
        q = dice.randrange(2, 3000)
        past = dice.choice((0, dice.randrange(512, 9000)))
        query, key, value = tensors(q, q + past + dice.randrange(3), dim=1, batch=1)
        if dice.random() < 0.5:
            query = query.transpose(1, 2).contiguous().transpose(1, 2)
        key, value = (t[:, :, : q + past] for t in (key, value))
        chunk_attention(query, key, value, 1.0, attend, lambda query, *_: (query, torch.zeros(query.shape[:3])))
    assert sum(plan[0] for plan in plans) <= 16, "squares"
    assert len(plans) <= 16 + 16 * 12


def test_a_plan_is_made_when_it_would_have_paid(monkeypatch):
    """The 4th time of four equal ones; at once where one pass has as much; in each thread anew."""
    no_plans_yet(monkeypatch)
    query, key, value = tensors(1024, 3072, dim=8)
    monkeypatch.setattr(parts, "PLAN", 4 * query.shape[0] * query.shape[1] * 8 * 1024 * 2048)
    monkeypatch.setattr(parts, "LAYERS", 1)
    seen = []

    def attend(query, key, value, causal, scale):
        seen.append(causal)
        return on_cpu(query, key, value, causal, scale)

    expected = definition(query, key, value, 0.3)
    for _ in range(5):
        seen.append("pass")
        torch.testing.assert_close(
            chunk_attention(query, key, value, 0.3, attend, on_cpu), expected, atol=1e-5, rtol=1e-5
        )
    assert seen == ["pass"] * 4 + [False, "pass", False]  # the square has a quarter of the products
    thread = threading.Thread(target=lambda: seen.append(parts.planned(query, key, 1024, 2048, False)))
    thread.start()
    thread.join()
    assert seen[-1] is False
    monkeypatch.setattr(parts, "LAYERS", 32)
    no_plans_yet(monkeypatch)
    seen.clear()
    chunk_attention(query, key, value, 0.3, attend, on_cpu)
    assert seen == [True, False]


@pytest.mark.parametrize(("q", "n"), [(1100, 1100), (700, 1500)])
def test_flash_attention_3_takes_everything(q, n, monkeypatch):
    """Padded and split for cuDNN it would be slower; no plan is made ahead."""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
    monkeypatch.setattr(parts, "PLAN", 0)
    query, key, value = tensors(q, n)
    found = chunk_attention(query, key, value, 0.3, lambda *given: pytest.fail("cuDNN"), on_cpu)
    torch.testing.assert_close(found, definition(query, key, value, 0.3), atol=1e-5, rtol=1e-5)
    assert parts.make_plans(query[:1, :, :1], key[:1, :, :1], value[:1, :, :1], 9000) == 0


@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (16, 24), (16, 16)])
def test_without_a_plan_values_may_be_of_another_width(dim, value_dim, monkeypatch):
    """As MLA's: 192 channels of keys, 128 of values. The flash kernels take one width only."""

    def flash(query, key, value, dropout, causal, mask, *, scale):
        if not query.shape[3] == key.shape[3] == value.shape[3]:
            raise RuntimeError("v must have shape (batch_size, seqlen_k, num_heads_k, head_size_og)")
        return *on_cpu(query, key, value, causal, scale), None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    query, key, value = tensors(9, 30, dim=dim)
    value = torch.randn(*value.shape[:3], value_dim, generator=torch.Generator().manual_seed(1))
    found = chunk_attention(query, key, value, 0.3, on_cpu)
    assert found.shape == (*query.shape[:3], value_dim)
    torch.testing.assert_close(found, definition(query, key, value, 0.3), atol=1e-5, rtol=1e-5)


def test_plans_of_all_prompts_up_to_a_length(monkeypatch):
    made = []
    no_plans_yet(monkeypatch)
    monkeypatch.setattr(parts, "serves", lambda *given: True)
    monkeypatch.setattr(parts, "_cudnn", lambda query, key, value, causal, scale: made.append((query.shape, causal)))
    assert parts.make_plans(*tensors(1, 1, dim=8, batch=1), 16384) == len(made) == 20
    padded = {-(-n // parts.grid(n)) * parts.grid(n) for n in range(parts.SHORT + 1, 16385)}
    assert {shape[2] for shape, causal in made if causal} == padded
    assert all(parts.planned(*tensors(1, 1, dim=8, batch=1)[:2], n, n, True) for n in padded)
    monkeypatch.setattr(parts, "PIECE", 8 * (8 + 8) * 4 * 1024)  # longer ones are taken in pieces
    made.clear()
    assert parts.make_plans(*tensors(1, 1, dim=8, batch=1), 1 << 20) == len(made)
    assert max(shape[2] for shape, _ in made) == 12288
    assert parts.lengths(1024) == [] and parts.lengths(1025) == [1280]


def test_lengths_are_on_a_grid():
    assert [parts.grid(n) for n in (1, 500, 1024, 1025, 2049, 5000, 8192, 8193, 100_000)] == [
        128,
        128,
        128,
        256,
        512,
        1024,
        1024,
        1024,
        1024,
    ]


@pytest.mark.parametrize("at_once", [4, 16, 40, 1 << 20], ids="{} bytes".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_very_different_weight(dtype, at_once, monkeypatch):
    """One part may outweigh the other by more than float32 can tell: no overflow, no NaN, some rows at a time."""
    monkeypatch.setattr(parts, "MERGED", at_once)
    out, other = torch.ones(2, 1, 3, 2, dtype=dtype), torch.full((2, 1, 3, 2), 5.0, dtype=dtype)
    lse = torch.tensor([[[500.0, -500.0, 0.0]], [[0.0, 500.0, -500.0]]])
    found = merge(out, lse, other, torch.zeros(2, 1, 3))
    assert found is out
    assert found[..., 0].tolist() == found[..., 1].tolist() == [[[1.0, 5.0, 3.0]], [[3.0, 1.0, 5.0]]]


@pytest.mark.parametrize(("q", "n"), [(1, 50), (20, 20), (20, 70), (600, 1300)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_causal(q, n, heads):
    query, key, value = tensors(q, n, heads)
    found = exact_attention(query, key, value, AttentionParams(0.3))
    torch.testing.assert_close(found, definition(query, key, value, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [((32, 8), 128), ((8, 8), 64), ((7, 1), 128)])
@pytest.mark.parametrize("size", [parts.PIECE, 1 << 19], ids=["at once", "in pieces"])
@pytest.mark.parametrize(("q", "n"), [(512, 1024), (700, 3001), (2048, 10000), (2, 2), (333, 333), (4500, 4500)])
def test_chunks_on_a_gpu(q, n, heads, dim, dtype, size, monkeypatch):
    """By cuDNN where that serves; keys and values as they lie in a cache, side by side."""
    monkeypatch.setattr(parts, "PIECE", size)
    query, key, value = tensors(q, n, heads, dim, dtype=dtype, device="cuda")
    side = torch.cat((key, value), -1)
    key, value = side[..., :dim], side[..., dim:]
    want = definition(query, key, value, 0.1)
    found = exact_attention(query, key, value, AttentionParams(0.1))
    torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
    assert float((found.float() - want.float()).square().mean().sqrt()) < 2e-3
    if torch.cuda.get_device_capability()[0] >= 9:
        assert parts.serves(query, key, value)


@pytest.mark.parametrize("q", [60, 25, 12])
@pytest.mark.parametrize("starts", [(0, 17, 40), (5, 0, 0), (0, 50, 3), (30, 60, 0)])
def test_long_rows_of_a_padded_batch_one_by_one(q, starts, monkeypatch):
    """Without the padding in front of them; short rows take our kernel, in one launch with the others."""
    query, key, value = tensors(q, 60, batch=3)
    columns = torch.arange(60) >= torch.tensor(starts)[:, None]
    params, calls = AttentionParams(0.3), []

    def causal(query, key, value, scale):
        calls.append((query.shape[2], key.shape[2]))
        return definition(query, key, value, scale)

    def kernel(query, key, value, scale, columns, *rest):
        calls.append("kernel")
        return reference.prompt_attention(query, key, value, scale, columns)

    given = {"use_triton": lambda t: True, "serves": lambda query, key, value: query.shape[2] > 1}
    for name, what in {**given, "chunk_attention": causal, "prompt_attention": kernel, "LEAST": 12}.items():
        monkeypatch.setattr(exact, name, what)
    found = exact_attention(query, key, value, params, columns=columns)
    for row, start in enumerate(starts):
        new = min(q, 60 - start)  # tokens among the queries
        own = slice(row, row + 1), slice(None)
        rows = query[own][:, :, q - new :], key[own][:, :, start:], value[own][:, :, start:]
        torch.testing.assert_close(found[own][:, :, q - new :], definition(*rows, 0.3), atol=1e-5, rtol=1e-5)
        assert not found[own][:, :, : q - new].any()
    long = [(min(q, 60 - start), 60 - start) for start in starts]
    assert calls == (long if min(long)[0] >= 12 else ["kernel"])
