"""Run samples through a model with many caches, and score the answers. Each batch is prefilled once for all caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from hf_sparsekv.cache import SparseCache

from . import forced
from .batches import Once, each_batch
from .cache_specs import CacheSpec
from .measures import Measure, Record
from .prefix import Prefix, forced_steps, greedy_rows, predicting, prefill
from .records import Results
from .samples import Sample

SCORE = Measure("score", "score", percent=True)
STEPPED = Measure("score in steps", "stepped", percent=True, beside="score")
ATTENDED = Measure("attended", "attended", percent=True)
MEASURES = [SCORE, STEPPED, ATTENDED]
KEPT = Measure("kept", "kept", "known", percent=True)
KEPT_STEPPED = Measure("kept in steps", "kept_stepped", "known", percent=True, beside="kept")
AGREEMENT = Measure("top-1 agreement", "same", "tokens", percent=True)
KL = Measure("KL", "kl", "tokens")
COMPARED = [SCORE, STEPPED, KEPT, KEPT_STEPPED, AGREEMENT, KL, ATTENDED]
NOTES = (
    "score: the whole prompt is prefilled, which is exact, as plain generate() does. in steps: the last tokens of the "
    "prompt, its question, are fed as decode steps, so that the cache answers from its first token on.",
    "kept: of what full attention finds in these very prompts, the share that the cache finds, too; empty where "
    "there is none. top-1 agreement, KL: at each token of full attention's own answer, teacher-forced.",
)


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
    steps: int = 0,
    advance: Callable[[int], None] = lambda n: None,
    *,
    prefilled: bool = True,
    against: bool = False,
) -> None:
    """Answer every sample with every cache, except pairs that have results.

    Args:
        samples: those of a task and length one after the other; they are batched together.
        steps: so many tokens at a prompt's end, the question, are fed as decode steps. So they are answered from the
            sparse cache, too: the value ``stepped``. 0: not answered so.
        advance: called with the number of finished (sample, cache) pairs.
        prefilled: answer with the whole prompt prefilled, which is exact, as ``generate()`` does: the value ``score``.
        against: compare with full attention's answer to the prefilled prompt, part by part (``kept`` of ``known``) and
            at each token of it (``same`` and ``kl`` of ``tokens``).

    Raises:
        ValueError: neither way of answering is asked for, or ``steps`` is as long as a prompt.
    """
    if not (steps or prefilled) or (against and not prefilled):
        raise ValueError("nothing to answer: leave prefilled=True, or give steps and no comparison")
    eos = stop_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos), 0)
    told = Once(advance)

    def work(group: list[Sample]) -> None:
        first = group[0]
        todo = [c for c in caches if not all(results.has(s.task, s.length, s.index, c.name) for s in group)]
        told(((s.task, s.length, s.index), c.name) for s in group for c in caches if c not in todo)
        if not todo:
            return
        ids, mask = collate(group, pad, model.device)
        cut = ids.shape[1] - steps
        if steps and (cut < 1 or not bool(mask[:, cut - 1 :].all())):
            raise ValueError(f"{steps} tokens of the question are to be decoded, but a prompt has no more than that")
        prefix = prefill(model, ids if prefilled else ids[:, :cut], mask=mask if prefilled else mask[:, :cut])
        short = prefix.cut(cut) if steps else None
        stop, room = eos | first.stop, max(sample.max_new_tokens for sample in group)
        truth = _Answer(model, prefix, room, stop, pad) if against else None

        def score(rows: list[list[int]]) -> tuple[list[str], list[tuple[float, ...]]]:
            texts = [
                tokenizer.decode(row[: sample.max_new_tokens], skip_special_tokens=True)
                for sample, row in zip(group, rows)
            ]
            return texts, [sample.parts(text) for sample, text in zip(group, texts)]

        known = score(truth.rows)[1] if truth else None
        for spec in todo:
            values: list[dict[str, float]] = [{} for _ in group]
            texts: list[str] = []
            for way in (*(("score",) if prefilled else ()), *(("stepped",) if steps else ())):
                if way == "stepped":
                    cache = spec.make(model.config)
                    rows = answer(model, short, cache, ids[:, cut:], room, stop)
                elif truth:
                    rows, cache, compared = truth.compare(spec)
                    for mine, more in zip(values, compared):
                        mine |= more
                else:
                    cache = spec.make(model.config)
                    rows = answer(model, prefix, cache, ids[:, :0], room, stop)
                said, parts = score(rows)
                texts = texts or said
                for row, (sample, text) in enumerate(zip(group, said)):
                    values[row][way] = float(sample.score(text, sample.references))
                    if known:
                        name = "kept" if way == "score" else "kept_stepped"
                        values[row]["known"] = sum(known[row])
                        values[row][name] = sum(min(a, b) for a, b in zip(known[row], parts[row]))
            attended = 1.0 if cache is None else cache.stats().attended_share
            for sample, mine, text in zip(group, values, texts):
                mine["attended"] = attended
                results.add(Record(sample.task, sample.length, sample.index, spec.name, mine, text))
            told(((s.task, s.length, s.index), spec.name) for s in group)

    each_batch(_groups(samples, batch), work)


class _Answer:
    """Full attention's greedy answers to a prefilled batch, and how caches agree with them token by token."""

    def __init__(self, model, prefix: Prefix, room: int, stop: set[int], pad: int) -> None:
        self.model, self.prefix, self.room, self.stop = model, prefix, room, stop
        self.rows = answer(model, prefix, None, prefix.ids[:, :0], room, stop)
        width = max(map(len, self.rows))
        self.ids = torch.tensor([row + [pad] * (width - len(row)) for row in self.rows], dtype=torch.long)
        self.ids = self.ids.reshape(len(self.rows), width).to(prefix.ids.device)
        self.counts = torch.tensor([len(row) for row in self.rows], device=prefix.ids.device)
        cache, _ = prefix.start(model, None)
        self.reference = [x.log_softmax(-1) for x in forced_steps(model, cache, self.ids, prefix)]

    def compare(self, spec: CacheSpec) -> tuple[list[list[int]], SparseCache | None, list[dict[str, float]]]:
        """A cache's own greedy answers, the cache after them, and ``same``, ``kl`` and ``tokens`` of each row."""
        cache = spec.make(self.model.config)
        same = torch.zeros(len(self.rows), dtype=torch.float64, device=self.ids.device)
        kl = torch.zeros_like(same)
        if spec.full:
            same += self.counts
        else:
            started, _ = self.prefix.start(self.model, cache)
            for i, logits in enumerate(forced_steps(self.model, started, self.ids, self.prefix)):
                alike, distance = forced.compare(self.reference[i], logits.log_softmax(-1))
                same += alike & (i < self.counts)
                kl += distance * (i < self.counts)
        values = [
            {"same": s, "kl": k, "tokens": n} for s, k, n in zip(same.tolist(), kl.tolist(), self.counts.tolist())
        ]
        if bool((same == self.counts).all()):  # then its greedy answers are full attention's, token by token
            return self.rows, cache, values
        cache = spec.make(self.model.config)
        return answer(self.model, self.prefix, cache, self.ids[:, :0], self.room, self.stop), cache, values


def _groups(samples: Iterable[Sample], batch: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        if group and (len(group) == batch or (sample.task, sample.length) != (group[0].task, group[0].length)):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group
