"""``with sparse(model): model.generate(...)``: every way to generate gets a new cache, and the model comes back."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import inspect
import re
import shutil
import sys
import threading
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from caches import FULL, SMALL, two_level
from inside import attention_of, hooks_of
from models import NEEDS_CONFIG, NOTHING_SPARSE, build, plain_text, prompt
from tokenizers_made import whole_words, words
from torch import nn
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer, dynamic_module_utils

import hf_sparsekv
from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    SparseCache,
    SparseConfig,
    StreamingConfig,
    TokenConfig,
    cache_source,
    disable,
    enable,
    generate,
    sparse,
)
from hf_sparsekv.cache_source import CacheSource
from hf_sparsekv.cuda_graph.optimize import runner_of

ROOT = Path(__file__).parents[1]
EVERYTHING = TokenConfig(**SMALL, **FULL)  # the dense model's text
FEW = TokenConfig(**SMALL, token_budget=32, tail=None)
GO = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture
def net():
    return build("llama", "sdpa")


@pytest.fixture
def made(monkeypatch) -> list[SparseCache]:
    """The caches that sparse() makes meanwhile."""
    found, new_cache = [], cache_source.new_cache

    def remember(*given):
        found.append(new_cache(*given))
        return found[-1]

    monkeypatch.setattr(cache_source, "new_cache", remember)
    return found


@contextmanager
def as_it_was(model):
    """Afterwards nothing of the model's own is another than before."""

    def look():
        kinds = [attention_of(config) for config in cache_source._configs(model)]
        return kinds, {name: id(value) for module in model.modules() for name, value in vars(module).items()}

    before = look()
    yield
    assert look() == before


def expected(name: str = "llama", *inputs, **how) -> torch.Tensor:
    return plain_text(name, *(inputs or (prompt(2, 90, (0, 30)),)), **{**GO, **how})


# ---------------------------------------------------------------------- ways to generate


@pytest.mark.quick
@pytest.mark.few
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.8},
        {"prefill_chunk_size": 16},
        {"generation_config": GenerationConfig(max_new_tokens=20)},
    ],
    ids=["greedy", "beams", "sample", "chunks", "config"],
)
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_ways_to_decode(net, made, how, offload):
    inputs = prompt(2, 90, (0, 30))
    text = expected("llama", inputs, **how)
    with as_it_was(net), sparse(net, EVERYTHING, offload=offload):
        torch.manual_seed(11)
        found = net.generate(**inputs, **{**GO, **how})
    assert torch.equal(found, text)
    assert len(made) == 1
    assert made[0].get_seq_length() > 90
    assert (made[0].offload_config is not None) == offload


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:no layer of this")
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt-oss", "deepseek-v3", *NEEDS_CONFIG, *NOTHING_SPARSE])
def test_models_of_other_kinds(name, made):
    """Sliding windows, sinks, latents, linear attention (which needs the model's configuration): all by one line."""
    net, inputs = build(name, "eager"), prompt(2, 90, (0, 30))
    with as_it_was(net), sparse(net, EVERYTHING):
        assert torch.equal(net.generate(**inputs, **GO), expected(name, inputs))
    assert len(made) == 1


