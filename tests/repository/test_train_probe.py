"""``tools/train_probe.py`` at toy size: its forward is transformers' own, its data are right, it can be interrupted."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import train_probe
from probe_training import network

from hf_sparsekv_eval import probe_cells as cells
from hf_sparsekv_eval import probe_language as lang

SIZE = network.Size(
    layers=3, hidden=48, heads=4, kv_heads=2, head_dim=16, ffn=64, q_rank=24, kv_rank=32, nope=8, rope=32
)


@pytest.fixture(scope="module")
def filler() -> lang.Filler:
    return lang.Filler(chains=128, steps=128)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_forward_is_transformers_own(kind: str, filler) -> None:
    model = network.build(kind, SIZE, seed=0).eval()
    net = network.Network(model)
    ids, _ = cells.make(2, 160, cells.exam_mix("multikey-25", 160), filler)
    with torch.no_grad():
        hidden, _ = net.hidden(ids, pad_to=400)
        expected = model.model(ids).last_hidden_state.flatten(0, 1)
        own = network.rms_norm(hidden[:320], model.model.norm.weight)
        torch.testing.assert_close(own, expected, atol=2e-4, rtol=2e-4)
        # Explicit scores are the same attention, and the oracle with room for all tokens drops none.
        for budget in (None, 160):
            tail, lost = net.hidden(ids, n_tail=40, budget=budget, penalty=160, dense_layers=1)
            torch.testing.assert_close(tail, hidden[:320], atol=2e-4, rtol=2e-4)
            assert float(lost.abs().max()) < 1e-5
        tight, lost = net.hidden(ids, n_tail=40, budget=8, penalty=8, dense_layers=1)
        assert not torch.allclose(tight, hidden[:320], atol=1e-3)
        assert float(lost.min()) > 0


def statements(words: list[str]) -> tuple[dict, dict]:
    """Facts ``{key: [values]}`` and variables ``{name: what it is given}`` of a prompt, in its order."""
    facts, variables = {}, {}
    for i, word in enumerate(words):
        if word == "fact":
            facts.setdefault(tuple(words[i + 1 : i + 3]), []).append(tuple(words[i + 3 : i + 5]))
        elif word == "var":
            variables[tuple(words[i + 1 : i + 3])] = tuple(words[i + 4 : i + 6])
    return facts, variables


@pytest.mark.parametrize("length", [128, 500, 2048])
def test_answers_follow_from_the_text(length: int, filler) -> None:
    """Every question of a training batch is answered by reading its text again."""
    words = {i: w for w, i in lang.vocabulary().items()}
    rng, seen = random.Random(length), set()
    for _ in range(6):
        ids, family = cells.training_batch(3, length, rng, filler)
        assert ids.shape == family.shape == (3, length)
        for row, kinds in zip(ids.tolist(), family.tolist()):
            text = [words[i] for i in row]
            facts, variables = statements(text)
            for i, word in enumerate(text):
                if word in ("ask", "list"):
                    answer = facts[tuple(text[i + 1 : i + 3])]
                    assert len(answer) == (1 if word == "ask" else cells.SAME_KEY)
                    expected = [part for value in answer for part in value]
                    begin = i + 3
                elif word == "each":
                    asked = [tuple(text[j : j + 2]) for j in range(i + 1, i + 9, 2)]
                    expected = [part for key in asked for part in (*key, *facts[key][0])]
                    begin = i + 10
                elif word == "trace":
                    held = {tuple(text[i + 1 : i + 3])}
                    for name, given in variables.items():
                        if given in held:
                            held.add(name)
                    expected = [part for name in variables if name in held for part in name]
                    begin = i + 3
                else:
                    continue
                expected.append("<end>")
                assert text[begin : begin + len(expected)] == expected
                assert set(kinds[begin : begin + len(expected)]) == {cells.FAMILIES.index(FAMILY[word])}
                seen.add(word)
            answered = sum(kind > 0 for kind in kinds)
            assert answered == sum(LENGTHS[word] for word in text if word in LENGTHS)
    assert "ask" in seen and (length < 2048 or seen == set(FAMILY))


FAMILY = {"ask": "single", "list": "multivalue", "each": "multiquery", "trace": "vt"}
LENGTHS = {"ask": 3, "list": 9, "each": 17, "trace": 11}


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_published_models_are_of_this_recipe(kind: str) -> None:
    """The command of a model's card, without further options, trains what is in ``assets/``."""
    path = Path(__file__).parents[2] / "assets" / f"probe-{kind}"
    result = json.loads((path / "result.json").read_text())
    recipe = json.loads(json.dumps(asdict(train_probe.recipe_of("published", kind))))
    assert result["gates_failed"] == []
    for made, now in ((result["recipe"], recipe), (result["recipe"]["size"], recipe["size"])):
        assert {name: now[name] for name in made if name != "size"} == {n: made[n] for n in made if n != "size"}
    steps = ",".join(map(str, result["steps"]))
    assert f"--kind {kind} --seed {result['seed']} --steps {steps}" in (path / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(path)
    expected = dict(network.build(kind, train_probe.recipe_of("published", kind).size, seed=0).named_parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in expected.items()}
    assert model.config.rope_parameters["rope_theta"] == recipe["size"]["theta"]
    assert AutoTokenizer.from_pretrained(path).get_vocab() == lang.vocabulary()
    assert (path / "model.safetensors").stat().st_size < 13e6
