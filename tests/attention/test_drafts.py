"""Drafts that are verified: each query attends to what a step of its own would. What nobody announces is exact."""

from __future__ import annotations

import copy
import random
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from caches import CACHES, FULL, ONE_EACH, SMALL, predictive, two_level
from caches import TIGHT as USUAL
from captured import Imitation
from models import build, model, plain_text, prompt, reference
from torch import Tensor
from transformers import DynamicCache

from hf_sparsekv import sparse
from hf_sparsekv.attention.drafts import are_drafts, verified_tokens
from hf_sparsekv.cache_name import given_cache, over, without_cache
from hf_sparsekv.kv.query_rows import QueryRows
from hf_sparsekv.ops.attention.sparse_decode import sparse_decode
from hf_sparsekv.ops.selection.mass_select import mass_select
from hf_sparsekv.ops.selection.token_score import token_score

MOST = SMALL["max_draft"] + 1
TIGHT = {**USUAL, "token_budget": 16}  # of 144 and more tokens: less than all even for MOST queries

pytestmark = pytest.mark.filterwarnings("ignore:.*by that layer's own query")


def ways(*wanted: str) -> list[str]:
    """Caches whose sparse layers verify drafts in one of these ways."""
    made = {name: make(**TIGHT) for name, make in CACHES.items()}
    return [name for name, kv in made.items() if kv.shared.of_layer(kv.config.dense_layers).drafts in wanted]


SPARSE = ways("together", "each")


@cache
def bare(name: str) -> torch.nn.Module:
    """Without hooks: every layer chooses by its own query, in steps as in passes."""
    return build(name, "sparsekv")


@torch.no_grad()
def together(net, ids: Tensor, kv) -> Tensor:
    with kv.drafts():
        return net(ids, past_key_values=kv).logits.clone()


@torch.no_grad()
def unannounced(net, ids: Tensor, kv) -> Tensor:
    return net(ids, past_key_values=kv).logits.clone()


def one_by_one(net, ids: Tensor, kv) -> Tensor:
    return torch.cat([unannounced(net, token, kv) for token in ids.split(1, dim=1)], dim=1)


def filled(net, make, length: int = 165, batch: int = 1, **changes):
    kv = make(**{**TIGHT, **changes})
    unannounced(net, prompt(batch, length)["input_ids"].to(net.device), kv)
    return kv


def rounds(net, ours, theirs, seed: int = 0, n: int = 9, batch: int = 1) -> float:
    """Passes of random lengths, of which a random rest is taken back; the largest difference of any logit.

    Nothing is taken back from sliding layers: single steps leave them nothing to go back to.
    """
    crops = "sliding_attention" not in (getattr(net.config, "layer_types", None) or ())
    draw, worst = random.Random(seed), 0.0
    for i in range(n):
        q = draw.randint(2, MOST)
        ids = prompt(batch, q, seed=100 * seed + i)["input_ids"].to(net.device)
        found, expected = together(net, ids, ours), one_by_one(net, ids, theirs)
        worst = max(worst, float((found - expected).abs().max()))
        remove = draw.randint(0, q - 1)
        if remove and crops:
            ours.crop(-remove)
            theirs.crop(-remove)
    return worst


@pytest.mark.parametrize("name", ["device-default", "device-block", "host-default"])
def test_each_query_has_a_row_of_the_table(name, monkeypatch):
    """The definitions would broadcast one row over all queries; kernels read a row for each."""
    seen, made = [], QueryRows.of

    @contextmanager
    def checked(*given):
        with made(*given) as rows:
            seen.append((rows.batch, len(rows.rows), len(rows.table), len(rows.block_table)))
            yield rows

    net = bare("llama")
    kv = filled(net, CACHES[name])
    monkeypatch.setattr(QueryRows, "of", checked)
    together(net, prompt(1, 3)["input_ids"], kv)
    assert seen and set(seen) == {(3, 3, 3, 3)}


