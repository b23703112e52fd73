"""Operators by their own words: worked out by hand, as transformers and papers have them, and what they refuse.

Calls of all shapes are in ``test_operators.py``.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from operator_calls import column
from operators import BY_NAME
from selection_operators import queries
from storage_operators import Seal
from transformers.integrations.moe import _default_apply_gate, batched_mm_experts_forward

from hf_sparsekv.ops.attention.latent_rope.reference import turn
from hf_sparsekv.ops.layers.experts import Gate
from hf_sparsekv.ops.layers.experts.triton import FEW
from hf_sparsekv.ops.layers.route import MAX_TOKENS as MAX_ROUTED
from hf_sparsekv.ops.selection.query_predict import query_predict as public_predict
from hf_sparsekv.ops.selection.token_score.config import can_use_tensor_cores
from hf_sparsekv.ops.storage.seal import Index, key_bounds
from hf_sparsekv.ops.storage.seal.reference import running_means

KERNELS = [
    "add_norm",
    "append",
    "block_score",
    "gated",
    "latent_rope",
    "qk_rope",
    "query_ring.push",
    "seal",
    "token_score",
]
add_norm, append, block_score, gated, latent_rope, qk_rope, push, seal, token_score = (
    BY_NAME[of].functions[0] for of in KERNELS
)
experts, reference_experts = BY_NAME["experts"].functions
pack, reference_pack = BY_NAME["pack"].functions
query_predict, reference_predict = BY_NAME["query_predict"].functions
route, reference_route = BY_NAME["route"].functions
reference_gated, reference_seal = (BY_NAME[of].functions[1] for of in ("gated", "seal"))

# ---------------------------------------------------------------------- recent tokens and queries


def test_append_step_by_step_is_as_at_once(place32):
    """Tokens appended one by one, through turns of the ring, leave the last ``R`` of each row, which has its own."""
    sinks, ring, total = 2, 5, 17
    k, v = place32.randn(2, 2, total, 64), place32.randn(2, 2, total, 64)
    recent_kv = place32.nan(2, 2, sinks + ring, 128)
    rows = column(place32, 0, -1, 3, -1).view(2, 2)
    for i in range(total):
        valid = torch.tensor([True, i % 3 != 1], device=place32.device)
        append(k[:, :, i : i + 1], v[:, :, i : i + 1], valid, recent_kv, rows[:, 0], sinks)
        rows[:, 0] += valid
    for row, tokens in enumerate((list(range(total)), [i for i in range(total) if i % 3 != 1])):
        first = 3 * row
        assert int(rows[row, 0]) == first + len(tokens)
        for nth, i in list(enumerate(tokens))[-ring:]:
            expected = torch.cat((k[row, :, i], v[row, :, i]), -1)
            assert torch.equal(recent_kv[row, :, sinks + (first + nth) % ring], expected)
    assert recent_kv[:, :, :sinks].isnan().all()


def test_push_step_by_step_is_as_at_once(place32):
    """Through three turns of the ring; a row whose first queries are not known, and one that misses one."""
    total, ring = 23, 7
    q = place32.randn(3, 2, total, 16)
    valid = torch.ones(3, total, dtype=torch.bool)
    valid[2, 18] = False
    valid, past = valid.to(place32.device), column(place32, 0, 0, 0)
    first = column(place32, 0, 9, 0)
    held = [place32.nan(3, 2, ring, 16), first, *(torch.zeros_like(past) for _ in range(2))]
    for i in range(total):
        push(q[:, :, i : i + 1], valid[:, i], past, *held)
        past += valid[:, i]
        known = [min(ring, n) for n in (i + 1, max(0, i - 8), i + (i < 18))]
        assert held[2].tolist() == known
    assert held[3].tolist() == [total % ring, total % ring, (total - 1) % ring]
    assert first.tolist() == [0, 9, 0]
    for i in range(total - ring, total):
        assert torch.equal(held[0][:2, :, i % ring], q[:2, :, i])
        if i != 18:
            assert torch.equal(held[0][2, :, (i - (i > 18)) % ring], q[2, :, i])


# ---------------------------------------------------------------------- predicted queries


EPSILON = 1e-2


def by_equations(history, window):
    """Equations 2 to 5 as they stand, for one head's queries ``[n, D]`` in order of time; float64."""
    q = history.double()
    n = min(window, len(q) - 1)
    ridge = EPSILON * q[-1 - n : -1].square().sum(-1).mean()
    found = []
    for k in range(1, n + 1):
        x = q[-1 - k : -1]  # Q_(t-k) .. Q_(t-1)
        w = torch.linalg.solve(x @ x.T + ridge * torch.eye(k, dtype=torch.float64), x @ q[-1])
        found.append(w.softmax(0) @ q[-k:])
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("count", [17, 9, 2])
@pytest.mark.parametrize("window", [16, 4])
def test_prediction_is_the_papers(count, window):
    history = queries(2, 3, count, 64)
    ring = torch.full((2, 3, 17, 64), math.nan)
    order = (torch.arange(count) + 11) % 17
    ring[:, :, order] = history
    got = reference_predict(
        ring,
        torch.full((2,), (11 + count) % 17, dtype=torch.int32),
        torch.full((2,), count, dtype=torch.int32),
        window,
        EPSILON,
    )
    want = torch.stack([torch.stack([by_equations(h, window) for h in row]) for row in history])
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


