"""One greedy loop for every system: read the context, read the question, answer token by token.

The same lines measure all systems, in any environment with torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .prompt_file import Prompt

INSIDE, AFTER, STEPS = "inside", "after", "steps"
CHECK = 8  # tokens after which an answer is looked at: a full score cannot get worse


@dataclass(frozen=True)
class Sizes:
    """Bytes of a cache after some steps.

    Args:
        device, host: what it holds in each place.
        read: of keys, values and whatever selects them, for one token.
    """

    device: int
    host: int
    read: float


@dataclass(frozen=True)
class System:
    """A way to keep and read keys and values.

    Args:
        name: of its rows.
        cache: makes an empty one.
        sizes: of one after decode steps.
        after: how a question after the context is read: :data:`AFTER`, in one pass over the compressed context, or
            :data:`STEPS`, token by token as decode steps.
        reading: around the pass over the context, which a press compresses at its end.
    """

    name: str
    cache: Callable[[], Any]
    sizes: Callable[[Any], Sizes]
    after: str = AFTER
    reading: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Answer:
    """Tokens, the cache that they were decoded over, and when they came.

    Args:
        first_s: seconds to the first token, with the compressed cache ready for the next one.
        between_ms: from each token to the next.
    """

    cache: Any
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    between_ms: list[float] = field(default_factory=list)


def now(device: torch.device) -> float:
    """Seconds, when everything on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward(model, cache, ids: Tensor, begin: int) -> Tensor:
    """Logits ``[vocab]`` of the last of ``ids [1, n]``, whose first position in the text is ``begin``."""
    positions = torch.arange(begin, begin + ids.shape[1], device=ids.device)[None]
    last = {"logits_to_keep": 1} if ids.shape[1] > 1 else {}
    return model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **last).logits[0, -1]


@torch.no_grad()
def decode(model, system: System, prompt: Prompt, question: str) -> Iterator[Answer]:
    """The answer after each of its tokens, without end.

    Args:
        question: :data:`INSIDE` the context, when a press compresses it; or after that (:data:`AFTER`, :data:`STEPS`).
    """
    ids = torch.tensor([prompt.ids], device=model.device)
    end = ids.shape[1]
    at = end if question == INSIDE else prompt.question
    answer, begin = Answer(system.cache()), now(model.device)
    with system.reading():
        logits = forward(model, answer.cache, ids[:, :at], 0)
    while at < end:
        to = at + 1 if question == STEPS else end
        logits = forward(model, answer.cache, ids[:, at:to], at)
        at = to
    while True:
        token = logits.argmax()
        answer.tokens.append(int(token))
        last, begin = begin, now(model.device)
        if len(answer.tokens) == 1:
            answer.first_s = begin - last
        else:
            answer.between_ms.append(1e3 * (begin - last))
        yield answer
        logits = forward(model, answer.cache, token[None, None], at)
        at += 1


def output(model, tokenizer, system: System, prompt: Prompt, question: str) -> str:
    """The text of an answer, which ends early where nothing can change its score."""
    own = model.generation_config.eos_token_id
    stop = {*prompt.stop, *(own if isinstance(own, list) else [] if own is None else [own])}
    text = ""
    for answer in decode(model, system, prompt, question):
        count, ended = len(answer.tokens), answer.tokens[-1] in stop
        ended |= count >= prompt.max_new_tokens
        if ended or count % CHECK == 0:
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            if ended or prompt.scored(text) == 1:
                break
    return text
