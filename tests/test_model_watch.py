"""A captured step is of the model as it is now: what changes it is noticed, before the next step."""

from __future__ import annotations

import copy
import time
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from caches import TIGHT, two_level
from captured import Imitation, imitated
from inside import later_hooks_of
from models import build, prompt
from torch import nn

from hf_sparsekv import Engine, Sampling, ServingConfig, optimize, unoptimize
from hf_sparsekv.cuda_graph.optimize import runner_of, unnoticed
from hf_sparsekv.model_watch import ModelWatch, kind_of

TOKEN = {**TIGHT, "level": "token", "lag": False}


class Added(nn.Module):
    """A low-rank addition, as PEFT puts one in the place of a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.on = base, True
        self.scaling, self.merged_adapters = {"default": 10.0}, []

    def forward(self, x):
        out = self.base_layer(x)
        return out + self.scaling["default"] * x.sum(-1, keepdim=True) if self.on and not self.merged_adapters else out

    def set_scale(self, name: str, scale: float) -> None:
        self.scaling[name] = scale

    def merge(self) -> None:
        self.merged_adapters.append("default")


def add(net) -> None:
    net.model.layers[1].self_attn.q_proj = Added(net.model.layers[1].self_attn.q_proj)


def added(net) -> Added:
    return net.model.layers[1].self_attn.q_proj


def assign(net) -> None:
    net.load_state_dict({key: value * 0.5 for key, value in net.state_dict().items()}, assign=True)


def data(net) -> None:
    weight = net.model.layers[0].mlp.down_proj.weight  # not joined with another one
    weight.data = weight.data * 0.5


def head(net) -> None:
    torch.manual_seed(1)
    net.lm_head = nn.Linear(64, 97, bias=False).to(net.lm_head.weight)


def in_its_dictionary(net) -> None:
    net.model.layers[0]._modules["mlp"] = copy.deepcopy(net.model.layers[1].mlp)


def parameter(net) -> None:
    net.model.norm.register_parameter("weight", nn.Parameter(net.model.norm.weight.detach() * 3))


def rotary(net) -> None:
    net.model.rotary_emb.register_buffer("inv_freq", net.model.rotary_emb.inv_freq * 0.9, persistent=False)


def scaling(net) -> None:
    for layer in net.model.layers:
        layer.self_attn.scaling = 0.05


def doubled(module, args, out):
    return out * 2


def own_forward(net) -> None:
    mlp = net.model.layers[0].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x) * 0.5


# name -> (what is done before the first step, the change)
CHANGES = {
    "module": (None, add),
    "module in its dictionary": (None, in_its_dictionary),
    "head": (None, head),
    "hook": (None, lambda net: net.model.layers[0].mlp.register_forward_hook(doubled)),
    "hook before": (None, lambda net: net.lm_head.register_forward_pre_hook(lambda m, args: (args[0] * 2,))),
    "hook removed": (lambda net: net.lm_head.register_forward_hook(doubled), lambda net, made: made.remove()),
    "hook beside another": (
        lambda net: net.lm_head.register_forward_hook(lambda *given: None),
        lambda net, _: net.lm_head.register_forward_hook(doubled),
    ),
    "hook in place of another": (
        lambda net: net.lm_head.register_forward_hook(doubled),
        lambda net, made: made.remove() or net.lm_head.register_forward_hook(lambda *given: given[2] * 3),
    ),
    "forward": (None, own_forward),
    "parameter": (None, parameter),
    "buffer": (None, rotary),
    "load_state_dict(assign=True)": (None, assign),
    "data": (None, data),
    "to()": (None, lambda net: net.to(torch.float64).to(torch.float32)),
    "part to()": (None, lambda net: net.model.layers[0].mlp.act_fn.to(torch.float64)),
    "train()": (None, lambda net: net.train()),
    "train() of a part": (None, lambda net: net.model.layers[0].train()),
    "scaling": (None, scaling),
    "eps": (None, lambda net: setattr(net.model.norm, "variance_epsilon", 1.0)),
    "attention": (None, lambda net: net.set_attn_implementation("sdpa")),
    "adapter off": (add, lambda net, _: setattr(added(net), "on", False)),
    "adapter scaled": (add, lambda net, _: added(net).set_scale("default", 1.0)),
    "adapter merged": (add, lambda net, _: added(net).merge()),
}


def changed(name: str, net: nn.Module, first) -> None:
    before, change = CHANGES[name]
    change(net) if before is None else change(net, first)


def step(net, cache, token: int = 5) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([[token]], device=net.device)
        return net(input_ids=ids, past_key_values=cache, use_cache=True).logits.clone()


def begun(net, tokens: int = 90):
    cache = two_level(False, **TOKEN)
    with torch.no_grad():
        net(input_ids=prompt(1, tokens)["input_ids"].to(net.device), past_key_values=cache)
    for _ in range(4):
        step(net, cache)
    return cache


def through(net, name: str) -> tuple[list[torch.Tensor], object]:
    """Logits behind the change; and of the steps before it that the runner, if there is one, has counted."""
    before = CHANGES[name][0]
    first = before(net) if before is not None else None
    cache = begun(net)
    runner = runner_of(net)
    counts = None if runner is None else (runner.captures, runner.replays)
    changed(name, net, first)
    return [step(net, cache) for _ in range(3)], counts


def imitated_with(name: str):
    """A model whose hooks were there before it was optimised."""
    net = build("llama", "sparsekv")
    first = CHANGES[name][0](net)
    runner = Imitation(net)
    runner.install()
    return net, runner, first


@pytest.mark.parametrize("name", ["hook removed", "hook beside another", "hook in place of another"])
def test_hooks_that_were_there_before(name):
    net, runner, first = imitated_with(name)
    cache = begun(net)
    nn.Linear(1, 1).register_forward_hook(doubled)  # another model's
    step(net, cache)
    captures, replays = runner.captures, runner.replays
    changed(name, net, first)
    step(net, cache)
    assert (runner.captures, runner.replays) == (captures + 1, replays + 1)


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_captured_anew(name):
    eager, _ = through(build("llama", "sparsekv"), name)
    net, runner = imitated("llama")
    found, (captures, replays) = through(net, name)
    for one, other in zip(found, eager):
        assert torch.equal(one, other)
    if name in ("train()", "attention"):  # runs eagerly
        assert (runner.captures, runner.replays) == (captures, replays)
    else:
        assert (runner.captures, runner.replays) == (captures + 1, replays + 3)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_captured_anew_on_a_gpu(name, fused):
    eager, _ = through(build("llama", "sparsekv").cuda(), name)
    net = optimize(build("llama", "sparsekv").cuda(), fused=fused)
    found, (captures, _) = through(net, name)
    for one, other in zip(found, eager):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert runner_of(net).captures == captures + (name not in ("train()", "attention"))


def test_an_unchanged_model_is_replayed():
    """Neither what is read, nor writing in place, nor setting what is there already is a change."""
    net, runner = imitated("llama")
    cache = begun(net)
    captures, replays = runner.captures, runner.replays
    net.eval().requires_grad_(False)
    net.load_state_dict(net.state_dict())
    net.lm_head = net.lm_head
    list(net.named_parameters()), net.state_dict(), copy.deepcopy(net.model.norm), repr(net)
    with torch.no_grad():
        net.lm_head.weight.mul_(2)
    net.model.layers[0].self_attn.scaling = net.model.layers[0].self_attn.scaling
    step(net, cache)
    assert (runner.captures, runner.replays) == (captures, replays + 1)


@contextmanager
def rows(net):
    batch = two_level(False, **TOKEN).rows(2, 256)
    for seed in range(2):
        batch.join(batch.prefill(net, prompt(1, 60, seed=seed)["input_ids"]))
    yield lambda: batch.step(net, [3, 4]).clone()


@contextmanager
def engine(net):
    with Engine(net, None, two_level(False, **TOKEN).config, None, ServingConfig(max_rows=2, max_length=256)) as one:
        ids = prompt(1, 60)["input_ids"][0].tolist()
        yield lambda: one.submit(ids, Sampling(max_tokens=8, temperature=0)).result(60).token_ids


@contextmanager
def generate(net):
    ids = prompt(1, 60)["input_ids"]
    yield lambda: net.generate(ids, past_key_values=two_level(False, **TOKEN), do_sample=False, max_new_tokens=8)


@pytest.mark.parametrize("way", [rows, engine, generate])
def test_ways_to_decode_notice(way):
    """Between two steps of a batch, two requests of an engine, two calls of ``generate()``."""
    found, counts = [], []
    for net, runner in ((build("llama", "sparsekv"), None), imitated("llama")):
        with way(net) as decode:
            told = [decode(), decode(), decode()]
            data(net)
            before = runner and (runner.captures, runner.replays)
            told += [decode(), decode()]
        found.append(told)
        counts.append((before, runner and (runner.captures, runner.replays)))
    for one, other in zip(*found):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    (captures, replays), (now, more) = counts[1]
    assert now > captures and more > replays


def test_memory_that_somebody_else_holds():
    """``.data =`` is noticed before the next prompt, and within some steps before."""
    net, runner = imitated("llama")
    cache = begun(net)
    weight, captures = net.model.layers[1].mlp.down_proj.weight, runner.captures
    held = weight.data
    weight.data = held * 2
    for _ in range(2):
        step(net, cache)
    assert runner.captures == captures + 1  # this model has some twenty parameters
    weight.data, other = held, weight.data
    begun(net)
    assert runner.captures > captures + 1
    assert other is not held


@pytest.mark.parametrize("others", [False, True], ids=["first", "beside others"])
def test_hooks_that_are_said_to_do_nothing(others):
    """Those that stop an engine's prompts between two layers: what is captured stays."""
    net = build("llama", "sparsekv")
    if others:
        net.model.layers[0].register_forward_pre_hook(lambda *given: None)
    runner = Imitation(net)
    runner.install()
    cache = begun(net)
    captures = runner.captures
    with unnoticed(net):
        hook = net.model.layers[0].register_forward_pre_hook(lambda *given: None)
    step(net, cache)
    with unnoticed(net):
        hook.remove()
    step(net, cache)
    assert runner.captures == captures
    net.model.layers[0].register_forward_pre_hook(lambda *given: None)
    step(net, cache)
    assert runner.captures == captures + 1


