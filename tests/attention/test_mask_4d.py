"""4-D attention masks over our caches: the logits are those of sdpa over a stock cache, or an error says why not."""

from __future__ import annotations

import pytest
import torch
from caches import CACHES, FULL, ONE_EACH, TIGHT, two_level
from models import model, prompt, reference
from transformers import DynamicCache

LENGTH = 90
NEAR = 2e-3  # of logits whose spread is about 10


def causal(batch: int = 1) -> torch.Tensor:
    return torch.ones(batch, 1, LENGTH, LENGTH, dtype=torch.bool).tril()


def _packed() -> torch.Tensor:
    """Two texts in one prompt, which do not see each other."""
    mask = causal()
    mask[..., 40:, :40] = False
    return mask


def _padded(batch: int = 2) -> torch.Tensor:
    """The second row begins with padding, whose queries see nothing."""
    mask = causal(batch)
    mask[1, :, :, :30] = False
    return mask


def _unattended() -> torch.Tensor:
    """The same, where queries that would see nothing see everything, as some models have it."""
    mask = _padded()
    return mask | ~mask.any(-1, keepdim=True)


def _itself() -> torch.Tensor:
    """The same, where such queries see themselves."""
    return _padded() | torch.eye(LENGTH, dtype=torch.bool)


def _prefix() -> torch.Tensor:
    """The first tokens see each other."""
    mask = causal()
    mask[..., :50, :50] = True
    return mask


def _heads() -> torch.Tensor:
    """Each head a band of its own."""
    apart = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return torch.stack([(apart >= 0) & (apart < 8 * (head + 1)) for head in range(4)])[None]


MASKS = {
    "packed": _packed,
    "banded": lambda: causal() & ~causal().tril(-20),
    "padded": _padded,
    "unattended": _unattended,
    "itself": _itself,
    "prefix": _prefix,
    "heads": _heads,
    "causal": causal,
}
PADDED = ("padded", "unattended", "itself")


def of_kind(mask: torch.Tensor, kind: str) -> torch.Tensor:
    """The same mask in another form."""
    if kind == "bool":
        return mask
    least = float("-inf") if kind == "inf" else torch.finfo(torch.float32).min
    return torch.zeros(mask.shape).masked_fill(~mask, least)


class Both:
    """One model over our cache and over a stock one."""

    def __init__(self, cache, family: str = "llama") -> None:
        self.ours, self.stock = cache, DynamicCache(config=model(family).config)
        self.net, self.plain = model(family), reference(family)

    @torch.no_grad()
    def differ(self, ids, mask, columns: torch.Tensor | None = None, **given) -> float:
        """The largest difference of any logit; ``columns``: rows and columns that count."""
        found, expected = (
            net(ids, attention_mask=mask, past_key_values=cache, **given).logits
            for net, cache in ((self.net, self.ours), (self.plain, self.stock))
        )
        apart = (found - expected).abs().amax(-1)
        return float(apart.max() if columns is None else apart[columns].max())


@pytest.mark.few
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", ["bool", "min", "inf"])
@pytest.mark.parametrize("name", MASKS)
def test_prompts_and_steps_by_any_mask(name, kind, chunks):
    """Then steps by no mask, which see every text, a 2-D one, a 4-D one that hides a text, and one more pass."""
    mask, padded = MASKS[name](), name in PADDED
    ids, both = prompt(len(mask), LENGTH)["input_ids"], Both(two_level(False, level="auto", lag=False, **FULL))
    tokens = torch.ones(len(mask), LENGTH, dtype=torch.bool)
    if padded:
        tokens[1, :30] = False
    if name == "prefix" and chunks == 2:
        mask[..., :50, 45:] = False  # no key is there before its chunk
        mask |= causal()
    for part in torch.arange(LENGTH).chunk(chunks):
        here = of_kind(mask, kind)[:, :, part, : int(part[-1]) + 1]
        assert both.differ(ids[:, part], here, tokens[:, part]) < NEAR
    assert both.ours.sparse_layers[0].store.held.lengths == tuple(tokens.sum(1).tolist())
    seen = torch.cat((tokens, torch.ones(len(mask), 20, dtype=torch.bool)), 1)
    more = prompt(len(mask), 20, seed=1)["input_ids"]
    at = LENGTH
    for step in range(9):
        two = seen[:, : at + 1].long()
        four = seen[:, None, None, : at + 1].clone()
        four[..., 35:60] = False  # of one token more or less, whatever it belongs to
        given = (None if not padded else two, two, of_kind(four, kind))[step % 3]
        assert both.differ(more[:, at - LENGTH : at - LENGTH + 1], given) < NEAR
        at += 1
    block = seen[:, None, None, : at + 5].expand(-1, -1, 5, -1).tril(at)
    assert both.differ(more[:, 9:14], of_kind(block, kind)) < NEAR


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("name", CACHES)
def test_packed_prompts_over_all_caches(name):
    ids, more = prompt(1, LENGTH)["input_ids"], prompt(1, 6, seed=1)["input_ids"]
    both = Both(CACHES[name](**FULL))
    assert both.differ(ids, _packed()) < NEAR
    assert max(both.differ(token, None) for token in more.split(1, dim=1)) < NEAR
    cache = CACHES[name](**TIGHT)
    with torch.no_grad():
        model("llama")(ids, attention_mask=_packed(), past_key_values=cache)
        assert all(torch.isfinite(model("llama")(one, past_key_values=cache).logits).all() for one in more.split(1, 1))
    assert cache.get_seq_length() == LENGTH + 6 and cache.sparse_layers[0].store.held.lengths == (LENGTH + 6,)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v3"])
def test_sliding_layers_sinks_and_latents(family):
    """Sliding layers are stock ones, to which a mask of the user's own is the only one."""
    config = model(family).config
    both = Both(two_level(False, model_config=config, level="auto", lag=False, **FULL), family)
    ids = prompt(1, LENGTH)["input_ids"]
    assert both.differ(ids, of_kind(_packed(), "min")) < NEAR  # additive: its eager attention adds whatever it gets
    assert max(both.differ(one, None) for one in prompt(1, 6, seed=1)["input_ids"].split(1, dim=1)) < NEAR


def test_what_is_refused():
    net, ids = model("llama"), prompt(2, LENGTH)["input_ids"]
    cache = two_level(**FULL)
    with torch.no_grad():
        for wrong, message in (
            (causal().long(), r"must be bool \(True: attend\) or additive floats, got torch.int64: pass mask.bool"),
            (causal()[..., :80], r"\[1, 1, 90, 80\] does not fit 90 queries over 90 cached and new columns"),
            (causal()[:, :, :40], r"\[1, 1, 40, 90\] does not fit 90 queries"),
        ):
            with pytest.raises(ValueError, match=message):
                net(ids, attention_mask=wrong, past_key_values=cache)
        net(ids, attention_mask=_padded(), past_key_values=cache)
        shown = torch.ones(2, 1, 1, LENGTH + 1, dtype=torch.bool)
        with pytest.raises(ValueError, match="shows columns that were padding when they were cached"):
            net(ids[:, :1], attention_mask=shown, past_key_values=cache)
        shown[1, ..., :30] = False
        net(ids[:, :1], attention_mask=shown, past_key_values=cache)
    assert cache.get_seq_length() == LENGTH + 1
