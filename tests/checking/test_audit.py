"""Audits: what is found of each token, the text that goes back, and what is refused."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from caches import CACHES, SMALL
from captured import Told
from models import PAD, build, model, prompt, reference

from hf_sparsekv import AuditConfig, OffloadConfig, PrefixCache, TokenConfig, enable, generate, sparse
from hf_sparsekv import disable as disabled
from hf_sparsekv.checking.exact_copy import exact_copy
from hf_sparsekv.checking.loop import MANY
from hf_sparsekv.checking.losses import losses

TIGHT = {**SMALL, "dense_below": 0, "token_budget": 8}
GO = {"pad_token_id": PAD, "return_dict_in_generate": True}


def audited(net, inputs: dict, audit: AuditConfig | bool = True, config: TokenConfig | None = None, **go):
    """The result of a call that is audited."""
    torch.manual_seed(3)
    with sparse(net, config or TokenConfig(**TIGHT), audit=audit):
        return net.generate(**inputs, **{"do_sample": True, "max_new_tokens": 40, **GO, **go})


def by_full_attention(name: str, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Full attention's probabilities after each column, by transformers alone."""
    new = torch.ones(len(text), text.shape[1] - mask.shape[1], dtype=mask.dtype)
    whole = torch.cat((mask, new), dim=1)
    with torch.no_grad():
        logits = reference(name)(text, attention_mask=whole, position_ids=(whole.cumsum(1) - 1).clamp_min(0)).logits
    return logits.softmax(-1)


@pytest.mark.parametrize("interval", [1, 7, 40, 128])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek-v3"])
def test_each_number_is_that_of_full_attention_over_the_text(name, interval):
    """KL divergence, total variation and likeliest token, by the logits of the sparse steps that drew."""
    inputs = prompt(3, 90, (0, 5, 40), 1)
    out = audited(model(name), inputs, AuditConfig(interval=interval), output_logits=True)
    full = by_full_attention(name, out.sequences, inputs["attention_mask"])
    found = out.past_key_values.stats().audit
    assert len(found.tokens) == 3 * 39 and found.by_full == 3
    for one in found.tokens:
        p, q = full[one.row, one.column - 1], out.logits[one.column - 90][one.row].softmax(-1)
        assert one.token == out.sequences[one.row, one.column]
        assert one.same_top == (p.argmax() == q.argmax())
        expected = (p * (p / q).log()).sum(), (p - q).abs().sum() / 2, p[one.token]
        assert torch.allclose(torch.tensor([one.kl, one.variation, one.probability]), torch.stack(expected), atol=1e-5)
    assert found.largest.variation == max(one.variation for one in found.tokens) > 0.02
    assert found.mean_variation == pytest.approx(sum(one.variation for one in found.tokens) / 117)
    assert found.other_top == pytest.approx(sum(not one.same_top for one in found.tokens) / 117)
    assert found.mean_kl > 0


def test_statistics_in_words():
    out = audited(model("llama"), prompt(1, 90))
    told = str(out.past_key_values.stats())
    assert re.search(
        r"; 39 tokens audited: total variation 0\.\d{3} on average, 0\.\d\d at most \(column 1?\d\d of row 0\), "
        r"another likeliest token in \d+\.\d%;",
        told,
    ), told
    kv = out.past_key_values
    kv.reset()
    assert kv.stats().audit is None


def test_a_kept_cache_adds_turns():
    """The second turn's prompt was read over keys of sparse steps; full attention reads it again over its own."""
    net, kv = model("llama"), CACHES["device-default"](**TIGHT)
    inputs = prompt(1, 90)
    first = audited(net, inputs, past_key_values=kv, max_new_tokens=20).sequences
    text = torch.cat((first, prompt(1, 7, seed=5)["input_ids"]), dim=1)
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    second = audited(net, inputs, past_key_values=kv, max_new_tokens=20).sequences
    found = kv.stats().audit
    assert [one.column for one in found.tokens] == [*range(91, 110), *range(117, 137)]
    full = by_full_attention("llama", second, inputs["attention_mask"])[0]
    for one in found.tokens[19:]:
        assert one.probability == pytest.approx(full[one.column - 1, one.token].item(), abs=1e-5)
    kv.crop(-5)
    with sparse(net, TokenConfig(**TIGHT)):  # without an audit nothing is added
        net.generate(second, attention_mask=torch.ones_like(second), **GO, past_key_values=kv, max_new_tokens=3)
    assert len(kv.stats().audit.tokens) == 39