def test_drafts(net, made):
    inputs = {"input_ids": prompt(1, 9)["input_ids"].repeat(1, 12)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    text = expected("llama", inputs)
    with as_it_was(net), sparse(net, EVERYTHING):
        assert torch.equal(net.generate(**inputs, **GO, prompt_lookup_num_tokens=5), text)
        assert torch.equal(net.generate(**inputs, **GO, assistant_model=build("llama", "sdpa", seed=5)), text)
        assert len(made) == 2
        assert torch.equal(net.generate(**inputs, **GO, assistant_model=net), text)  # its own drafts: two caches
    assert all(cache.get_seq_length() > 100 for cache in made)


def test_sparse_is_sparse(net, made):
    """The settings arrive: fewer tokens are read, and another text comes out."""
    inputs = prompt(1, 300)
    with sparse(net, FEW):
        found = net.generate(**inputs, **GO)
    (cache,) = made
    assert not torch.equal(found, expected("llama", inputs))
    assert cache.stats().sparse_calls > 0
    assert cache.stats().attended_share < 0.5
    own = build("llama", "sparsekv").generate(**inputs, **GO, past_key_values=SparseCache(FEW))
    assert torch.equal(found, own)


def test_each_call_gets_a_new_cache(net, made):
    short, long = prompt(1, 40, seed=3), prompt(2, 90)
    with sparse(net, EVERYTHING):
        for inputs in (long, short, long):
            assert torch.equal(net.generate(**inputs, **GO), expected("llama", inputs))
    assert len({id(cache) for cache in made}) == 3


def test_the_new_cache_is_given_back_for_the_next_turn(net):
    ids = prompt(1, 90)["input_ids"]
    more = torch.cat((ids, prompt(1, 30, seed=7)["input_ids"]), 1)
    with sparse(net, EVERYTHING):
        first = net.generate(ids, return_dict_in_generate=True, **GO)
        cache = first.past_key_values
        assert isinstance(cache, SparseCache)
        assert cache.stats().decode_steps == 19
        whole = torch.cat((first.sequences, more[:, 90:]), 1)
        second = net.generate(whole, past_key_values=cache, **GO)
    assert torch.equal(second, expected("llama", {"input_ids": whole}))
    assert cache.get_seq_length() == second.shape[1] - 1


def test_a_cache_of_the_users_own_is_kept(net, made):
    inputs = prompt(2, 90, (0, 30))
    with sparse(net, FEW):
        for mine in (two_level(**FULL), DynamicCache()):
            assert torch.equal(net.generate(**inputs, past_key_values=mine, **GO), expected())
            assert mine.get_seq_length() == 109
    assert not made


class Tokens:
    """Enough of a tokenizer for a streamer."""

    def decode(self, ids, **_):
        return " ".join(map(str, [ids] if isinstance(ids, int) else ids)) + "\n"


def test_a_streamer_in_another_thread(net, made):
    """The thread that generates is not the one that is inside."""
    ids = prompt(1, 90)["input_ids"]
    streamer = TextIteratorStreamer(Tokens(), skip_prompt=True, timeout=60)
    with sparse(net, EVERYTHING):
        thread = threading.Thread(target=net.generate, args=(ids,), kwargs={**GO, "streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text.split() == [str(token) for token in expected("llama", {"input_ids": ids})[0, 90:].tolist()]
    assert len(made) == 1


class LoRA(nn.Module):
    """A linear layer with a low-rank addition, as PEFT puts it in the layer's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Wrapper(nn.Module):
    """Wrappers of PEFT around a model: no model of transformers itself, passing on what it does not know."""

    def __init__(self, model) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)


def test_a_wrapped_model_with_low_rank_additions(net, made):
    torch.manual_seed(0)
    for layer in net.model.layers:
        layer.self_attn.q_proj, layer.mlp.up_proj = LoRA(layer.self_attn.q_proj), LoRA(layer.mlp.up_proj)
    inputs, wrapped = prompt(2, 90, (0, 30)), Wrapper(net)
    text = wrapped.generate(**inputs, **GO)
    assert not torch.equal(text, expected())
    with as_it_was(net), sparse(wrapped, EVERYTHING) as same:
        assert same is wrapped
        assert torch.equal(wrapped.generate(**inputs, **GO), text)
    assert len(made) == 1


# ---------------------------------------------------------------------- the context


def fail(ids: torch.Tensor, scores) -> torch.Tensor:
    """A stopping criterion that has a fault."""
    if ids.shape[1] > 45:
        raise IndexError("in mid-text")
    return torch.zeros(ids.shape[0], dtype=torch.bool)


def test_the_model_is_as_it_was(net):
    with as_it_was(net):
        with sparse(net):
            assert attention_of(net) == "sparsekv"
        with pytest.raises(KeyError), sparse(net, "fast"):
            raise KeyError
        with pytest.raises(IndexError, match="in mid-text"), sparse(net, FEW):
            net.generate(prompt(1, 40)["input_ids"], stopping_criteria=[fail], **GO)
    assert torch.equal(net.generate(**prompt(2, 90, (0, 30)), **GO), expected())


@pytest.mark.parametrize("attn", ["sdpa", "eager", "sparsekv"])
def test_any_attention_is_put_back(attn):
    net = build("llama", attn)
    with as_it_was(net), sparse(net):
        pass
    assert attention_of(net) == attn


def test_parts_of_a_model_are_put_back_one_by_one():
    """A model of text and images, whose parts have configurations of their own."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**text, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None),
        image_token_index=96,
    )
    torch.manual_seed(0)
    net = transformers.LlavaForConditionalGeneration(config).eval()
    net.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    ids = prompt(1, 90)["input_ids"] % 90
    ids[:, 5:9] = 96
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    text = net.generate(**inputs, **GO)
    with as_it_was(net), sparse(net, EVERYTHING):
        again = net.generate(**inputs, **GO, return_dict_in_generate=True)
    assert torch.equal(again.sequences, text)
    assert again.past_key_values.stats().decode_steps == 19


def test_nested(net, made):
    ids = prompt(1, 60)["input_ids"]
    with as_it_was(net), sparse(net, FEW):
        with sparse(net, EVERYTHING, offload=True):
            net.generate(ids, **GO)
        net.generate(ids, **GO)
        with pytest.raises(KeyError), sparse(net, ProgressiveConfig()):
            net.generate(ids, **GO)
            raise KeyError
        net.generate(ids, **GO)
    configs = [cache.config for cache in made]
    assert configs == [EVERYTHING, FEW, ProgressiveConfig(), FEW]
    assert [cache.offload_config is None for cache in made] == [False, True, True, True]


def test_contexts_that_end_in_another_order(net):
    """As coroutines of one thread may: nobody's end takes away what others use."""
    with as_it_was(net):
        first, second = sparse(net, FEW), sparse(net, EVERYTHING)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert net.generate(**prompt(1, 40), return_dict_in_generate=True, **GO).past_key_values.config == EVERYTHING
        second.__exit__(None, None, None)


# ---------------------------------------------------------------------- without an end, and without a beginning


def config_of(net) -> object:
    """The configuration that a new ``generate()`` of this model has."""
    past = net.generate(**prompt(1, 40), return_dict_in_generate=True, **GO).past_key_values
    return getattr(past, "config", None)


def test_enabled_until_disabled(net):
    with as_it_was(net):
        assert enable(net, FEW) is net
        assert config_of(net) == config_of(net) == FEW
        enable(net, FEW, token_budget=32, offload=True)  # other settings take their place
        assert config_of(net) == replace(FEW, token_budget=32)
        for args, error in ((("nope",), ValueError), ((3,), TypeError)):
            with pytest.raises(error):
                enable(net, *args)
        assert config_of(net) == replace(FEW, token_budget=32)
        assert disable(net) is net
        assert config_of(net) is None
        disable(net)  # is no error


def test_enabled_within_contexts_and_around_them(net):
    """An open context decides, whichever was first; both ends leave the other alone."""
    with as_it_was(net):
        with sparse(net, EVERYTHING):
            enable(net, FEW)
            assert config_of(net) == EVERYTHING
        assert config_of(net) == FEW
        with sparse(net, EVERYTHING):
            assert config_of(net) == EVERYTHING
            enable(net, ProgressiveConfig())
            assert config_of(net) == EVERYTHING
            disable(net)
            assert config_of(net) == EVERYTHING
        assert config_of(net) is None


def test_enabling_in_vain_leaves_what_was_enabled(net, monkeypatch):
    """Also if setting up fails in the middle."""
    with as_it_was(net):
        enable(net, FEW)
        with monkeypatch.context() as patch:
            patch.setattr(CacheSource, "_use_attention", lambda self: fail_once(patch))
            with pytest.raises(torch.OutOfMemoryError):
                enable(net, EVERYTHING)
        assert config_of(net) == FEW
        other = elsewhere(lambda: sparse(net, EVERYTHING).__enter__())
        assert isinstance(other, RuntimeError) and "another thread" in str(other)
        disable(net)


def fail_once(patch):
    patch.undo()
    raise torch.OutOfMemoryError("no memory")


def test_enabled_wrapper_and_parts():
    """The model within a wrapper; what cannot generate is refused at once."""
    net = build("llama", "sdpa")
    wrapped = nn.ModuleDict({"inner": net})
    with as_it_was(net):
        enable(wrapped, FEW)
        assert config_of(net) == FEW
        disable(wrapped)
    for change in (enable, disable):
        with pytest.raises(TypeError, match="needs a model of transformers"):
            change(nn.Linear(2, 2))


def test_what_is_dropped_unentered_is_told(net):
    with as_it_was(net):
        with pytest.warns(RuntimeWarning, match=r"was not entered, so nothing is sparse.*`enable\(model\)`") as told:
            sparse(net, FEW)
        assert [Path(one.filename).name for one in told] == [Path(__file__).name]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with sparse(net, FEW):
                pass
            with pytest.raises(ValueError):
                sparse(net, "nope")

            @sparse(net, FEW)
            def inside():
                return config_of(net)

            assert inside() == inside() == FEW

            async def later():
                raise AssertionError

            async def pieces():
                yield later

            def steps():
                yield inside

            for body in (later, pieces, steps):
                with pytest.raises(TypeError, match="inside of it"):
                    sparse(net, FEW)(body)
            with ExitStack() as stack:
                stack.enter_context(sparse(net, FEW))
        once = sparse(net, FEW)
        with once:
            pass
        with pytest.raises(RuntimeError, match="was entered before"), once:
            pass


def test_a_context_that_is_dropped_open_restores_the_model(net):
    """As after an interrupt between its entry and the block."""
    with as_it_was(net):
        opened = sparse(net, FEW)
        opened.__enter__()
        del opened
        gc.collect()


def elsewhere(work) -> BaseException | None:
    """Run ``work`` in another thread: what it raised."""
    raised: list[BaseException] = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_second_thread_with_other_settings_is_refused(net):
    def use(*settings, **more):
        with sparse(net, *settings, **more):
            assert torch.equal(net.generate(**prompt(2, 90, (0, 30)), **GO), expected())

    with as_it_was(net):
        with sparse(net, EVERYTHING):
            for wrong in ((FEW,), (EVERYTHING, {"offload": True}), ("fast",)):
                error = elsewhere(lambda given=wrong: use(given[0], **(given[1] if len(given) > 1 else {})))
                assert isinstance(error, RuntimeError), error
                assert "another thread (MainThread) uses this model" in str(error)
                assert "past_key_values" in str(error)
            assert elsewhere(lambda: use(EVERYTHING)) is None
            with sparse(net, FEW):  # the outer settings would be refused as well now
                assert isinstance(elsewhere(lambda: use(EVERYTHING)), RuntimeError)
                assert isinstance(elsewhere(lambda: use(FEW)), RuntimeError)
            assert attention_of(net) == "sparsekv"
        assert elsewhere(lambda: use(EVERYTHING)) is None


def test_threads_with_the_same_settings(net):
    """Whoever leaves first takes nothing away from the others."""
    inside, leave, raised = threading.Barrier(3), threading.Event(), []

    def use():
        try:
            with sparse(net, EVERYTHING):
                inside.wait(60)
                assert torch.equal(net.generate(**prompt(2, 90, (0, 30)), **GO), expected())
                leave.wait(60)
        except BaseException as error:
            raised.append(error)

    with as_it_was(net):
        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        with sparse(net, EVERYTHING):
            inside.wait(60)
        assert attention_of(net) == "sparsekv"
        with pytest.raises(RuntimeError, match="another thread"), sparse(net, FEW):
            pass
        leave.set()
        for thread in threads:
            thread.join()
    assert not raised


async def in_task(net, entered: asyncio.Event, go_on: asyncio.Event, *settings, **more) -> torch.Tensor:
    """A text in a task of its own, which waits inside."""
    with sparse(net, *settings, **more):
        entered.set()
        await go_on.wait()
        return await asyncio.to_thread(net.generate, **prompt(2, 90, (0, 30)), **GO)


@pytest.mark.parametrize("first", [{}, {"exact": True, "drafts": 3}])
def test_a_second_task_with_other_settings_is_refused(net, first):
    """The first gets what it asked for, whoever entered last."""

    async def main():
        entered, go_on = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(in_task(net, entered, go_on, FEW, **first), name="first")
        await entered.wait()
        refused = pytest.raises(RuntimeError, match=r"another task \(first\) uses this model inside sparse\(\) with")
        with refused, sparse(net, FEW, exact=True, drafts=2):
            pass
        with sparse(net, FEW, **first):  # the same settings
            go_on.set()
            text = await task
        with sparse(net, FEW, exact=True, drafts=2):  # once it has left
            assert torch.equal(net.generate(**prompt(2, 90, (0, 30)), **GO), expected())
        return text

    with as_it_was(net):
        text = asyncio.run(main())
        with sparse(net, FEW, **first):
            assert torch.equal(text, net.generate(**prompt(2, 90, (0, 30)), **GO))
        assert not first or torch.equal(text, expected())


def test_tasks_inside(net):
    """Children have their own settings inside; their parent gets an error meanwhile, and its own afterwards."""

    async def main():
        entered, go_on = asyncio.Event(), asyncio.Event()
        with sparse(net, FEW):
            child = asyncio.create_task(in_task(net, entered, go_on, EVERYTHING), name="child")
            await entered.wait()
            with pytest.raises(RuntimeError, match=r"another task \(child\) uses this model"):
                await asyncio.to_thread(net.generate, **prompt(2, 90, (0, 30)), **GO)
            go_on.set()
            assert torch.equal(await child, expected())
            assert config_of(net) == FEW

    with as_it_was(net):
        asyncio.run(main())


def test_a_thread_that_expects_what_is_enabled(net):
    """It is not inside the context of another thread."""
    with as_it_was(net):
        enable(net, EVERYTHING)
        assert elsewhere(lambda: config_of(net) == EVERYTHING or 1 / 0) is None
        with sparse(net, FEW):
            assert config_of(net) == FEW
            assert "another thread (MainThread) uses this model inside sparse()" in str(
                elsewhere(lambda: config_of(net))
            )
            inherited = contextvars.copy_context()
            assert elsewhere(lambda: inherited.run(config_of, net) == FEW or 1 / 0) is None
        disable(net)


def test_a_context_keeps_no_model_alive():
    """One that was left elsewhere, as the fixtures of asynchronous tests are."""
    opened = sparse(build("llama", "sdpa"), FEW)
    held = contextvars.copy_context()
    watched = weakref.ref(held.run(opened.__enter__))
    opened.__exit__(None, None, None)
    del opened
    gc.collect()
    assert watched() is None and held is not None


def test_a_copy_made_inside_works_by_itself(net):
    with sparse(net, EVERYTHING):
        other = copy.deepcopy(net)
        assert torch.equal(other.generate(**prompt(2, 90, (0, 30)), **GO), expected())


def test_disable_ends_what_a_copy_made_inside_has_taken_along(net):
    with sparse(net, FEW), sparse(net, EVERYTHING):
        other = copy.deepcopy(net)
    kinds = []
    for _ in range(2):
        out = other.generate(**prompt(2, 90, (0, 30)), return_dict_in_generate=True, **GO)
        assert torch.equal(out.sequences, expected())  # the inner settings
        kinds.append(type(out.past_key_values))
        with as_it_was(net):
            hf_sparsekv.disable(other)
    assert kinds == [SparseCache, DynamicCache]
    assert other.__dict__.keys() == net.__dict__.keys()
    assert attention_of(other) == attention_of(net) == "sdpa"
    with as_it_was(other), sparse(other, EVERYTHING):
        assert attention_of(other) == "sparsekv"


def test_a_copy_made_inside_where_queries_are_expected(net):
    """The hooks of the copy do nothing: its layers select by their own query, and a warning says so."""
    with sparse(net, PredictiveConfig(**SMALL, token_budget=32)):
        other = copy.deepcopy(net)
    inputs = prompt(2, 90, (0, 30))
    with pytest.warns(UserWarning, match="in place"):
        out = other.generate(**inputs, return_dict_in_generate=True, **GO)
    assert out.past_key_values.stats().sparse_calls > 0
    hf_sparsekv.disable(other)
    assert torch.equal(other.generate(**inputs, **GO), expected())


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "changes", "config"),
    [
        (None, {}, TokenConfig()),
        ("accurate", {}, TokenConfig.preset("accurate")),
        ("fast", {"sinks": 8}, TokenConfig.preset("fast", sinks=8)),
        (None, {"token_budget": 256}, TokenConfig(token_budget=256)),
        (ProgressiveConfig(mass=0.9), {"sinks": 8}, ProgressiveConfig(mass=0.9, sinks=8)),
        (StreamingConfig(window=64), {}, StreamingConfig(window=64)),
    ],
)
def test_settings(net, given, changes, config):
    with sparse(net, given, **changes):
        out = net.generate(**prompt(1, 40), return_dict_in_generate=True, **GO)
    assert out.past_key_values.config == config


