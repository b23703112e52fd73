"""Several tokens of some rows at once, over everything, while other rows decode sparsely beside them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import transformers as tf
from caches import FULL, SMALL
from captured import calls_of, imitated
from models import VOCAB, build, model, prompt
from rotary_models import SWITCH, rotary_llama, wide
from test_row_batch import LENGTH, NEAR

from hf_sparsekv import ProgressiveConfig, SparseCache, StreamingConfig, TokenConfig
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.row_batch.verifying import selects, take_back, verify

pytestmark = pytest.mark.filterwarnings("error:decode steps run eagerly")
CHOOSE = {**SMALL, "dense_below": 0}
BUDGET = {**CHOOSE, "token_budget": 16}
MADE = {
    "tokens": TokenConfig(**BUDGET),
    "blocks": TokenConfig(**BUDGET, level="two_level", num_blocks=3, tail=None),
    "progressive": ProgressiveConfig(**CHOOSE, mass=0.7, min_tokens=16),
    "streaming": StreamingConfig(block_size=16, sinks=4, window=32, dense_layers=0, max_draft=4),
    "by-need": TokenConfig(**CHOOSE, mass=0.7),
}


class Mixed:
    """Rows 0 and 2 are verified, and row 1 decodes sparsely; for each there is a cache of its own."""

    def __init__(self, config, name: str, captured: bool) -> None:
        self.alone = model(name)
        self.net = imitated(name)[0] if captured else build(name, "sparsekv")
        self.rows = SparseCache(config, None).rows(4, LENGTH)
        self.own, self.next, self.gaps = {}, {}, {0: [], 1: [], 2: []}
        for row, n in enumerate((150, 90, 61)):
            first = self.rows.prefill(self.alone, prompt(1, n, seed=n)["input_ids"], chunk=40)
            kv = copy.deepcopy(first.cache)
            if row != 1:
                kv = SparseCache(TokenConfig(**{**SMALL, **FULL}), None)
                with torch.no_grad():
                    self.alone(prompt(1, n, seed=n)["input_ids"], past_key_values=kv)
            assert self.rows.join(first) == row
            self.own[row], self.next[row] = kv, int(first.logits.argmax())

    def expect(self, row: int, found: torch.Tensor) -> None:
        """Logits of the row's next token, and the token after it."""
        with torch.no_grad():
            expected = self.alone(torch.tensor([[self.next[row]]]), past_key_values=self.own[row]).logits[0, -1]
        self.gaps[row].append(float((found - expected).abs().max()))
        self.next[row] = int(expected.argmax())

    def check(self) -> None:
        """A walk by need may turn at a tie."""
        assert max(self.gaps[0] + self.gaps[2]) < NEAR
        assert sum(gap >= NEAR for gap in self.gaps[1]) <= 1

    def round(self, drafts: int, counts: dict[int, int]) -> None:
        """Drafts of rows 0 and 2 are nonsense; then they get ``counts`` right tokens."""
        rows, before = self.rows, self.rows.lengths
        for i in range(drafts):
            tokens = torch.tensor([3 + i, self.next[1], 5 + i, 0])
            self.expect(1, rows.step(self.net, tokens)[1])
        take_back(rows, {0: before[0], 2: before[2]})
        ids = torch.zeros(4, 1 + max(drafts, 1), dtype=torch.long)
        texts = {}
        for row, count in counts.items():
            ahead = copy.deepcopy(self.own[row])
            text = [self.next[row]]
            while len(text) < count:
                with torch.no_grad():
                    text.append(int(self.alone(torch.tensor([text[-1:]]), past_key_values=ahead).logits.argmax()))
            ids[row, :count], texts[row] = torch.tensor(text), text
        logits = verify(rows, self.net, ids, [counts.get(row, 0) for row in range(4)])
        assert logits.shape[:2] == (rows.width, ids.shape[1])
        for row, text in texts.items():
            for i, token in enumerate(text):
                assert token == self.next[row]
                self.expect(row, logits[row, i])
        assert rows.lengths[1] == before[1] + drafts
        assert [rows.lengths[row] - before[row] for row in (0, 2)] == [counts.get(row, 0) for row in (0, 2)]