def test_few_queries(place32):
    """One: that query. None: zeros. Two: the last one, whose weight the softmax makes 1."""
    ring = queries(3, 2, 17, 64).to(place32.device)
    position = torch.full((3,), 4, dtype=torch.int32, device=place32.device)
    count = torch.tensor([1, 0, 2], dtype=torch.int32, device=place32.device)
    for run in (query_predict, reference_predict):
        got = run(ring, position, count, 16, EPSILON)
        assert torch.equal(got[0], ring[0, :, 3])
        assert not got[1].any()
        assert torch.allclose(got[2], ring[2, :, 3])


HARD = {
    "all the same": lambda q: q[:, :, :1].expand_as(q).clone(),
    "nearly the same": lambda q: q[:, :, :1] + 1e-3 * q,
    "all zero": torch.zeros_like,
    "zero but for the newest": lambda q: q * (torch.arange(q.shape[2]) == q.shape[2] - 1).to(q)[:, None],
    "large": lambda q: q * 1e3,
    "small": lambda q: q * 1e-3,
    "one of them large": lambda q: q * (1 + 99 * (torch.arange(q.shape[2]) == 7)).to(q)[:, None],
}


@pytest.mark.parametrize("case", HARD.values(), ids=HARD.keys())
def test_hard_queries(place, case):
    """Collinear, zero, large: finite, and what the definition says."""
    ring = case(queries(2, 2, 17, 64)).to(place.dtype).to(place.device)
    position = torch.zeros(2, dtype=torch.int32, device=place.device)
    count = torch.tensor([17, 12], dtype=torch.int32, device=place.device)
    want = reference_predict(ring.cpu(), position.cpu(), count.cpu(), 16, 1e-3)
    assert want.isfinite().all()
    place.close(query_predict(ring, position, count, 16, 1e-3), want, 6e-3 if place.dtype.itemsize == 2 else 1e-3)
    if not ring[:, :, :-1].any():
        assert torch.equal(want, ring[:, :, -1].cpu())  # nothing to regress on


def test_overflow_predicts_the_last(place32):
    """Squared norms beyond float32, and an infinite predecessor."""
    ring = queries(2, 1, 17, 64).to(place32.device)
    ring[0, :, 3] = 1e30
    ring[1, :, 3] = math.inf
    position = torch.zeros(2, dtype=torch.int32, device=place32.device)
    count = torch.full((2,), 17, dtype=torch.int32, device=place32.device)
    for run in (query_predict, reference_predict):
        assert torch.equal(run(ring, position, count, 16, EPSILON), ring[:, :, -1])