@pytest.mark.parametrize(
    ("error", "message", "args", "how"),
    [
        (ValueError, r"no preset 'acurate' \(did you mean 'accurate'\?\); it has 'fast', 'accurate'", ("acurate",), {}),
        (TypeError, "unexpected keyword argument 'token_bugdet': did you mean 'token_budget'", (), {"token_bugdet": 1}),
        (TypeError, r"give offload=OffloadConfig\(device_pool=7\)", (), {"device_pool": 7}),
        (TypeError, "give OffloadedSparseCache's configuration", (two_level(),), {}),
        (TypeError, "config must be a configuration, a preset's name or None, got int", (1024,), {}),
        (TypeError, "offload must be an OffloadConfig, True, False or None, got str", (), {"offload": "cpu"}),
        (TypeError, "optimize must be True, False or None, got 1", (), {"optimize": 1}),
        (TypeError, "must be the configuration of a method", (SparseConfig(),), {}),
    ],
)
def test_wrong_settings(net, error, message, args, how):
    with as_it_was(net), pytest.raises(error, match=message), sparse(net, *args, **how):
        pass


def test_what_cannot_be_sparse():
    t5 = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    mamba = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)
    mpt = transformers.MptConfig(vocab_size=97, d_model=32, n_layers=1, n_heads=4)
    for net, error, message in (
        (transformers.T5ForConditionalGeneration(t5), ValueError, "decoder-only models"),
        (transformers.MambaForCausalLM(mamba), ValueError, "has a cache of its own kind"),
        (transformers.MptForCausalLM(mpt), ValueError, "itself"),
        (nn.Linear(2, 2), TypeError, "needs a model of transformers that can generate"),
        ("Qwen/Qwen3-8B", TypeError, "got str"),
    ):
        with pytest.raises(error, match=message), sparse(net):
            pass
        if isinstance(net, transformers.PreTrainedModel):
            assert attention_of(net) != "sparsekv"
            assert "_prepare_cache_for_generation" not in vars(net)


