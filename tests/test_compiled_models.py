"""Models compiled by ``torch.compile``, whole or in parts: over a sparse cache they say what they say eagerly.

Dynamo traces Python, without generating code (``backend="eager"``): what it traces of a cache it may take for constant.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from caches import CACHES, FULL, SMALL, TIGHT
from models import build, plain_text, prompt

from hf_sparsekv import (
    Engine,
    OffloadedSparseCache,
    ProgressiveCache,
    Sampling,
    ServingConfig,
    SparseCache,
    TokenConfig,
    predict_ahead,
    sparse,
)
from hf_sparsekv.attention.interface import sparsekv_attention
from hf_sparsekv.attention.masks import sparsekv_mask

NEW = 8  # tokens: from the sixth on a traced cache went wrong


def _in_place(modules: Callable) -> Callable:
    def compiled(net, backend="eager"):
        for module in modules(net):
            module.compile(backend=backend)
        return net

    return compiled


def _forward(net, backend="eager"):
    net.forward = torch.compile(net.forward, backend=backend)
    return net


WAYS = {
    "model.compile()": _in_place(lambda net: [net]),
    "torch.compile(model)": lambda net, backend="eager": torch.compile(net, backend=backend),
    "its forward": _forward,
    "its inner model": _in_place(lambda net: [net.model]),
    "its layers": _in_place(lambda net: net.model.layers),
    "its attention": _in_place(lambda net: [layer.self_attn for layer in net.model.layers]),
}
FAMILIES = ("llama", "gemma3", "gpt-oss", "deepseek-v3", "deepseek-v32")


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    """Nothing compiled before or after, and room for all shapes of a test: at its limit Dynamo runs eagerly."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


@torch.no_grad()
def steps(net, cache, ids, attention_mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens ``[batch, NEW]`` by a loop of one's own, and the last logits."""
    found, mask = [], attention_mask
    for _ in range(NEW):
        logits = net(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        found.append(ids)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
    return torch.cat(found, dim=1), logits


def _check(family: str, cache: str, way: str, *ways_to_generate: str) -> None:
    given, go = prompt(2, 90, (0, 30)), {"do_sample": False, "max_new_tokens": NEW}
    eager = build(family, "sparsekv")
    with predict_ahead(eager):
        right = steps(eager, CACHES[cache](eager.config, **TIGHT), given["input_ids"], given["attention_mask"])
        text = eager.generate(**given, past_key_values=CACHES[cache](eager.config, **TIGHT), **go)
    net = build(family, "sparsekv")
    with predict_ahead(net):
        net = WAYS[way](net)
        if "loop" in ways_to_generate:
            found = steps(net, CACHES[cache](eager.config, **TIGHT), given["input_ids"], given["attention_mask"])
            assert torch.equal(found[0], right[0])
            torch.testing.assert_close(found[1], right[1])
        if "generate" in ways_to_generate:
            assert torch.equal(net.generate(**given, past_key_values=CACHES[cache](eager.config, **TIGHT), **go), text)


@pytest.mark.parametrize("way", ["its layers", "its attention"])
def test_a_compiled_part(way):
    _check("llama", "device-default", way, "loop")


def test_a_compiled_model():
    _check("llama", "predictive", "model.compile()", "generate")


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", ["host", "device-default", "predictive-need", "progressive-host"])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_models(family, cache, way):
    _check(family, cache, way, "loop", "generate")


@pytest.mark.parametrize("way", ["its layers", pytest.param("model.compile()", marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafts", [pytest.param(3, marks=pytest.mark.slow), None])
def test_exact_mode(way, drafts):
    given = prompt(1, 120)
    net = WAYS[way](build("llama", "sdpa"))
    with sparse(net, TokenConfig(**{**SMALL, "token_budget": 16, "dense_below": 0}), exact=True, drafts=drafts):
        found = net.generate(**given, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(found, plain_text("llama", given, max_new_tokens=NEW))


@pytest.mark.parametrize("way", ["its layers", pytest.param("model.compile()", marks=pytest.mark.slow)])
def test_an_engine(way):
    given = [prompt(1, 60, seed=seed)["input_ids"] for seed in (1, 2)]
    texts = [plain_text("llama", {"input_ids": ids}, max_new_tokens=NEW)[0, ids.shape[1] :] for ids in given]
    net = WAYS[way](build("llama", "sparsekv"))
    with Engine(net, None, TokenConfig(**SMALL, **FULL), None, ServingConfig(max_rows=2, max_length=200)) as engine:
        asked = [engine.submit(ids[0].tolist(), Sampling(max_tokens=NEW, temperature=0)) for ids in given]
        assert [list(one.result(300).token_ids) for one in asked] == [text.tolist() for text in texts]


def test_a_whole_graph_is_refused():
    given = prompt(1, 40)
    net = build("llama", "sparsekv")
    with pytest.raises(Exception, match="optimize"), torch.no_grad():
        torch.compile(net, backend="eager", fullgraph=True)(**given, past_key_values=OffloadedSparseCache())


@pytest.mark.parametrize("kind", [SparseCache, OffloadedSparseCache, ProgressiveCache])
def test_models_reach_nothing_that_dynamo_may_trace(kind):
    """Whatever method or property a cache has, inherited ones too, and the two functions that transformers calls."""
    entered = {"sparsekv_attention": sparsekv_attention, "sparsekv_mask": sparsekv_mask}
    for name in dir(kind):
        member = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        if name.startswith("_") or isinstance(member, classmethod | staticmethod | type):
            continue
        if isinstance(member, property):
            entered |= {f"{name}.{part}": getattr(member, part) for part in ("fget", "fset") if getattr(member, part)}
        elif callable(member):
            entered[name] = member
    assert {"update", "get_seq_length", "get_mask_sizes", "is_initialized.fget", "crop"} <= set(entered)
    assert [name for name, one in entered.items() if not getattr(one, "_torchdynamo_disable", False)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("way", ["model.compile()", "its forward", "its layers"])
def test_captured_steps_of_a_compiled_model(way, backend):
    """optimize() captures what it can; whatever runs eagerly says so, and is right."""
    given = {name: value.cuda() for name, value in prompt(2, 90, (0, 30)).items()}
    go = {"do_sample": False, "max_new_tokens": 3 * NEW}
    right = build("llama", "sdpa").cuda().generate(**given, **go)
    net = WAYS[way](build("llama", "sdpa").cuda(), backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "decode steps run eagerly")
        for settings in ({}, {"offload": True}, {"exact": True, "drafts": 3}):
            with sparse(net, TokenConfig(**SMALL, **FULL), **settings):
                assert torch.equal(net.generate(**given, **go), right), settings
