"""Exact mode: the text of full attention, token by token, whatever was drafted before."""

from __future__ import annotations

import random

import pytest
import torch
from caches import CACHES, SMALL
from caches import TIGHT as USUAL
from captured import calls_of, imitated
from models import MODELS, NOTHING_SPARSE, TELLING_MODELS, build, model, plain_text, prompt

from hf_sparsekv import ProgressiveConfig, TokenConfig, sparse
from hf_sparsekv.checking.exact import BUDGET
from hf_sparsekv.checking.loop import Loop
from hf_sparsekv.checking.pace import Next, Pace

TIGHT = {**USUAL, "token_budget": 16}  # so few that some drafts are wrong
TOKENS = 28
PADS = (0, 5, 61)
DRAFTS = SMALL["max_draft"]
LINEAR = ("qwen3-next", "kimi-linear")  # keep no earlier states

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*by that layer's own query"),
    pytest.mark.filterwarnings("ignore:no layer of this"),
]


def drafting(name: str) -> bool:
    """Caches in device memory whose steps choose for themselves."""
    kv = CACHES[name](**TIGHT)
    return kv.offload_config is None and kv.shared.of_layer(kv.config.dense_layers).drafts != "exact"


DEVICE = [name for name in CACHES if drafting(name)]


def written(net, inputs: dict, cache: str = "device-default", drafts: int | None = 3, **go):
    """Writes of exact mode, and the cache."""
    kv = CACHES[cache](model_config=net.config, **TIGHT)
    torch.manual_seed(11)
    with sparse(net, kv.config, exact=True, drafts=drafts):
        out = net.generate(**inputs, **{"do_sample": False, **go}, past_key_values=kv)
    return out, kv


def same_text(name: str, inputs: dict, cache: str = "device-default", drafts: int | None = 3, net=None, **go):
    """Exact mode against the reference with transformers' own cache; the cache."""
    go = {"max_new_tokens": TOKENS, **go}
    expected = plain_text(name, inputs, **go)
    found, kv = written(model(name) if net is None else net, inputs, cache, drafts, **go)
    assert torch.equal(found, expected)
    assert not (kv.row_table.exactness.everything or kv.going_on)
    return kv


# ---------------------------------------------------------------------- every model, every cache


@pytest.mark.quick
@pytest.mark.few(name=TELLING_MODELS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Sliding layers take tokens back; models with linear attention decode densely."""
    kv = same_text(name, prompt(1, 120), "streaming")  # whose drafts are wrong the most often
    stats = kv.stats()
    assert (stats.drafted > 0) == (name not in (*LINEAR, *NOTHING_SPARSE))
    assert kv.get_seq_length() == 120 + TOKENS - 1
    if stats.drafted:
        assert stats.accepted < stats.drafted
        assert stats.sparse_calls > 0


@pytest.mark.quick
@pytest.mark.few
@pytest.mark.parametrize("drafts", [1, 2, DRAFTS, None])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_any_number_of_drafts(name, drafts):
    """And one that depends on the times of this machine."""
    assert same_text(name, prompt(1, 150), drafts=drafts, max_new_tokens=40).stats().drafted > 0


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_no_more_is_drafted_than_may_still_come(tokens):
    """The last token of a round is the verification's own."""
    drafted = same_text("llama", prompt(1, 150), max_new_tokens=tokens).stats().drafted
    assert drafted <= max(0, tokens - 2)
    assert drafted or tokens < 3


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
@pytest.mark.parametrize("cache", ["device-default", "predictive"])
def test_rows(name, cache):
    """A batch with padding accepts what its slowest row does."""
    same_text(name, prompt(3, 140, PADS), cache)


# ---------------------------------------------------------------------- captured


@pytest.mark.pairwise
@pytest.mark.parametrize("pads", [None, (0, 0), PADS], ids=["one", "two", "padded"])
@pytest.mark.parametrize("cache", ["device-default", "progressive", "predictive", "device-tail"])
@pytest.mark.parametrize("name", ["llama", "glm4-moe-lite", "gemma3"])
def test_captured(name, cache, pads):
    """Drafts, verifications and dense steps are replayed, and after the first rounds nothing is planned again."""
    net, runner = imitated(name)
    planned = calls_of(runner, "_step")
    kv = same_text(name, prompt(len(pads or (0,)), 165, pads), cache, net=net, max_new_tokens=24)
    stats = kv.stats()
    assert stats.drafted > 0
    if name == "gemma3":  # sliding layers are verified eagerly
        return
    assert stats.exact_calls == 0
    assert len(planned) <= 8 < runner.replays - 10


# ---------------------------------------------------------------------- rows that grow each by itself


@pytest.mark.parametrize(
    ("captured", "how"),
    [
        (False, {}),
        (True, {"eos_token_id": [5, 17, 40]}),
        (True, {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 30}),
        (False, {"do_sample": True, "eos_token_id": [5, 17, 40, 60, 77]}),
    ],
    ids=["greedy", "captured-ends", "captured-drawn", "drawn-ends"],
)
def test_rows_of_their_own(monkeypatch, captured, how):
    """Where nobody keeps the cache: each row is one's own text, and gets more of a round than the slowest does."""
    inputs, go = prompt(4, 140, (0, 5, 61, 3)), {"max_new_tokens": 30, "pad_token_id": 0, **how}
    expected = plain_text("llama", inputs, **go)
    net, shares, rounds = imitated("llama")[0] if captured else build("llama", "sparsekv"), [], []
    original = Loop._round
    monkeypatch.setattr(Loop, "_round", lambda *given: rounds.__setitem__(-1, rounds[-1] + 1) or original(*given))
    for ragged in (False, True):
        rounds.append(0)
        torch.manual_seed(11)
        config = CACHES["device-default"](**TIGHT).config
        with sparse(net, config, exact=True, drafts=3):
            source = net.__dict__["_prepare_cache_for_generation"]
            seen = spy(source.watch)
            out = net.generate(**inputs, **{"do_sample": False, **go}, return_dict_in_generate=not ragged)
        assert torch.equal(out if ragged else out.sequences, expected)
        stats = seen[0].stats()
        shares.append(stats.accepted / stats.drafted)
    assert shares[1] > shares[0]
    assert rounds[1] < rounds[0]


@pytest.mark.few
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kept", [False, True], ids=["ragged", "kept"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "drawn"])
def test_rounds_and_dense_steps_in_any_order(monkeypatch, sample, kept, seed):
    draw = random.Random(seed)
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(draw.choice((0, 0, 1, 2, DRAFTS)), draw.randint(1, 6)))
    rows = draw.randint(1, 4)
    inputs, eos = prompt(rows, 130, (0, 40, 7, 0)[:rows], seed), draw.choice((None, [5, 17], list(range(2, 97, 9))))
    go = {"max_new_tokens": draw.randint(2, 40), "eos_token_id": eos, "pad_token_id": 0, "do_sample": sample}
    expected = plain_text("llama", inputs, **go)
    torch.manual_seed(11)
    with sparse(model("llama"), CACHES["device-default"](**TIGHT).config, exact=True):
        out = model("llama").generate(**inputs, **go, return_dict_in_generate=kept)
    assert torch.equal(out.sequences if kept else out, expected)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "drawn"])