def test_another_cache_or_none(net):
    inputs = prompt(1, 40)
    with sparse(net, FEW):
        for how in ({"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}):
            with pytest.raises(ValueError, match="use_cache=True, or call generate"):
                net.generate(**inputs, **{**GO, **how})
        for kind in ("offloaded", "static", "quantized"):
            with pytest.raises(ValueError, match=rf"cache_implementation='{kind}' .*offload=True"):
                net.generate(**inputs, **GO, cache_implementation=kind)
        net.generation_config.cache_implementation = "static"  # as some models' files have it
        assert net.generate(**inputs, **GO, return_dict_in_generate=True).past_key_values.config == FEW


def test_queries_are_expected_of_the_layer_before(net):
    """As predict_ahead() does, without a word from the user, and only as long as it is of use."""
    config = PredictiveConfig(**SMALL, token_budget=32)
    with as_it_was(net), sparse(net, config), warnings.catch_warnings():
        warnings.simplefilter("error")
        out = net.generate(**prompt(1, 120), **GO, return_dict_in_generate=True)
        assert out.past_key_values.stats().foreseen_calls > 0
        with sparse(net, FEW):
            assert not any(len(hooks_of(layer)) for layer in net.model.layers)
    assert not any(len(hooks_of(layer)) for layer in net.model.layers)


def test_optimised_and_undone(net, monkeypatch):
    """Where it can be, or when asked for; what the user has optimised stays."""
    inputs = prompt(1, 40)

    def inside(**how) -> bool:
        with sparse(net, FEW, **how):
            return runner_of(net) is not None

    with as_it_was(net):
        assert [inside(), inside(optimize=False), inside(optimize=True)] == [False, False, True]
        monkeypatch.setattr(cache_source, "_captures", lambda model: True)
        assert [inside(), inside(optimize=False), inside(optimize=True)] == [True, False, True]
        with sparse(net, FEW):
            with sparse(net, FEW, optimize=False):
                assert runner_of(net) is None
            assert runner_of(net) is not None
    net.set_attn_implementation("sparsekv")
    hf_sparsekv.optimize(net)
    mine = runner_of(net)
    for how in ({}, {"optimize": False}):
        with sparse(net, FEW, **how), pytest.warns(UserWarning, match="decode steps run eagerly"):
            mine._said.clear()
            net.generate(**inputs, **GO)
        assert runner_of(net) is mine


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_on_a_gpu_steps_are_captured(offload):
    """By itself, and neither fused layers nor joined weights stay."""
    net = build("qwen3", "sdpa").cuda()
    inputs = {name: value.cuda() for name, value in prompt(2, 90, (0, 30)).items()}
    text = net.generate(**inputs, **GO)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with as_it_was(net):
        for config in (EVERYTHING, FEW, EVERYTHING):
            with sparse(net, config, offload=offload):
                assert torch.equal(net.generate(**inputs, **GO), text) or config is FEW
                assert runner_of(net).replays > 10
                streamer = TextIteratorStreamer(Tokens(), skip_prompt=True, timeout=60)
                go = {**GO, "streamer": streamer, "input_ids": inputs["input_ids"][:1]}
                thread = threading.Thread(target=net.generate, kwargs=go)
                thread.start()
                assert len("".join(streamer).split()) == 20
                thread.join()
            assert runner_of(net) is None
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.is_contiguous()
    assert torch.equal(net.generate(**inputs, **GO), text)


def test_an_error_while_it_is_optimised_leaves_nothing(net, monkeypatch):
    def fail(model):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cache_source, "capture", fail)
    with as_it_was(net), pytest.raises(torch.OutOfMemoryError), sparse(net, optimize=True):
        pass


# ---------------------------------------------------------------------- custom_generate


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 4}], ids=lambda how: str(list(how))
)
def test_as_custom_generate(net, made, how):
    inputs = prompt(1, 90)
    text = expected("llama", inputs, **{name: v for name, v in how.items() if name != "prompt_lookup_num_tokens"})
    with as_it_was(net):
        torch.manual_seed(11)
        found = net.generate(**inputs, **{**GO, **how}, custom_generate=generate, sparse_config=EVERYTHING)
    assert torch.equal(found, text)
    assert len(made) == 1


