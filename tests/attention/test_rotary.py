"""Rotary factors that depend on the longest position of a pass: fixed, or chosen without the host."""

from __future__ import annotations

import pytest
import torch
from captured import Imitation
from models import VOCAB
from rotary_models import CONTEXT, KINDS, SWITCH, by_layer_type, phi3, phimoe, rotary_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_sparsekv import SparseCache, TokenConfig, fixed_rotary, optimize
from hf_sparsekv.attention.rotary import PassRotary, switches, unfixed
from hf_sparsekv.cuda_graph.optimize import runner_of

LONG = {"llama": lambda: rotary_llama("longrope"), "phi3": phi3, "phimoe": phimoe, "by layer type": by_layer_type}
FULL = TokenConfig(block_size=16, window=16, token_budget=4096, calibration_tokens=32)


class NoReads(TorchDispatchMode):
    """The host may not read what the device has computed: no graph could hold that."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number of the device"
        return func(*args, **(kwargs or {}))


def rotary_of(net):
    return net.get_decoder().rotary_emb


def turned(net, *rows: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of the model's rotary embedding for rows of positions."""
    rotary = rotary_of(net)
    more = ("full_attention",) if isinstance(rotary.rope_type, dict) else ()
    places = torch.stack([torch.arange(*row) for row in rows])
    return rotary(torch.zeros(1), places, *more)


def same(a, b) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_the_table_has_every_kind():
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS}
    found = {kind for kind in KINDS if switches(rotary_llama(kind))}
    assert found == {"dynamic", "longrope"}
    assert all(len(switches(make())) == 1 for make in LONG.values())


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("end", [1, SWITCH - 1, SWITCH, SWITCH + 1, 300])
def test_longrope_without_the_host(name, end):
    """As transformers on both sides of the switch, in one row and where another row is the longest."""
    for rows in [((end - 1, end),), ((max(0, end - 8), end), (0, min(8, end)))]:
        expected, net = turned(LONG[name](), *rows), LONG[name]()  # a new one: it may switch once only
        instead = PassRotary(net)
        instead.install()
        with NoReads():
            found = [turned(net, *rows) for _ in range(2)]
        instead.remove()
        assert "forward" not in rotary_of(net).__dict__
        same(found[0], expected)
        same(found[1], expected)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("length", [SWITCH, SWITCH + 1, 400])
def test_fixed_factors(name, length):
    """Those of a prompt of that length, for short rows and beside longer ones."""
    whole = turned(LONG[name](), (0, length))
    net = LONG[name]()
    with fixed_rotary(net, length) as switched, NoReads():
        assert [one.tokens for one in switched] == ([SWITCH] if length > SWITCH else [])
        found = {n: turned(net, (0, n)) for n in (1, 20, length)}
        beside = turned(net, (0, 8), (400, 408))
    for n, each in found.items():
        same(each, [t[:, :n] for t in whole])
    same([t[:1] for t in beside], [t[:, :8] for t in whole])
    assert "forward" not in rotary_of(net).__dict__
    same(turned(net, (0, 20)), turned(LONG[name](), (0, 20)))


@pytest.mark.parametrize("make", [lambda: rotary_llama("dynamic"), lambda: by_layer_type("dynamic")])
@pytest.mark.parametrize("length", [400, CONTEXT, 700])
def test_dynamic_factors_do_not_remember(make, length):
    whole = turned(make(), (0, length))
    net = make()
    turned(net, (0, 900))  # which it would remember
    with fixed_rotary(net, length), NoReads():
        found, beside = turned(net, (0, length)), turned(net, (0, 8), (800, 808))
    same(found, whole)
    same([t[:1] for t in beside], [t[:, :8] for t in whole])
    assert "forward" not in rotary_of(net).__dict__


def test_fixed_factors_end_with_an_error():
    net = phi3()
    with pytest.raises(KeyError), fixed_rotary(net, 100):
        assert unfixed(net, 100) is None
        with fixed_rotary(net, 20):  # the inner one counts
            same(turned(net, (50, 60)), turned(phi3(), (50, 60)))
        raise KeyError
    assert "forward" not in rotary_of(net).__dict__ and "rope_type='longrope'" in unfixed(net, 100)
    with pytest.raises(ValueError, match="max_length must be positive, got 0"), fixed_rotary(net, 0):
        pass


# ---------------------------------------------------------------------- captured steps


def continued(net, cache, n: int, tokens: int) -> torch.Tensor:
    ids = torch.randint(2, VOCAB, (1, n), generator=torch.Generator().manual_seed(1))
    return net.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=tokens)


@pytest.mark.parametrize(
    ("name", "length"),
    [("llama", 20), ("llama", 50), ("llama", 100), ("by layer type", 20), ("by layer type", 100), ("phimoe", 20)],
)
def test_replays_on_both_sides_of_the_switch(name, length, monkeypatch):
    """Replayed steps are transformers' own, below the switch, past it, and where they cross it."""
    stock = LONG[name]()
    if name == "by layer type":
        PassRotary(stock).install()  # transformers fails at its second pass past the switch
    expected = continued(stock, DynamicCache(), length, 40)
    net = LONG[name]()
    net.set_attn_implementation("sparsekv")
    runner = Imitation(net)
    runner.install()
    rotary = rotary_of(net)
    plain = rotary.forward

    def forward(*args, **kwargs):
        with NoReads():
            return plain(*args, **kwargs)

    monkeypatch.setattr(rotary, "forward", forward)
    found = continued(net, SparseCache(FULL, model_config=net.config), length, 40)
    assert torch.equal(found, expected)
    assert runner.replays > 20


def test_dynamic_factors_are_not_captured():
    """Past the context they follow the longest one so far, which the host computes anew in each step."""
    expected = continued(rotary_llama("dynamic", max_position_embeddings=64), DynamicCache(), 50, 40)
    net = rotary_llama("dynamic", max_position_embeddings=64)
    net.set_attn_implementation("sparsekv")
    runner = Imitation(net)
    runner.install()
    with pytest.warns(UserWarning, match=r"decode steps run eagerly: .*\(rope_type='dynamic'\) are recomputed"):
        found = continued(net, SparseCache(FULL, model_config=net.config), 50, 40)
    assert torch.equal(found, expected)
    assert runner.replays == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("length", [20, 50, 100])
def test_captured_on_both_sides_of_the_switch(name, length):
    """Captured steps compute what eager ones do; the graph is the same on both sides."""
    steps = torch.randint(2, VOCAB, (1, 40), generator=torch.Generator().manual_seed(2)).cuda()
    ids = torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(1)).cuda()
    logits = []
    for captured in (False, True):
        net = LONG[name]().cuda()
        net.set_attn_implementation("sparsekv")
        if captured:
            optimize(net, fused=False)
        elif name == "by layer type":
            PassRotary(net).install()
        cache, made = SparseCache(FULL, model_config=net.config), []
        with torch.no_grad():
            net(ids, past_key_values=cache, position_ids=torch.arange(length, device="cuda")[None])
            for at, token in enumerate(steps.split(1, dim=1), length):
                place = torch.tensor([[at]], device="cuda")
                made.append(net(token, past_key_values=cache, position_ids=place).logits[:, -1].clone())
        logits.append(torch.stack(made))
    assert runner_of(net).replays > 30
    assert (logits[0] - logits[1]).abs().max() < 2e-3 * logits[0].abs().max()
