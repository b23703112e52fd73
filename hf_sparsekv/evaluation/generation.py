"""Run samples through a model with many caches, and score the answers. Each batch is prefilled once for all caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .cache_specs import CacheSpec
from .prefix import Prefix, forced_steps, greedy_rows, predicting, prefill
from .records import Measure, Record, Results
from .samples import Sample

MEASURES = [Measure("score", "score", percent=True), Measure("attended", "attended", percent=True)]


def stop_ids(model, tokenizer) -> set[int]:
    """Ids that end an answer: the model's own and the tokenizer's."""
    out: set[int] = set()
    for eos in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        out |= {eos} if isinstance(eos, int) else set(eos or ())
    return out


def collate(samples: list[Sample], pad: int, device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[batch, n]`` with left padding."""
    width = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), width), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, width - len(sample.ids) :] = torch.tensor(sample.ids)
        mask[row, width - len(sample.ids) :] = 1
    return ids.to(device), mask.to(device)


@torch.no_grad()
def answer(model, prefix: Prefix, cache, tail: Tensor, max_new_tokens: int, stop: set[int]) -> list[list[int]]:
    """Greedy continuations of ``prefix`` and ``tail [batch, t]``, whose tokens are fed as decode steps."""
    cache, logits = prefix.start(model, cache)
    if tail.shape[1]:
        for logits in forced_steps(model, cache, tail, prefix):  # noqa: B007 (the last ones)
            pass
        mask = prefix.mask
        mask = None if mask is None else torch.cat((mask, torch.ones_like(tail, dtype=torch.bool)), 1)
        prefix = Prefix(torch.cat((prefix.ids, tail), 1), [], None, None, mask)
    return greedy_rows(model, prefix, cache, logits, max_new_tokens, stop)


@predicting
def evaluate(
    model,
    tokenizer,
    samples: Iterable[Sample],
    caches: list[CacheSpec],
    results: Results,
    batch: int = 1,
    tail: int = 0,
    advance: Callable[[int], None] = lambda n: None,
) -> None:
    """Answer every sample with every cache that has not.

    Args:
        samples: those of a task and length one after the other; they are batched together.
        tail: so many tokens at a prompt's end, the question, are fed as decode steps, so that they are answered from
            the sparse cache, too. 0: the whole prompt is prefilled, which is exact.
        advance: called with the number of finished (sample, cache) pairs.
    """
    eos = stop_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos), 0)
    for group in _groups(samples, batch):
        first = group[0]
        todo = [c for c in caches if not all(results.has(s.task, s.length, s.index, c.name) for s in group)]
        advance(len(group) * (len(caches) - len(todo)))
        if not todo:
            continue
        ids, mask = collate(group, pad, model.device)
        cut = ids.shape[1] - tail
        if tail and not bool(mask[:, cut - 1 :].all()):
            raise ValueError(f"{tail} tokens of the question are to be decoded, but a prompt has no more than that")
        prefix = prefill(model, ids[:, :cut], mask=mask[:, :cut])
        stop, room = eos | first.stop, max(sample.max_new_tokens for sample in group)
        for spec in todo:
            cache = spec.make(model.config)
            rows = answer(model, prefix, cache, ids[:, cut:], room, stop)
            attended = 1.0 if cache is None else cache.stats().attended_share
            for sample, row in zip(group, rows):
                text = tokenizer.decode(row[: sample.max_new_tokens], skip_special_tokens=True)
                values = {"score": float(sample.score(text, sample.references)), "attended": attended}
                results.add(Record(sample.task, sample.length, sample.index, spec.name, values, text))
            advance(len(group))


def _groups(samples: Iterable[Sample], batch: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        if group and (len(group) == batch or (sample.task, sample.length) != (group[0].task, group[0].length)):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group
