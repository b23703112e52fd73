"""With a budget that holds everything, generate() gives what plain attention gives, however it is called."""

from __future__ import annotations

import warnings

import pytest
import torch
from caches import CACHES, FULL, two_level
from inside import attention_of
from models import (
    MODELS,
    NEEDS_CONFIG,
    NOTHING_SPARSE,
    TELLING_MODELS,
    build,
    model,
    plain_text,
    prompt,
    reference,
)
from transformers import DynamicCache

TOKENS = 28  # blocks of 16 become full at 100 and 116, of 32 at 116
PADS = (0, 5, 61)


def same_text(name: str, cache, inputs: dict, **generate) -> None:
    """Our model and cache against the reference with transformers' own cache."""
    generate = {"do_sample": False, "max_new_tokens": TOKENS, **generate}
    expected, ours = plain_text(name, inputs, **generate), model(name)
    torch.manual_seed(11)
    found = ours.generate(**inputs, past_key_values=cache, **generate)
    assert torch.equal(found, expected)
    assert len(set(expected[0].tolist())) > 15, "the text says nothing: the test would pass for anything"
    assert cache.get_seq_length() > 0, "the cache was not used"


# ---------------------------------------------------------------------- every model, every cache


@pytest.mark.quick
@pytest.mark.few(name=TELLING_MODELS)
@pytest.mark.filterwarnings("ignore:no layer of this")
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Blocks on the device; of each model in host memory in test_logits."""
    cache = two_level(False, model(name).config if name in NEEDS_CONFIG else None, **FULL)
    same_text(name, cache, prompt(3, 90, PADS))
    stats = cache.stats()
    assert (stats.decode_steps == TOKENS - 1) != (name in NOTHING_SPARSE)
    assert stats.materialised == stats.sparse_calls == 0


@pytest.mark.quick
@pytest.mark.few(name=TELLING_MODELS)
@pytest.mark.filterwarnings("ignore:no layer of this")
@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    """Text may agree by luck where a softcap or a sink is lost; logits do not."""
    config = model(name).config
    ours = two_level(model_config=config if name in NEEDS_CONFIG else None, **FULL)
    stock = DynamicCache(config=config)
    ids = prompt(1, 110)["input_ids"]
    for chunk in (ids[:, :80], ids[:, 80:90], *ids[:, 90:].split(1, dim=1)):
        with torch.no_grad():
            found = model(name)(chunk, past_key_values=ours).logits
            expected = reference(name)(chunk, past_key_values=stock).logits
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)


@pytest.mark.few
@pytest.mark.parametrize("net", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("name", CACHES)
def test_caches(name, net):
    cache, go = CACHES[name](**FULL), {"max_new_tokens": 14}  # a block becomes full
    if name == "predictive-second" and net == "glm4-moe-lite":
        with pytest.raises(ValueError, match="does not hold latents"):
            same_text(net, cache, prompt(3, 90, PADS), **go)
        return
    same_text(net, cache, prompt(3, 90, PADS), **go)


def test_nothing_sparse_warns_once():
    cache = two_level(**FULL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_text("mistral-window", cache, prompt(1, 40))
    assert [str(w.message) for w in caught if "has nothing to make sparse" in str(w.message)].__len__() == 1


# ---------------------------------------------------------------------- ways to call generate()


@pytest.mark.quick
@pytest.mark.parametrize("batch", [1, 2])
def test_short_prompt_long_answer(batch):
    same_text("llama", two_level(**FULL), prompt(batch, 1), max_new_tokens=100)


@pytest.mark.few
@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("level", ["two_level", "token"])
def test_budget_is_enough_only_just(level, name):
    """Every stored token but the sinks is chosen one by one: the sparse path, and still the dense result."""
    cache = two_level(token_budget=7 * 16 - 4, num_blocks=7, level=level)
    same_text(name, cache, prompt(2, 118, (0, 30)), max_new_tokens=30)
    assert cache.stats().sparse_calls > 0


@pytest.mark.quick
@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3", "glm4-moe-lite"])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=["beams", "beams-return", "sample", "sample-return", "beam-sample"],
)
def test_decoding(name, offload, how):
    same_text(name, two_level(offload, **FULL), prompt(2, 70, (0, 23)), **how)


CHUNKS = [("llama", size) for size in (1, 7, 64, 200)] + [("deepseek-v3", 3), ("glm4-moe-lite", 37), ("gemma3", 13)]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "size"), CHUNKS)
def test_chunked_prefill(name, size):
    same_text(name, two_level(**FULL), prompt(2, 101, (0, 45)), prefill_chunk_size=size)


@pytest.mark.few
@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("draft", [3, 30])
def test_prompt_lookup(name, draft):
    """30 drafts are more than ``max_draft``: blocks are taken back."""
    piece = prompt(1, 9)["input_ids"]
    ids = piece.repeat(1, 12)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    same_text(name, two_level(**FULL), inputs, prompt_lookup_num_tokens=draft, max_new_tokens=60)


@pytest.mark.few
@pytest.mark.quick
@pytest.mark.parametrize("attn", ["sdpa", "sparsekv"])
@pytest.mark.parametrize("same", [True, False], ids=["good-drafts", "bad-drafts"])
def test_assistant(attn, same):
    """The assistant has its own stock cache, whatever its attention is."""
    assistant = build("llama", attn, seed=0 if same else 5)
    cache, go = two_level(**FULL), {"do_sample": False, "max_new_tokens": 50}
    found = model("llama").generate(**prompt(1, 90), **go, assistant_model=assistant, past_key_values=cache)
    assert torch.equal(found, plain_text("llama", prompt(1, 90), **go))
    assert cache.stats().exact_calls > 0


def test_inputs_embeds():
    inputs = prompt(2, 70, (0, 20))
    embeds = model("llama").get_input_embeddings()(inputs["input_ids"]).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    same_text("llama", two_level(**FULL), inputs)


GRAD, NO_GRAD, INFERENCE = torch.enable_grad, torch.no_grad, torch.inference_mode
MODES = [(GRAD, GRAD), (INFERENCE, INFERENCE), (INFERENCE, NO_GRAD), (NO_GRAD, INFERENCE)]


@pytest.mark.parametrize(("first", "then"), MODES)
def test_gradient_modes(first, then):
    """A cache filled in inference mode goes on outside, and the other way round."""
    ids, cache, stock = prompt(1, 120)["input_ids"], two_level(**FULL), DynamicCache()
    for chunk in (ids[:, :80], ids[:, 80:90], *ids[:, 90:].split(1, dim=1)):
        with first() if chunk.shape[1] == 80 else then():
            found = model("llama")(chunk, past_key_values=cache).logits
            expected = reference("llama")(chunk, past_key_values=stock).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


# ---------------------------------------------------------------------- bfloat16


@pytest.mark.few(name=("llama", "gpt-oss", "youtu"))
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-oss", "youtu"])
def test_bf16_logits(name, capsys):
    """Teacher-forced: our bf16 is as far from float32 as the reference's own bf16 is, within a factor of 1.5."""
    ids = prompt(1, 150)["input_ids"]
    # All experts at once: a router that tips over under rounding would be all that is measured.
    changes = {"num_experts_per_tok": 2} if name == "gpt-oss" else {}
    attn = attention_of(reference(name))
    ours, theirs = (build(name, each, **changes).bfloat16() for each in ("sparsekv", attn))
    exact = build(name, attn, **changes)
    caches = {"ours": two_level(**FULL), "theirs": DynamicCache(config=theirs.config)}
    rows = {"ours": [], "theirs": []}
    with torch.no_grad():
        for chunk in (ids[:, :90], *ids[:, 90:].split(1, dim=1)):
            rows["ours"].append(ours(chunk, past_key_values=caches["ours"]).logits.float())
            rows["theirs"].append(theirs(chunk, past_key_values=caches["theirs"]).logits.float())
        truth = exact(ids).logits
    found, expected = torch.cat(rows["ours"], 1)[:, 90:], torch.cat(rows["theirs"], 1)[:, 90:]
    truth = truth[:, 90:]

    def distance(a, b):
        return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())

    mine, stock, between = distance(found, truth), distance(expected, truth), distance(found, expected)
    top1 = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    with capsys.disabled():
        print(
            f"\n  bf16 {name}: RMS error against float32 {mine:.4f} (reference {stock:.4f}), between the two "
            f"{between:.4f}, top-1 agreement {top1:.3f}"
        )
    assert mine < 1.5 * stock
    assert between < 2.5 * stock
    assert top1 >= 0.9