def test_optimize_again_says_that_something_has_changed():
    net, runner = imitated("llama")
    cache = begun(net)
    captures = runner.captures
    assert optimize(net) is net
    step(net, cache)
    assert runner.captures == captures + 1


def test_steps_before_each_of_which_the_model_changes_run_eagerly():
    net, runner = imitated("llama")
    cache, norm = begun(net), net.model.norm
    captures = runner.captures
    with pytest.warns(UserWarning, match="something changes the model before each step"):
        for i in range(8):
            norm.variance_epsilon = 1e-6 * (i + 2)
            step(net, cache)
    assert runner.captures == captures + 3
    for _ in range(2):
        step(net, cache)
    assert runner.captures == captures + 4 and runner.replays


def test_autocast():
    """A graph is of the autocast that it was captured in, and keeps nothing that autocast has cast."""
    found = []
    for optimised in (False, True):
        net, runner = imitated("llama") if optimised else (build("llama", "sparsekv"), None)
        cache, told, captures = begun(net, 40), [], []  # no block is sealed, nothing is chosen from
        for dtype in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                told += [step(net, cache, token) for token in (5, 6)]
            captures.append(runner and runner.captures)
        found.append(told)
    for one, other in zip(*found):
        assert torch.equal(one, other)
    assert [n - captures[0] for n in captures] == [0, 1, 1, 2, 2]


