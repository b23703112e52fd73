"""lm-eval's own client of completions against the server: its likelihoods are those of our evaluation (echoes)."""

from __future__ import annotations

import pytest
from caches import FULL, SMALL
from http_server import serving
from test_lm_eval import CONTEXT, requests
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: make test-lm-eval")
pytest.importorskip("tenacity", reason="lm-evaluation-harness has no client: its extra `api` is not installed")

from lm_eval.models.openai_completions import LocalCompletionsAPI

from hf_sparsekv import Engine, ServingConfig, TokenConfig
from hf_sparsekv_eval.lm_eval_model import SparseKVLM
from hf_sparsekv_serve.http import create_app

ASKED = [(CONTEXT, "fox"), (CONTEXT, "dog and jug"), ("the lazy", " dog"), (CONTEXT[:100], CONTEXT[100:])]


@pytest.mark.parametrize("concurrent", [1, 3])
def test_likelihoods_are_those_of_our_evaluation(tiny, concurrent):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    serving_config = ServingConfig(max_rows=4, max_length=1000, chunk=64)
    ours = SparseKVLM(str(tiny), cache="full", device="cpu")
    expected = ours.loglikelihood(requests("loglikelihood", *ASKED), disable_tqdm=True)
    rolling = requests("loglikelihood_rolling", (CONTEXT,))
    engine = Engine(model, tokenizer, TokenConfig(**SMALL, **FULL), None, serving_config)
    with engine, serving(create_app(engine, "tiny")) as url:
        options = {"num_concurrent": concurrent, "max_retries": 1, "batch_size": 2, "max_length": 900}
        client = LocalCompletionsAPI(
            model="tiny", base_url=f"{url}/v1/completions", tokenizer=str(tiny), tokenized_requests=True, **options
        )
        found = client.loglikelihood(requests("loglikelihood", *ASKED), disable_tqdm=True)
        (whole,) = client.loglikelihood_rolling(rolling, disable_tqdm=True)
        generated = client.generate_until(
            requests("generate_until", (CONTEXT, {"until": ["a", "b", "c", "d", "e", "fox"], "max_gen_toks": 8}))
        )
    for (got, greedy), (want, is_greedy) in zip(found, expected):
        assert got == pytest.approx(want, abs=1e-3) and greedy == is_greedy
    assert whole == pytest.approx(ours.loglikelihood_rolling(rolling, disable_tqdm=True)[0], abs=2e-3)
    assert len(generated) == 1