@pytest.mark.gpu
def test_captured_prediction():
    """A CUDA graph holds one kernel that follows ring, position and counts at their addresses."""
    ring = queries(3, 8, 17, 128).bfloat16().cuda()
    position = torch.tensor([5, 5, 2], dtype=torch.int32, device="cuda")
    count = torch.tensor([17, 0, 2], dtype=torch.int32, device="cuda")
    query_predict(ring, position, count, 16, EPSILON)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = query_predict(ring, position, count, 16, EPSILON)
    ring.copy_(ring.flip(1))
    position.copy_(torch.tensor([9, 0, 16]))
    count.copy_(torch.tensor([3, 17, 8]))
    graph.replay()
    want = reference_predict(ring.cpu(), position.cpu(), count.cpu(), 16, EPSILON)
    assert (out.cpu() - want).float().square().mean() < (6e-3) ** 2 * want.float().square().mean()


# ---------------------------------------------------------------------- small layers


def test_gated_large_values(place):
    """Nothing overflows on the way: the ends are zero and the product."""
    gate = torch.tensor([-3e4, -60.0, 60.0, 3e4], dtype=place.dtype, device=place.device)
    for activation in ("silu", "gelu_tanh"):
        got = gated(gate, torch.ones_like(gate), activation)
        place.close(got, torch.relu(gate).cpu())


@pytest.mark.parametrize("interleaved", [True, False])
def test_turn_is_transformers_own(interleaved):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as file

    angles = torch.rand(2, 5, 4)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    apply = file.apply_rotary_pos_emb_interleave if interleaved else file.apply_rotary_pos_emb
    for x, expected in zip((q, k), apply(q, k, cos, sin)):
        assert torch.equal(turn(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2), expected)


