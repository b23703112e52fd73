"""Sparse prompts: everything chosen is exact attention; what is audited is true; who cannot have them is told."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from caches import CACHES, FULL
from inside import LATENT_BYTES, latent_pieces
from models import build, model, plain_text, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import OffloadedSparseCache, TokenConfig, sparse
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.sparse_prompt import LAST, PromptAudit, sparse_attention
from hf_sparsekv.layers import sparse_prompt as sparse_layers
from hf_sparsekv.layers.sparse_prompt import too_precise
from hf_sparsekv.ops._prompts import BLOCK, STEP, TILE
from hf_sparsekv.telemetry.prompt_stats import PromptStats, described
from hf_sparsekv.types import AttentionParams

ALL = {"prefill": 1.0, "prefill_below": 0}
SOME = {"prefill": 0.7, "prefill_below": 0, "dense_layers": 0}


def tensors(q, n, heads=(4, 2), dim=16, batch=1):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, h, rows, dim, generator=generator) for h, rows in zip((heads[0], *heads[1:] * 2), (q, n, n))
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    ["device", "host-default", "device-tail", "need", "progressive", "predictive", "predictive-host-dense1"],
)
def test_everything_is_exact(name):
    """Greedy text, of rows with padding."""
    inputs = prompt(3, 400, (0, 5, 261))
    cache = CACHES[name](**FULL, **ALL)
    found = model("llama").generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=12)
    assert torch.equal(found, plain_text("llama", inputs, max_new_tokens=12))
    stats = cache.stats()
    assert [p.layer for p in stats.prompts] == [0, 1][cache.config.dense_layers :]
    assert all(p.density == 1 and not p.audited and p.covered is None for p in stats.prompts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "gpt-oss", "glm4-moe-lite"])
@torch.no_grad()
def test_pieces(name, monkeypatch):
    """Of a prompt, on the device and in host memory, over latents some heads at a time."""
    ids = prompt(1, 900)["input_ids"]
    expected = reference(name)(ids, past_key_values=DynamicCache(config=model(name).config)).logits[:, -1]
    latent_pieces(monkeypatch, 1 << 18)
    for make in ("device-default", "host-default"):
        cache = CACHES[make](**FULL, **ALL)
        for piece in ids.split(450, dim=1):
            logits = model(name)(piece, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, expected, atol=5e-4, rtol=1e-4)
        assert all(p.densities == (1.0,) * 4 for p in cache.stats().prompts)
        assert cache.stats().prompts


@pytest.mark.parametrize("prefill", [None, 0.4])
@torch.no_grad()
def test_a_later_piece_reads_what_is_in_host_memory_once(prefill):
    """Each layer all full blocks, whatever its queries choose of them."""
    cache = CACHES["host-default"](**{**SOME, "prefill": prefill})
    first, second = prompt(1, 900)["input_ids"].split((500, 400), dim=1)
    model("llama")(first, past_key_values=cache)
    before, expected = cache.stats().host_to_device_bytes, 0
    for layer in cache.sparse_layers:
        store = layer.store
        expected += store.full_blocks * store.block_size * store.heads * store.stored_bytes
    model("llama")(second, past_key_values=cache)
    assert cache.stats().host_to_device_bytes - before == expected > 0
    assert len(cache.stats().prompts) == (0 if prefill is None else 2)


@torch.no_grad()
def test_latents_are_chosen_from(monkeypatch):
    """In all layers; some heads at a time choose as all heads do, and so does a piece that follows another."""
    net, ids = model("glm4-moe-lite"), prompt(1, 1000)["input_ids"]
    found = []
    for size in (LATENT_BYTES, 1 << 18):
        latent_pieces(monkeypatch, size)
        cache = OffloadedSparseCache(TokenConfig(**{**SOME, "prefill": 0.4}), offload=None)
        for piece in ids.split((300, 700), dim=1):
            out = net(piece, past_key_values=cache).logits[:, -1]
        found.append((out, cache.stats().prompts))
    (out, prompts), (again, other) = found
    torch.testing.assert_close(out, again, atol=1e-4, rtol=1e-4)
    assert [layer.layer for layer in prompts] == [*range(net.config.num_hidden_layers)]
    for layer, more in zip(prompts, other):
        assert layer.density < 0.95
        assert layer.audited > 0
        assert layer.densities == pytest.approx(more.densities, abs=0.02)
        assert all(share >= 0.4 for share in layer.heads if share is not None)


@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_rows_of_latents_begin_where_their_padding_ends(rows, monkeypatch):
    """Some rows at a time, as all of them together do."""
    net, inputs, found = model("glm4-moe-lite"), prompt(3, 700, (0, 63, 300)), []
    each = 700 * (12 + 8 + 10) * 4  # bytes of a row's keys and values of one head
    for size in (LATENT_BYTES, rows * each):
        latent_pieces(monkeypatch, size)
        cache = OffloadedSparseCache(TokenConfig(**{**SOME, "prefill": 0.4}), offload=None)
        found.append((net(**inputs, past_key_values=cache).logits, cache.stats().prompts))
    (out, prompts), (again, other) = found
    live = inputs["attention_mask"].bool()
    torch.testing.assert_close(again[live], out[live], atol=1e-4, rtol=1e-4)
    assert [layer.densities for layer in other] == [layer.densities for layer in prompts]
    assert all(layer.density < 1 for layer in prompts)


@pytest.mark.parametrize(
    ("below", "sparse"), [(0, [True] * 3), (1436, [True, True, False]), (1437, [True, False, False])]
)
def test_short_rows_beside_long_ones_are_exact(below, sparse):
    """As they are alone: their padding does not count."""
    query, key, value = tensors(1024, 1536, batch=3)
    key[:, :, ::29] *= 6
    start = torch.tensor([0, 100, 101], dtype=torch.int32)
    columns = torch.arange(1536) >= start[:, None]
    exact = exact_attention(query, key, value, AttentionParams(0.4), columns=columns)
    audit = PromptAudit()
    found = sparse_attention(query, key, value, AttentionParams(0.4), 0.4, audit, start=start, below=below)
    far = (found - exact).abs().amax((1, 2, 3))
    assert [bool(off > 1e-2) for off in far] == sparse, far
    assert (far[[not one for one in sparse]] < 1e-5).all()


@pytest.mark.parametrize("name", ["llama", "glm4-moe-lite"])
@torch.no_grad()
def test_layers_say_which_rows_are_short(name, monkeypatch):
    """Latents are attended to a row at a time."""
    said = []

    def attend(*args, start, below, **named):
        said.append((start.tolist(), below))
        return real(*args, start=start, below=below, **named)

    real = sparse_layers.sparse_attention
    monkeypatch.setattr(sparse_layers, "sparse_attention", attend)
    latent_pieces(monkeypatch, 1)
    cache = OffloadedSparseCache(TokenConfig(**{**SOME, "prefill_below": 650}), offload=None)
    model(name)(**prompt(3, 700, (0, 63, 300)), past_key_values=cache)
    assert {below for _, below in said} == {650} and sorted({one for start, _ in said for one in start}) == [0, 63, 300]


@torch.no_grad()
def test_what_is_counted():
    """Rows with padding; a copy counts on, a reset begins again."""
    inputs = prompt(2, 800, (0, 100))
    cache = OffloadedSparseCache(TokenConfig(**SOME), offload=None)
    model("llama")(**inputs, past_key_values=cache)
    stats = cache.stats()
    assert len(stats.prompts) == 2
    for layer in stats.prompts:
        assert 0 < layer.density < 1
        assert len(layer.heads) == len(layer.least) == 4
        assert 0.7 <= layer.covered <= 1
        assert layer.least[0] <= layer.heads[0]
        assert layer.lowest == min((share, head) for head, share in enumerate(layer.heads))[::-1]
        assert layer.choices == 2  # of each row once
        assert all(dense <= again <= 2 for again, dense in zip(layer.again, layer.dense))
    assert "sparse prompts attended to" in str(stats)
    assert stats.prompt_covered >= 0.7
    other = copy.deepcopy(cache)
    cache.reset()
    assert not cache.stats().prompts
    assert other.stats().prompts == stats.prompts


@pytest.mark.parametrize(("hidden", "exact"), [(None, 0), (slice(690, 700), 2)], ids=["sparse", "exact"])
@torch.no_grad()
def test_sparse_pieces_are_no_exact_calls(hidden, exact):
    """Padding within makes a later piece exact."""
    cache, inputs = CACHES["device-default"](**SOME), prompt(2, 1000)
    if hidden is not None:
        inputs["attention_mask"][1, hidden] = 0
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    model("llama")(ids[:, :500], attention_mask=mask[:, :500], past_key_values=cache)
    model("llama")(ids[:, 500:], attention_mask=mask, past_key_values=cache)
    assert cache.stats().exact_calls == exact
    assert [layer.choices for layer in cache.stats().prompts] == [2 if exact else 4] * 2


@torch.no_grad()
def test_an_interrupt_between_heads(monkeypatch):
    """Statistics tell of what was chosen, though some heads have seen nothing."""
    from hf_sparsekv.attention import sparse_prompt

    def attend(*args, **named):
        if done:
            raise KeyboardInterrupt
        done.append(0)
        return real(*args, **named)

    real, done = sparse_prompt.block_attention, []
    latent_pieces(monkeypatch, 1)  # a head at a time
    monkeypatch.setattr(sparse_prompt, "block_attention", attend)
    cache = CACHES["device-default"](**SOME)
    with pytest.raises(KeyboardInterrupt):
        model("glm4-moe-lite")(**prompt(1, 700), past_key_values=cache)
    (layer,) = cache.stats().prompts
    assert layer.densities[0] < 1 and layer.densities[2:] == (1.0, 1.0)


@torch.no_grad()
def test_rows_that_join_are_counted():
    cache = CACHES["device-default"](**SOME)
    rows, counted = cache.rows(2, 1000), []
    for seed in range(2):
        read = rows.prefill(model("llama"), prompt(1, 900, seed=seed)["input_ids"])
        counted.append(read.cache.stats().prompts)
        rows.join(read)
    for layer, (one, two) in zip(cache.stats().prompts, zip(*counted)):
        assert layer.audited == one.audited + two.audited > 0
        assert layer.least == tuple(map(min, one.least, two.least))
    assert len(cache.stats().prompts) == 2


def test_what_the_line_says():
    one = PromptStats(3, 0.25, (0.5, 0.0), 4, 0.9, (0.85, 0.95), (0.8, 0.9), 100, 2, (1, 0), (1, 0))
    assert described([]) == ""
    assert described([one]) == (
        "sparse prompts attended to 25.0% of what they could see, covered mass 90.00% (layer 3, head 0: 85.00%), "
        "1 head became dense (layer.head 3.0)"
    )


def test_a_pass_that_is_short_is_exact():
    cache = OffloadedSparseCache(TokenConfig(prefill=0.5), offload=None)
    with torch.no_grad():
        model("llama")(**prompt(1, 700), past_key_values=cache)
    assert not cache.stats().prompts


@pytest.mark.parametrize("hidden", [slice(690, 700), slice(300, 310)], ids=["behind", "within"])
@torch.no_grad()
def test_other_padding_is_exact(hidden):
    inputs = prompt(2, 700)
    inputs["attention_mask"][1, hidden] = 0
    logits = []
    for changes in (SOME, {"dense_layers": 0}):
        cache = OffloadedSparseCache(TokenConfig(**changes), offload=None)
        logits.append(model("llama")(**inputs, past_key_values=cache).logits)
        assert not cache.stats().prompts
    assert torch.equal(*logits)


# ---------------------------------------------------------------------- the audit


def shares(query, key, scale):
    """True shares of blocks, ``[batch, Hq, q, blocks]``."""
    q, n, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    s = query.double() @ key.repeat_interleave(group, 1).double().transpose(-1, -2) * scale
    seen = torch.arange(n) <= torch.arange(n - q, n)[:, None]
    share = s.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.nn.functional.pad(share, (0, -n % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)


def audited_rows(past, q, step=STEP):
    """The row of each tile that is held back."""
    return [tile * TILE + ((past // TILE + tile) % (TILE // step) + 1) * step - 1 for tile in range(q // TILE)]


@pytest.mark.parametrize("step", [STEP, 2 * STEP])
def test_audit_is_true(step, monkeypatch):
    """What attention got, against what is counted; with fewer exact rows, as long prompts have, too."""
    from hf_sparsekv.attention import sparse_prompt
    from hf_sparsekv.ops import _prompts

    monkeypatch.setattr(_prompts, "LONG", 1536 if step > STEP else 1537)

    query, key, value = tensors(1024, 1536)
    key[:, :, ::29] *= 6
    lists = []

    def attend(*args, **named):
        lists.append(args[3:5])
        return real(*args, **named)

    real = sparse_prompt.block_attention
    monkeypatch.setattr(sparse_prompt, "block_attention", attend)
    audit = PromptAudit()
    sparse_attention(query, key, value, AttentionParams(0.4), 0.92, audit)
    ((ids, counts),) = lists
    true, rows = shares(query, key, 0.4), audited_rows(512, 1024, step)
    for head in range(4):
        covered = []
        for tile, row in enumerate(rows[: -LAST // TILE]):
            chosen = ids[0, head, tile, : counts[0, head, tile]].long()
            if len(chosen) < (512 + (tile + 1) * TILE) // BLOCK:
                covered.append(true[0, head, row, chosen].sum())
        assert int(audit.table[head, 0]) == len(covered) > 0
        torch.testing.assert_close(audit.table[head, 1], torch.stack(covered).sum(), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(audit.table[head, -1], torch.stack(covered).amin(), atol=1e-5, rtol=1e-5)
    assert audit.table[:, 2].sum() == counts.sum()
    assert (audit.table[:, 3] == sum((512 + (tile + 1) * TILE) // BLOCK for tile in range(8))).all()
    assert (audit.table[:, 1] / audit.table[:, 0]).min() >= 0.92


@pytest.mark.parametrize("rows", [8, 1])
def test_heads_that_miss_their_share_become_dense(rows):
    """Audited rows of one head look up what no other row does, so no estimate finds it; one of six is enough."""
    query, key, value = tensors(1024, 2048)
    query[:, 0] *= 0.1
    query[:, 0, :, 0] = -8.0
    key[:, 0, :, 0] = 1.0
    key[:, 0, 5 * BLOCK : 6 * BLOCK, 0] = 0.0  # which all others look up
    for row in audited_rows(1024, 1024)[:rows]:
        query[:, 0, row] = 0
        query[:, 0, row, 1] = 40.0
    audit = PromptAudit()
    out = sparse_attention(query, key, value, AttentionParams(1.0), 0.8, audit)
    params = AttentionParams(1.0)
    exact = exact_attention(query, key, value, params)
    assert audit.table[0, 0] == 0, "nothing of this head is left out"
    assert audit.table[0, 2] == audit.table[0, 3]
    assert audit.table[0, 4:7].tolist() == [1, 1, 1], "it chose, chose again, and became dense"
    assert not audit.table[1:, 6].any()
    assert (audit.table[1:, 2] < audit.table[1:, 3]).all()
    torch.testing.assert_close(out[:, 0], exact[:, 0])
    torch.testing.assert_close(out[:, :, -LAST:], exact[:, :, -LAST:])


def test_covered_mass_bounds_the_error():
    query, key, value = tensors(1024, 1024)
    exact = exact_attention(query, key, value, AttentionParams(0.6))
    errors, densities = [], []
    for mass in (0.5, 0.8, 0.95):
        audit = PromptAudit()
        out = sparse_attention(query, key, value, AttentionParams(0.6), mass, audit)
        errors.append((out - exact).norm() / exact.norm())
        densities.append((audit.table[:, 2] / audit.table[:, 3]).mean())
    assert errors == sorted(errors, reverse=True)
    assert densities == sorted(densities)
    assert errors[2] < 0.1


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_caps_and_sinks(softcap, sinks):
    """All blocks are exact attention. Of some, the audit tells the mass among keys: sinks take part in no choice."""
    query, key, value = tensors(700, 900, batch=2)
    logits = torch.randn(4, generator=torch.Generator().manual_seed(1)) + 6 if sinks else None
    params, start = AttentionParams(0.8, softcap, logits), torch.tensor([0, 130], dtype=torch.int32)
    columns = torch.arange(900) >= start[:, None]
    exact = exact_attention(query, key, value, params, columns=columns)
    out = sparse_attention(query, key, value, params, 1.0, PromptAudit(), start=start)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)
    audits = PromptAudit(), PromptAudit()
    out = sparse_attention(query, key, value, params, 0.7, audits[0], start=start)
    sparse_attention(query, key, value, AttentionParams(0.8, softcap), 0.7, audits[1], start=start)
    assert torch.equal(audits[0].table, audits[1].table)
    assert (audits[0].table[:, 2] < audits[0].table[:, 3]).all(), "something is left out"
    torch.testing.assert_close(out[:, :, -LAST:], exact[:, :, -LAST:], atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- who cannot have them


def test_wrong_values():
    for bad in (0, 1.5, True, "much"):
        with pytest.raises(ValueError, match="prefill must be a number in"):
            TokenConfig(prefill=bad)
    with pytest.raises(ValueError, match="prefill_below must be an integer"):
        TokenConfig(prefill=0.9, prefill_below=-1)
    with pytest.raises(ValueError, match="which a sparse prompt changes"):
        sparse(model("llama"), exact=True, prefill=0.9)


@pytest.mark.parametrize(
    ("name", "learns"),
    [
        ("llama", ""),
        ("llama", "k_proj"),
        ("llama", "v_proj"),
        ("glm4-moe-lite", "kv_a_proj_with_mqa"),
        ("glm4-moe-lite", "kv_b_proj"),
    ],
)
def test_gradients_are_exact(name, learns):
    """Of all weights, and of those alone that no query depends on."""
    net, inputs, found = build(name, "sparsekv", num_hidden_layers=1), prompt(1, 400), []
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(learns in key)
    for cache in (OffloadedSparseCache(TokenConfig(**SOME), offload=None), DynamicCache(config=net.config)):
        net.zero_grad()
        net(**inputs, past_key_values=cache).logits.square().mean().backward()
        found.append([parameter.grad for parameter in net.parameters() if parameter.requires_grad])
        assert not isinstance(cache, OffloadedSparseCache) or not cache.stats().prompts
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_float64_is_exact():
    """The operators compute in float32."""
    net, inputs = build("llama", "sparsekv").double(), prompt(1, 400)
    cache = OffloadedSparseCache(TokenConfig(**{**SOME, **ALL}), offload=None)
    expected = net(**inputs, past_key_values=DynamicCache(config=net.config)).logits
    torch.testing.assert_close(net(**inputs, past_key_values=cache).logits, expected, rtol=1e-9, atol=1e-9)
    assert not cache.stats().prompts


@pytest.mark.parametrize(
    ("dtype", "channels", "gpu", "exact"),
    [
        (torch.float64, 16, False, True),
        (torch.float32, 256, False, False),
        (torch.float32, 64, True, False),
        (torch.float32, 80, True, True),
        (torch.bfloat16, 256, True, False),
    ],
)
def test_what_kernels_are_not_for_is_exact(dtype, channels, gpu, exact):
    query = SimpleNamespace(dtype=dtype, shape=(1, 2, 300, channels), is_cuda=gpu)
    assert too_precise(query) is exact


@pytest.mark.gpu
@pytest.mark.parametrize("start", [None, (0, 700)], ids=["", "padded"])
@torch.no_grad()
def test_on_a_gpu(start):
    """Everything chosen is exact; less is what the definitions choose, up to rounding."""
    query, key, value = (t.cuda().bfloat16() for t in tensors(2000, 3000, dim=128, batch=2))
    key[:, :, ::29] *= 4
    starts = None if start is None else torch.tensor(start, dtype=torch.int32, device="cuda")
    columns = None if starts is None else torch.arange(3000, device="cuda") >= starts[:, None]
    out = sparse_attention(query, key, value, AttentionParams(0.05), 1.0, PromptAudit(), start=starts)
    exact = exact_attention(query, key, value, AttentionParams(0.05), columns=columns)
    assert (out - exact).float().norm() < 1e-2 * exact.float().norm()
    audits = PromptAudit(), PromptAudit()
    out = sparse_attention(query, key, value, AttentionParams(0.05), 0.8, audits[0], start=starts)
    given = (t.cpu().float() for t in (query, key, value))
    other = sparse_attention(
        *given, AttentionParams(0.05), 0.8, audits[1], start=None if starts is None else starts.cpu()
    )
    assert (out.cpu() - other).norm() < 3e-2 * other.norm()
    torch.testing.assert_close(audits[0].table.cpu(), audits[1].table, rtol=0.02, atol=1)