def test_custom_generate_settings(net):
    inputs, more = prompt(1, 90), {"custom_generate": generate, "return_dict_in_generate": True}
    out = net.generate(**inputs, **GO, **more, sparse_config="fast", offload=True).past_key_values
    assert out.config == TokenConfig.preset("fast")
    assert out.offload_config == OffloadConfig()
    mine = two_level(**FULL)
    assert net.generate(**inputs, **GO, **more, past_key_values=mine).past_key_values is mine
    with sparse(net, FEW):
        out = net.generate(**inputs, **GO, **more, sparse_config="accurate").past_key_values
        assert out.config == TokenConfig.preset("accurate")
    with pytest.raises(ValueError, match="use_cache=True"):
        net.generate(**inputs, **GO, **more, use_cache=False)


def test_arguments_of_custom_generate_are_what_transformers_passes_on():
    """Those of its loop by the same names; the rest must not look like the loop's, or they would never come."""
    ours = inspect.signature(generate).parameters
    loop = inspect.signature(transformers.GenerationMixin._sample).parameters
    assert set(ours) - set(loop) == {
        "model",
        "inputs_tensor",
        "sparse_config",
        "offload",
        "optimize",
        "exact",
        "drafts",
        "audit",
        "given",
    }


@pytest.fixture
def modules_in(monkeypatch, tmp_path):
    """Where transformers puts code that it loads from repositories."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 4}], ids=lambda how: str(list(how))
)
def test_the_folder_for_the_hub(net, made, modules_in, how):
    """custom_generate/ of this repository, which is laid out as one of the hub's, on a model loaded with sdpa."""
    inputs = prompt(1, 90)
    text = expected("llama", inputs, **{name: v for name, v in how.items() if name != "prompt_lookup_num_tokens"})
    hub = {"custom_generate": str(ROOT), "trust_remote_code": True}
    with as_it_was(net):
        torch.manual_seed(11)
        assert torch.equal(net.generate(**inputs, **{**GO, **how}, **hub, sparse_config=EVERYTHING), text)
        streamer = TextIteratorStreamer(Tokens(), skip_prompt=True, timeout=60)
        net.generate(**inputs, **{**GO, "streamer": streamer}, **hub, sparse_config="fast", offload=True)
    assert len("".join(streamer).split()) == 20
    assert [cache.config for cache in made] == [EVERYTHING, TokenConfig.preset("fast")]
    assert made[1].offload_config == OffloadConfig()