def test_rows_that_have_ended_do_not_slow_dense_steps_down(monkeypatch, sample):
    """They go on in ``generate()``'s own loop, and how many drafts pay is not asked before each token."""
    asked = []
    monkeypatch.setattr(Pace, "next", lambda *_, **__: asked.append(1) or Next(0, 16))
    inputs = prompt(4, 130, (0, 40, 7, 0))
    go = {"max_new_tokens": 60, "eos_token_id": list(range(2, 97, 9)), "pad_token_id": 0, "do_sample": sample}
    expected = plain_text("llama", inputs, **go)
    assert len({*(expected == 0)[:, 130:].sum(1).tolist()}) > 1, "rows end at different times"
    for kept in (False, True):
        asked.clear()
        torch.manual_seed(11)
        with sparse(model("llama"), CACHES["device-default"](**TIGHT).config, exact=True):
            out = model("llama").generate(**inputs, **go, return_dict_in_generate=kept)
        assert torch.equal(out.sequences if kept else out, expected)
        assert len(asked) <= -(-(expected.shape[1] - 131) // 16) + 1


def spy(watch) -> list:
    """The caches of the calls that are watched from here on."""
    seen, gets = [], watch.gets

    def told(cache) -> None:
        seen.append(cache)
        gets(cache)

    watch.gets = told
    return seen


ASKED = {
    "nothing": ((None, {}), (None, BUDGET)),
    "other options": ((TokenConfig(window=128), {"block_size": 32}), (None, BUDGET)),
    "a budget": ((None, {"token_budget": 256}), (None, 256)),
    "a share": ((None, {"mass": 0.8}), (0.8, None)),
    "a preset": (("fast", {}), (0.75, None)),
}


@pytest.mark.parametrize("asked, expected", ASKED.values(), ids=ASKED)
def test_drafts_attend_to_a_fixed_budget_unless_asked_otherwise(asked, expected):
    (config, changes), net = asked, build("llama", "sdpa")
    with sparse(net, config, exact=True, **changes):
        out = net.generate(**prompt(1, 40), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    found = out.past_key_values.config
    assert (found.mass, found.token_budget) == expected
    assert TokenConfig() == TokenConfig(mass=None, token_budget=None)  # what sparse steps have, stays by need


def test_other_methods_draft_as_they_are():
    net = build("llama", "sdpa")
    with sparse(net, ProgressiveConfig(), exact=True):
        out = net.generate(**prompt(1, 40), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert out.past_key_values.config == ProgressiveConfig()
