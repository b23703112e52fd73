"""Quality of every cache, with thresholds that chance does not reach: ``make test-accuracy``.

On the probe models RULER's families at 2k tokens (the models are in ``assets/``; tools/train_probe.py makes them), on
the small real model agreement with full attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv_eval import forced, generation, ruler_probe
from hf_sparsekv_eval.cache_specs import CacheSpec, parse_cache
from hf_sparsekv_eval.records import Results
from hf_sparsekv_eval.samples import Sample
from hf_sparsekv_eval.text import python_reference

pytestmark = pytest.mark.accuracy

ASSETS = Path(__file__).parents[2] / "assets"
LENGTH = 2048
QUESTION = 3  # tokens of the question that are answered from the sparse cache, too
TIGHT = "token_budget=128,num_blocks=16"  # of 2,048 tokens, 30 blocks
BOUNDS = "two_level:level=two_level"  # AsyncTLS

# name -> spec, and how many points of the mean score it may lose against full attention on either model. One prompt is
# 16.7 points of six: most may lose none but a part of one. Measured losses are beside each.
CACHES = {
    "two_level": (f"{BOUNDS},{TIGHT}", {"gqa": 9, "mla": 17}),  # 0, 0
    # With lag, blocks of the step before.
    "two_level, lag": (f"{BOUNDS},token_budget=128,num_blocks=24,lag=true,offload=true", {"gqa": 9, "mla": 17}),  # 0, 0
    "two_level, host": (f"two_level:{TIGHT},offload=true", {"gqa": 9, "mla": 17}),
    # Narrow blocks tell facts apart.
    "two_level, blocks of 16": (f"{BOUNDS},token_budget=128,num_blocks=64,block_size=16", {"gqa": 9, "mla": 17}),
    "token_only": ("token_only:token_budget=128", {"gqa": 9, "mla": 17}),  # 0, 0
    "block_only": ("block_only:token_budget=512", {"gqa": 34}),
    "progressive": ("progressive", {"gqa": 9, "mla": 17}),
    "predictive": ("predictive:token_budget=128", {"gqa": 9, "mla": 17}),
    # What earlier steps predict cannot look up what is asked next: far worse than the others, and still no chance.
    "predictive, earlier steps": (  # 67, 33
        "predictive:token_budget=512,predictor=assembled",
        {"gqa": 76, "mla": 51},
    ),
    "oracle": ("oracle:token_budget=128", {"gqa": 4, "mla": 9}),  # 0, 0
    # 92, 100; reads as much as any of a fixed budget, and has the widest limit.
    "random": ("random:token_budget=512", {"gqa": 76, "mla": 51}),
}

PROMPTS = {"gqa": 1, "mla": 1}  # of each family
EACH = [(kind, name) for kind in PROMPTS for name, (_, limits) in CACHES.items() if kind in limits]


def prompts(tokenizer, count: int) -> list[Sample]:
    """``count`` of each family, all of them equally long: one batch without padding."""
    made = []
    for family in ruler_probe.FAMILIES:
        for index in range(count):
            answer = ruler_probe.make_sample(tokenizer, family, LENGTH, index, seed=7).max_new_tokens
            sample = ruler_probe.make_sample(tokenizer, family, LENGTH + answer, index, seed=7)
            made.append(replace(sample, task="all families", length=LENGTH, index=len(made)))
    assert {len(sample.ids) for sample in made} == {LENGTH}
    return made


@cache
def measured(kind: str) -> dict[str, dict[str, float]]:
    """Per cache: % right, and the share of tokens attended to."""
    path = ASSETS / f"probe-{kind}"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sparsekv", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    specs = [parse_cache("full"), *(named(name, text) for name, (text, limits) in CACHES.items() if kind in limits)]
    results, samples = Results(None, {}), prompts(tokenizer, PROMPTS[kind])
    generation.evaluate(model, tokenizer, samples, specs, results, batch=len(samples), steps=QUESTION, prefilled=False)
    table: dict[str, dict[str, float]] = {}
    for figure in results.figures(generation.MEASURES):
        table.setdefault(figure.cache, {})[figure.measure] = 100 * figure.value
    print(results.write(generation.MEASURES, path.name))
    return table


def named(name: str, text: str) -> CacheSpec:
    spec = parse_cache(text)
    return CacheSpec(name, spec.method, spec.options)


def check(kind: str, name: str) -> None:
    """The cache has lost no more against full attention than it may."""
    table, loss = measured(kind), CACHES[name][1][kind]
    full, got = table["full"]["score in steps"], table[name]["score in steps"]
    assert full == 100
    assert got >= full - loss, f"{name}: {got:.1f} % right, full attention {full:.1f} %; {loss} points may be lost"


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_cache_answers_from_little(kind: str, name: str) -> None:
    """Reads: otherwise the answers would say nothing about the selection."""
    if name != "random":
        check(kind, name)
    assert measured(kind)[name]["attended"] < 60  # two layers of six are dense


@pytest.mark.parametrize("kind", PROMPTS)
def test_chance_does_not_pass(kind: str) -> None:
    """These thresholds fail for a selector that picks at random, although it reads as much as any."""
    assert CACHES["random"][1][kind] == max(limits[kind] for _, limits in CACHES.values() if kind in limits)
    with pytest.raises(AssertionError, match="random"):
        check(kind, "random")


# On a real model: name -> spec, and the largest KL divergence (nats a token), two to four times what was measured over
# several passages: 0.057, 0.048, 0.009, 0.10, 0.004, and 0.60 for chance. Passages differ a lot; this is one
# that chance gets wrong (1.4; of another 0.06, which tells nothing): here it is 0.046, 0.057, 0.008, 0.065, 0.001.
REAL = {
    "two_level": (f"{BOUNDS},token_budget=128,num_blocks=12", 0.12),
    "two_level, lag": (f"{BOUNDS},token_budget=128,num_blocks=12,lag=true", 0.12),
    "token_only": ("token_only:token_budget=128", 0.03),
    "block_only": ("block_only:token_budget=512", 0.25),
    "progressive": ("progressive", 0.03),
    "predictive": ("predictive:token_budget=512", 0.02),  # measured 0.005 over longer passages
    # What earlier steps predict misses what the next query looks up: measured 0.04, and 0.15 over longer passages.
    "predictive, earlier steps": ("predictive:token_budget=512,predictor=assembled", 0.25),
    "oracle": ("oracle:token_budget=128", 0.015),
    "random": ("random:token_budget=512", 0.25),  # as much as any reads, and the widest threshold
}


@pytest.fixture(scope="module")
def divergence(small_model_dir) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(small_model_dir, attn_implementation="sparsekv").eval()
    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    words = tokenizer(python_reference(), add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    results, specs = Results(None, {}), [named(name, text) for name, (text, _) in REAL.items()]
    forced.evaluate(model, words, forced.passages(words, 2048, 16, 1), 2048, 16, specs, results, "agreement")
    print(results.write(forced.MEASURES["agreement"], small_model_dir.name))
    return {f.cache: f.value for f in results.figures(forced.MEASURES["agreement"]) if f.measure == "KL"}


@pytest.mark.small_model
@pytest.mark.parametrize("name", [name for name in REAL if name != "random"])
def test_agrees_on_a_real_model(divergence, name: str) -> None:
    assert divergence[name] <= REAL[name][1]


@pytest.mark.small_model
def test_chance_does_not_agree_on_a_real_model(divergence) -> None:
    assert divergence["random"] > REAL["random"][1] == max(limit for _, limit in REAL.values())