def test_losses_of_what_is_no_distribution():
    full, sparse_ = (
        torch.tensor([[[0.0, 1.0, -torch.inf], [0.0] * 3]]),
        torch.tensor([[[0.0, -torch.inf, 1.0], [0.0] * 3]]),
    )
    found = losses(full, sparse_, torch.tensor([[1, 0]]))
    assert found.kl[0].tolist() == [torch.inf, 0] and not found.same[0, 0]
    assert losses(full * torch.nan, sparse_, torch.tensor([[1, 0]])).variation.isnan().all()


def test_slices_of_many_logits_are_the_same(monkeypatch):
    full, sparse_, tokens = torch.randn(2, 9, 50), torch.randn(2, 9, 50), torch.randint(50, (2, 9))
    whole = losses(full, sparse_, tokens)
    monkeypatch.setattr("hf_sparsekv.checking.losses._AT_ONCE", 250)
    for one, other in zip(whole, losses(full, sparse_, tokens)):
        assert torch.allclose(one, other)


def test_nothing_is_held_after_a_call(monkeypatch):
    """The copy of the cache is gone at once: its blocks would take memory until the next garbage collection."""
    made = []

    def copied(*given):
        made.append(weakref.ref(copy := exact_copy(*given)))
        return copy

    monkeypatch.setattr("hf_sparsekv.checking.audit.exact_copy", copied)
    gc.collect()
    gc.disable()
    try:
        audited(model("llama"), prompt(1, 90))
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


# ---------------------------------------------------------------------- a limit


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("limit", [0.05, "top"])
def test_the_text_goes_back_to_the_first_token_beyond_the_limit(limit, sample):
    """Each token is what the sparse step drew, or what full attention draws with the same random numbers."""
    inputs = prompt(1, 90)
    out = audited(model("llama"), inputs, AuditConfig(interval=6, max_loss=limit), do_sample=sample)
    found = out.past_key_values.stats().audit
    assert found.returns > 0 and found.taken_back >= found.returns
    assert len(found.tokens) + found.by_full == 40
    assert all(one.same_top if limit == "top" else one.variation <= limit for one in found.tokens)
    assert f"went back {found.returns} times, by {found.taken_back} tokens" in str(found)
    text = out.sequences[0]
    full = by_full_attention("llama", out.sequences, inputs["attention_mask"])[0]
    if not sample:  # what full attention has chosen itself is its likeliest token
        drawn = {one.column for one in found.tokens}
        assert all(text[at] == full[at - 1].argmax() for at in range(90, 130) if at not in drawn)


def test_a_limit_of_one_keeps_every_draft():
    out = audited(model("llama"), prompt(2, 90, (0, 30)), AuditConfig(interval=13, max_loss=1.0))
    found = out.past_key_values.stats().audit
    assert found.returns == found.taken_back == 0
    assert found.by_full == 2 * 4  # the first of each row, and the one after each of three intervals


def test_drafts_end_where_the_text_does():
    """An interval of many tokens takes no further steps once all rows have ended."""
    inputs = prompt(1, 90)
    net = model("llama")
    text = audited(net, inputs, AuditConfig(max_loss=1.0), do_sample=False).sequences[0]
    end = int(text[100])
    out = audited(net, inputs, AuditConfig(max_loss=1.0), do_sample=False, eos_token_id=end)
    first = (text[90:] == end).nonzero()[0].item()
    assert out.sequences.shape[1] == 91 + first
    assert first <= out.past_key_values.stats().drafted < first + MANY


class TakesBack(Told):
    """A streamer whose text may shrink."""

    backs = 0

    def take_back(self, tokens: int) -> None:
        self.backs += 1
        del self.heard[-tokens:]


@pytest.mark.parametrize("release", ["checked", "drawn"])
def test_a_streamer_hears_the_text(release):
    told = TakesBack()
    audit = AuditConfig(interval=6, max_loss=0.05, release=release)
    text = audited(model("llama"), prompt(1, 90), audit, streamer=told).sequences[0, 90:].tolist()
    assert [one for step in told.heard[1:] for one in step] == text
    assert (told.backs > 0) == (release == "drawn")


