"""transformers' two names of a cache, and whether steps are still what they are meant to be with its newest release.

Where a release changes a name or a loop that we look at, steps may become eager or dense, with the right text. So for
each feature there is a count here that would be zero then.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers
from caches import CACHES, SMALL, predictive, two_level
from captured import imitated
from models import build, model, prompt
from test_drafts import TIGHT, repetitive
from test_fused import anywhere  # noqa: F401
from test_late_stop import late  # noqa: F401
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

import hf_sparsekv
from hf_sparsekv import (
    AsyncPredictiveCache,
    Engine,
    OffloadedSparseCache,
    PredictiveConfig,
    PrefixCache,
    Sampling,
    ServingConfig,
    TokenConfig,
    predict_ahead,
    sparse,
)
from hf_sparsekv.cache_name import (
    GENERATE,
    NAMES,
    cache_name,
    declared_name,
    generate_over,
    given_cache,
    over,
    without_cache,
)
from hf_sparsekv.cuda_graph.late_stop import LateStopping
from hf_sparsekv.cuda_graph.optimize import optimize, unoptimize
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.tuning.channels import calibrate
from hf_sparsekv_eval.prefix import forced_steps, greedy_rows, prefill

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:decode steps run eagerly. the model is not on a CUDA device"),
]

FEW = {"token_budget": 32}
GO = {"do_sample": False, "max_new_tokens": 12}
(OTHER,) = {*NAMES} - {GENERATE}
ACCEPTED = [GENERATE] if GENERATE == "past_key_values" else [GENERATE, OTHER]  # the old one, too


def in_turn(net, cache, name: str, ids: torch.Tensor, steps: int = 6) -> torch.Tensor:
    """Logits of single steps after a prompt, in calls that give the cache by this name."""
    with torch.no_grad():
        net(ids[:, :-steps], **{name: cache})
        at = range(ids.shape[1] - steps, ids.shape[1])
        steps = (net(ids[:, i : i + 1], position_ids=torch.tensor([[i]]), **{name: cache}) for i in at)
        return torch.cat([step.logits.clone() for step in steps], 1)


# ---------------------------------------------------------------------- which name


class NewName(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **more):
        return super().forward(input_ids, attention_mask, position_ids, cache, **more)


class OldName(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **more)


# A model of one's own code, which declares the name that this release of transformers does not.
OwnCode = {"cache": NewName, "past_key_values": OldName}[OTHER]


class Wrapped(nn.Module):
    """What hands on all keywords, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def own_code() -> OwnCode:
    net = build("llama", "sparsekv")
    net.__class__ = OwnCode
    return net


def test_the_name_is_the_one_that_is_declared():
    net, own = build("llama", "sparsekv"), own_code()
    assert GENERATE in inspect.signature(net.forward).parameters
    assert cache_name(net) == cache_name(Wrapped(net)) == cache_name(net.model) == GENERATE
    assert cache_name(own) == cache_name(Wrapped(own)) == OTHER
    assert cache_name(lambda **given: net(**given)) == GENERATE
    assert cache_name(nn.Linear(2, 2)) == GENERATE
    assert declared_name(nn.Linear(2, 2)) is None
    assert generate_over(1) == over(net, 1) == {GENERATE: 1}


def test_optimised_and_fused_models_keep_their_name(anywhere):  # noqa: F811
    net = optimize(build("llama", "sparsekv"), fused=True)
    layer = net.model.layers[0]
    assert fused_layers.FusedAttention in type(layer.self_attn).__mro__
    assert cache_name(net) == declared_name(layer) == declared_name(layer.self_attn) == GENERATE
    unoptimize(net)


@pytest.mark.parametrize(
    ("given", "cache"),
    [({"cache": 1}, 1), ({"past_key_values": 2}, 2), ({"cache": None, "past_key_values": 2}, 2), ({}, None)],
)
def test_calls_are_looked_at_by_either_name(given, cache):
    assert given_cache({**given, "use_cache": True}) == cache
    assert without_cache({**given, "use_cache": True}) == {"use_cache": True}


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [lambda: build("llama", "sparsekv"), own_code], ids=["transformers", "own-code"])
def test_direct_calls_are_replayed_by_either_name(name, make):
    """Also by the one that the model does not declare, where the eager model would not take it."""
    ids, net = prompt(1, 120)["input_ids"], make()
    expected = in_turn(net, two_level(**FEW), cache_name(net), ids)
    fast, runner = imitated("llama", make=make)
    torch.testing.assert_close(in_turn(fast, two_level(**FEW), name, ids), expected)
    assert runner.replays > 0


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_outputs_hold_the_cache_by_both_names_that_transformers_has():
    net, runner = imitated()
    cache, ids = two_level(**FEW), prompt(1, 120)["input_ids"]
    in_turn(net, cache, GENERATE, ids)
    before = runner.replays
    with torch.no_grad():
        out = net(ids[:, :1], position_ids=torch.tensor([[120]]), **over(net, cache))
    assert runner.replays == before + 1
    assert [getattr(out, name) is cache for name in ACCEPTED] == [True] * len(ACCEPTED)
    assert out[GENERATE] is cache