@pytest.mark.pairwise(once=("config",))
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "glm4-moe-lite"])
@pytest.mark.parametrize("config", MADE)
def test_rows_are_verified_beside_others(config, name, captured):
    it = Mixed(MADE[config], name, captured)
    assert selects(it.rows.cache)
    for drafts, counts in [(3, {0: 4, 2: 4}), (1, {0: 2, 2: 1}), (4, {0: 1, 2: 5}), (0, {0: 1, 2: 1}), (2, {2: 3})] * 2:
        it.round(drafts, counts)
    it.rows.leave(1)
    it.rows.move(2)
    it.check()
    it.gaps[1], it.own[1], it.next[1] = [], it.own.pop(2), it.next.pop(2)
    for _ in range(3):  # everybody attends to everything
        found = it.rows.step(it.net, torch.tensor([it.next[0], it.next[1], 0, 0]), exactly=True)
        for row in (0, 1):
            it.expect(row, found[row])
    assert max(it.gaps[0] + it.gaps[1]) < NEAR
    assert not it.rows.cache.row_table.exactness.everything
    stats = it.rows.cache.stats()
    assert stats.sparse_calls > 0 == stats.exact_calls


def test_verifications_are_planned_once():
    """Rounds are replayed: neither a verification nor what is taken back makes later passes plan again."""
    it = Mixed(MADE["tokens"], "llama", captured=True)
    for pool in it.rows.cache.block_pools.values():
        pool.reserve(64)
    planned = calls_of(runner_of(it.net), "_step")
    for _ in range(12):
        it.round(3, {0: 4, 2: 2})
    assert len(planned) <= 6


def test_what_cannot_be_verified():
    it = Mixed(MADE["tokens"], "llama", captured=False)
    ids = torch.zeros(4, 4, dtype=torch.long)
    for counts, given in [([0, 0, 0, 0], ids), ([1, 0, 0, 1], ids), ([1, 0, 0, 0], ids[:, :1])]:
        with pytest.raises(ValueError, match="cannot get up to"):
            verify(it.rows, it.net, given, counts)
    it.rows.max_length = 152
    with pytest.raises(ValueError, match="would hold more than max_length=152"):
        verify(it.rows, it.net, ids, [3, 0, 0, 0])
    assert it.rows.lengths == (150, 90, 61, 0)


def learned_positions() -> torch.nn.Module:
    """GPT-2, whose rows may hold as many tokens as there are positions."""
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SWITCH}
    return wide(tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)))


@pytest.mark.parametrize("make", [partial(rotary_llama, "longrope"), learned_positions], ids=["longrope", "learned"])
def test_no_row_is_given_positions_that_it_does_not_reach(make):
    """Else factors of all rows change with them, or there are none of these positions."""
    net = make()
    net.set_attn_implementation("sparsekv")
    plain = copy.deepcopy(net)
    plain.set_attn_implementation("eager")
    rows = SparseCache(TokenConfig(**{**SMALL, **FULL}), None).rows(3, SWITCH)
    texts = [prompt(1, n, seed=n)["input_ids"] for n in (SWITCH, 30)]
    for text, cached in zip(texts, (SWITCH - 2, 25)):
        rows.join(rows.prefill(net, text[:, :cached]))
    ids = torch.zeros(3, 5, dtype=torch.long)
    ids[0, :2], ids[1] = texts[0][0, -2:], texts[1][0, -5:]
    found = verify(rows, net, ids, [2, 5, 0])
    with torch.no_grad():
        for row, (text, new) in enumerate(zip(texts, (2, 5))):
            torch.testing.assert_close(found[row, :new], plain(text).logits[0, -new:], atol=1e-3, rtol=1e-3)
