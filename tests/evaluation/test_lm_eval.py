"""The adapter to lm-evaluation-harness, on a local task (`make test-lm-eval` installs the harness)."""

from __future__ import annotations

import json

import pytest
from inside import short_pieces
from test_evaluation_passes import passes
from transformers import AutoModelForCausalLM, AutoTokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: make test-lm-eval")

from lm_eval.api.instance import Instance  # noqa: E402

from hf_sparsekv_eval import prefix  # noqa: E402
from hf_sparsekv_eval.lm_eval_model import SparseKVLM  # noqa: E402

SETTINGS = "block_size=16;window=16;max_draft=4;dense_layers=0;calibration_tokens=32"
ALL = f"two_level:{SETTINGS};token_budget=4096"
FEW = f"two_level:{SETTINGS};token_budget=16;num_blocks=1"
CONTEXT = "the quick brown fox jumps over the lazy dog " * 6


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": CONTEXT + "pack my box " * i, "choices": ["fox", "jug", "dog"], "answer": i % 3} for i in range(3)
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files: {path}/rows.jsonl\ntest_split: train\n"
    (path / "choice.yaml").write_text(
        "task: local_choice\n" + common + 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list:\n- metric: acc\n'
    )
    (path / "write.yaml").write_text(
        "task: local_write\n" + common + 'output_type: generate_until\ndoc_to_text: "{{question}}"\n'
        'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs:\n  until: ["."]\n  max_gen_toks: 8\n'
        "metric_list:\n- metric: exact_match\n"
    )
    return path


def requests(kind: str, *args) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(args)]


def test_likelihoods_with_room_for_all_are_full_attentions(tiny) -> None:
    asked = [(CONTEXT, "fox"), (CONTEXT, "dog and jug"), ("the lazy", " dog")]
    found = {}
    for name, cache in (("full", "full"), ("all", ALL), ("few", FEW)):
        found[name] = SparseKVLM(str(tiny), cache=cache, device="cpu").loglikelihood(
            requests("loglikelihood", *asked), disable_tqdm=True
        )
    for full, ours in zip(found["full"], found["all"]):
        assert ours[0] == pytest.approx(full[0], abs=1e-3) and ours[1] == full[1]
    # The first token comes from the exact prefill, the last context is short; the rest was chosen.
    assert abs(found["few"][1][0] - found["full"][1][0]) > 1e-3
    assert found["few"][2][0] == pytest.approx(found["full"][2][0], abs=1e-3)


def test_rolling_likelihood_and_text_are_full_attentions(tiny) -> None:
    rolling, text = requests("loglikelihood_rolling", (CONTEXT[:100],)), (CONTEXT, {"until": ["."], "max_gen_toks": 8})
    results = []
    for cache in ("full", ALL):
        model = SparseKVLM(str(tiny), cache=cache, device="cpu")
        results.append(
            (
                model.loglikelihood_rolling(rolling, disable_tqdm=True)[0],
                model.generate_until(requests("generate_until", text), disable_tqdm=True),
            )
        )
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    assert results[1][1] == results[0][1]


def test_harness_runs_local_tasks(tiny, task_dir) -> None:
    out = lm_eval.simple_evaluate(
        model="sparsekv",
        model_args=f"pretrained={tiny},cache={FEW}",
        tasks=["local_choice", "local_write"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(task_dir), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    assert 0 <= out["results"]["local_choice"]["acc,none"] <= 1
    assert out["results"]["local_write"]["exact_match,none"] == 0


def test_a_model_that_is_loaded_already_and_wrong_specs(tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="sparsekv")
    ours = SparseKVLM(model, tokenizer=AutoTokenizer.from_pretrained(tiny), cache=ALL)
    assert ours.spec.options["token_budget"] == 4096
    with pytest.raises(ValueError, match="no option 'budget'"):
        SparseKVLM(str(tiny), cache="two_level:budget=4")


@pytest.mark.parametrize("cache", ["full", ALL])
def test_long_contexts_are_read_in_passes(tiny, cache, monkeypatch) -> None:
    """A batch of several lengths; no pass holds more tokens than evaluation's own, none a single column."""
    asked = [(CONTEXT + "pack my box " * i, {"until": ["."], "max_gen_toks": 8}) for i in range(3)]
    short_pieces(monkeypatch, 16)
    said = []
    for most in (1 << 20, 256):
        monkeypatch.setattr(prefix, "PASS", most)
        ours = SparseKVLM(str(tiny), cache=cache, device="cpu", batch_size=3)
        with passes(ours.model) as seen:
            said.append(ours.generate_until(requests("generate_until", *asked), disable_tqdm=True))
        assert max(rows * columns for rows, columns, _ in seen) <= most
        assert sum(columns > 1 for _, columns, _ in seen) == (1 if most > 256 else 4)
    assert said[0] == said[1]
