"""Exact mode: the text of full attention, token by token, whatever was drafted before."""

from __future__ import annotations

import pytest
import torch
from caches import CACHES, SMALL, TIGHT
from captured import imitated
from models import MODELS, NOTHING_SPARSE, model, plain_text, prompt

from hf_sparsekv import sparse

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
    """What exact mode writes, and the cache."""
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
    assert not kv.row_table.exactness.everything
    return kv


# ---------------------------------------------------------------------- every model, every cache


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Sliding layers take tokens back; models with linear attention decode densely."""
    kv = same_text(name, prompt(1, 120))
    stats = kv.stats()
    assert (stats.drafted > 0) == (name not in (*LINEAR, *NOTHING_SPARSE))
    assert kv.get_seq_length() == 120 + TOKENS - 1
    if stats.drafted:
        assert 0 < stats.accepted < stats.drafted
        assert stats.sparse_calls > 0


@pytest.mark.pairwise(once=("name",))
@pytest.mark.parametrize("net", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("name", DEVICE)
def test_caches(name, net):
    assert same_text(net, prompt(1, 120), name, max_new_tokens=40).stats().drafted > 0


@pytest.mark.quick
@pytest.mark.parametrize("drafts", [1, 2, DRAFTS, None])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_any_number_of_drafts(name, drafts):
    """And one that depends on the times of this machine."""
    assert same_text(name, prompt(1, 150), drafts=drafts, max_new_tokens=60).stats().drafted > 0


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe-lite", "qwen3-next"])
@pytest.mark.parametrize("cache", ["device-default", "progressive", "predictive", "device-token"])
def test_rows(name, cache):
    """A batch with padding accepts what its slowest row does."""
    same_text(name, prompt(3, 140, PADS), cache)


# ---------------------------------------------------------------------- captured


@pytest.mark.pairwise
@pytest.mark.parametrize("pads", [None, (0, 0), PADS], ids=["one", "two", "padded"])
@pytest.mark.parametrize("cache", ["device-default", "progressive", "predictive", "streaming", "need", "device-tail"])
@pytest.mark.parametrize("name", ["llama", "glm4-moe-lite", "gemma3", "gpt-oss"])
def test_captured(name, cache, pads):
    """Drafts, verifications and dense steps are replayed, and after the first rounds nothing is planned again."""
    net, runner = imitated(name)
    planned = []
    original = runner._step

    def step(*args, **kwargs):
        planned.append(runner.replays)
        return original(*args, **kwargs)

    runner._step = step
    kv = same_text(name, prompt(len(pads or (0,)), 165, pads), cache, net=net, max_new_tokens=60)
    stats = kv.stats()
    assert stats.drafted > 0
    if name in ("gemma3", "gpt-oss"):  # sliding layers are verified eagerly
        return
    assert stats.exact_calls == 0
    assert len(planned) <= 8 < runner.replays - 40
