"""Tokens from logits: settings as transformers' processors apply them, draws by their probabilities."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_sparsekv.serving.logit_edits import Allowed, LogitEdits
from hf_sparsekv.serving.sampler import Sampler

VOCABULARY = 101
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Asked:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


GREEDY = Asked(temperature=0.0)
PENALTIES = [("repetition_penalty", 0.01), ("repetition_penalty", 100.0)]
MANY = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.8),
    Asked(),
    Asked(temperature=0.3),
    Asked(temperature=5.0),
    Asked(top_k=1),
    Asked(top_k=7),
    Asked(top_k=VOCABULARY),
    Asked(top_k=10 * VOCABULARY),
    Asked(top_p=0.9),
    Asked(top_p=0.01),
    Asked(min_p=0.1),
    Asked(min_p=1.0),
    Asked(repetition_penalty=1.5),
    Asked(repetition_penalty=0.5, top_p=0.8),
    Asked(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.2),
    Asked(temperature=1.5, top_p=0.95, top_k=50),
    Asked(temperature=1.5, top_p=0.6, min_p=0.2, seed=3),
    Asked(top_k=3, min_p=0.3, seed=4),
]


def normal(n: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(n, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def warped(logits: torch.Tensor, asked: Asked, ids: list[int]) -> torch.Tensor:
    """Probabilities ``[vocabulary]`` of what transformers leaves of one row's logits; in its order."""
    steps = LogitsProcessorList()
    if asked.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(asked.repetition_penalty))
    if asked.temperature == 0:
        found = steps(torch.tensor([ids]), logits[None])[0]
        return torch.nn.functional.one_hot(found.argmax(), len(logits)).float()
    steps.append(TemperatureLogitsWarper(asked.temperature))
    if asked.top_k:
        steps.append(TopKLogitsWarper(asked.top_k))
    if asked.top_p < 1:
        steps.append(TopPLogitsWarper(asked.top_p))
    if asked.min_p:
        steps.append(MinPLogitsWarper(asked.min_p))
    return steps(torch.tensor([ids]), logits[None])[0].softmax(-1)


class Watched(Sampler):
    """Notes the probabilities that tokens are drawn by."""

    def _draw(self, logits, best, plan, *more):
        noise = torch.Tensor.exponential_
        torch.Tensor.exponential_ = lambda held, generator=None: held.fill_(1.0)
        argmax, found = torch.Tensor.argmax, []
        torch.Tensor.argmax = lambda held, dim: found.append(held.clone()) or argmax(held, dim)
        try:
            tokens = super()._draw(logits, best, plan, *more)
        finally:
            torch.Tensor.exponential_, torch.Tensor.argmax = noise, argmax
        self.probabilities = found[0].softmax(-1)
        return tokens


