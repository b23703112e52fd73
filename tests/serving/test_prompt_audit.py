"""Sparse prompts of an engine: pieces, prefixes that are found again; and their audit, summed over requests."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import SMALL
from engines import greedy, ids_of, inside, quiet
from models import build
from waiting import wait_until

from hf_sparsekv import Engine, OffloadConfig, ServingConfig, SparseCache, TokenConfig
from hf_sparsekv.serving import meter
from hf_sparsekv.serving.prefill import chunks

CONFIG = TokenConfig(**SMALL, prefill=0.4, prefill_below=0)
SERVING = ServingConfig(max_rows=2, max_length=1024, chunk=512, prefill_ms=1.0)
COUNTS = ("layer", "visible", "choices", "audited", "again", "dense")


@torch.no_grad()
def read(net, cache: SparseCache, ids: list[int], past: int = 0) -> None:
    """The rest of a prompt, in an engine's pieces."""
    for n in chunks(len(ids) - past, SERVING.chunk, past):
        net(torch.tensor([ids[past : past + n]]), past_key_values=cache)
        past += n


@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["device", "host"])
def test_the_audit_is_that_of_all_requests(offload, monkeypatch):
    """Reads: the second prompt's beginning was found, the third was given up."""
    monkeypatch.setattr(meter, "EACH_S", 0.0)
    net = build("llama", "sparsekv")
    first, third = ids_of(900, 1), ids_of(1000, 3)
    second = first[:640] + ids_of(360, 2)
    with Engine(net, None, CONFIG, offload, SERVING) as engine:
        assert engine.stats().prompts == ()
        outputs = [engine.submit(ids, greedy(2)).result(60) for ids in (first, second)]
        given_up = engine.submit(third, greedy(2))
        wait_until(lambda: inside(engine).loop.work.reading is not None or given_up.done)
        given_up.cancel()
        given_up.result(60)
        quiet(engine)
        engine.stats()
        wait_until(lambda: len(engine.stats().prompts) == 2)
        found = engine.stats().prompts
    kept = outputs[1].cached_tokens
    assert 256 < kept <= 640
    cache = SparseCache(CONFIG, offload)
    read(net, cache, first)
    other = copy.deepcopy(cache)  # which counts on
    other.crop(kept - len(first))
    read(net, other, second, kept)
    expected = other.stats().prompts
    assert [[getattr(one, name) for name in COUNTS] for one in found] == [
        [getattr(one, name) for name in COUNTS] for one in expected
    ]
    for one, more in zip(found, expected):
        assert 0 < one.density < 1 and one.density == pytest.approx(more.density)
        assert one.covered == pytest.approx(more.covered, rel=1e-5)
        assert one.least == pytest.approx(more.least, rel=1e-4)
        assert one.audited > 0 and one.covered >= 0.4


@pytest.mark.parametrize(
    "serving",
    [{"layer_segments": False, "prefill_ms": 0.01}, {"chunk": 1024}],
    ids=["few tokens a turn", "short pieces"],
)
def test_pieces_are_long_enough_to_be_sparse(serving, monkeypatch):
    """With the usual least length of a sparse piece, 1,024 tokens."""
    monkeypatch.setattr(meter, "EACH_S", 0.0)
    net = build("llama", "sparsekv", max_position_embeddings=4096)
    config = TokenConfig(**SMALL, prefill=0.4, prefill_below=1024)
    with Engine(net, None, config, None, ServingConfig(max_rows=1, max_length=2100, **serving)) as engine:
        engine.submit(ids_of(2048, 1), greedy(2)).result(60)
        quiet(engine)
        engine.stats()
        wait_until(lambda: engine.stats().prompts)
        assert [layer.density < 1 for layer in engine.stats().prompts] == [True, True]


@pytest.mark.parametrize(("below", "chunk"), [(16384, 1023), (1024, 512), (0, 256), (600, 599)])
def test_pieces_that_would_all_be_exact(below, chunk):
    config = TokenConfig(prefill=0.98, prefill_below=below)
    with pytest.raises(ValueError, match=rf"chunk={chunk} reads pieces of fewer than .* tokens, which are exact"):
        Engine(build("llama", "sparsekv"), None, config, None, ServingConfig(chunk=chunk))


def test_prompts_that_would_all_be_exact():
    config = TokenConfig(**SMALL, prefill=0.98, prefill_below=700)
    net, serving = build("llama", "sparsekv"), ServingConfig(max_rows=1, max_length=700)
    with (
        pytest.warns(UserWarning, match="no prompt of this engine is sparse"),
        Engine(net, None, config, None, serving),
    ):
        pass
