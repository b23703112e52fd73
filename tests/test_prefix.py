"""PrefixCache: one prefill, many caches."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import ALL, FULL, ONE_EACH, TIGHT, two_level
from captured import imitated
from models import NEEDS_CONFIG, build, model, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, PrefixCache
from hf_sparsekv.tuning.channels import calibrate

NEW = 12


def prefixed(name: str, inputs: dict, chunk: int = 1000, **kwargs) -> PrefixCache:
    ours = model(name)
    prefix = PrefixCache(model_config=ours.config if name in NEEDS_CONFIG else None, **kwargs)
    mask, end = inputs["attention_mask"], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate() makes them
    with torch.no_grad():
        for part in inputs["input_ids"].split(chunk, dim=1):
            start, end = end, end + part.shape[1]
            where = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            ours(part, **where, past_key_values=prefix)
    return prefix


def answer(ours, cache, inputs: dict) -> torch.Tensor:
    """A question behind the context, and what follows."""
    batch = inputs["input_ids"].shape[0]
    ids = torch.cat((inputs["input_ids"], torch.tensor([[5, 6, 7]] * batch)), dim=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    return ours.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False)


def holds_what_a_stock_cache_does(cache, inputs: dict) -> None:
    """Every key and value of every token: an answer need not depend on a single one."""
    expected = DynamicCache()
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        reference("llama")(**inputs, position_ids=positions, past_key_values=expected)
    n, real = inputs["input_ids"].shape[1], inputs["attention_mask"].bool()
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        for found, wanted in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            found, wanted = (x[:, :, :n].transpose(1, 2)[real] for x in (found, wanted))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def channel_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("channels") / "channels.safetensors"
    calibrate(model("llama"), [prompt(1, 120)["input_ids"]]).save(path)
    return path


LONG = [(name, 600) for name in ("host-block", "progressive-host")]  # more than a prefix keeps first queries of


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize(("name", "length"), [*((name, 200) for name in ALL), *LONG])
def test_a_cache_goes_on_as_after_its_own_prefill(channel_file, name, length):
    ours, inputs = model("llama"), prompt(1, length)
    # Of a longer context a prefix calibrates on the first tokens alone: a channel file does not depend on that.
    settings = {**TIGHT, **({"channel_file": channel_file} if (name, length) == ("progressive-host", 600) else {})}
    direct = ALL[name](**settings)
    with torch.no_grad():
        ours(**inputs, past_key_values=direct)
    started = prefixed("llama", inputs).start(ALL[name](**settings))
    with torch.no_grad():  # a step at once: what it attends to goes by the context's last query where choices lag
        steps = [ours(torch.tensor([[5]]), past_key_values=copy.deepcopy(cache)).logits for cache in (started, direct)]
    torch.testing.assert_close(*steps)
    assert torch.equal(answer(ours, started, inputs), answer(ours, direct, inputs))
    assert started.stats().attended_tokens == direct.stats().attended_tokens


@pytest.mark.parametrize(
    ("family", "chunk"),
    [("llama", 1000), ("llama", 37), ("gemma3", 64), ("gemma3", 37), ("gpt-oss", 64), ("qwen3-next", 37)],
)
def test_models_chunks_and_padding(family, chunk):
    inputs = prompt(2, 130, (0, 21))
    ours = model(family)
    expected = answer(reference(family), None, inputs)
    prefix = prefixed(family, inputs, chunk)
    config = ours.config if family in NEEDS_CONFIG else None
    started = prefix.start(two_level(model_config=config, **FULL))
    if family == "llama":
        holds_what_a_stock_cache_does(started, inputs)
        holds_what_a_stock_cache_does(prefix.full(), inputs)
    assert torch.equal(answer(ours, started, inputs), expected)
    assert torch.equal(answer(ours, prefix.full(), inputs), expected)
    assert torch.equal(answer(ours, copy.deepcopy(prefix), inputs), expected)


@pytest.mark.parametrize(("length", "chunk"), [(600, 150), (600, 590), (111, 70), (111, 37)])
def test_the_queries_that_a_first_selection_uses_are_those_of_one_chunk(length, chunk):
    """The context's first and last ones, however short its last chunk was."""
    inputs = prompt(2, length)
    at_once, in_chunks = (prefixed("llama", inputs, n) for n in (1000, chunk))
    for one, other in zip(at_once.sparse_layers, in_chunks.sparse_layers, strict=True):
        torch.testing.assert_close(other.policy.first, one.policy.first, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(other.policy.last, one.policy.last, atol=1e-5, rtol=1e-4)


def test_the_prefix_itself_stays_as_it_is():
    inputs, ours = prompt(1, 150), model("llama")
    prefix = prefixed("llama", inputs)
    holds_what_a_stock_cache_does(prefix, inputs)
    first = [answer(ours, make(), inputs) for make in (prefix.full, lambda: prefix.start(two_level(**FULL)))]
    again = [answer(ours, make(), inputs) for make in (lambda: copy.deepcopy(prefix), prefix.full)]
    assert all(torch.equal(first[0], other) for other in (*first, *again))
    assert prefix.get_seq_length() == 150
    holds_what_a_stock_cache_does(prefix, inputs)


def test_in_host_memory():
    inputs, ours = prompt(1, 150), model("llama")
    prefix = prefixed("llama", inputs, offload=OffloadConfig())
    assert prefix.memory_bytes()["host"] > 0
    expected = answer(reference("llama"), None, inputs)
    for cache in (prefix.start(two_level(False, **FULL)), prefix.start(two_level(True, **FULL)), copy.deepcopy(prefix)):
        holds_what_a_stock_cache_does(cache, inputs)
        assert torch.equal(answer(ours, cache, inputs), expected)
    holds_what_a_stock_cache_does(prefix, inputs)


def test_a_copy_decodes_in_captured_steps():
    inputs = prompt(1, 150)
    ours, runner = imitated()
    prefix = prefixed("llama", inputs)
    out = answer(ours, copy.deepcopy(prefix), inputs)
    assert torch.equal(out, answer(reference("llama"), None, inputs))
    assert runner.replays == NEW - 1


def test_what_is_refused():
    inputs = prompt(1, 100)
    with pytest.raises(ValueError, match="prefix is empty"):
        PrefixCache().start(two_level())
    prefix = prefixed("llama", inputs)
    filled = prefix.start(two_level())
    with pytest.raises(ValueError, match="needs an empty cache"):
        prefix.start(filled)
    with pytest.raises(ValueError, match="keeps 512 queries"):
        prefix.start(two_level(calibration_tokens=600))
    for name in ("gemma3", "deepseek-v3"):
        with pytest.raises(ValueError, match="made for another model"):
            prefix.start(two_level(model_config=model(name).config))


@pytest.mark.gpu
def test_captured_dense_decoding_on_a_gpu():
    from hf_sparsekv import optimize
    from hf_sparsekv.cuda_graph.optimize import runner_of

    ours = optimize(build("llama", "sparsekv").to("cuda"), fused=False)
    ids = prompt(1, 200)["input_ids"].cuda()
    prefix = PrefixCache()
    with torch.no_grad():
        ours(ids, past_key_values=prefix)
    asked = torch.cat((ids, torch.tensor([[5, 6, 7]], device="cuda")), dim=1)

    def tokens(cache):
        return ours.generate(asked, past_key_values=cache, max_new_tokens=40, do_sample=False)

    expected = tokens(prefix.full())
    assert torch.equal(tokens(copy.deepcopy(prefix)), expected)
    assert runner_of(ours).replays == 39
    assert torch.equal(tokens(prefix.start(two_level(True, **FULL))), expected)
