"""docs/models.md is of the installed transformers' list, and what it says of some models is found again."""

from __future__ import annotations

import model_list
import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TEXT = model_list.PAGE.read_text()
LINES = model_list.lines_of(TEXT)
SAMPLE = [
    *("llama", "mixtral", "qwen3_moe", "gemma2", "smollm3", "olmo2", "cohere2", "granite", "glm4"),
    *("jamba", "bamba", "nemotron_h", "bart", "bloom", "mamba", "deepseek_v32", "falcon_h1"),
]

needs_its_transformers = pytest.mark.skipif(
    f"transformers {transformers.__version__}'s" not in TEXT, reason="docs/models.md is of another transformers"
)
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the page says what replayed steps do on a CPU")


@needs_its_transformers
def test_the_page_has_all_of_transformers_list():
    assert {line.kind: line.name for line in LINES.values()} == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(LINES) > 150


@needs_its_transformers
@on_a_cpu
def test_the_page_is_as_the_command_writes_it():
    assert model_list.page(list(LINES.values())) == TEXT, "run: python tests/helpers/model_list.py"


@needs_its_transformers
@on_a_cpu
@pytest.mark.few(kind=("llama", "jamba", "bart"))
@pytest.mark.parametrize("kind", SAMPLE)
def test_what_the_page_says_is_found_again(kind):
    assert model_list.survey(kind) == LINES[kind]


def test_the_sample_has_every_result():
    results = {LINES[kind].result for kind in SAMPLE}
    seldom = {model_list.FAILS, model_list.UNBUILT}
    assert results == {line.result for line in LINES.values()} - seldom


@needs_its_transformers
def test_no_engine_gives_other_tokens():
    """All models of the list: the tokens of generate() alone, or a refusal."""
    found = {line.engine for line in LINES.values() if line.result not in (model_list.REFUSED, model_list.UNBUILT)}
    assert found == {model_list.SERVED, *model_list.NOT_SERVED.values()}
    assert {line.engine for line in LINES.values()} - found == {"refused", ""}


def test_a_line_comes_back_from_its_page():
    line = model_list.Line("some_kind", "SomeForCausalLM", model_list.REFUSED, "either a \\| or none", "a \\| b")
    assert model_list.lines_of(model_list.page([line])) == {"some_kind": line}


def test_a_difference_is_seen(monkeypatch):
    """Another attention than full attention's is not called one that works."""
    monkeypatch.setattr(model_list, "FULL", {**model_list.FULL, "token_budget": 16, "tail": None})
    assert model_list.survey("llama").result == model_list.FAILS
