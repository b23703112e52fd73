"""Lists that are drawn in place of what sparse prompts choose."""

from __future__ import annotations

import pytest
import torch
from caches import CACHES
from models import model, prompt

from benchmarks.drawn_lists import Drawn, draw
from hf_sparsekv.attention import sparse_prompt


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
@torch.no_grad()
def test_prompts_attend_to_drawn_lists(density):
    """Beside the last 256 queries and what is always chosen, about as many as were asked for."""
    cache = CACHES["device-default"](prefill=0.9, prefill_below=0)
    draw(density)
    try:
        model("llama")(**prompt(1, 1000), past_key_values=cache)
    finally:
        draw(None)
    assert not isinstance(sparse_prompt.prompt_choice, Drawn)
    first, second = cache.stats().prompts
    assert first.densities == second.densities, "all layers have the same lists"
    assert first.audited == 0
    if density == 1:
        assert first.density > 0.85  # half of the blocks are a head's, half a tile's: some are drawn twice
    elif density == 0.5:
        assert 0.55 < first.density < 0.85
    else:
        assert first.density <= 0.5  # so much is always chosen
