"""Rows of models with windows, chunks and states: each answers as it would alone, whatever the others do."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from captured import imitated
from layer_kinds import CHUNKS, FULL, STATES, TELLING, TIGHT, WINDOWS, eager, new_model, plain
from models import VOCAB
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseCache, TokenConfig

KINDS = tuple(kind for kind in (*STATES, *CHUNKS, *WINDOWS) if kind != "jamba")  # its prompts are read at once
NEAR = 2e-3  # of logits whose spread is about 10: sums over other shapes
LENGTH = 150


class Program:
    """Rows of one cache, and for each a cache of transformers' own that gets the same tokens."""

    def __init__(self, kind: str, model: torch.nn.Module, seed: int, offload: OffloadConfig | None = None) -> None:
        self.model, self.plain, self.random = model, plain(kind), random.Random(seed)
        self.rows = OffloadedSparseCache(TokenConfig(**FULL), offload, model.config).rows(4, LENGTH)
        self.alone: dict[int, DynamicCache] = {}
        self.steps = 0

    @torch.no_grad()
    def ask(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        cache = self.alone[row]
        past = int(cache.get_seq_length())  # some models would count from 0 on again
        where = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        return self.plain(ids, position_ids=where, past_key_values=cache).logits[:, -1]

    def join(self) -> None:
        n = self.random.choice((1, 2, 5, 16, 17, 33, 60, 90))
        ids = torch.tensor([[self.random.randrange(2, VOCAB) for _ in range(n)]])
        read = self.rows.prefill(self.model, ids, self.random.choice((None, 8, 23, 64)))
        if self.random.random() < 0.5:  # others decode between a prefill and its join
            self.step()
        row = self.rows.join(read)
        self.alone[row] = DynamicCache(config=self.plain.config)
        assert (self.ask(row, ids) - read.logits).abs().max() < NEAR

    def step(self) -> None:
        if not (active := self.rows.active):
            return
        tokens = [self.random.randrange(2, VOCAB) for _ in range(4)]
        logits = self.rows.step(self.model, tokens)
        for row in active:
            expected = self.ask(row, torch.tensor([[tokens[row]]]))
            assert (logits[row] - expected).abs().max() < NEAR
        self.steps += 1

    def leave(self, row: int) -> None:
        self.rows.leave(row)
        del self.alone[row]

    def fork(self, row: int) -> None:
        self.alone[self.rows.fork(row)] = copy.deepcopy(self.alone[row])

    def move(self, row: int) -> None:
        free = [place for place in range(4) if place not in self.rows.rows]
        self.alone[self.rows.move(row, self.random.choice(free))] = self.alone.pop(row)

    def run(self, changes: int) -> None:
        for _ in range(changes):
            rows, held = self.rows.rows, [row for row in self.rows.rows if row not in self.rows.active]
            ways = ["step"] * 3
            if len(rows) < 4:
                ways += ["join", "fork", "move"] if rows else ["join"]
            if rows:
                ways += ["leave", "hold", "resume"]
            how = self.random.choice(ways)
            if how in ("step", "join"):
                getattr(self, how)()
            elif how == "hold" and self.rows.active:
                self.rows.hold(self.random.choice(self.rows.active))
            elif how == "resume" and held:
                self.rows.resume(self.random.choice(held))
            elif how in ("leave", "fork", "move"):
                getattr(self, how)(self.random.choice(rows))
            if any(length > LENGTH - 3 for length in self.rows.lengths):
                self.leave(max(range(4), key=lambda row: self.rows.lengths[row]))


@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_random_programs(kind, captured):
    """Rows join, wait, go on, are copied, move and leave, between steps."""
    runner = None
    if captured:
        model, runner = imitated(make=lambda: new_model(kind, "sparsekv"))
    program = Program(kind, model if captured else eager(kind), seed=len(kind))
    program.run(70)
    for row in program.rows.rows:
        if row not in program.rows.active:
            program.rows.resume(row)
    for _ in range(20):  # past a window's end
        program.step()
    assert program.steps > 30
    if runner is not None:
        assert runner.replays == program.steps
        runner.remove()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["resident", "offloaded"])
def test_random_programs_on_a_gpu(kind, offload, monkeypatch):
    from hf_sparsekv import optimize
    from hf_sparsekv.cuda_graph.optimize import runner_of

    model = optimize(new_model(kind, "sparsekv").cuda(), fused=False)
    program = Program(kind, model, 3, offload)
    program.plain = copy.deepcopy(program.plain).cuda()
    with torch.device("cuda"):
        program.run(60)
    assert runner_of(model).replays == program.steps > 15


@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3_text"])
def test_what_such_rows_cannot_do(kind):
    """Give tokens back, share blocks, be copied: said at once, and nothing has changed."""
    model = eager(kind)
    cache = SparseCache(TokenConfig(**TIGHT), None, model.config)
    rows = cache.rows(2, LENGTH)
    ids = torch.arange(70)[None] % VOCAB
    row = rows.join(rows.prefill(model, ids))
    assert rows.keeps_more
    with pytest.raises(ValueError, match="cannot give tokens back"):
        rows.crop(row, 60)
    with pytest.raises(ValueError, match="give what snapshot\\(\\) made"):
        rows.begin(rows.blocks(row), rows.channels(row))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(cache)
    before = rows.step(model, [3, 0])[0].clone()
    rows.leave(row)
    row = rows.join(rows.prefill(model, ids))
    torch.testing.assert_close(rows.step(model, [3, 0])[0], before)
    cache.reset()  # and serves a batch again
    go = {"do_sample": False, "max_new_tokens": 5, "attention_mask": torch.ones_like(ids)}
    again = SparseCache(TokenConfig(**TIGHT), None, model.config)
    expected = model.generate(ids, past_key_values=again, **go)
    assert torch.equal(model.generate(ids, past_key_values=cache, **go), expected)
