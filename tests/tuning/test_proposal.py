"""Which preset ``plan`` proposes, and by which bytes."""

from __future__ import annotations

import pytest
import torch
from models import model

from hf_sparsekv import OffloadConfig, TokenConfig
from hf_sparsekv.ops._device import Gpu
from hf_sparsekv.policies import crossover
from hf_sparsekv.policies.memory import LayerShape
from hf_sparsekv.tuning import proposal
from hf_sparsekv.tuning.plan import ModelShape, model_shape, plan_memory
from hf_sparsekv.tuning.proposal import MORE, propose, step_bytes

GIB = 1 << 30
# As Qwen3-8B: 36 layers of 8 KV heads of 128 + 128 channels.
MODEL = ModelShape("qwen3", torch.bfloat16, 16_400_000_000, (LayerShape("full", 8, 128, 128),) * 36, 4096, 12288, 32)
ROOMY = {"gpu": 1000 * GIB, "host": 1000 * GIB}


def test_what_a_step_reads():
    """Against the sum by hand: one dense layer, then labels, means and chosen tokens of 35."""
    config, context, batch, token = TokenConfig(), 32 << 10, 2, 8 * 256 * 2
    planned = plan_memory(MODEL, config, None, context=context, batch=batch)
    found = step_bytes(MODEL, config, None, context=context, batch=batch)
    beside = MODEL.weights + planned.labels + planned.means + planned.recent
    chosen = round(0.0206 * 0.1**-0.75 * context)
    assert chosen / context == pytest.approx(0.116, abs=0.001)
    assert found == beside + batch * token * (context + 35 * chosen)
    offloaded = step_bytes(MODEL, config, OffloadConfig(), context=context, batch=batch)
    assert offloaded - found == pytest.approx(batch * token * 35 * chosen * 2.7)
    fixed = step_bytes(MODEL, TokenConfig(token_budget=1024), None, context=context, batch=batch)
    assert found - fixed == batch * token * 35 * (chosen - 1024)
    assert step_bytes(MODEL, config, None, context=512, batch=1) < step_bytes(
        MODEL, config, None, context=1024, batch=1
    )


def test_more_rows_choose_fewer_tokens():
    found = [propose(MODEL, context=32 << 10, batch=batch, **ROOMY) for batch in (1, 2, 4, 8, 16, 32, 64)]
    shares = [one.config.threshold for one in found]
    assert shares == sorted(shares, reverse=True) and set(shares) == {0.75, 0.9, 0.95}
    for one in found:
        assert one.config == (TokenConfig.preset(one.preset) if one.preset else TokenConfig())
        assert 0 <= one.more <= MORE and not one.offloaded and not one.every and one.pieces == 32 << 10
    assert found[0].call == 'sparse(model, "accurate")'


def test_what_fits():
    """All on the GPU; prompts in pieces; in host memory; nowhere."""
    given = {"context": 128 << 10, "host": 40 * GIB}
    whole, pieces, host = (propose(MODEL, gpu=size * GIB, **given) for size in (60, 40, 30))
    assert (whole.offloaded, whole.pieces) == (False, 128 << 10)
    assert (pieces.offloaded, pieces.pieces) == (False, proposal.PIECE)
    assert pieces.plan.prefill == whole.plan.prefill // 32
    assert (host.offloaded, host.call) == (True, 'sparse(model, "fast", offload=True)')
    for one, size in ((whole, 60), (pieces, 40), (host, 30)):
        assert one.plan.device_total <= size * GIB and one.plan.cache_host <= given["host"]
    assert propose(MODEL, gpu=30 * GIB, context=128 << 10, host=GIB) is None
    assert propose(MODEL, gpu=10 * GIB, **given) is None


def test_where_full_attention_is_as_good(monkeypatch):
    """Below the least number of tokens anywhere; below the crossover on a GPU that is known."""
    assert propose(MODEL, context=64, **ROOMY).every and not propose(MODEL, context=65, **ROOMY).every
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Other GPU")
    monkeypatch.setattr(crossover, "gpu", lambda device: Gpu(132, 50 << 20, 227 << 10, 4.8e12))
    monkeypatch.setattr(crossover, "has_triton", lambda: True)
    here = torch.device("cuda", 0)
    assert propose(MODEL, context=15_000, device=here, **ROOMY).every
    assert not propose(MODEL, context=16_000, device=here, **ROOMY).every
    assert not propose(MODEL, context=15_000, device=here, gpu=18 * GIB, host=1000 * GIB).every, "over the link never"


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe-lite"])
def test_other_models(name):
    shape = model_shape(model(name).config, torch.float32)
    found = propose(shape, context=3000, batch=2, **ROOMY)
    assert found.plan == plan_memory(shape, found.config, None, context=3000, batch=2)
    with pytest.raises(ValueError, match="context must be positive"):
        propose(shape, context=0, **ROOMY)


def test_a_model_that_chooses_its_tokens():
    """There is nothing to choose among but the place."""
    shape = model_shape(model("deepseek-v32").config)
    found = propose(shape, context=700, gpu=GIB, host=GIB)
    assert (found.preset, found.config, found.every) == (None, TokenConfig(), False)
    least = min(
        proposal.in_pieces(plan_memory(shape, TokenConfig(), offload, context=700), 700).device_total
        for offload in (None, OffloadConfig())
    )
    assert propose(shape, context=700, gpu=least, host=GIB).call == "sparse(model, offload=True)"
    assert proposal.shortage(shape, context=700, gpu=0, host=GIB).on_gpu > 0
    assert step_bytes(shape, TokenConfig(), None, context=700, batch=1) > shape.weights
