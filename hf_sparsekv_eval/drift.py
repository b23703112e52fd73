"""Long own output: how far a cache drifts from full attention along full attention's own greedy answer.

Full attention writes the answer, and may not end it early. Then the answer is fed to each cache token by token. Up to
the first token that a cache would have chosen differently, the answer is the cache's own greedy text. From there two
free-running texts would diverge, and only teacher forcing still compares steps with steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import forced
from .cache_specs import CacheSpec
from .generation import AGREEMENT, ATTENDED, KL
from .measures import Measure, Record
from .prefix import Prefix, forced_steps, prefill
from .records import Results

WHOLE = "answer"  # the task of the records that hold what is said of an answer as a whole
FIRST = Measure("first difference", "first")
REPEATED = Measure("repeated", "repeated", percent=True)
MEASURES = [AGREEMENT, KL, FIRST, REPEATED, ATTENDED]
NOTES = (
    "first difference: so many tokens of its greedy answer are full attention's (the length of the answer: all). "
    "Columns are windows of the answer; KL and agreement are teacher-forced on full attention's answer. "
    "repeated: the share of 8-token pieces of full attention's answer that came before in it; where it repeats itself, "
    "agreement is easy.",
)
PIECE = 8
_ASK = "Explain the text above in detail, part by part, with an example of your own for each. Write as much as you can."


def windows(tokens: int, width: int) -> list[tuple[int, int]]:
    """``[start, end)`` of the windows of an answer; the last one may be shorter."""
    return [(start, min(start + width, tokens)) for start in range(0, tokens, width)]


def window_task(start: int, end: int) -> str:
    """The name of a window's records: its first and last token, counted from 1."""
    return f"{start + 1}-{end}"


def prompt(tokenizer, words: Tensor, start: int, length: int, chat: bool) -> list[int]:
    """A prompt of at most ``length`` tokens that wants a long answer.

    Args:
        words: ids ``[n]`` of a text.
        start: where in it the prompt begins.
        chat: ask for an explanation, in the tokenizer's chat template; otherwise the text is to go on.

    Raises:
        ValueError: ``length`` has no room for the question.
    """
    if not chat:
        return words[start : start + length].tolist()

    def encode(body: list[int]) -> list[int]:
        turn = [{"role": "user", "content": f"{tokenizer.decode(body)}\n\n{_ASK}"}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    body = words[start : start + length].tolist()
    while body:
        ids = encode(body)
        if len(ids) <= length:
            return ids
        body = body[: len(body) - (len(ids) - length)]
    raise ValueError(f"{length} tokens have no room for a text and the question about it: give more")


@torch.no_grad()
def own_answer(model, prefix: Prefix, tokens: int, stop: set[int]) -> tuple[Tensor, list[Tensor]]:
    """Full attention's greedy answer of exactly ``tokens`` tokens to one prompt.

    Args:
        stop: ids that would end it; they are not chosen.

    Returns:
        ids ``[1, tokens]``, and after each of them the log-probabilities ``[1, vocab]``, float32, in host memory
        (tokens x vocabulary x 4 bytes).
    """
    cache, logits = prefix.start(model, None)
    barred = sorted(stop)
    out, after = [], []
    for _ in range(tokens):
        logits = logits.float().clone()
        logits[:, barred] = float("-inf")
        out.append(logits.argmax(-1, keepdim=True))
        (logits,) = forced_steps(model, cache, out[-1])
        after.append(logits.log_softmax(-1).cpu())
    return torch.cat(out, 1), after


def repeated(row: list[int]) -> float:
    """The share of a text's pieces of ``PIECE`` tokens that came before in it."""
    pieces = [tuple(row[i : i + PIECE]) for i in range(len(row) - PIECE + 1)]
    return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


def evaluate(
    model,
    prompts: list[list[int]],
    length: int,
    tokens: int,
    window: int,
    caches: list[CacheSpec],
    results: Results,
    stop: set[int],
    advance: Callable[[int], None] = lambda n: None,
    indices: list[int] | None = None,
) -> None:
    """Compare every cache along full attention's answer to each prompt, except pairs that have results.

    Args:
        prompts: ids of each.
        length: of a prompt, as it was asked for.
        tokens: of an answer; ``window``: of the parts of it that have figures of their own.
        stop: ids that end answers; see :func:`own_answer`.
        advance: called with the number of finished (prompt, cache) pairs.
        indices: numbers of the prompts in records; ``None``: their order.
    """
    parts = windows(tokens, window)
    names = [WHOLE, *(window_task(*part) for part in parts)]
    barred = sorted(stop)
    for index, ids in zip(range(len(prompts)) if indices is None else indices, prompts):
        todo = [c for c in caches if not all(results.has(name, length, index, c.name) for name in names)]
        advance(len(caches) - len(todo))
        if not todo:
            continue
        prefix = prefill(model, torch.tensor([ids], device=model.device))
        answer, reference = own_answer(model, prefix, tokens, stop)
        loops = repeated(answer[0].tolist())
        for spec in todo:
            own = spec.make(model.config)
            same, kl = torch.ones(tokens, dtype=torch.bool), torch.zeros(tokens)
            first = tokens
            if not spec.full:
                cache, _ = prefix.start(model, own)
                for i, logits in enumerate(forced_steps(model, cache, answer)):
                    logp = logits.log_softmax(-1).cpu()
                    alike, distance = forced.compare(reference[i], logp)
                    same[i], kl[i] = bool(alike), float(distance)
                    logp[:, barred] = float("-inf")
                    if first == tokens and i + 1 < tokens and int(logp.argmax(-1)) != int(answer[0, i + 1]):
                        first = i + 1
            attended = 1.0 if own is None else own.stats().attended_share
            whole = {"first": first, "repeated": loops, "attended": attended}
            for start, end in parts:
                values = {
                    "same": float(same[start:end].sum()),
                    "kl": float(kl[start:end].double().sum()),
                    "tokens": end - start,
                }
                results.add(Record(window_task(start, end), length, index, spec.name, values))
            results.add(Record(WHOLE, length, index, spec.name, whole))
            advance(1)


def prompts(tokenizer, words: Tensor, length: int, count: int, chat: bool) -> list[list[int]]:
    """``count`` prompts from places all over a text ``[n]``."""
    return [prompt(tokenizer, words, start, length, chat) for start in forced.passages(words, length, 0, count)]