def test_the_folder_in_a_models_own_repository(net, made, modules_in, tmp_path):
    net.save_pretrained(tmp_path / "model")
    shutil.copytree(ROOT / "custom_generate", tmp_path / "model" / "custom_generate")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    inputs = prompt(1, 90)
    found = loaded.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **GO)
    assert torch.equal(found, expected("llama", inputs))
    assert [cache.config for cache in made] == [TokenConfig()]
    with sparse(loaded, EVERYTHING):  # the call has settings of its own, and they are within
        loaded.generate(inputs["input_ids"], sparse_config="fast", **GO)
    assert made[1].config == TokenConfig.preset("fast")


# ---------------------------------------------------------------------- pipelines


@pytest.fixture
def pipe(net):
    """A pipeline with a tokenizer of whole words, ``w2`` to ``w96``."""
    tokenizer = whole_words()
    tokenizer.chat_template = "<s> {% for m in messages %}{{ m['content'] }} {% endfor %}"
    return transformers.pipeline("text-generation", model=net, tokenizer=tokenizer)


def test_pipelines(pipe, made):
    """Each prompt of a list, a padded batch, and a chat; a pipeline with one cache dies at the second prompt."""
    long, short = (words(prompt(1, n, seed=n)["input_ids"][0].tolist()) for n in (90, 40))
    chat = [{"role": "user", "content": long}]
    go = {**GO, "return_full_text": False}
    texts = pipe([long, short], **go), pipe([long, short], batch_size=2, **go), pipe(chat, **go)
    with as_it_was(pipe.model), sparse(pipe.model, EVERYTHING):
        assert pipe([long, short], **go) == texts[0]
        assert len(made) == 2
        assert pipe([long, short], batch_size=2, **go) == texts[1]
        assert pipe(chat, **go) == texts[2]
        assert len(made) == 4
    assert pipe(long, **go, custom_generate=generate, sparse_config=EVERYTHING) == texts[0][0]
    assert len(made) == 5
    with pytest.raises(TypeError, match=r"sparse\(pipe.model\)"), sparse(pipe):
        pass


