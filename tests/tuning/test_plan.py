"""The planner's numbers against the bytes that a cache and a model really allocate."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from models import build, model, prompt
from transformers import DynamicCache, T5Config

from hf_sparsekv import (
    AsyncPredictiveCache,
    OffloadConfig,
    OffloadedSparseCache,
    PredictiveConfig,
    ProgressiveCache,
    ProgressiveConfig,
    SparseCache,
    TokenConfig,
)
from hf_sparsekv.kv import pool, store
from hf_sparsekv.kv.block_ids import bucket
from hf_sparsekv.tuning.plan import MemoryPlan, ModelShape, plan_memory
from hf_sparsekv.tuning.plan import model_shape as shape_of
from hf_sparsekv.tuning.serving_plan import MOST, rows_that_fit

NAMES = ("llama", "llama-mqa", "qwen3", "gemma3", "mistral", "phi3", "qwen3-next", "glm4-moe-lite", "deepseek-v32")
CONFIGS = {
    "default": {},
    "block only": {"level": "block"},
    "token only": {"level": "token"},
    "few channels": {"label_channels": 6},
    "small blocks": {"block_size": 16, "window": 100, "max_draft": 7, "sinks": 0},
    "no dense layer": {"dense_layers": 0},
    "reserved": {"max_length": 3000},
}


@pytest.fixture(autouse=True)
def rooms_of_a_gpu(monkeypatch):
    """Plans are of a GPU's memory, whose pools begin with 16 blocks. A CPU's begin smaller."""
    for module in (pool, store):
        monkeypatch.setattr(module, "room", lambda blocks, device: bucket(blocks))


def model_shape(config, dtype: torch.dtype = torch.float32) -> ModelShape:
    """These models are made in float32, which their configurations do not say."""
    return shape_of(config, dtype)


def prefill(name: str, cache, *, batch: int, length: int):
    with torch.no_grad():
        model(name)(**prompt(batch, length), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def tensor_bytes(layer) -> int:
    return sum(t.nbytes for t in (layer.keys, layer.values))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "offload"),
    [*((name, OffloadConfig()) for name in NAMES), ("gemma3", None), ("glm4-moe-lite", None)],
    ids=str,
)
def test_cache_bytes(name, offload):
    config = TokenConfig(dense_layers=1)
    real = prefill(name, OffloadedSparseCache(config, offload, model(name).config), batch=3, length=700).memory_bytes()
    plan = plan_memory(model_shape(model(name).config), config, offload, context=700, batch=3)
    assert {"device": plan.cache_device, "host": plan.cache_host} == real
    assert plan.offloaded == (real["host"] > 0)


@pytest.mark.parametrize(
    ("which", "length"), [*((which, 1000) for which in CONFIGS), ("default", 40), ("reserved", 40)]
)
def test_cache_bytes_by_config(which, length):
    config = TokenConfig(**CONFIGS[which])
    changes = {"num_hidden_layers": 3}
    grown = build("llama", "sparsekv", **changes)
    cache = OffloadedSparseCache(config, OffloadConfig())
    with torch.no_grad():
        grown(**prompt(2, length), past_key_values=cache, use_cache=True, logits_to_keep=1)
    plan = plan_memory(model_shape(grown.config), config, OffloadConfig(), context=length, batch=2)
    assert {"device": plan.cache_device, "host": plan.cache_host} == cache.memory_bytes()


@pytest.mark.parametrize("name", ("llama", "gemma3", "mistral-window"))
@pytest.mark.parametrize("length", (5, 300))
def test_dense_bytes(name, length):
    cache = prefill(name, DynamicCache(config=model(name).config), batch=2, length=length)
    plan = plan_memory(model_shape(model(name).config), TokenConfig(), None, context=length, batch=2)
    assert plan.dense_kv == sum(tensor_bytes(layer) for layer in cache.layers)
    assert plan.stock == sum(tensor_bytes(layer) for layer in cache.layers if layer.is_sliding)


def test_linear_attention_state():
    cache = prefill("qwen3-next", DynamicCache(config=model("qwen3-next").config), batch=2, length=50)
    shape = model_shape(model("qwen3-next").config)
    kinds = [layer.kind for layer in shape.layers]
    assert kinds == ["other", "full"]
    state = cache.layers[0]
    held = [t for t in (*_flat(state.conv_states), *_flat(state.recurrent_states)) if isinstance(t, torch.Tensor)]
    plan = plan_memory(shape, TokenConfig(), None, context=50, batch=2)
    assert plan.stock == sum(t.nbytes for t in held) > 0


def _flat(value):
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("name", NAMES)
def test_weights(name):
    real = model(name)
    shape = model_shape(real.config)
    assert shape.weights == sum(t.nbytes for t in (*real.parameters(), *real.buffers()))
    assert model_shape(real.config, torch.float16).weights < shape.weights


def test_tied_weights_count_once():
    tied = build("llama", "sdpa", tie_word_embeddings=True)
    apart = build("llama", "sdpa", tie_word_embeddings=False)
    table = tied.get_input_embeddings().weight.nbytes
    assert model_shape(apart.config).weights - model_shape(tied.config).weights == table


def plan_of(cache: SparseCache, offload: OffloadConfig | None, steps: int = 0) -> MemoryPlan:
    """A cache of four layers long enough to choose among blocks; the plan is what such a cache allocates.

    ``steps``: the last tokens are decoded, which copies what they choose.
    """
    grown = build("llama", "sparsekv", num_hidden_layers=4)
    with torch.no_grad():
        for part in prompt(2, 300)["input_ids"].split([300 - steps, *[1] * steps], 1):
            grown(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    plan = plan_memory(model_shape(grown.config), cache.config, offload, context=300, batch=2)
    planned = {"device": plan.cache_device, "host": plan.cache_host}
    assert (planned | {"second": plan.second} if plan.second else planned) == cache.memory_bytes()
    return plan


@pytest.mark.pairwise
@pytest.mark.parametrize("blocks", [{"num_blocks": 4}, {}, {"level": "token", "num_blocks": 3}], ids=str)
@pytest.mark.parametrize("options", [{}, {"device_pool": 0}, {"device_pool": 100_000}, {"keep_dense": False}], ids=str)
def test_device_pool(options, blocks):
    """A cache long enough to choose among blocks: the plan is what is allocated, pages and page tables included."""
    config = TokenConfig(block_size=16, window=16, token_budget=32, dense_layers=1, **blocks)
    offload = OffloadConfig(**options)
    plan = plan_of(OffloadedSparseCache(config, offload), offload, steps=1)
    assert (plan.device_pages > 0) == (options.get("device_pool") != 0)
    assert (plan.kept > 0) == options.get("keep_dense", True)


@pytest.mark.few
@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("chosen", [{}, {"level": "two_level", "num_blocks": 2}], ids=str)
def test_codes_in_host_memory(chosen, keep_dense):
    """A quarter of float32 in host memory, and the scales on the device."""
    # Blocks of 64 are whole pages of host memory here, as those of usual models are.
    config = TokenConfig(block_size=64, window=16, token_budget=32, dense_layers=1, **chosen)
    plans = []
    for kv_dtype in ("int8", None):
        offload = OffloadConfig(kv_dtype=kv_dtype, keep_dense=keep_dense)
        plans.append(plan_of(OffloadedSparseCache(config, offload), offload, steps=1))
    mine, theirs = plans
    assert 4 * mine.cache_host == theirs.cache_host > 0
    assert (mine.scales > 0, theirs.scales) == (True, 0)
    assert mine.cache_device == theirs.cache_device + mine.scales
    assert mine.device_pages == theirs.device_pages


def test_codes_of_latents_are_refused():
    shape = model_shape(model("glm4-moe-lite").config)
    with pytest.raises(ValueError, match="kv_dtype='int8' is not for latents"):
        plan_memory(shape, TokenConfig(), OffloadConfig(kv_dtype="int8"), context=300)


@pytest.mark.few
@pytest.mark.parametrize("offload", [None, OffloadConfig(), OffloadConfig(device_pool=0)])
@pytest.mark.parametrize(
    "kept",
    [{}, {"max_length": 5300}],
    ids=str,
)
def test_progressive(offload, kept):
    """The plan is what a progressive cache allocates."""
    config = ProgressiveConfig(block_size=16, window=16, dense_layers=1, mass=0.6, min_tokens=16, **kept)
    plan = plan_of(ProgressiveCache(config, offload), offload)
    assert plan.labels > 0 == plan.bounds
    assert (plan.working_set > 0) == (offload is not None)


@pytest.mark.few
@pytest.mark.parametrize("offload", [None, OffloadConfig(), OffloadConfig(device_pool=0), OffloadConfig(device_pool=9)])
@pytest.mark.parametrize(
    "changes",
    [
        *[{}, {"start_length": 400}, {"token_budget": 400}, {"predictor": "assembled", "max_length": 5300}],
        {"mass": 0.9, "token_budget": None},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:copies of the chosen tokens take", "ignore:AsyncPredictiveCache chooses")
def test_predictive(offload, changes):
    """The plan is what a predictive cache allocates."""
    config = PredictiveConfig(**{"block_size": 16, "window": 16, "dense_layers": 1, "token_budget": 40, **changes})
    plan = plan_of(AsyncPredictiveCache(config, offload), offload, steps=1)
    assert plan.bounds == 0 and plan.labels > 0
    packs = offload == OffloadConfig() and not ("start_length" in changes or changes.get("token_budget"))
    assert (plan.device_pages > 0) == packs


@pytest.mark.parametrize("changes", [{}, {"token_budget": 400}, {"max_length": 5300}], ids=str)
def test_a_second_device(changes):
    """The plan is what each of the two devices holds: the keys and values of sparse layers are on the second alone."""
    config = PredictiveConfig(**{"block_size": 16, "window": 16, "dense_layers": 1, "token_budget": 40, **changes})
    config, alone = replace(config, cache_rank="cpu"), config
    plan, other = (plan_of(AsyncPredictiveCache(c, None), None) for c in (config, alone))
    assert plan.blocks * 4 == other.blocks and plan.labels == 0
    assert plan.second > other.blocks * 3 // 4 + other.labels


@pytest.mark.few
@pytest.mark.parametrize(
    "changes", [{}, {"max_length": 900}, {"block_size": 16, "window": 16, "dense_layers": 2}], ids=str
)
@pytest.mark.parametrize(
    "offload", [None, OffloadConfig(), OffloadConfig(device_pool=0), OffloadConfig(device_pool=10**6)]
)
def test_a_model_that_chooses_its_tokens(offload, changes):
    """Latents, keys of indexers (one layer uses another's choice), copies: as captured steps leave them."""
    name, config = "glm-moe-dsa", TokenConfig(**changes)
    shape = model_shape(model(name).config)
    cache = prefill(name, SparseCache(config, offload), batch=2, length=700)
    if offload is None:
        for layer in cache.layers:
            layer.policy.prepare(layer.store)  # as before a capture
    plan = plan_memory(shape, config, offload, context=700, batch=2)
    assert {"device": plan.cache_device, "host": plan.cache_host} == cache.memory_bytes()
    assert plan.index_keys > 0 and (plan.device_pages > 0) == (offload is not None and offload.device_pool != 0)
    stock = prefill(name, DynamicCache(config=model(name).config), batch=2, length=700)
    keys = [layer.indexer_keys for layer in stock.layers]
    assert plan.dense_kv == sum(map(tensor_bytes, stock.layers)) + sum(t.nbytes for t in keys if t is not None)
    assert plan.labels == plan.bounds == plan.means == plan.dense_tokens == 0
    with pytest.raises(ValueError, match="without options that choose"):
        plan_memory(shape, TokenConfig(token_budget=64), offload, context=700)
    fit = rows_that_fit(shape, config, offload, context=700, gpu=1 << 28, host=1 << 40)
    assert 0 < fit.dense < fit.sparse and 0 < fit.offloaded < MOST


def test_totals_add_up():
    shape = model_shape(model("gemma3").config)
    config = TokenConfig(dense_layers=2)  # all of its full layers
    on, off = (plan_memory(shape, config, where, context=5000, batch=2) for where in (OffloadConfig(), None))
    assert on.device_total + on.blocks - on.kept == off.device_total
    assert (
        on.device_total
        == on.weights + on.kept + on.bounds + on.labels + on.means + on.recent + on.tables + on.stock + on.prefill
    )
    assert on.dense_total == on.weights + on.dense_kv + on.prefill == off.dense_total


@pytest.mark.parametrize(("context", "batch", "name"), ((0, 1, "context"), (10, 0, "batch")))
def test_nothing_to_plan(context, batch, name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        plan_memory(model_shape(model("llama").config), TokenConfig(), None, context=context, batch=batch)


def test_context_beyond_max_length():
    shape = model_shape(model("llama").config)
    with pytest.raises(ValueError, match="max_length=100 is less than the context of 200"):
        plan_memory(shape, TokenConfig(max_length=100), None, context=200)


def test_encoder_decoder_is_refused():
    with pytest.raises(ValueError, match="encoder-decoder"):
        model_shape(T5Config())


def test_the_configuration_is_left_alone():
    config = copy.deepcopy(model("llama").config)
    config.dtype = None
    assert shape_of(config).dtype == torch.bfloat16
    assert config.dtype is None