def test_rows_and_steps_over_a_model_of_ones_own_code():
    found = []
    for net in (build("llama", "sparsekv"), own_code()):
        rows = OffloadedSparseCache(TokenConfig(**FEW), None).rows(2, 200)
        first = rows.prefill(net, prompt(1, 100)["input_ids"])
        rows.join(first)
        found.append(torch.cat((first.logits, rows.step(net, [3, 0]))))
    torch.testing.assert_close(*found)


# ---------------------------------------------------------------------- what must not become eager or dense


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", ACCEPTED)
def test_steps_are_replayed(name):
    inputs = prompt(2, 90, (0, 30))
    net, runner = imitated()
    expected = model("llama").generate(**inputs, **{name: two_level(**FEW)}, **GO)
    assert torch.equal(net.generate(**inputs, **{name: two_level(**FEW)}, **GO), expected)
    assert runner.replays > 6


@pytest.mark.parametrize("how", ["sparse", "custom_generate"])
def test_steps_are_replayed_and_sparse_without_a_cache_of_the_users(how):
    net, runner = imitated()
    go = {**prompt(1, 120), **GO, "return_dict_in_generate": True}
    config = TokenConfig(**SMALL, **FEW)
    if how == "sparse":
        with sparse(net, config):
            out = net.generate(**go)
    else:
        out = net.generate(**go, custom_generate=hf_sparsekv.generate, sparse_config=config)
    stats = out[GENERATE].stats()
    assert stats.sparse_calls > 0
    assert runner.replays > 6


def test_sliding_layers_are_replayed():
    net, runner = imitated("gemma3")
    inputs = prompt(1, 120)
    expected = model("gemma3").generate(**inputs, **generate_over(two_level(**FEW)), **GO)
    assert torch.equal(net.generate(**inputs, **generate_over(two_level(**FEW)), **GO), expected)
    assert runner.replays > 6


@pytest.mark.parametrize(
    ("name", "user"),
    [*((name, "predict_ahead") for name in ("llama", "gemma3", "deepseek-v3", "qwen3-next")), ("llama", "sparse")],
)
def test_layers_are_foreseen(name, user):
    net = build(name, "sparsekv", **({} if name == "qwen3-next" else {"num_hidden_layers": 3}))
    config = PredictiveConfig(**SMALL, **FEW)
    go = {**prompt(1, 120), **GO, "return_dict_in_generate": True}
    if user == "sparse":
        with sparse(net, config):
            stats = net.generate(**go)[GENERATE].stats()
    else:
        cache = AsyncPredictiveCache(config, model_config=net.config)
        with predict_ahead(net) as tap:
            assert any(where == "in" for where in tap.layers.values())
            net.generate(**go, **generate_over(cache))
        stats = cache.stats()
    assert stats.foreseen_calls > 0


def test_captured_steps_are_foreseen():
    net, runner = imitated()
    cache = predictive(**FEW)
    net.generate(**prompt(1, 120), **generate_over(cache), **GO)
    assert cache.stats().foreseen_calls > 6
    assert runner.replays > 6


@pytest.mark.parametrize(
    ("name", "operator"), [("llama", "qk_rope"), ("gemma3", "qk_rope"), ("deepseek-v3", "latent_rope")]
)
def test_layers_are_fused(anywhere, monkeypatch, name, operator):  # noqa: F811
    inputs, calls = prompt(1, 90), []
    net = build(name, "sparsekv")
    expected = net.generate(**inputs, **generate_over(two_level(**FEW)), **GO)
    original = getattr(fused_layers, operator)
    monkeypatch.setattr(fused_layers, operator, lambda *given: (calls.append(0), original(*given))[1])
    cache = two_level(**FEW)
    found = optimize(net, fused=True).generate(**inputs, **generate_over(cache), **GO)
    unoptimize(net)
    assert torch.equal(found, expected)
    assert len(calls) == GO["max_new_tokens"] * net.config.num_hidden_layers
    assert cache.get_seq_length() == 90 + GO["max_new_tokens"] - 1


@pytest.mark.few
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("how", ["lookup", "assistant"])
def test_drafts_are_decoded_as_drafts(how, captured):
    more = {"prompt_lookup_num_tokens": 4} if how == "lookup" else {"assistant_model": build("llama", "sdpa", seed=5)}
    (net, runner), cache = (
        imitated() if captured else (build("llama", "sparsekv"), None),
        CACHES["device-default"](**TIGHT),
    )
    net.generate(**repetitive(), **generate_over(cache), **GO, **more)
    stats = cache.stats()
    assert stats.draft_queries > 0 == stats.exact_calls
    assert not captured or runner.replays > 0