def chi_square_limit(degrees: int) -> float:
    """The value that one of 10^5 true samples exceeds (Wilson and Hilferty)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.265 * part**0.5) ** 3


@pytest.mark.parametrize("seed", range(3))
def test_rows_keep_what_transformers_keeps(seed):
    order = MANY * 2
    random.Random(seed).shuffle(order)
    sampler, prompts = Watched(len(order), VOCABULARY, "cpu"), []
    for row, asked in enumerate(order):
        prompts.append(random.Random(seed + row).choices(range(VOCABULARY), k=30))
        sampler.set(row, asked, prompts[row])
    logits = normal(len(order), seed)
    tokens = sampler(logits, range(len(order)))
    drawn = iter(sampler.probabilities)
    for row, asked in enumerate(order):
        expected = warped(logits[row], asked, prompts[row])
        if asked.temperature == 0:
            assert tokens[row] == expected.argmax(), asked
        else:
            torch.testing.assert_close(next(drawn), expected, rtol=1e-4, atol=1e-7, msg=lambda m, a=asked: f"{a}: {m}")
            assert expected[tokens[row]] > 0, asked
    assert next(drawn, None) is None


@pytest.mark.parametrize("asked", MANY, ids=str)
def test_a_row_alone_does_as_in_a_batch(asked):
    logits = normal(1, 5)
    sampler = Watched(3, VOCABULARY, "cpu")
    sampler.set(1, asked, [1, 2, 3])
    token = sampler(logits, [1])
    expected = warped(logits[0], asked, [1, 2, 3])
    assert expected[token] > 0
    if asked.temperature:
        torch.testing.assert_close(sampler.probabilities[0], expected, rtol=1e-4, atol=1e-7)


def test_draws_follow_the_probabilities():
    rows, calls = len(MANY), 3000
    sampler = Sampler(rows, VOCABULARY, "cpu")
    logits = normal(rows, 8, spread=1.5)
    torch.manual_seed(12)
    counts = torch.zeros(rows, VOCABULARY)
    for row, asked in enumerate(MANY):
        sampler.set(row, replace(asked, repetition_penalty=1.0))  # or a draw would change the next one's
    for _ in range(calls):
        counts[torch.arange(rows), sampler(logits, range(rows))] += 1
    for row, asked in enumerate(MANY):
        expected = calls * warped(logits[row], replace(asked, repetition_penalty=1.0), [0])
        assert counts[row][expected == 0].sum() == 0, asked
        often = expected >= 5
        found, wanted = counts[row][often], expected[often]
        rare = expected.sum() - wanted.sum()
        if rare > 5:  # together
            found, wanted = torch.cat([found, calls - found.sum()[None]]), torch.cat([wanted, rare[None]])
        if len(wanted) > 1:
            assert ((found - wanted) ** 2 / wanted).sum() < chi_square_limit(len(wanted) - 1), asked
        else:
            assert found[0] >= calls - rare - 4 * max(1.0, rare) ** 0.5, asked


@pytest.mark.slow
def test_wrong_draws_exceed_the_limit():
    # At temperature 1.3 instead of 1.
    sampler = Sampler(1, VOCABULARY, "cpu")
    logits = normal(1, 8, spread=1.5)
    sampler.set(0, Asked(temperature=1.3, seed=1))
    counts = torch.zeros(VOCABULARY)
    for _ in range(3000):
        counts[sampler(logits, [0])] += 1
    expected = 3000 * logits[0].softmax(-1)
    often = expected >= 5
    total = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert total > chi_square_limit(int(often.sum()) - 1)


def test_equal_logits_stay_or_go_together():
    logits = torch.full((3, VOCABULARY), -5.0)
    logits[:, [4, 50, 90]] = 1.0
    logits[:, 7] = 3.0
    sampler = Watched(3, VOCABULARY, "cpu")
    sampler.set(0, Asked(top_k=2))
    sampler.set(1, Asked(top_k=2, top_p=0.8))
    sampler.set(2, Asked(top_p=0.8))
    sampler(logits, [0, 1, 2])
    for found in sampler.probabilities:
        assert found.nonzero()[:, 0].tolist() == [4, 7, 50, 90]
    # 7 holds 0.711 of the four; of two it would hold 0.88.
    for top_p, left in ((0.7, [7]), (0.72, [4, 7, 50, 90])):
        sampler.set(1, Asked(top_k=2, top_p=top_p))
        sampler(logits, [0, 1, 2])
        assert sampler.probabilities[1].nonzero()[:, 0].tolist() == left


def test_the_penalty_counts_what_was_generated():
    sampler = Sampler(2, VOCABULARY, "cpu")
    sampler.set(0, replace(GREEDY, repetition_penalty=1e6), [3])
    sampler.set(1, GREEDY)
    logits = normal(2, 2).abs() + 1
    order = logits[0].argsort(descending=True).tolist()
    order.remove(3)
    found = [sampler(logits, [0, 1]).tolist() for _ in range(5)]
    assert [tokens[0] for tokens in found] == order[:5]
    assert {tokens[1] for tokens in found} == {int(logits[1].argmax())}


def test_a_row_begins_anew():
    sampler = Sampler(1, VOCABULARY, "cpu")
    logits, asked = normal(1, 2).abs() + 1, replace(GREEDY, repetition_penalty=1e6)
    sampler.set(0, asked)
    first = [int(sampler(logits, [0])) for _ in range(3)]
    sampler.clear(0)
    sampler.set(0, asked)
    assert [int(sampler(logits, [0])) for _ in range(3)] == first
    # What was generated may be given as part of the prompt: as if it had gone on.
    sampler.set(0, asked, first[:2])
    assert int(sampler(logits, [0])) == first[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", [Asked(seed=5), Asked(seed=5, top_p=0.9, temperature=2.0, repetition_penalty=1.1)])
def test_a_seeded_row_draws_the_same_whatever_the_batch(asked, device):
    steps = [normal(1, seed).to(device) for seed in range(20)]
    alone = Sampler(1, VOCABULARY, device)
    alone.set(0, asked, [1, 2])
    expected = [int(alone(logits, [0])) for logits in steps]

    picked, rows = random.Random(0), Sampler(6, VOCABULARY, device)
    row, found, others = 2, [], {}
    rows.set(row, asked, [1, 2])
    for logits in steps:
        if picked.random() < 0.3:
            to = picked.choice([r for r in range(6) if r != row and r not in others])
            rows.move(row, to)
            row = to
        free = [r for r in range(6) if r != row and r not in others]
        if len(free) > 1 and picked.random() < 0.6:
            others[free[0]] = picked.choice(MANY)
            rows.set(free[0], others[free[0]], [7])
        elif others and picked.random() < 0.5:
            gone = next(iter(others))
            rows.clear(gone)
            others.pop(gone)
        batch = [row, *(r for r in others if picked.random() < 0.7)]
        picked.shuffle(batch)
        given = torch.cat([logits if r == row else normal(1, r).to(device) for r in batch])
        found.append(int(rows(given, batch)[batch.index(row)]))
    assert found == expected


def test_another_seed_draws_others():
    sampler = Sampler(3, VOCABULARY, "cpu")
    for row, seed in enumerate((1, 2, 1)):
        sampler.set(row, Asked(seed=seed, temperature=3.0))
    logits = normal(1, 0).expand(3, -1)
    found = torch.stack([sampler(logits, [0, 1, 2]) for _ in range(30)])
    assert torch.equal(found[:, 0], found[:, 2])
    assert (found[:, 0] == found[:, 1]).float().mean() < 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "asked", [GREEDY, Asked(), Asked(top_k=4, top_p=0.5), Asked(top_p=0.5, repetition_penalty=2.0)]
)
def test_logits_that_are_no_distribution_fail_their_row_alone(asked, dtype, device):
    logits = normal(6, 1).to(device, dtype)
    logits[5, 2:] = -torch.inf  # two tokens are left: no error
    whole = logits.clone()
    logits[1, 17], logits[3], logits[4, 20] = torch.nan, -torch.inf, torch.inf
    found = []
    for given in (logits, whole):
        sampler = Sampler(6, VOCABULARY, device)
        for row in range(6):
            sampler.set(row, replace(asked, seed=row), [0])
        before = given.clone()
        tokens = sampler(given, range(6))
        assert torch.equal(given.nan_to_num(), before.nan_to_num())
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCABULARY
        assert torch.equal(sampler.last[0], tokens)
        found.append(sampler.last.tolist())
    assert found[0][1] == [0, 1, 0, 1, 1, 0]
    assert found[1][1] == [0] * 6
    assert all(found[0][0][row] == found[1][0][row] for row in (0, 2, 5))
    assert found[0][0][5] in (0, 1)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_no_temperature_overflows(temperature):
    sampler = Sampler(1, VOCABULARY, "cpu")
    sampler.set(0, Asked(temperature=temperature, top_p=0.99999))
    logits = 1e36 * normal(1, 3).clamp(-3, 3)
    token = int(sampler(logits, [0]))
    assert logits[0, token] == logits[0].max()
    assert sampler.last[1].tolist() == [0]


@pytest.mark.parametrize("penalty", [1e-39, 1e-30, 0.01, 100.0, 1e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_is_no_fault_of_the_logits(penalty, temperature):
    """A row that has failed withdraws the blocks that its prompt shares with others."""
    sampler = Sampler(2, VOCABULARY, "cpu")
    sampler.set(0, Asked(temperature=temperature, repetition_penalty=penalty), range(VOCABULARY))
    sampler.set(1, GREEDY)
    logits = normal(2, seed=1)
    tokens = sampler(logits, [0, 1])
    assert sampler.last[1].tolist() == [0, 0]
    assert tokens[1] == logits[1].argmax() and 0 <= tokens[0] < VOCABULARY
    logits[0, 3] = torch.nan
    sampler(logits, [0, 1])
    assert sampler.last[1].tolist() == [1, 0], "but NaN is"


@pytest.mark.parametrize("field, value", [("temperature", 100.0), ("temperature", 1e-4), *PENALTIES])
@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_masked_token_stays_masked_at_the_bounds_of_settings(field, value, mask):
    logits = normal(1, seed=2).expand(500, -1).clone()
    logits[:, 10:] = mask
    sampler = Sampler(500, VOCABULARY, "cpu")
    for row in range(500):
        sampler.set(row, Asked(**{field: value}), range(5, VOCABULARY))
    assert (sampler(logits, range(500)) < 10).all()
    assert not sampler.last[1].any()


def test_whole_tables_with_rows_that_mean_nothing():
    sampler, logits = Sampler(4, VOCABULARY, "cpu"), normal(4, 6)
    sampler.set(2, Asked(seed=9))
    sampler.set(0, Asked(seed=8, repetition_penalty=1.5), [1])
    logits[1] = torch.nan
    whole = [sampler(logits, [0, -1, 2, -1])[[0, 2]].tolist() for _ in range(4)]
    sampler.set(2, Asked(seed=9))
    sampler.set(0, Asked(seed=8, repetition_penalty=1.5), [1])
    assert [sampler(logits[[0, 2]], [0, 2]).tolist() for _ in range(4)] == whole


def test_greedy_rows_cost_a_maximum(monkeypatch):
    sampler = Sampler(4, VOCABULARY, "cpu")
    for row in range(4):
        sampler.set(row, GREEDY, [1])
    called = []
    monkeypatch.setattr(Sampler, "_draw", lambda *args: called.append("drawn"))
    monkeypatch.setattr(LogitEdits, "apply", lambda *args: called.append("edited"))
    logits = normal(4, 1).bfloat16()
    assert torch.equal(sampler(logits, range(4)), logits.argmax(-1))
    assert not called and sampler._edits._seen is None


def test_with_seeds_alone_the_devices_generator_is_not_touched():
    sampler = Sampler(2, VOCABULARY, "cpu")
    sampler.set(0, Asked(seed=1))
    sampler.set(1, GREEDY)
    state = torch.get_rng_state()
    sampler(normal(2, 1), [0, 1])
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="max_rows must be positive, got 0"):
        Sampler(0, VOCABULARY, "cpu")
    sampler = Sampler(2, VOCABULARY, "cpu")
    with pytest.raises(ValueError, match="there is no row 2: rows are 0 to 1"):
        sampler.set(2, GREEDY)
    with pytest.raises(ValueError, match="token ids must be 0 to 100, got 5 to 101"):
        sampler.set(0, Asked(repetition_penalty=1.1), [5, 101])
    with pytest.raises(ValueError, match=r"rows \[0\] have no settings"):
        sampler(normal(1, 0), [0])
    sampler.set(0, GREEDY)
    with pytest.raises(ValueError, match=r"logits of 1 rows are \[1, 101\], got \[2, 101\]"):
        sampler(normal(2, 0), [0])
    sampler.set(1, GREEDY)
    with pytest.raises(ValueError, match="row 1 is taken"):
        sampler.move(0, 1)
    sampler.clear(1)
    with pytest.raises(ValueError, match="row 1 has no settings to move"):
        sampler.move(1, 0)
    with pytest.raises(ValueError, match=r"rows \[1\] have no settings"):
        sampler(normal(2, 0), [0, 1])


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    sampler = Sampler(len(MANY), VOCABULARY, "cuda")
    logits = normal(len(MANY), 0).cuda()
    for row, asked in enumerate(MANY):  # the first copies make pinned memory
        sampler.set(row, asked, [1, 2, 3])
    sampler(logits, range(len(MANY)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for row, asked in itertools.islice(enumerate(MANY), 1, None):
            sampler.clear(row)
            sampler.set(row, asked, [3, 4])
        for rows in (range(len(MANY)), [0], [4, 3]):
            sampler(logits[: len(rows)], rows)
        sampler.clear(5)
        sampler.move(4, 5)
        sampler(logits[:2], [5, -1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------- what clients of OpenAI's API ask for


def test_frequency_and_presence_penalties_count_the_answer():
    """By OpenAI's formula, the prompt apart: logit - count * frequency - (count > 0) * presence."""
    sampler, logits = Sampler(3, VOCABULARY, "cpu"), normal(3, seed=1)
    asked = [replace(GREEDY, frequency_penalty=0.5, presence_penalty=1.5), GREEDY, replace(GREEDY, presence_penalty=-2)]
    for row, one in enumerate(asked):
        sampler.set(row, one, [5, 6])
    counts = torch.zeros(3, VOCABULARY)
    for step in range(12):
        expected = logits.clone()
        for row, one in enumerate(asked):
            used = counts[row]
            expected[row] -= used * one.frequency_penalty + (used > 0) * one.presence_penalty
        found = sampler(logits, [0, 1, 2])
        assert torch.equal(found, expected.argmax(-1)), step
        counts[range(3), found] += 1
    assert len(counts[0].nonzero()) > 1 and len(counts[1].nonzero()) == len(counts[2].nonzero()) == 1
    sampler.clear(1)
    sampler.move(0, 1)  # with its counts
    assert sampler(logits[:2], [-1, 1])[1] == (logits[1] - counts[0] * 0.5 - (counts[0] > 0) * 1.5).argmax()
    sampler.set(1, asked[0])  # another request begins without them
    assert sampler(logits[:2], [-1, 1])[1] == logits[1].argmax()


