"""Prompts of the probe models, for training and exams: statements in cells of 16 tokens, questions at the end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from . import probe_language as lang

CELL, WIDE = 16, 32  # tokens in a statement's or short question's cell, and in that of a question for four keys
FAMILIES = ("none", "single", "multivalue", "multiquery", "vt")
SINGLE, MULTIVALUE, MULTIQUERY, TRACING = range(1, 5)
HOPS, SAME_KEY, QUERIES = 5, 4, 4  # variables of a chain, facts of a key in a group, keys of one question


@dataclass(frozen=True)
class Mix:
    """How many statements and questions a prompt has.

    Args:
        keys: keys with one fact; ``groups``: keys with four; ``chains``: chains of five variables.
        single, multivalue, multiquery, tracing: questions; no key is asked for twice.
        letters: words that keys (and names) are pairs of; few make pairs share words.
        name_letters: the same for variables.
        at_end: each question ends its cell (exams), rather than lying anywhere in it.
    """

    keys: int
    groups: int
    chains: int
    single: int
    multivalue: int
    multiquery: int
    tracing: int
    letters: int = lang.KEYS
    name_letters: int = lang.NAMES
    at_end: bool = False

    @property
    def tail(self) -> int:
        """Tokens that the questions take."""
        return CELL * (self.single + self.multivalue + self.tracing) + WIDE * self.multiquery


def training_mix(length: int, rng: random.Random, packed: bool) -> Mix:
    """A mix for prompts of ``length`` tokens: a statement in every cell, or anything from one statement on."""
    cells = (length - 1) // CELL
    asked = min(384, max(2, int(cells * rng.uniform(0.2, 0.55))))
    body = cells - asked
    wanted = body if packed else int(math.exp(rng.random() * math.log(body + 0.99)))
    most = max(1, asked // 4)
    chains = rng.randint(0, min(most, (wanted - 1) // HOPS)) if rng.random() < 0.7 else 0
    groups = rng.randint(0, min(most, (wanted - 1 - HOPS * chains) // SAME_KEY)) if rng.random() < 0.7 else 0
    keys = wanted - HOPS * chains - SAME_KEY * groups
    # Questions: all chains and groups, a share of cells for the wide ones, the rest for single keys.
    left = asked - chains - groups
    wide = min(keys // QUERIES, int(left * rng.uniform(0, 0.5)) // 2) if rng.random() < 0.6 else 0
    single = max(0, min(keys - QUERIES * wide, left - 2 * wide))
    fewest = max(6, math.ceil(math.sqrt(1.3 * (keys + groups))))
    fewest_names = max(6, math.ceil(math.sqrt(2 * HOPS * max(1, chains))))
    return Mix(
        keys=keys,
        groups=groups,
        chains=chains,
        single=single,
        multivalue=groups,
        multiquery=wide,
        tracing=chains,
        letters=rng.randint(min(fewest, lang.KEYS), lang.KEYS),
        name_letters=rng.randint(min(fewest_names, lang.NAMES), lang.NAMES),
    )


def training_batch(batch: int, length: int, rng: random.Random, filler: lang.Filler) -> tuple[Tensor, Tensor]:
    """:func:`make`, half of the rows with packed bodies, so that every batch has many answers."""
    parts = [(batch + 1) // 2, batch // 2]
    halves = [
        make(rows_, length, training_mix(length, rng, packed), filler)
        for rows_, packed in zip(parts, (True, False))
        if rows_
    ]
    return tuple(torch.cat(both) for both in zip(*halves))


def exam_mix(name: str, length: int) -> Mix:
    """One question of a family; ``multikey-25`` and ``multikey-all`` fill a quarter or all cells with other keys."""
    body = (length - 1 - WIDE) // CELL
    chains = min(4, max(1, body // 10))
    none = {"keys": 0, "groups": 0, "chains": 0, "single": 0, "multivalue": 0, "multiquery": 0, "tracing": 0}
    own = {
        "single": {"keys": 1, "single": 1},
        "multikey-25": {"keys": body // 4, "single": 1},
        "multikey-all": {"keys": body, "single": 1},
        "multivalue": {"keys": min(20, body - 4), "groups": 1, "multivalue": 1},
        "multiquery": {"keys": max(8, body // 8), "multiquery": 1},
        "vt": {"keys": max(0, min(20, body - HOPS * chains)), "chains": chains, "tracing": 1},
    }[name]
    return Mix(**{**none, **own}, at_end=True)


EXAMS = ("single", "multikey-25", "multikey-all", "multivalue", "multiquery", "vt")


def distinct_pairs(batch: int, count: int, letters: int, first: int, total: int, device) -> Tensor:
    """``[batch, count, 2]`` different pairs of ``letters`` of the ``total`` words from id ``first`` on."""
    if count > letters * letters:
        raise ValueError(f"{letters} words make {letters * letters} pairs, {count} are needed")
    code = torch.rand(batch, letters * letters, device=device).argsort(1)[:, :count]
    words = torch.rand(batch, total, device=device).argsort(1) + first
    return torch.stack((words.gather(1, code // letters), words.gather(1, code % letters)), -1)


def values(*shape: int, device) -> Tensor:
    """Random values, two words each: ``[*shape, 2]``."""
    return torch.randint(lang.VALUE, lang.VALUE + lang.VALUES, (*shape, 2), device=device)


def rows(batch: int, count: int, width: int, *parts: int | Tensor, device) -> Tensor:
    """Words and tensors ``[batch, count, n]`` joined to ``[batch, count, width]``, padded with -1."""
    if count == 0:
        return torch.empty(batch, 0, width, dtype=torch.long, device=device)
    whole = [
        torch.full((batch, count, 1), part, device=device) if isinstance(part, int) else part.reshape(batch, count, -1)
        for part in parts
    ]
    out = torch.cat(whole, -1)
    return torch.nn.functional.pad(out, (0, width - out.shape[-1]), value=-1)


def make(batch: int, length: int, mix: Mix, filler: lang.Filler) -> tuple[Tensor, Tensor]:
    """Prompts with answers.

    Returns:
        ids ``[batch, length]`` and, as long, the family of each answer token (0: not part of an answer).
    """
    device = filler.words.device
    count = HOPS * mix.chains + SAME_KEY * mix.groups + mix.keys
    cells = (length - 1 - mix.tail) // CELL
    if count > cells:
        raise ValueError(f"{count} statements do not fit into {cells} cells of a prompt of {length} tokens")
    ids = filler.sample(batch, length + 1)  # one spare column, where nothings are written
    ids[:, 0] = lang.BOS
    family = torch.zeros_like(ids)

    names = distinct_pairs(batch, HOPS * mix.chains, mix.name_letters, lang.NAME, lang.NAMES, device)
    names = names.view(batch, mix.chains, HOPS, 2)
    given = values(batch, mix.chains, device=device)
    keys = distinct_pairs(batch, mix.groups + mix.keys, mix.letters, lang.KEY, lang.KEYS, device)
    group_keys, single_keys = keys[:, : mix.groups], keys[:, mix.groups :]
    many = values(batch, mix.groups, SAME_KEY, device=device)
    # The first words of a key's values differ, or the second would not say which value it belongs to.
    first = torch.rand(batch, mix.groups, lang.VALUES, device=device).argsort(-1)[..., :SAME_KEY] + lang.VALUE
    many[..., 0] = first
    one = values(batch, mix.keys, device=device)

    # Chains and groups appear in the order in which they are answered.
    slot = torch.rand(batch, cells, device=device).argsort(1)[:, :count]
    parts = slot.split((HOPS * mix.chains, SAME_KEY * mix.groups, mix.keys), dim=1)
    ordered = [
        p.reshape(batch, p.shape[1] // n, n).sort(-1).values.flatten(1) for p, n in zip(parts, (HOPS, SAME_KEY, 1))
    ]
    slot = torch.cat(ordered, 1)
    right = torch.cat((given[:, :, None], names[:, :, :-1]), 2)
    statements = torch.cat(
        (
            rows(batch, HOPS * mix.chains, 7, lang.VAR, names, lang.IS, right, lang.END, device=device),
            rows(
                batch,
                SAME_KEY * mix.groups,
                7,
                lang.FACT,
                group_keys[:, :, None].expand(-1, -1, SAME_KEY, -1),
                many,
                lang.END,
                device=device,
            ),
            rows(batch, mix.keys, 7, lang.FACT, single_keys, one, lang.END, device=device),
        ),
        1,
    )
    offset = torch.randint(0, CELL - 7 + 1, slot.shape, device=device)
    body = length - mix.tail - CELL * cells
    write(ids, body + CELL * slot + offset, statements)

    asked = single_keys[:, QUERIES * mix.multiquery :], one[:, QUERIES * mix.multiquery :]
    asked = [t[:, : mix.single] for t in asked]
    four = single_keys[:, : QUERIES * mix.multiquery].reshape(batch, mix.multiquery, QUERIES, 2)
    answers = torch.cat((four, one[:, : QUERIES * mix.multiquery].view_as(four)), -1)
    narrow = [
        (SINGLE, 3, rows(batch, mix.single, CELL, lang.ASK, *asked, lang.END, device=device)),
        (MULTIVALUE, 3, rows(batch, mix.multivalue, CELL, lang.LIST, group_keys[:, : mix.multivalue],
                             many[:, : mix.multivalue], lang.END, device=device)),
        (TRACING, 3, rows(batch, mix.tracing, CELL, lang.TRACE, given[:, : mix.tracing], names[:, : mix.tracing],
                          lang.END, device=device)),
    ]  # fmt: skip
    wide = [(MULTIQUERY, 10, rows(batch, mix.multiquery, WIDE, lang.EACH, four, lang.ANSWER, answers, lang.END,
                                  device=device))]  # fmt: skip
    regions = [(CELL, narrow), (WIDE, wide)]
    if not mix.at_end and torch.rand(()).item() < 0.5:
        regions.reverse()
    start = length - mix.tail
    for width, kinds in regions:
        text = torch.cat([row for _, _, row in kinds], 1)
        column = torch.arange(width, device=device)
        kind = torch.cat(
            [torch.where((column >= skip) & (row >= 0), code, 0) for code, skip, row in kinds], 1
        )  # the family where the answer is
        order = torch.randperm(text.shape[1], device=device)
        text, kind = text[:, order], kind[:, order]
        spare = (text < 0).sum(-1)
        offset = spare if mix.at_end else (torch.rand(spare.shape, device=device) * (spare + 1)).long()
        at = start + width * torch.arange(text.shape[1], device=device) + offset
        write(ids, at, text)
        write(family, at, torch.where(text >= 0, kind, -1))
        start += width * text.shape[1]
    return ids[:, :length], family[:, :length]


def write(ids: Tensor, at: Tensor, text: Tensor) -> None:
    """Put ``text [batch, n, width]`` at columns ``at [batch, n]`` on; its -1 go into the last column, a spare."""
    spare = ids.shape[1] - 1
    column = at[..., None] + torch.arange(text.shape[-1], device=ids.device)
    ids.scatter_(1, torch.where(text >= 0, column, spare).flatten(1), text.flatten(1))