def test_the_examples_of_the_docs(pipe, made, modules_in):
    text = (ROOT / "docs/generating.md").read_text().replace("you/sparse-generate", str(ROOT))
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 4
    there = {"hf_sparsekv": hf_sparsekv, "pipe": pipe, "model": pipe.model, "inputs": prompt(1, 40)}
    with as_it_was(pipe.model):
        for block in blocks:
            exec(block, there)
    presets = [TokenConfig.preset(name) for name in ("accurate", "fast")]
    assert [cache.config for cache in made] == [TokenConfig(), *[presets[0]] * 4, presets[1]]


# ---------------------------------------------------------------------- caches: options, and one line


def test_options_of_a_cache_as_keywords():
    for made, config in (
        (OffloadedSparseCache(token_budget=512), TokenConfig(token_budget=512)),
        (OffloadedSparseCache(TokenConfig.preset("fast"), sinks=8), TokenConfig.preset("fast", sinks=8)),
        (ProgressiveCache(mass=0.9, offload=OffloadConfig()), ProgressiveConfig(mass=0.9)),
        (AsyncPredictiveCache(token_budget=512), PredictiveConfig(token_budget=512)),
        (SparseCache(StreamingConfig(), window=64), StreamingConfig(window=64)),
    ):
        assert made.config == config
    for kind in (OffloadedSparseCache, ProgressiveCache, AsyncPredictiveCache):
        with pytest.raises(TypeError, match="unexpected keyword argument 'window_size': did you mean 'window'"):
            kind(window_size=3)
        with pytest.raises(TypeError, match=r"give offload=OffloadConfig\(pin_memory=False\)"):
            kind(pin_memory=False)
    with pytest.raises(TypeError, match="'zzz': its options are block_size, sinks"):
        TokenConfig(zzz=1)
    with pytest.raises(TypeError, match="did you mean 'sinks'"):
        TokenConfig.preset("fast", sink=1)
    with pytest.raises(ValueError, match="token_budget must be a positive integer or None, got 0"):
        OffloadedSparseCache(token_budget=0)


def test_a_cache_in_one_line(net):
    assert repr(OffloadedSparseCache()) == "OffloadedSparseCache(0 tokens on host)"
    assert repr(OffloadedSparseCache(token_budget=512)) == "OffloadedSparseCache(0 tokens on host, token_budget=512)"
    cache = SparseCache(StreamingConfig(window=8))
    build("llama", "sparsekv").generate(**prompt(2, 90), past_key_values=cache, **GO)
    assert str(cache) == "SparseCache(2 x 109 tokens on device, StreamingConfig(window=8))"
    assert repr(AsyncPredictiveCache(cache_rank="cpu")) == (
        "AsyncPredictiveCache(0 tokens on second device, cache_rank='cpu')"
    )
    assert "\n" not in str(two_level())
