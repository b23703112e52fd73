"""Attention of some new tokens to each other, merged with attention to earlier ones: kernel, definition, softmax."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hf_sparsekv.ops.attention.new_tokens import reference
from hf_sparsekv.ops.attention.new_tokens import triton as kernel


@dataclass(frozen=True)
class Case:
    """``n`` new tokens after ``past`` earlier ones."""

    n: int
    past: int = 20
    batch: int = 2
    heads: int = 2
    group: int = 2
    dk: int = 32
    dv: int = 32
    softcap: float | None = None

    def make(self, place):
        """Arguments as projections give them, transposed; and what plain attention gives."""
        total = self.past + self.n

        def made(tokens, heads, dim):
            return place.randn(self.batch, tokens, heads, dim).transpose(1, 2)

        query = made(self.n, self.heads * self.group, self.dk)
        key, value = made(total, self.heads, self.dk), made(total, self.heads, self.dv)
        scale = 2 * self.dk**-0.5
        q, k, v = (t.double() for t in (query, *(t.repeat_interleave(self.group, 1) for t in (key, value))))
        logits = q @ k.transpose(-1, -2) * scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        before, hidden = logits[..., : self.past], torch.ones(self.n, self.n, device=q.device).triu(1) > 0
        lse = before.logsumexp(-1).float()
        past = (before.softmax(-1).nan_to_num(0.0) @ v[:, :, : self.past]).float()
        if not self.past:
            past.fill_(7.0)  # nothing is there, so this counts as nothing
        logits[..., self.past :].masked_fill_(hidden, -torch.inf)
        new = key[:, :, self.past :], value[:, :, self.past :]
        return (query, *new, past, lse, scale, self.softcap), logits.softmax(-1) @ v


CASES = {
    "two": Case(2),
    "four of one head": Case(4, heads=1, group=1, batch=1),
    "four": Case(4, group=4, dk=64, dv=64),
    "seven heads": Case(5, heads=1, group=7, dk=48, dv=48),
    "values of another width": Case(8, dk=24, dv=16),
    "seventeen": Case(17, group=3),
    "more than a tile of keys": Case(70, group=2, batch=1),
    "soft cap": Case(6, softcap=3.0),
    "nothing before": Case(9, past=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_definition(case, place32):
    args, expected = case.make(place32)
    torch.testing.assert_close(reference.new_tokens(*args).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel(case, place):
    args, _ = case.make(place)
    expected = reference.new_tokens(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args))
    place.close(kernel.new_tokens(*args), expected)


def test_latents_are_left_to_the_definition(place):
    """A program does not hold 576 channels."""
    args, _ = Case(3, heads=1, group=4, dk=288, dv=256).make(place)
    expected = reference.new_tokens(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args))
    place.close(kernel.new_tokens(*args), expected)