def test_tokens_that_cannot_be_taken_back_are_not_shown_early():
    with pytest.raises(ValueError, match=r"Told has no method take_back\(tokens\)"):
        audited(model("llama"), prompt(1, 90), AuditConfig(max_loss=0.05, release="drawn"), streamer=Told())


# ---------------------------------------------------------------------- ways to ask


def test_ways_to_ask():
    net, inputs = model("llama"), prompt(1, 90)
    go = {**GO, "max_new_tokens": 6, "do_sample": False}
    enable(net, TokenConfig(**TIGHT), audit=True)
    try:
        one = net.generate(**inputs, **go)
    finally:
        disabled(net)
    other = net.generate(
        **inputs, **go, custom_generate=generate, sparse_config=TokenConfig(**TIGHT), audit=AuditConfig(interval=2)
    )
    assert len(one.past_key_values.stats().audit.tokens) == len(other.past_key_values.stats().audit.tokens) == 5
    assert net.generate(**inputs, **go).sequences.shape[1] == 96  # nothing of it is left


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize(
    "given, why",
    [
        ({"audit": 3}, "audit must be an AuditConfig, True or False"),
        ({"exact": True}, "give one of exact and audit"),
        ({"prefill": 0.9}, "leave prefill out"),
        ({"offload": OffloadConfig(kv_dtype="int8")}, "kv_dtype are rounded"),
    ],
)
def test_what_is_refused_at_once(given, why, limit):
    with pytest.raises((TypeError, ValueError), match=why):
        sparse(model("llama"), **{"audit": AuditConfig(max_loss=limit), **given})


@pytest.mark.parametrize("value", [-0.1, 1.5, "most", float("nan")])
def test_limits_are_checked(value):
    with pytest.raises(ValueError, match="max_loss must be"):
        AuditConfig(max_loss=value)


@pytest.mark.parametrize(
    "name, go, why",
    [
        ("qwen3-next", {}, "recurrent layers"),
        ("llama", {"num_beams": 2, "do_sample": False}, "not for beams"),
        ("llama", {"prompt_lookup_num_tokens": 3, "do_sample": False}, "not for prompt lookup"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_cannot_be_audited(name, go, why):
    with pytest.raises(ValueError, match=why):
        audited(model(name), prompt(1, 90), **go)


def test_models_and_caches_that_cannot_be_audited():
    net, inputs = build("llama", "sparsekv").train(), prompt(1, 90)
    with pytest.raises(ValueError, match="eval mode"):
        audited(net, inputs)
    net.eval()
    with pytest.raises(ValueError, match="a PrefixCache attends to everything"):
        audited(net, inputs, past_key_values=PrefixCache())
    with pytest.raises(ValueError, match="second device"):
        audited(net, inputs, past_key_values=CACHES["predictive-second"]())
    with pytest.raises(ValueError, match="this call has inputs_embeds"):
        audited(net, {"inputs_embeds": net.get_input_embeddings()(inputs["input_ids"])})
    kv = CACHES["device-default"](**TIGHT)
    with sparse(net, TokenConfig(**TIGHT)):
        net.generate(**inputs, **GO, past_key_values=kv, max_new_tokens=5)
    text = torch.cat((inputs["input_ids"], torch.ones(1, 9, dtype=torch.long)), dim=1)
    with pytest.raises(ValueError, match="max_loss goes on from the keys and values of full attention"):
        audited(net, {"input_ids": text}, AuditConfig(max_loss=0.1), past_key_values=kv)


def test_an_error_in_an_exact_pass_leaves_the_cache(monkeypatch):
    """The cache holds what the loop has cached, and goes on."""
    net, inputs, kv = model("llama"), prompt(1, 90), CACHES["device-default"](**TIGHT)
    monkeypatch.setattr("hf_sparsekv.checking.audit.logits_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        audited(net, inputs, AuditConfig(interval=4), past_key_values=kv)
    assert kv.get_seq_length() == 93 and kv.row_table.exactness.check is None
    with sparse(net, TokenConfig(**TIGHT)):
        text = torch.cat((inputs["input_ids"], torch.ones(1, 5, dtype=torch.long)), dim=1)
        net.generate(text, attention_mask=torch.ones_like(text), past_key_values=kv, pad_token_id=PAD, max_new_tokens=4)
    assert kv.get_seq_length() == 98