def test_the_end_is_noticed_late(late):  # noqa: F811
    net, runner = imitated()
    assert isinstance(net, LateStopping)
    net.generate(**prompt(1, 90), **generate_over(two_level(**FEW)), **GO)
    (loop,) = late
    assert loop.made == GO["max_new_tokens"]
    assert runner.replays > 6


# ---------------------------------------------------------------------- no call of ours is a deprecated one


_OF_ASSISTANTS = "together with generation-related arguments"  # transformers calls an assistant's generate() so itself


@contextmanager
def nothing_deprecated():
    """Inside, a deprecation is an error: a warning, or what transformers logs once, even if it has before."""
    logged: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Keep(logging.WARNING)
    logging.Logger.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("error", kind)
            warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)  # torch's own calls
            yield
    finally:
        logger.removeHandler(handler)
    assert not [one for one in logged if "deprecat" in one.lower() and _OF_ASSISTANTS not in one]


def test_the_context_finds_what_is_deprecated():
    logger = transformers.utils.logging.get_logger("transformers.models")
    for _ in range(2):
        with pytest.raises(AssertionError), nothing_deprecated():
            logger.warning_once("`that` is deprecated")
    with pytest.raises(FutureWarning), nothing_deprecated():
        warnings.warn("`that`", FutureWarning, stacklevel=1)


def eager(inputs):
    build("llama", "sparsekv").generate(**inputs, **generate_over(two_level(**FEW)), **GO)


def replayed(inputs):
    net, runner = imitated()
    cache = two_level(**FEW)
    for _ in range(2):  # the second turn, too
        text = net.generate(**inputs, **generate_over(cache), **GO)
        inputs = {"input_ids": torch.cat((text, inputs["input_ids"]), 1)}
    assert runner.replays > 0


def foreseen(inputs):
    net = build("llama", "sparsekv")
    with sparse(net, PredictiveConfig(**SMALL, **FEW)):
        net.generate(**inputs, **GO)


def chosen_by_custom_generate(inputs):
    net = build("llama", "sdpa")
    net.generate(**inputs, **GO, custom_generate=hf_sparsekv.generate, sparse_config="fast")


def beams_in_chunks(inputs):
    with sparse(build("llama", "sdpa"), "fast") as net:
        net.generate(**inputs, **GO, num_beams=2, prefill_chunk_size=40)


def by_drafts(inputs):
    net, _ = imitated()
    for more in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": build("llama", "sdpa", seed=5)}):
        cache = CACHES["device-default"](**TIGHT)
        net.generate(**repetitive(), **generate_over(cache), **GO, **more)
        assert cache.stats().draft_queries > 0


def by_an_engine(inputs):
    net, runner = imitated()
    ids, asked = inputs["input_ids"][0].tolist(), Sampling(max_tokens=8, temperature=0)
    with Engine(net, None, TokenConfig(**FEW), None, ServingConfig(max_rows=2, max_length=200, chunk=64)) as engine:
        handles = [engine.submit(ids[:n], asked) for n in (30, 120)]
        assert [len(handle.result(60).token_ids) for handle in handles] == [8, 8]
    assert runner.replays > 0


def by_evaluation(inputs):
    net, ids = build("llama", "sparsekv"), inputs["input_ids"]
    first = prefill(net, ids)
    for cache in (two_level(**FEW), None):
        held, logits = first.start(net, cache)
        greedy_rows(net, first, held, logits, 4, set())
    list(forced_steps(net, held, ids[:, :3]))


def by_tuning(inputs):
    calibrate(build("llama", "sparsekv"), [inputs["input_ids"]])


def by_a_prefix(inputs):
    net, prefix = build("llama", "sparsekv"), PrefixCache()
    net(**inputs, **over(net, prefix))
    net.generate(torch.cat((inputs["input_ids"],) * 2, 1), **generate_over(prefix.start(two_level(**FEW))), **GO)


def over_a_cache_of_transformers(inputs):
    net, _ = imitated()
    net.generate(**inputs, **generate_over(DynamicCache(config=net.config)), **GO)


@pytest.mark.parametrize(
    "use",
    [
        *(eager, replayed, foreseen, chosen_by_custom_generate, beams_in_chunks, by_drafts, by_an_engine),
        *(by_evaluation, by_tuning, by_a_prefix, over_a_cache_of_transformers),
    ],
    ids=lambda use: use.__name__,
)
def test_nothing_deprecated_is_called(use):
    inputs = prompt(1, 120)
    with nothing_deprecated():
        use(inputs)
