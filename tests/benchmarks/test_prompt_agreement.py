"""The probe of sparse prompts: everything chosen is exact, and what it calls the truth is that of the audit."""

from __future__ import annotations

import pytest
import torch
from models import model, prompt

from benchmarks.probes.prompt_agreement import Truth, read
from hf_sparsekv.telemetry.prompt_stats import mean_covered


def test_what_is_compared():
    net, ids, answer = model("llama"), prompt(1, 1500)["input_ids"][0].tolist(), [3, 4, 5]
    exact, right, audit = read(net, ids, answer, None, Truth())
    assert not audit
    everything, some = Truth(), Truth()
    whole, same, _ = read(net, ids, answer, 1.0, everything)
    torch.testing.assert_close(whole, exact, atol=5e-4, rtol=1e-4)
    assert same == pytest.approx(right, abs=1e-4)
    assert not torch.cat(everything.covered).numel()
    part, _, audit = read(net, ids, answer, 0.6, some)
    assert not torch.equal(part, exact)
    assert mean_covered(audit) == pytest.approx(float(torch.cat(some.covered).mean()), abs=0.1)
