"""Teacher-forced evaluation: held-out text goes in token by token, as if the model had written it.

Prompts are exact by default, so caches differ only in decode steps. Perplexity is that of the held-out text; agreement
compares each step's distribution with full attention's, and is the most sensitive number there is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import Once, each_batch
from .cache_specs import CacheSpec
from .measures import Measure, Record
from .prefix import forced_steps, predicting, prefill
from .records import Results

PERPLEXITY = Measure("perplexity", "nll", "tokens", exponential=True)
MEASURES = {
    "perplexity": [PERPLEXITY, Measure("attended", "attended", percent=True)],
    "agreement": [
        Measure("top-1 agreement", "same", "tokens", percent=True),
        Measure("KL", "kl", "tokens"),
        Measure("KL p95", "kl_p95"),
        PERPLEXITY,
        Measure("attended", "attended", percent=True),
    ],
}


def compare(reference: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Compare a step with the reference's: whether the likeliest token is the same, and the KL divergence in nats.

    Args:
        reference, logp: log-probabilities ``[batch, vocab]``, float32.

    Returns:
        bool and float32 ``[batch]``.
    """
    kl = (reference.exp() * (reference - logp)).sum(-1).clamp(min=0)  # rounding leaves it a little below
    return logp.argmax(-1) == reference.argmax(-1), kl


def passages(words: Tensor, context: int, tokens: int, count: int, stride: int | None = None) -> list[int]:
    """Starts of ``count`` passages of ``context + tokens + 1`` ids in a text ``[n]``.

    Args:
        stride: distance of starts; ``None`` spreads the passages evenly. ``stride == tokens`` slides over the text, so
            that every held-out token is counted once.

    Raises:
        ValueError: the text is too short.
    """
    room = len(words) - context - tokens - 1
    if room < 0:
        raise ValueError(
            f"the text has {len(words)} tokens, a passage takes {context + tokens + 1}: give a longer text, or shorten "
            "--lengths or --tokens"
        )
    if stride is None:
        return [round(i * room / max(1, count - 1)) for i in range(count)]
    most = room // stride + 1
    if count > most:
        raise ValueError(f"the text of {len(words)} tokens has room for {most} passages of this stride, not {count}")
    return [i * stride for i in range(count)]


@predicting
def evaluate(
    model,
    words: Tensor,
    starts: list[int],
    context: int,
    tokens: int,
    caches: list[CacheSpec],
    results: Results,
    task: str,
    batch: int = 1,
    against: bool = True,
    advance=lambda n: None,
    indices: list[int] | None = None,
) -> None:
    """Measure every passage with every cache, except pairs that have results.

    Args:
        words: ids ``[n]`` of the text.
        starts: of the passages.
        context: tokens before the held-out ones.
        against: compare with full attention, too: likeliest tokens, the mean of KL, and its 95th percentile over a
            passage's steps.
        advance: called with the number of finished (passage, cache) pairs.
        indices: numbers of the passages in records; ``None``: their order.
    """
    numbers = list(range(len(starts))) if indices is None else indices
    told, rows = Once(advance), list(zip(numbers, starts))

    def work(part: list[tuple[int, int]]) -> None:
        group = [number for number, _ in part]
        todo = [c for c in caches if not all(results.has(task, context, i, c.name) for i in group)]
        told((i, c.name) for i in group for c in caches if c not in todo)
        if not todo:
            return
        ids = torch.stack([words[start : start + context + tokens + 1] for _, start in part]).to(model.device)
        prefix = prefill(model, ids[:, :context])
        ids, target = ids[:, context:-1], ids[:, context + 1 :]
        reference: list[Tensor] = []
        if against:
            cache, _ = prefix.start(model, None)
            reference = [logits.log_softmax(-1) for logits in forced_steps(model, cache, ids, prefix)]
        for spec in todo:
            sums = torch.zeros(len(group), 2, dtype=torch.float64, device=model.device)
            kl = torch.zeros(len(group), tokens, dtype=torch.float64, device=model.device)
            own = spec.make(model.config)
            if spec.full and against:
                steps = iter(reference)
            else:
                cache, _ = prefix.start(model, own)
                steps = (logits.log_softmax(-1) for logits in forced_steps(model, cache, ids, prefix))
            for i, logp in enumerate(steps):
                sums[:, 0] -= logp.gather(-1, target[:, i : i + 1])[:, 0]
                if against:
                    same, kl[:, i] = compare(reference[i], logp)
                    sums[:, 1] += same
            attended = 1.0 if own is None else own.stats().attended_share
            divergence = zip(kl.sum(-1).tolist(), kl.quantile(0.95, -1).tolist())
            for index, (nll, same), (total, high) in zip(group, sums.tolist(), divergence):
                values = {"nll": nll, "tokens": tokens, "attended": attended}
                values |= {"same": same, "kl": total, "kl_p95": high} if against else {}
                results.add(Record(task, context, index, spec.name, values))
            told((i, spec.name) for i in group)

    each_batch((rows[at : at + batch] for at in range(0, len(rows), batch)), work)
