"""Models with an indexer of their own (DSA): the tokens of transformers' own cache, whatever happens to ours."""

from __future__ import annotations

import copy

import pytest
import torch
from captured import Imitation
from inside import chosen_pieces, score_pieces
from models import INDEXED, build, model, plain_text, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import (
    OffloadConfig,
    OffloadedSparseCache,
    PrefixCache,
    ProgressiveConfig,
    SparseCache,
    StreamingConfig,
    TokenConfig,
    restore_mla,
    sparse,
)
from hf_sparsekv.attention.mla import is_mla
from hf_sparsekv.cache_name import over

SMALL = {"block_size": 16, "window": 16, "max_draft": 4}
GO = {"do_sample": False, "max_new_tokens": 20}
INPUTS = prompt(2, 90, (0, 30))
TOPK = 24


def new_cache(offload: bool | OffloadConfig = True, **changes) -> SparseCache:
    if isinstance(offload, bool):
        offload = OffloadConfig() if offload else None
    return SparseCache(TokenConfig(**SMALL, **changes), offload)


def longer(text: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Another turn after ``text``."""
    more = prompt(len(text), 20, seed=5)["input_ids"]
    new = text.shape[1] + 20 - mask.shape[1]
    return {"input_ids": torch.cat((text, more), 1), "attention_mask": torch.nn.functional.pad(mask, (0, new), value=1)}


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.quick
@pytest.mark.few
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", INDEXED)
def test_tokens_are_those_of_transformers_own_cache(name, offload, monkeypatch):
    """A padded batch, its next turn, and the prompt in chunks, which pieces of queries score and attend."""
    net, cache, stock = model(name), new_cache(offload), DynamicCache(config=reference(name).config)
    text = reference(name).generate(**INPUTS, **GO, **over(reference(name), stock))
    assert torch.equal(net.generate(**INPUTS, **GO, **over(net, cache)), text)
    turn = longer(text, INPUTS["attention_mask"])
    expected = reference(name).generate(**turn, **GO, **over(reference(name), stock))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), expected)
    stats = cache.stats()
    assert stats.materialised == 0
    assert stats.sparse_calls == 2 * 19 * len(cache.layers)
    assert stats.attended_tokens == stats.sparse_calls * 2 * TOPK, "of each row what the indexer chooses, no more"
    score_pieces(monkeypatch, 7 * 4 * 2 * (8 + 16) * 90)
    chosen_pieces(monkeypatch, 50_000)
    cache.reset()
    assert torch.equal(net.generate(**INPUTS, **GO, prefill_chunk_size=40, **over(net, cache)), text)
    cache.reset()
    other = prompt(3, 40, (0, 3, 9))
    assert torch.equal(net.generate(**other, **GO, **over(net, cache)), plain_text(name, other, **GO))


@pytest.mark.few
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "lookup"])
def test_beams_and_drafts(how, offload):
    name, inputs = "deepseek-v32", prompt(1, 100)
    net = model(name)
    found = net.generate(**inputs, **GO, **how, **over(net, new_cache(offload)))
    assert torch.equal(found, plain_text(name, inputs, **GO, **how))


@pytest.mark.few(topk=(24,))
@pytest.mark.parametrize("topk", [24, 150])
def test_short_contexts_attend_to_everything(topk):
    """Before there are more tokens than the indexer chooses; before a block is full, and after."""
    ours, stock = (build("deepseek-v32", attn, index_topk=topk) for attn in ("sparsekv", "sdpa"))
    inputs, go = prompt(2, 12, (0, 5)), {**GO, "max_new_tokens": 44}
    expected = stock.generate(**inputs, **go)
    for config in (TokenConfig(), TokenConfig(**SMALL)):
        for offload in (None, OffloadConfig()):
            cache = SparseCache(config, offload)
            assert torch.equal(ours.generate(**inputs, **go, **over(ours, cache)), expected)
            assert (cache.stats().dense_calls > 0) == (offload is None and topk > 24 and config != TokenConfig())


def life(net, cache) -> list[torch.Tensor]:
    """Logits through crops, rows that change places and numbers, and copies."""
    found = []

    def feed(cache, length: int, seed: int, rows: int = 2, together: bool = False) -> None:
        ids = prompt(rows, length, seed=seed)["input_ids"]
        with torch.no_grad():
            for part in (ids,) if together else ids.split(1, dim=1):
                found.append(net(part, **over(net, cache)).logits[:, -1])

    feed(cache, 130, 0, together=True)
    feed(cache, 8, 1)
    cache.crop(-70)  # full blocks as well
    feed(cache, 40, 2, together=True)
    feed(cache, 6, 3)
    cache.reorder_cache(torch.tensor([1, 0]))
    feed(cache, 4, 4)
    cache.batch_repeat_interleave(2)
    feed(cache, 4, 5, rows=4)
    cache.batch_select_indices(torch.tensor([3, 0]))
    feed(cache, 4, 6)
    copied = copy.deepcopy(cache)
    for one, seed in ((copied, 7), (cache, 8), (copied, 9)):
        feed(one, 4, seed)
    return found


ONE = 2 * 2 * TOPK * (24 * 4 + 8)  # bytes for the tokens of one step


@pytest.mark.parametrize(
    ("name", "pool"), [("deepseek-v32", None), ("deepseek-v32", 0), ("hy-v4", None), ("hy-v4", 2 * ONE)]
)
def test_the_life_of_a_cache(name, pool):
    expected = life(reference(name), DynamicCache(config=reference(name).config))
    for cache in (new_cache(OffloadConfig(device_pool=pool)), new_cache(False))[: 2 if pool is None else 1]:
        for found, logits in zip(life(model(name), cache), expected, strict=True):
            torch.testing.assert_close(found, logits, atol=2e-4, rtol=1e-4)
        if cache.offload_config is not None:
            stats = cache.stats()
            assert (stats.needed > 0) == (pool != 0)
            assert stats.found <= stats.needed


def test_a_later_mask_hides_the_end_of_an_answer():
    name = "deepseek-v32"
    net, text = model(name), plain_text(name, INPUTS, **GO)
    turn = longer(text, INPUTS["attention_mask"])
    turn["attention_mask"][1, 100:110] = 0
    cache = new_cache()
    net.generate(**INPUTS, **GO, **over(net, cache))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), plain_text(name, turn, **GO))


# ---------------------------------------------------------------------- what is kept, and who else reads it


@pytest.mark.parametrize("name", INDEXED)
def test_latents_are_kept_and_the_keys_of_indexers(name):
    cache, net = new_cache(), model(name)
    net.generate(**INPUTS, **GO, **over(net, cache))
    for module, layer in zip((one for one in net.modules() if is_mla(one)), cache.layers, strict=True):
        store, keys = layer.store, layer.policy.index_keys
        assert store.latent
        assert store.pool.kv.shape[1:] == (1, 16, module.kv_lora_rank + module.qk_rope_head_dim)
        assert (keys is None) == (module.indexer is None)
        assert keys is None or (keys.shape[1] <= 400 and keys.shape[2] == 16)
    assert cache.memory_bytes()["device"] > sum(
        layer.policy.index_keys.nbytes for layer in cache.layers if layer.policy.index_keys is not None
    )


def test_chosen_blocks_are_watched():
    """From before the model is known."""
    cache, net = new_cache(), model("deepseek-v32")
    cache.watch_blocks()
    net.generate(**INPUTS, **GO, **over(net, cache))
    cache.bind(net.config)
    assert cache.get_seq_length() == 109, "binding again changes nothing"
    seen, sealed = cache.chosen_blocks(), torch.tensor(cache.joined_rows().sealed)[:, None]
    for layer, share in zip(cache.sparse_layers, seen.share, strict=True):
        tokens = layer.policy.chosen - torch.tensor([[0], [30]])  # of a row without its padding
        blocks = torch.where(tokens // 16 < sealed, tokens // 16, len(share))
        marks = torch.zeros(2, len(share) + 1).scatter_(1, blocks, 1.0)[:, :-1]
        assert torch.equal(share, marks.mean(0)) and 0 < marks.sum() < marks.numel()


def test_reserved_keys_do_not_move():
    cache, net = new_cache(max_length=128), model("deepseek-v32")
    with torch.no_grad():
        net(**INPUTS, **over(net, cache))
        held = [layer.policy.index_keys for layer in cache.layers]
        for _ in range(30):
            net(INPUTS["input_ids"][:, :1], **over(net, cache))
    assert all(layer.policy.index_keys is keys for layer, keys in zip(cache.layers, held))


@pytest.mark.parametrize(("name", "offload"), [("deepseek-v32", True), ("glm-moe-dsa", False)])
def test_saved_caches_go_on(name, offload, tmp_path):
    """On the host and on the device, with what indexers have kept; two copies of one share it."""
    net, cache, path = model(name), new_cache(offload, max_length=400), tmp_path / "file"
    text = net.generate(**INPUTS, **GO, **over(net, cache))
    turn = longer(text, INPUTS["attention_mask"])
    cache.save(path)
    with pytest.raises(ValueError, match="pass model_config"):
        SparseCache.load(path)
    loaded = SparseCache.load(path, offload=None if offload else OffloadConfig(), model_config=net.config)
    assert loaded.layers[0].policy.index_keys.shape[1] == 109
    for one in (copy.deepcopy(loaded), loaded):
        assert torch.equal(net.generate(**turn, **GO, **over(net, one)), plain_text(name, turn, **GO))
    loaded = SparseCache.load(path, model_config=net.config)
    loaded.layers[-1].policy.index_keys = None
    with pytest.raises(RuntimeError, match="lost the keys"):
        net.generate(**turn, **GO, **over(net, loaded))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_other_attention_functions_get_everything(attn):
    name = "deepseek-v32"
    net, cache = build(name, attn), new_cache()
    with pytest.warns(UserWarning, match="dense and slow"):
        found = net.generate(**INPUTS, **GO, **over(net, cache))
    assert torch.equal(found, plain_text(name, INPUTS, **GO))


@pytest.mark.few(name=("deepseek-v32",))
@pytest.mark.quick
@pytest.mark.parametrize("name", INDEXED)
def test_other_caches_under_our_attention_function(name):
    """Models leave the indices to it, whatever the cache is."""
    net, text = build(name, "sparsekv"), plain_text(name, INPUTS, **GO)
    for _ in range(2):
        assert torch.equal(net.generate(**INPUTS, **GO), text)
        net.generate(**INPUTS, **GO, **over(net, new_cache()))  # replaces expand_kv
    assert torch.equal(net(**INPUTS).logits[:, -1].argmax(-1), text[:, 90])
    restore_mla(net)
    assert not any("sparsekv" in key or key == "forward" for one in net.modules() for key in one.__dict__)


def test_prefill_can_be_differentiated():
    net = build("deepseek-v32", "sparsekv")
    net(**INPUTS, **over(net, new_cache())).logits.sum().backward()
    assert all(one.kv_b_proj.weight.grad.abs().sum() > 0 for one in net.modules() if is_mla(one))


def test_4d_masks_of_the_caller():
    name = "deepseek-v32"
    net, cache, mask = build(name, "sparsekv"), new_cache(), INPUTS["attention_mask"]
    n, at = mask.shape[1], (mask.cumsum(1) - 1).clamp_min(0)
    whole = mask.bool()[:, None, None] & torch.ones(n, n, dtype=torch.bool).tril()
    with torch.no_grad():
        for last in (n - 1, n):
            cols = slice(0 if last < n else n - 1, last)
            found = net(
                INPUTS["input_ids"][:, cols],
                attention_mask=whole[:, :, cols, :last],
                position_ids=at[:, cols],
                **over(net, cache),
            )
        expected = reference(name)(**INPUTS, position_ids=at)
    torch.testing.assert_close(found.logits[:, -1], expected.logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inputs", [INPUTS, prompt(1, 90)], ids=["padded", "alone"])
def test_masks_that_are_copied_on_their_way(inputs):
    """As accelerate does between devices: later layers decode sparsely all the same."""
    name = "deepseek-v32"
    net, cache = build(name, "sparsekv"), new_cache()

    def copied(module, args, kwargs):
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}

    for layer in net.model.layers[1:]:
        layer.register_forward_pre_hook(copied, with_kwargs=True)
    found = net.generate(**inputs, **GO, **over(net, cache))
    assert torch.equal(found, plain_text(name, inputs, **GO))
    assert cache.stats().sparse_calls == 19 * len(cache.layers)


# ---------------------------------------------------------------------- without being asked, and refusals


def test_nothing_has_to_be_asked_for():
    name = "glm-moe-dsa"
    net, text = build(name, "sdpa"), plain_text(name, INPUTS, **GO)
    before = {key: dict(one.__dict__) for key, one in net.named_modules()}
    for offload in (True, None):
        with sparse(net, offload=offload):
            assert torch.equal(net.generate(**INPUTS, **GO), text)
        assert {key: dict(one.__dict__) for key, one in net.named_modules()} == before
    net.set_attn_implementation("sparsekv")
    for cache in (OffloadedSparseCache(), OffloadedSparseCache(model_config=net.config)):
        assert torch.equal(net.generate(**INPUTS, **GO, **over(net, cache)), text)


REFUSED = [TokenConfig(token_budget=512), TokenConfig.preset("fast"), ProgressiveConfig(), StreamingConfig()]


@pytest.mark.parametrize("config", REFUSED, ids=lambda config: config.brief())
def test_methods_that_choose_are_refused(config):
    """By the configuration, and as soon as the model runs."""
    net = model("deepseek-v32")
    with pytest.raises(ValueError, match="would only lose tokens of its selection"):
        SparseCache(config, model_config=net.config)
    with pytest.raises(ValueError, match="would only lose tokens of its selection"):
        net.generate(**INPUTS, **GO, **over(net, SparseCache(config)))


def test_what_is_not_served():
    net = model("deepseek-v32")
    with pytest.raises(ValueError, match="leave exact out"), sparse(net, exact=True):
        pass
    with pytest.raises(ValueError, match=r"go on with copy.deepcopy\(\)"):
        net.generate(**INPUTS, **GO, **over(net, PrefixCache()))


REPLAYED = [(name, i % 2 == 0, (0, 13)) for i, name in enumerate(INDEXED)] + [("deepseek-v32", False, None)]


@pytest.mark.few(name=("deepseek-v32", "glm-moe-dsa"))
@pytest.mark.parametrize(("name", "offload", "pads"), REPLAYED)
def test_replayed_steps(name, offload, pads):
    """Over blocks that become full, and from 256 tokens on a table that grows; in two turns."""
    net, inputs, go = build(name, "sparsekv"), prompt(2, 40 if pads else 240, pads), {**GO, "max_new_tokens": 34}
    runner, cache = Imitation(net), new_cache(offload)
    runner.install()
    text = net.generate(**inputs, **go, **over(net, cache))
    assert torch.equal(text, plain_text(name, inputs, **go))
    assert runner.replays == 33
    turn = longer(text, inputs["attention_mask"])
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), plain_text(name, turn, **GO))
    assert runner.replays == 33 + 19
    eager = new_cache(offload)
    runner.remove()
    net.generate(**inputs, **go, **over(net, eager))
    net.generate(**turn, **GO, **over(net, eager))
    mine, theirs = cache.stats(), eager.stats()
    for count in ("attended_tokens", "context_tokens", "sparse_calls", "dense_calls", "index_bytes_read"):
        assert getattr(mine, count) == getattr(theirs, count)
    assert abs(mine.needed - theirs.needed) <= theirs.needed // 100, "among equal scores another may be chosen"


def test_padding_between_tokens_is_not_captured():
    name = "deepseek-v32"
    net, cache = build(name, "sparsekv"), new_cache()
    runner = Imitation(net)
    runner.install()
    text = net.generate(**INPUTS, **GO, **over(net, cache))
    assert torch.equal(text, plain_text(name, INPUTS, **GO))
    assert runner.replays == 19
    turn = longer(text, INPUTS["attention_mask"])
    turn["attention_mask"][1, 100:110] = 0
    with pytest.warns(UserWarning, match="padding between their tokens"):
        assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), plain_text(name, turn, **GO))
    assert runner.replays == 19
    runner.remove()