@pytest.mark.gpu
def test_autocast_on_a_gpu():
    found = []
    for optimised in (False, True):
        net = build("llama", "sparsekv").cuda()
        net = optimize(net, fused=False) if optimised else net
        cache, told = begun(net), []
        for dtype in (torch.bfloat16, None, torch.bfloat16):
            with nullcontext() if dtype is None else torch.autocast("cuda", dtype):
                told += [step(net, cache, token) for token in (5, 6)]
            torch.full((1 << 22,), float("nan"), device="cuda")  # where what autocast has cast was
        found.append(told)
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


def test_modules_are_as_they_were():
    net = build("llama", "sparsekv")
    before = [type(module) for module in net.modules()]
    own = net.lm_head.register_forward_hook(doubled)
    runner = Imitation(net)
    runner.install()
    made = net.model.norm.register_forward_hook(doubled)
    copied = copy.deepcopy(net.model)
    unoptimize(net)
    own.remove()
    made.remove()  # handles that were given before and inside work behind it
    assert not later_hooks_of(net.lm_head) and not later_hooks_of(net.model.norm)
    assert [type(module) for module in net.modules()] == before
    assert all(type(module._modules) is type(nn.Linear(1, 1)._modules) for module in net.modules())
    assert [type(module) for module in copied.modules()] == [type(module) for module in net.model.modules()]
    assert not any(hasattr(module, "_sparsekv_watches") and module._sparsekv_watches for module in copied.modules())


def test_an_optimised_model_is_not_copied():
    """Its copy would compute with the weights of the model that it was made from."""
    net = build("llama", "sparsekv")
    optimize(net)
    with pytest.raises(TypeError, match=r"cannot be copied.*unoptimize\(model\)"):
        copy.deepcopy(net)
    before = net(torch.tensor([[5, 6]])).logits
    other = copy.deepcopy(unoptimize(net))
    for parameter in other.parameters():
        parameter.data.zero_()
    assert not other(torch.tensor([[5, 6]])).logits.any()
    assert torch.equal(net(torch.tensor([[5, 6]])).logits, before)


def test_two_may_watch_the_same_modules():
    net = build("llama", "sparsekv")
    whole, part = ModelWatch(net), ModelWatch(net.model)
    for watch in (whole, part):
        watch.begin()
        watch.refresh()
    assert whole.check() and part.check()
    net.lm_head.weight = nn.Parameter(net.lm_head.weight * 2)
    assert not whole.same() and part.same()
    whole.refresh()
    net.model.norm.train()
    assert not whole.same() and not part.same()
    part.refresh()
    whole.end()
    assert kind_of(net) is type(net) and part.check()
    net.model.norm.eval()
    assert not part.same()
    part.end()
    assert kind_of(net.model) is type(net.model)


def test_nothing_is_kept_that_the_model_gives_up():
    net, _ = imitated("llama")
    begun(net)
    freed = []
    weakref.finalize(net.lm_head.weight.untyped_storage(), freed.append, "head")
    net.to(torch.float64)
    assert freed == ["head"]


def test_what_asking_costs():
    """A model of 36 layers, 400 parameters: 2 us on a core of 2026; 30 us if each parameter was asked."""
    net = build("llama", "sparsekv", num_hidden_layers=36)
    watch = ModelWatch(net)
    watch.begin()
    watch.refresh()

    def us(ask) -> float:
        begun = time.perf_counter()
        for _ in range(200):
            assert ask()
        return (time.perf_counter() - begun) / 200 * 1e6

    assert min(us(watch.same) for _ in range(20)) < min(10.0, min(us(watch.check) for _ in range(20)) / 3)
