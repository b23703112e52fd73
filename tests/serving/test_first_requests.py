"""No request waits for a compiler: the engine's start has launched whatever requests do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest
import torch
from models import build

pytest.importorskip("triton")

from first_requests import CASES, short, waited_for

from hf_sparsekv import Engine, TokenConfig
from hf_sparsekv.serving import first_prompt
from hf_sparsekv_config.serving import ServingConfig


@pytest.mark.few(case=("sparse-offloaded", "sparse-latents"))
@pytest.mark.parametrize("case", CASES)
def test_requests_launch_no_other_kernels_than_the_start(case):
    """Nor the same ones with other constants, sizes or alignments."""
    script = Path(__file__).with_name("first_requests.py")
    done = forked.run([str(script), case], env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {case: {}}


@pytest.mark.parametrize(("dtype", "runs"), [(torch.float32, True), (torch.float64, False)])
def test_only_what_can_be_sparse_is_compiled(dtype, runs, monkeypatch):
    launched = []
    monkeypatch.setattr(first_prompt, "use_triton", lambda tensor: True)
    monkeypatch.setattr(first_prompt, "sparse_attention", lambda query, *_, **__: launched.append(query.dtype))
    net = build("llama", "sparsekv", max_position_embeddings=2048).to(dtype)
    config = TokenConfig(prefill=0.9, prefill_below=1024)
    with Engine(net, None, config, None, ServingConfig(max_rows=1, max_length=1500)):
        pass
    assert launched == [dtype] * len(launched) and bool(launched) is runs


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:decode steps run eagerly")
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_for_requests(case):
    with short():
        assert waited_for(case) == {}