def test_experts_are_transformers_own():
    generator = torch.Generator().manual_seed(0)
    x, index = torch.randn(5, 32, generator=generator), torch.randint(0, 6, (5, 3), generator=generator)
    weights = torch.rand(5, 3, generator=generator)
    gate_up, down = torch.randn(6, 48, 32, generator=generator), torch.randn(6, 32, 24, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        module = SimpleNamespace(
            num_experts=6, has_gate=True, has_bias=False, is_transposed=False, act_fn=torch.nn.functional.silu,
            gate_up_proj=gate_up.to(dtype), down_proj=down.to(dtype),
        )  # fmt: skip
        module._apply_gate = lambda out, module=module: _default_apply_gate(module, out)
        want = batched_mm_experts_forward(module, x.to(dtype), index, weights)
        found = reference_experts(x.to(dtype), index, weights, gate_up.to(dtype), down.to(dtype), Gate())
        assert torch.equal(found, want)


def test_equal_scores_go_to_the_lower_expert(place32):
    x, weight = torch.ones(1, 16, device=place32.device), torch.ones(8, 16, device=place32.device)
    bias = torch.zeros(8, device=place32.device)
    for run in (route, reference_route):
        index = run(x, weight, bias, 3, groups=4, top_groups=2, normalise=True, scale=1.0)[2]
        assert index.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_route_is_transformers_own(groups, top_groups):
    config = tf.DeepseekV3Config(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=3, n_group=groups, topk_group=top_groups
    )
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.normal_(std=0.1)
        x = torch.randn(9, 32)
        logits, weights, index = router(x)
        found = reference_route(
            x, router.weight, router.e_score_correction_bias, 3, groups=groups, top_groups=top_groups,
            normalise=config.norm_topk_prob, scale=config.routed_scaling_factor,
        )  # fmt: skip
    order = index.sort(-1)
    mine = found[2].sort(-1)
    assert torch.equal(order.values, mine.values)
    torch.testing.assert_close(found[0], logits)
    torch.testing.assert_close(found[1].gather(1, mine.indices), weights.gather(1, order.indices))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routes_by_softmax_are_transformers_own(dtype, normalise):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_experts_per_tok": 3}
    softmax = Qwen3MoeTopKRouter(tf.Qwen3MoeConfig(num_experts=16, norm_topk_prob=normalise, **sizes))
    chosen = GptOssTopKRouter(tf.GptOssConfig(num_local_experts=16, **sizes))
    x = torch.randn(9, 32, dtype=dtype)
    for router, named in (
        (softmax, {"normalise": normalise, "scores": "softmax"}),
        (chosen, {"scores": "softmax_chosen"}),
    ):
        bias = getattr(router, "bias", None)
        with torch.no_grad():
            router.weight.normal_()
            if bias is not None:
                bias.normal_()
            logits, weights, index = router.to(dtype)(x)
            found = reference_route(x, router.weight, getattr(router, "bias", None), 3, **named)
        assert torch.equal(logits.gather(1, found[2]), logits.gather(1, index))  # equal ones in either order
        torch.testing.assert_close(found[0], logits)
        torch.testing.assert_close(found[1], weights)


def test_unknown_scores(place32):
    x, weight = torch.ones(1, 16, device=place32.device), torch.ones(8, 16, device=place32.device)
    for run in (route, reference_route):
        with pytest.raises(ValueError, match="scores must be one of"):
            run(x, weight, None, 3, scores="tanh")


# ---------------------------------------------------------------------- full blocks


def test_seal_by_hand():
    """A row's first block of 16, whose first two tokens are sinks; that of the second is not due, the third rests."""
    recent_kv = torch.arange(1.0, 103.0).view(3, 1, 34, 1).repeat(1, 1, 1, 4)
    recent_kv[..., 1] *= -1
    kv, bounds = torch.zeros(3, 1, 16, 4), torch.zeros(3, 1, 2, 2)
    block_table = torch.tensor([[2, 0], [1, -1], [1, 0]], dtype=torch.int32)
    rows = torch.tensor([[20, 0], [20, 0], [0, 0]], dtype=torch.int32)
    after = torch.tensor([[20, 16], [20, 0], [40, 16]], dtype=torch.int32)
    before = recent_kv.clone()
    reference_seal(recent_kv, rows, after, 2, block_table, kv, Index(2, bounds))
    assert torch.equal(kv[2], before[0, :, 2:18])
    assert bounds[2, 0].tolist() == [[18.0, -5.0], [5.0, -18.0]]
    assert not kv[:2].any() and not bounds[:2].any()
    assert torch.equal(recent_kv[0, 0, :2], before[0, 0, 2:4])
    assert torch.equal(recent_kv[1:], before[1:]) and torch.equal(recent_kv[:, :, 2:], before[:, :, 2:])


@pytest.mark.parametrize("sinks", [0, 3, 20])
def test_means_step_by_step_are_as_at_once(place32, sinks):
    """Blocks sealed one after the other have the running means of all of them together."""
    size, blocks, span, width = 16, 7, 3, 24
    kv = place32.randn(1, 2, blocks * size, width)
    token = torch.arange(blocks * size, device=place32.device).view(blocks, 1, size)
    stored = kv.unflatten(2, (blocks, size)).movedim(2, 0)  # [blocks, 1, H, size, D]
    expected = running_means(stored, token >= sinks, stored[0, :, :, 0], token.new_zeros(1), span=span)
    recent_kv, means = place32.nan(1, 2, sinks + 2 * size, width), place32.nan(blocks, 2, width)
    block_table = torch.arange(blocks, dtype=torch.int32, device=place32.device)[None]
    for i in range(blocks):
        at = sinks + i % 2 * size
        recent_kv[:, :, at : at + size] = kv[:, :, i * size : (i + 1) * size]
        rows = column(place32, (i + 1) * size, i * size, (i + 1) * size, (i + 1) * size).view(2, 1, 2)
        seal(
            recent_kv, *rows, sinks, block_table, place32.nan(blocks, 2, size, 0), Index(width, means=means, span=span)
        )
    place32.close(means, expected[:, 0].cpu())
    assert torch.equal(recent_kv[:, :, :sinks], kv[:, :, :sinks])


def test_bounds_by_hand():
    """Keys 1, 2, 6 and one that is not usable."""
    keys = torch.tensor([1.0, 2.0, 100.0, 6.0])[None, :, None]
    usable = torch.tensor([True, True, False, True])
    assert key_bounds(keys, usable).flatten().tolist() == [6, 1]
    high, low = key_bounds(keys, usable & False).flatten().tolist()
    assert high < -1e38 and low > 1e38


def test_what_is_packed(place32):
    """By the words of the definition: each chosen token lies where its place says, and few have moved."""
    batch, heads, room, size, blocks, width = 2, 2, 32, 16, 8, 24
    given = BY_NAME["pack"].call(place32, batch, heads, room, size, blocks, width)
    kv, block_table, held, order, packed, page_ids = list(given.values())[1:7]
    before = [{c for c in row if c >= 0} for row in held.flatten(0, 1).tolist()]
    chosen = moved = 0
    for step in range(5):
        given["ids"] = ids = BY_NAME["pack"].call(place32, batch, heads, room, size, blocks, width)["ids"]
        how = pack if step % 2 else reference_pack
        how(**given)
        assert torch.equal(held, ids)
        for row in range(batch):
            for head in range(heads):
                assert sorted(order[row, head].tolist()) == list(range(room))
                now = [c for c in ids[row, head].tolist() if c >= 0]
                assert (page_ids[row, head, len(now) :] == -1).all()
                for at, place in zip(now, page_ids[row, head].tolist()):
                    token = kv[int(block_table[row, at // size]), head, at % size]
                    assert torch.equal(packed.flatten(0, 2)[place], token)
                i = row * heads + head
                chosen, moved = chosen + len(now), moved + len(set(now) - before[i])
                before[i] = set(now)
    assert given["counters"].tolist() == [chosen, moved]


def test_disabled_pack_changes_nothing(place32):
    given = BY_NAME["pack"].call(place32, 1, 2, 16, 16, 4, 32) | {"enabled": column(place32, 1)}
    pack(**given)
    kept = {name: given[name].clone() for name in ("held", "order", "packed", "page_ids", "counters")}
    given["ids"] = BY_NAME["pack"].call(place32, 1, 2, 16, 16, 4, 32)["ids"]
    given["enabled"].zero_()
    for how in (reference_pack, pack):
        how(**given)
        for name, expected in kept.items():
            torch.testing.assert_close(given[name], expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- scores


def test_bound_holds(place32):
    """No key of a block scores higher than the block."""
    keys, q = place32.randn(6, 2, 16, 64), place32.randn(1, 6, 64)
    bounds = torch.stack((keys.amax(2), keys.amin(2)), 2)
    block_table = torch.arange(6, dtype=torch.int32, device=place32.device)[None]
    score = block_score(q, bounds, column(place32, 99, 96)[None], block_table, "mean", tokens=16, sinks=0)
    exact = torch.einsum("hgd,nhtd->hgnt", q.view(2, 3, 64), keys).mean(1).amax(-1)
    assert (score[0] >= exact - 1e-4).all()


@pytest.mark.parametrize("group", [1, 3, 16])
def test_negative_scores(place, group):
    """Scores below zero in every head: what pads the group must not win."""
    operator = BY_NAME["block_score"]
    given = operator.call(place, 1, 2, group, 64, 9, "max")
    given |= {"q": given["q"].abs(), "bounds": -given["bounds"].abs()}
    operator.check(place, given, operator.expected(given), "max", "min_max")


def test_what_tensor_cores_take():
    q, codes, params = torch.zeros(1, 8, 64).half(), torch.zeros(3, 2, 16, 16).byte(), torch.zeros(3, 2, 16, 2).half()
    wide = torch.zeros(3, 2, 16, 64).byte()  # 128 channels
    for mean in (False, True):
        assert can_use_tensor_cores(q, codes, params, mean)
        assert can_use_tensor_cores(q.bfloat16().repeat(1, 4, 1), codes, params, mean)
        assert can_use_tensor_cores(q, wide, params, mean)
        assert can_use_tensor_cores(q.repeat(1, 2, 1), wide, params, mean) == mean, "8 heads of 128 channels"
        assert can_use_tensor_cores(q.repeat(1, 5, 1), codes, params, mean) == mean, "20 heads"
        assert not can_use_tensor_cores(q.float(), codes, params, mean)
        assert not can_use_tensor_cores(q, torch.zeros(3, 2, 16, 20).byte()[..., :16], params, mean), "a gap"
        assert not can_use_tensor_cores(q, torch.zeros(3, 2, 16, 128).byte(), params, mean), "256 channels"


def test_nothing_selectable(place32):
    """Rows that are empty, have nothing but sinks, or only blocks that are missing."""
    given = BY_NAME["token_score"].call(place32, 4, 1, 2, 64, 16, 16, 4, 3)
    given["qparams"].fill_(torch.nan)
    given |= {"sinks": 32, "rows": column(place32, 0, 0, 40, 32, 70, 64, 70, 64).view(4, 2)}
    given["block_table"][2] = given["block_ids"][3] = -1
    assert (token_score(**given) == float("-inf")).all()


def test_what_is_sealed_scores(place32):
    """Tokens and blocks whose table has an entry for all of them; two sinks more than a block."""
    given = BY_NAME["token_score"].call(place32, 2, 1, 2, 64, 16, 16, 5, None)
    given["qparams"].fill_(1.0)
    rows, table = column(place32, 70, 48, 9, 0).view(2, 2), given["block_table"].clamp_min(0)
    given |= {"sinks": 18, "rows": rows, "block_table": table}
    live = token_score(**given).isfinite()[:, 0]
    assert live.nonzero().tolist() == [[0, i] for i in range(18, 48)]
    for tokens, found in ((16, [1, 2]), (8, [2, 3, 4])):
        bounds, q = place32.randn(9, 1, 2, 64), place32.randn(2, 2, 64)
        score = block_score(q, bounds, rows, table, "max", tokens=tokens, sinks=18)
        assert score.isfinite()[:, 0].nonzero().tolist() == [[0, i] for i in found]


# ---------------------------------------------------------------------- refused


def changed(of: str, *case, **changes):
    """Arguments of an operator's call, some of them others."""

    def make(place) -> dict:
        return BY_NAME[of].call(place, *case) | {name: value(place) for name, value in changes.items()}

    return make


RING = ("query_predict", 2, 3, 5, 8, 4, 0)
REFUSED = {
    "too wide": (add_norm, changed("add_norm", (1, 40_000))),
    "post_weight": (add_norm, changed("add_norm", (1, 4), post_weight=lambda p: p.randn(4), residual=lambda p: None)),
    "rotary width": (qk_rope, changed("qk_rope", 1, 1, 2, 1, 64, 80, 1, False, False)),
    "no latents": (latent_rope, changed("latent_rope", 2, 3, 4, 12, 8, 16, True, weight=lambda p: p.randn(15))),
    "one of": (gated, changed("gated", (4,), "relu")),
    "must be one of": (reference_gated, changed("gated", (4,), "relu")),
    "activation": (experts, changed("experts", 1, 4, 2, 16, 16, "swish")),
    f"at most {MAX_ROUTED}": (route, changed("route", MAX_ROUTED + 1, 16, 8, 2, 1, 1, True)),
    "ring must be": (public_predict, changed(*RING, ring=lambda p: p.randn(2, 5, 8))),
    "needs a ring of 17": (public_predict, changed(*RING, window=lambda p: 16)),
    "window must lie": (public_predict, changed(*RING, window=lambda p: 40)),
    "epsilon must be": (public_predict, changed(*RING, epsilon=lambda p: 0.0)),
    "position must be int32": (public_predict, changed(*RING, position=lambda p: p.rand(1))),
    "count must be int32 with 2": (public_predict, changed(*RING, count=lambda p: column(p, 0, 0, 0))),
    "position must be int32 with 2": (public_predict, changed(*RING, position=lambda p: column(p, 0))),
    "valid must be bool": (append, changed("append", 2, 1, 3, 8, 8, 0, 9, 4, False, valid=lambda p: p.rand(2, 3) > 1)),
    "past must have": (append, changed("append", 2, 1, 3, 8, 8, 0, 9, 4, False, past=lambda p: column(p, 1))),
    "count must have": (push, changed("query_ring.push", 2, 1, 3, 8, 9, 4, False, count=lambda p: column(p, 1))),
    "whole blocks of 16": (seal, changed("seal", Seal(), sinks=lambda p: 3)),
    "after must be": (seal, changed("seal", Seal(), after=lambda p: column(p, 1, 2))),
    "out must be": (public_predict, changed(*RING, out=lambda p: p.randn(2, 3, 9))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses(place32, message):
    function, make = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        function(**make(place32))


def test_many_tokens_share_experts(place32):
    given = BY_NAME["experts"].call(place32, FEW + 1, 4, 2, 16, 16)
    place32.close(experts(**given), BY_NAME["experts"].expected(given)[0])