@pytest.mark.pairwise(once=("name",))
@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("net", ["llama", "gemma3", "glm4-moe-lite"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_pass_is_as_many_steps(name, net):
    """Logits, through crops and sealed blocks, and what is attended to."""
    net = bare(net)
    ours, theirs = filled(net, CACHES[name]), filled(net, CACHES[name])
    before = ours.sparse_layers[-1].store.full_blocks
    assert rounds(net, ours, theirs) < 1e-3
    assert ours.sparse_layers[-1].store.full_blocks > before
    found, expected = ours.stats(), theirs.stats()
    dense = sum(layer.index < ours.config.dense_layers for layer in ours.sparse_layers)
    assert found.sparse_calls == found.decode_steps * (found.layers - dense) > 0
    assert found.draft_queries == expected.decode_steps - found.decode_steps > 0
    assert found.exact_calls == found.decode_steps * dense
    if not dense:  # each query counts as a step does
        assert found.attended_tokens == expected.attended_tokens
        assert found.context_tokens == expected.context_tokens
        # A pass is planned once, by what its last query finds: some more bounds where that is the first to choose.
        assert found.index_bytes_read == pytest.approx(expected.index_bytes_read, rel=0.1)
        assert found.device_to_host_bytes == expected.device_to_host_bytes
    ours.reset()
    assert ours.stats().draft_queries == 0


@pytest.mark.few
@pytest.mark.parametrize("net", ["gpt-oss", "gemma2", "llama-mqa", "deepseek-v3"])
@pytest.mark.parametrize("name", ["host-default", "device-tail", "host-nolag", "progressive", "predictive"])
def test_other_attention(name, net):
    """Learned sinks, softcaps, one KV head, other latents."""
    net = bare(net)
    assert rounds(net, filled(net, CACHES[name]), filled(net, CACHES[name])) < 1e-3


@pytest.mark.few(name=("host-default", "predictive-host", "streaming"))
@pytest.mark.parametrize("name", ["device-default", "host-default", "host-nolag", "predictive-host", "streaming"])
def test_several_rows(name):
    """One token after the other."""
    net = bare("llama")
    ours, theirs = (filled(net, CACHES[name], batch=3) for _ in range(2))
    assert rounds(net, ours, theirs, batch=3) < 1e-3
    assert ours.stats().attended_tokens == theirs.stats().attended_tokens
    assert ours.stats().draft_queries > 0


# ---------------------------------------------------------------------- announced, or exact


def repetitive(times: int = 16) -> dict[str, Tensor]:
    ids = prompt(1, 9)["input_ids"].repeat(1, times)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.few
@pytest.mark.parametrize("name", ["device-default", "host-default", "progressive-host", "streaming"])
@pytest.mark.parametrize("new", [2, MOST])
def test_short_turns_and_chunks_are_exact(name, new):
    """As many tokens as drafts may be, and nobody has said that they are: those of full attention."""
    net, kv, stock = bare("llama"), filled(bare("llama"), CACHES[name]), DynamicCache()
    unannounced(reference("llama"), prompt(1, 165)["input_ids"], stock)
    for seed in range(3):
        ids = prompt(1, new, seed=seed)["input_ids"]
        found, expected = unannounced(net, ids, kv), unannounced(reference("llama"), ids, stock)
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)
    stats = kv.stats()
    assert (stats.exact_calls, stats.decode_steps, stats.draft_queries) == (3 * 2, 0, 0)


@pytest.mark.quick
def test_turns_around_prompt_lookup_are_exact():
    """generate() with drafts, then a short second turn over the same cache, then a pass."""
    net, kv, go = bare("llama"), two_level(False, level="token", **TIGHT), {"do_sample": False}
    text = net.generate(**repetitive(), past_key_values=kv, prompt_lookup_num_tokens=MOST - 1, max_new_tokens=30, **go)
    first = kv.stats()
    assert first.draft_queries > 0 and first.exact_calls == 0
    before = kv.stats()
    text = torch.cat((text, prompt(1, 2, seed=9)["input_ids"]), dim=1)
    net.generate(text, attention_mask=torch.ones_like(text), past_key_values=kv, max_new_tokens=1, **go)
    now = kv.stats().since(before)  # the last token of the turn before, and the two new ones
    assert (now.exact_calls, now.decode_steps, now.draft_queries) == (2, 0, 0)
    before = kv.stats()
    unannounced(net, prompt(1, 3)["input_ids"], kv)
    assert kv.stats().since(before).exact_calls == 2


@pytest.mark.parametrize("size", [3, MOST])
def test_chunked_prefill_is_exact(size):
    """Chunks as short as drafts, inside of generate()."""
    kv = two_level(False, level="token", **TIGHT)
    bare("llama").generate(**prompt(1, 150), past_key_values=kv, prefill_chunk_size=size, max_new_tokens=1)
    stats = kv.stats()
    assert stats.exact_calls == 2 * (-(-150 // size) - 1) and stats.decode_steps == 0


@pytest.mark.quick
def test_what_announces():
    net, kv = bare("llama"), filled(bare("llama"), CACHES["device-default"])
    ids = prompt(1, 3)["input_ids"]
    assert verified_tokens(kv) == 0 and not are_drafts(kv, 3)
    with kv.drafts():
        assert are_drafts(kv, 3) and not are_drafts(copy.deepcopy(kv), 3)
        with kv.drafts(sparse=False):
            unannounced(net, ids, kv)
        assert are_drafts(kv, 3)
    assert kv.stats().exact_calls == 2
    with pytest.raises(KeyError), kv.drafts():
        raise KeyError
    assert not are_drafts(kv, 3)


def test_drafts_of_generate_can_be_exact():
    net, inputs, kv = bare("llama"), repetitive(), two_level(False, level="token", **TIGHT)
    with kv.drafts(sparse=False):
        net.generate(**inputs, past_key_values=kv, prompt_lookup_num_tokens=MOST - 1, max_new_tokens=30)
    assert kv.stats().draft_queries == 0 < kv.stats().exact_calls


@pytest.mark.parametrize("ids", ["long", "padding"])
def test_what_is_no_draft_is_exact(ids):
    net, kv = bare("llama"), two_level(False, level="token", **TIGHT)
    unannounced(net, prompt(1, 165)["input_ids"], kv)
    new = prompt(1, MOST + 1 if ids == "long" else 3)["input_ids"]
    mask = torch.ones(1, 165 + new.shape[1], dtype=torch.long)
    mask[0, 166] = ids != "padding"
    with torch.no_grad(), kv.drafts():
        net(new, attention_mask=mask, past_key_values=kv)
    stats = kv.stats()
    assert (stats.exact_calls, stats.decode_steps, stats.draft_queries) == (2, 0, 0)


@pytest.mark.parametrize("name", ways("exact"))
def test_who_chooses_a_step_ahead_is_exact(name):
    kv, ids, stock = filled(bare("llama"), CACHES[name]), prompt(1, 3)["input_ids"], DynamicCache()
    unannounced(reference("llama"), prompt(1, 165)["input_ids"], stock)
    expected = unannounced(reference("llama"), ids, stock)
    torch.testing.assert_close(together(bare("llama"), ids, kv), expected, atol=5e-4, rtol=1e-4)
    assert kv.stats().exact_calls == 2 and kv.stats().draft_queries == 0


def test_where_a_step_is_dense_a_pass_is_exact():
    kv = two_level(False, **FULL)
    unannounced(bare("llama"), prompt(1, 165)["input_ids"], kv)
    together(bare("llama"), prompt(1, 3)["input_ids"], kv)
    assert kv.stats().exact_calls == 2


# ---------------------------------------------------------------------- generate()


@pytest.mark.pairwise(once=("name",))
@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("net", ["llama", "gemma3", "glm4-moe-lite"])
@pytest.mark.parametrize("name", SPARSE)
def test_prompt_lookup_with_everything_chosen_is_plain_text(name, net):
    kv, inputs = CACHES[name](**FULL), repetitive()
    found = model(net).generate(
        **inputs, past_key_values=kv, prompt_lookup_num_tokens=MOST - 1, max_new_tokens=40, do_sample=False
    )
    assert torch.equal(found, plain_text(net, inputs, max_new_tokens=40))
    stats = kv.stats()
    assert stats.draft_queries + stats.exact_calls > 0
    if name in ("progressive", "progressive-host"):  # through the sparse path, which attends to all that there is
        assert stats.draft_queries > 0 and stats.exact_calls == stats.dense_calls == 0


@pytest.mark.few(name=("device-default", "host-nolag"))
@pytest.mark.parametrize("name", ["device-default", "host-default", "host-default-nopool", "host-nolag"])
def test_queries_that_would_read_more_than_all_are_exact(name):
    """Each with a budget of a third of what is in full blocks. Copies on the device may be read as often as wanted."""
    net, kv, stock = bare("llama"), filled(bare("llama"), CACHES[name], token_budget=48), DynamicCache()
    copies = name == "host-default"
    unannounced(reference("llama"), prompt(1, 165)["input_ids"], stock)
    for new, selects in ((2, True), (3, copies)):
        before, ids = kv.stats(), prompt(1, new, seed=new)["input_ids"]
        found, expected = together(net, ids, kv), unannounced(reference("llama"), ids, stock)
        now = kv.stats().since(before)
        assert (now.draft_queries, now.exact_calls) == ((new - 1, 0) if selects else (0, 2))
        if new == 2:  # the same past for the next
            kv.crop(-2)
            stock.crop(-2)
        elif not selects:
            torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)


@pytest.mark.quick
@pytest.mark.few
@pytest.mark.parametrize("how", ["lookup", "assistant"])
@pytest.mark.parametrize("name", ["device-default", "host-default", "host-nolag", "predictive-host", "streaming"])
def test_drafts_are_verified_as_by_single_steps(name, how, monkeypatch):
    """generate() with a tight budget, and again with a model that is given one token at a time."""
    net, go = bare("llama"), {"do_sample": False, "max_new_tokens": 40}
    if how == "lookup":
        go["prompt_lookup_num_tokens"] = MOST - 1
    else:
        go["assistant_model"] = assistant = build("llama", "sdpa", seed=5)
        assistant.generation_config.num_assistant_tokens = MOST - 1
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
    ours, theirs = CACHES[name](**TIGHT), CACHES[name](**TIGHT)
    found = net.generate(**repetitive(), past_key_values=ours, **go)
    assert ours.stats().draft_queries > 0 == ours.stats().exact_calls
    whole = net.forward

    def apart(input_ids, attention_mask=None, position_ids=None, **rest):
        cache, rest, n = given_cache(rest), without_cache(rest), input_ids.shape[1]
        if not cache.get_seq_length() or cache is not theirs:
            return whole(input_ids, attention_mask, position_ids, cache, **rest)
        rest.pop("logits_to_keep", None)
        outs = [whole(input_ids[:, i : i + 1], **over(net, theirs), **rest) for i in range(n)]
        outs[-1].logits = torch.cat([out.logits for out in outs], dim=1)
        return outs[-1]

    monkeypatch.setattr(net, "forward", apart, raising=False)
    assert torch.equal(net.generate(**repetitive(), past_key_values=theirs, **go), found)
    assert theirs.stats().draft_queries == 0


def test_an_assistant_over_a_sparse_cache_of_its_own():
    """Its own loop runs inside of the other's, and reads two tokens at once to catch up: these are no drafts."""
    net, config = build("llama", "sparsekv"), CACHES["device-default"](**TIGHT).config
    with sparse(net, config, optimize=False):
        out = net.generate(
            **repetitive(), assistant_model=net, do_sample=False, max_new_tokens=30, return_dict_in_generate=True
        )
    stats = out.past_key_values.stats()
    assert stats.draft_queries > 0 == stats.exact_calls


# ---------------------------------------------------------------------- what a pass reads, and leaves


def moved(name: str, sparse: bool = True) -> tuple[int, int]:
    """Bytes over the link in passes that follow a step, and how many layer calls were exact."""
    net = bare("llama")
    kv = filled(net, CACHES[name], 400)
    one_by_one(net, prompt(1, 3, seed=1)["input_ids"], kv)
    before = kv.stats()
    for seed in range(6):
        (together if sparse else unannounced)(net, prompt(1, 4, seed=seed)["input_ids"], kv)
        kv.crop(-2)
    now = kv.stats().since(before)
    return now.host_to_device_bytes, now.exact_calls


@pytest.mark.few(name=("host-default", "host-nolag"))
@pytest.mark.parametrize("name", ["host-default", "host-default-nopool", "host-nolag", "predictive-host"])
def test_less_crosses_the_link(name):
    found, exact = moved(name)
    whole, all_exact = moved(name, sparse=False)
    assert (exact, all_exact) == (0, 6 * 2)
    assert 0 < found < whole / 2


@pytest.mark.few(name=("host-nolag", "progressive-host"))
@pytest.mark.parametrize("name", ["device-default", "host-nolag", "predictive-host", "progressive-host"])
def test_an_error_is_told_and_reset_mends(name, monkeypatch):
    net = bare("llama")
    kv, ids = filled(net, CACHES[name]), prompt(1, 4, seed=3)["input_ids"]
    expected = together(net, ids, filled(net, CACHES[name]))
    policy = kv.sparse_layers[1].policy

    def fails(*args, **named):
        raise RuntimeError("no attention today")

    monkeypatch.setattr(policy, "attend_drafts" if policy.drafts == "together" else "attend", fails)
    with pytest.raises(RuntimeError, match="no attention today"):
        together(net, ids, kv)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="incomplete"):
        together(net, ids, kv)
    kv.reset()
    unannounced(net, prompt(1, 165)["input_ids"], kv)
    assert torch.equal(together(net, ids, kv), expected)
    assert kv.stats().draft_queries == 3


@pytest.mark.parametrize(
    "name", ["device-default", "host-default", "device", "host-nolag", "progressive", "predictive"]
)
def test_marked_blocks_are_those_of_all_queries(name):
    net, ids = bare("llama"), prompt(1, 4, seed=3)["input_ids"]
    ours, theirs, seen = filled(net, CACHES[name]), filled(net, CACHES[name]), []
    ours.watch_blocks()
    theirs.watch_blocks()
    together(net, ids, ours)
    for token in ids.split(1, dim=1):
        unannounced(net, token, theirs)
        seen.append([layer.policy.watch.marks.clone() for layer in theirs.sparse_layers])
    for layer, *marks in zip(ours.sparse_layers, *seen):
        assert torch.equal(layer.policy.watch.marks[..., :-1], torch.stack(marks).any(0)[..., :-1])


@pytest.mark.parametrize("pads", [(20,), (20, 0, 60)], ids=["one-row", "three-rows"])
def test_padding_before_the_past(pads):
    net, rows = bare("llama"), len(pads)
    ids, found = prompt(rows, 4, seed=3)["input_ids"], []
    for feed in (together, one_by_one):
        kv, given = two_level(False, level="token", **TIGHT), prompt(rows, 165, pads)
        with torch.no_grad():
            net(**given, past_key_values=kv)
            mask, outs = given["attention_mask"], []
            for part in [ids] if feed is together else ids.split(1, dim=1):
                mask = torch.cat((mask, torch.ones_like(part)), dim=1)
                with kv.drafts(feed is together):
                    outs.append(net(part, attention_mask=mask, past_key_values=kv).logits.clone())
        stats = kv.stats()
        assert stats.sparse_calls == 2 * len(outs)
        found.append((torch.cat(outs, 1), stats.attended_tokens, stats.context_tokens))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_passes_are_not_foreseen(offload):
    """Hooks expect the query of a step; what they have had chosen for one that never came is of no use to a pass."""
    net, plain, ids = model("llama"), bare("llama"), prompt(1, 4, seed=3)["input_ids"]
    ours, theirs = (filled(n, predictive, offload=offload, predictor="layer") for n in (net, plain))
    layer = ours.sparse_layers[1]

    def stop(*args, **named):
        raise RuntimeError("stopped")

    handle = net.model.layers[0].self_attn.register_forward_pre_hook(stop)
    try:
        with pytest.raises(RuntimeError, match="stopped"):
            unannounced(net, prompt(1, 1, seed=9)["input_ids"], ours)
    finally:
        handle.remove()
    assert layer.policy.foreseen == 165
    assert torch.equal(together(net, ids, ours), together(plain, ids, theirs))
    assert ours.stats().foreseen_calls == 0


def test_statistics_say_passes():
    kv = filled(bare("llama"), CACHES["host-default"])
    together(bare("llama"), prompt(1, 4)["input_ids"], kv)
    assert str(kv.stats()).startswith("1 passes of 4 queries over 169 cached tokens: ")
    assert " a pass instead of " in str(kv.stats())


# ---------------------------------------------------------------------- kernels


def test_kernels_take_one_row_as_many():
    """Block table, channels and recent tokens of one row, with a stride of 0 between queries."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    n, heads, group, dim, size, r = 3, 2, 2, 16, 16, 8
    q, kv = draw(n, heads * group, dim), draw(5, heads, size, 2 * dim)
    codes = torch.randint(256, (5, heads, size, r // 2), generator=generator, dtype=torch.uint8)
    scales = torch.stack((draw(5, heads, size).abs() / 8, draw(5, heads, size)), dim=-1).half()
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    channels = torch.arange(r, dtype=torch.int32).mul(2).repeat(1, heads, 1)
    norms = torch.stack((draw(1, heads, r), draw(1, heads, r).abs() + 0.5), dim=2)
    recent = draw(1, heads, 4 + 48, 2 * dim)
    rows = torch.tensor([[60, 48], [61, 48], [62, 48]], dtype=torch.int32)
    ids = torch.randperm(44, generator=generator)[: n * heads * 7].view(n, heads, 7).int() + 4
    ids = ids.sort(-1).values
    strided = [t.expand(n, *t.shape[1:]) for t in (table, channels, norms, recent)]
    found = []
    for table, channels, norms, recent in (strided, [t.contiguous() for t in strided]):
        each = token_score.kernel()(q, codes, scales, channels, rows, table, None, "none", sinks=4, norms=norms)
        taken = mass_select.kernel()(
            *(each, q, channels, recent, rows),
            **{"sinks": 4, "scale": 0.25, "threshold": 0.7, "min_tokens": 2},
        )
        attended = torch.zeros(n, heads, dtype=torch.int64)
        out = sparse_decode.kernel()(
            *(q, kv, rows, table, ids, recent),
            **{"granularity": "token", "value_dim": dim, "sinks": 4, "scale": 0.25, "attended": attended},
        )
        found.append((each, taken.count, out, attended))
    for one, many in zip(*found):
        assert torch.equal(one, many)


# ---------------------------------------------------------------------- beside captured steps

CAPTURED = ["host-default", "host-default-smallpool", "device-default", "host-nolag", "host-tail", "progressive-host"]


@pytest.mark.parametrize("name", [*CAPTURED, "predictive-host", "streaming-host"])
def test_passes_between_captured_steps(name):
    """Each finds what the other has left: steps are captured and replayed, passes run eagerly."""
    net, plain = build("llama", "sparsekv"), bare("llama")
    runner = Imitation(net)
    runner.install()
    ours, theirs, draw, worst = filled(net, CACHES[name]), filled(plain, CACHES[name]), random.Random(3), 0.0
    for i in range(14):
        q = draw.choice([1, 1, 1, 3, MOST])
        ids = prompt(1, q, seed=i)["input_ids"]
        worst = max(worst, float((together(net, ids, ours) - one_by_one(plain, ids, theirs)).abs().max()))
        if remove := draw.randint(0, q - 1):
            ours.crop(-remove)
            theirs.crop(-remove)
    assert worst < (1e-3 if "predictive" not in name else 1e9)
    assert runner.replays > 3
    assert ours.stats().draft_queries > 3
