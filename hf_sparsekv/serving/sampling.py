"""A request's settings.

Results are in :mod:`.request`. Nothing here needs torch or knows the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from hf_sparsekv_config.options import (
    Alternative,
    Count,
    Number,
    Positive,
    Share,
    check,
    is_int,
    require,
    shown,
)

MAX_STOPS = 32  # OpenAI's API has 4, evaluations ask for more
MAX_TEXT_TOKENS = 128  # special tokens that are text, and further ends
MAX_STOP = 1024  # characters of a stop string: each character of an answer is compared, and tables are kept
# Logits are float32 when settings are applied. Within these bounds neither overflows, and a masked token stays masked.
MAX_TEMPERATURE = 100.0
PENALTIES = Number(0.01, 100.0)
COUNTED_PENALTIES = Number(-2.0, 2.0)  # as OpenAI's API, like the three below
BIASES = Number(-100.0, 100.0)
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR = 1 << 16  # characters of a schema or a grammar: compiling longer ones takes long


@dataclass(frozen=True)
class Sampling:
    """Sampling and stopping of one request. Names and meanings are those of vLLM's ``SamplingParams``.

    Attributes:
        max_tokens: most tokens of the answer, 1 or more.
        temperature: from 0 to 100. 0 is greedy: it takes the likeliest token and ignores the other fields.
        top_p: draw from the likeliest tokens that together have this share of the probability, in (0, 1].
        top_k: draw from this many likeliest tokens. 0: from all.
        min_p: drop tokens whose probability is below this share of the likeliest one's, in [0, 1].
        repetition_penalty: CTRL's penalty, from 0.01 to 100. Above 1, tokens of the prompt and of the answer so far
            become less likely.
        frequency_penalty: from -2 to 2; subtracted from a token's logit as often as the answer has it.
        presence_penalty: from -2 to 2; subtracted once from the logits of tokens that the answer has.
        logit_bias: what is added to the logits of tokens: ``{id: bias}`` of up to 1,024 tokens, from -100 to 100.
        logprobs: log probabilities of each token, and of this many likeliest ones, 0 to 20. ``None``: none. They are
            the model's own, before all that is asked of them.
        seed: seed of this request's draws, a signed 64-bit integer. ``None``: a new one for each request.
        prompt_logprobs: log probabilities of the prompt's tokens, and of this many likeliest ones, 0 to 20. ``None``:
            none. Such a prompt is read whole, without the prefix cache.
        stop: up to 32 strings of up to 1,024 characters; a single string is allowed. The text ends before the first
            one that appears. Special tokens are no text, but a string that contains a special token's text matches it.
        text_tokens: up to 128 special tokens that are text of the answer. Some models write calls of tools with them.
        stop_token_ids: up to 128 further tokens that end the answer, and are not in its text.
        min_tokens: tokens of the answer before one may end it; stop strings may still.
        json_schema: the answer is JSON that follows this schema: JSON itself, as text or as a mapping. Needs the extra
            ``structured``, as the next one.
        grammar: the answer follows this grammar, in llguidance's dialect of Lark, or in llama.cpp's GBNF.
        ignore_eos: continue after the end-of-sequence token, up to ``max_tokens``.
        exact: the tokens are those of full attention (docs/exact.md), of an engine with ``ServingConfig(exact=True)``.
            None: as that says.

    Raises:
        ValueError: a field has a value or type that is not allowed.
    """

    max_tokens: Positive = 256
    temperature: Annotated[float, Number(0, MAX_TEMPERATURE)] = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Annotated[float, Number(0, 1)] = 0.0
    repetition_penalty: Annotated[float, PENALTIES] = 1.0
    frequency_penalty: Annotated[float, COUNTED_PENALTIES] = 0.0
    presence_penalty: Annotated[float, COUNTED_PENALTIES] = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: Annotated[int, Number(0, MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Number(0, MAX_LOGPROBS)] | None = None
    seed: Annotated[int, Number(-(2**63), 2**63 - 1, unit="64-bit")] | None = None
    stop: tuple[str, ...] = ()
    text_tokens: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: Count = 0
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    ignore_eos: bool = False
    exact: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop", _stops(self.stop))
        for name in ("text_tokens", "stop_token_ids"):
            object.__setattr__(self, name, _tokens(name, getattr(self, name)))
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        check(self)
        for name in ("json_schema", "grammar"):
            given = getattr(self, name)
            require(
                given is None or len(given) <= MAX_GRAMMAR,
                f"{name} may have {MAX_GRAMMAR:,} characters at most, got {len(given or ''):,}",
            )
        require(self.grammar is None or self.json_schema is None, "grammar and json_schema are both given: take one")
        for name in ("ignore_eos", "min_tokens"):
            require(
                not getattr(self, name) or (self.grammar is None and self.json_schema is None),
                f"{name} goes without grammar and json_schema: nothing may follow the end of what they describe",
            )
        require(
            self.min_tokens <= self.max_tokens,
            f"min_tokens must be at most max_tokens={shown(self.max_tokens)}, got {shown(self.min_tokens)}",
        )


def _schema(given: object) -> str | None:
    """A JSON schema as text."""
    if given is None:
        return None
    try:
        found = json.loads(given) if isinstance(given, str) else given
        require(isinstance(found, Mapping), f"json_schema must be a JSON object, got {shown(given)}")
        return json.dumps(found)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"json_schema must be JSON: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"json_schema must be JSON: {error}") from None


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Biases as pairs, by token."""
    try:
        pairs = [(token, bias) for token, bias in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must be a mapping of token ids to biases, got {shown(given)}") from None
    require(len(pairs) <= MAX_BIASES, f"logit_bias may have {MAX_BIASES:,} tokens at most, got {len(pairs):,}")
    for token, bias in pairs:
        require(is_int(token) and token >= 0, f"logit_bias must have token ids, got {shown(token)}")
        low, high = BIASES.low, BIASES.high
        require(
            Alternative(float, BIASES).holds(bias),
            f"logit_bias must have biases from {low:g} to {high:g}, got {shown(bias)}",
        )
    return tuple(sorted((token, float(bias)) for token, bias in dict(pairs).items()))


def _tokens(name: str, given: object) -> tuple[int, ...]:
    """Token ids of a field."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise ValueError(f"{name} must be token ids, got {shown(given)}")
    found = tuple(given)
    require(len(found) <= MAX_TEXT_TOKENS, f"{name} may have {MAX_TEXT_TOKENS} tokens at most, got {len(found)}")
    for token in found:
        require(is_int(token) and token >= 0, f"{name} must have token ids, got {shown(token)}")
    return found


def _stops(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple: one, several, or none."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else None
    if stops is None or not all(isinstance(one, str) for one in stops):
        raise ValueError(f"stop must be strings, got {shown(stop)}")
    require(all(stops), "stop must not have an empty string: it would end the answer at once")
    require(len(stops) <= MAX_STOPS, f"stop may have {MAX_STOPS} strings at most, got {len(stops)}")
    longest = max(map(len, stops), default=0)
    require(longest <= MAX_STOP, f"stop may have strings of {MAX_STOP} characters at most, got {longest}")
    return stops
