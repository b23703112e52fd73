"""The probe of models with an indexer prints a line for each cache, of steps after the first."""

from __future__ import annotations

import re

import torch
from models import build

from benchmarks.probes.indexed import report


def test_a_stated_pattern_gives_its_hit_rate(capsys):
    config = build("deepseek-v32", "sdpa", index_topk=40).config
    report(config, [(1, 300), (2, 200)], 0.9, ("eager",), "cpu", torch.float32)
    said = capsys.readouterr().out
    assert len(re.findall("ms a step", said)) == 10
    rates = [float(rate) for rate in re.findall(r"hit rate (0\.\d+)", said)]
    assert len(rates) == 4 and all(0.89 < rate < 1 for rate in rates)