def test_biases_move_tokens():
    sampler, logits = Sampler(3, VOCABULARY, "cpu"), normal(3, seed=2)
    best = logits.argmax(-1).tolist()
    biased = replace(GREEDY, logit_bias=((best[0], -100.0), (7, 60.0)))
    for row, one in enumerate((biased, GREEDY, replace(biased, logit_bias=((3, 100.0),)))):
        sampler.set(row, one)
    assert sampler(logits, [0, 1, 2]).tolist() == [7, best[1], 3]
    with pytest.raises(ValueError, match="token ids must be 0 to 100"):
        sampler.set(0, replace(GREEDY, logit_bias=((VOCABULARY, 1.0),)))


@pytest.mark.parametrize("asked", [GREEDY, Asked(), Asked(top_k=5), Asked(top_p=0.5, seed=3)])
def test_only_allowed_tokens_are_drawn(asked):
    """Whatever else is asked for; other places are as without."""
    sampler, logits = Sampler(2, VOCABULARY, "cpu"), normal(2, seed=3)
    may = [0, 31, 32, 64, 100]
    words = torch.zeros(1, (VOCABULARY + 31) // 32, dtype=torch.int64)
    for token in may:
        words[0, token // 32] |= 1 << token % 32
    allowed = Allowed(torch.tensor([1]), (words - (words >> 31 << 32)).to(torch.int32))
    for row in (0, 1):
        sampler.set(row, asked if row else GREEDY)
    drawn = [sampler(logits, [0, 1], allowed).tolist() for _ in range(50)]
    assert {one for _, one in drawn} <= set(may)
    assert {one for one, _ in drawn} == {int(logits[0].argmax())}
    assert sampler.last[1].tolist() == [0, 0]
    assert asked is GREEDY or asked.seed or len({one for _, one in drawn}) > 1


def test_log_probabilities_are_the_model_s():
    """Before penalties, biases and temperature; of the drawn token and of the likeliest ones."""
    sampler, logits = Sampler(4, VOCABULARY, "cpu"), normal(4, seed=4)
    asked = (replace(GREEDY, logprobs=3, logit_bias=((9, 90.0),)), GREEDY, Asked(temperature=5.0, logprobs=0), GREEDY)
    for row, one in enumerate(asked):
        sampler.set(row, one)
    tokens = sampler(logits.bfloat16(), [0, 1, 2, 3])
    told, expected = sampler.logprobs, logits.bfloat16().float().log_softmax(-1)
    assert told.places == (0, 2) and tokens[0] == 9
    for i, place in enumerate(told.places):
        best = expected[place].topk(3)
        assert torch.allclose(told.values[i], torch.cat([expected[place, tokens[place]][None], best.values]))
        assert torch.equal(told.ids[i], best.indices)
    sampler(logits, [-1, 1, -1, 3])
    assert sampler.logprobs is None
