"""Tests of the command line work out a model's shape once: half a second for a large one."""

from __future__ import annotations

import pytest

from hf_sparsekv.cli import plan

SHAPES: dict[tuple, plan.ModelShape] = {}
model_shape = plan.model_shape


@pytest.fixture(autouse=True)
def shapes_are_kept(monkeypatch) -> None:
    def kept(config, dtype=None) -> plan.ModelShape:
        asked = config.to_json_string(use_diff=False), dtype
        if asked not in SHAPES:
            SHAPES[asked] = model_shape(config, dtype)
        return SHAPES[asked]

    monkeypatch.setattr(plan, "model_shape", kept)
