"""A request's settings, and how errors quote what a client gave.

Apart from :mod:`.request`, which has results. Nothing here needs torch or knows the engine.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_sparsekv_config.options import is_int, require

MAX_STOPS = 4  # as OpenAI's API
MAX_STOP = 1024  # characters of a stop string: each character of an answer is compared, and tables are kept
# Logits are float32 when settings are applied. Within these bounds neither overflows, and a masked token stays masked.
MAX_TEMPERATURE = 100.0
PENALTIES = 0.01, 100.0
COUNTED_PENALTIES = -2.0, 2.0  # as OpenAI's API, like the three below
BIASES = -100.0, 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR = 1 << 16  # characters of a schema or a grammar: compiling longer ones takes long
DIGITS = 80  # of an integer that an error quotes


def is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


_QUOTED = reprlib.Repr()
_QUOTED.maxstring = _QUOTED.maxother = 80
_QUOTED.maxlevel = 2


def shown(value: object) -> str:
    """A value as an error quotes it: briefly, whatever its size."""
    if isinstance(value, int) and abs(value) >= 10**DIGITS:  # converting it takes quadratic time, or fails
        return f"an integer of more than {DIGITS} digits"
    return _QUOTED.repr(value)


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
        stop: up to four strings of up to 1,024 characters; a single string is allowed. The text ends before the first
            one that appears. Special tokens are no text, but a string that contains a special token's text matches it.
        json_schema: the answer is JSON that follows this schema: JSON itself, as text or as a mapping. Needs the extra
            ``structured``, as the next one.
        grammar: the answer follows this grammar, in llguidance's dialect of Lark.
        ignore_eos: continue after the end-of-sequence token, up to ``max_tokens``.
        exact: the tokens are those of full attention (docs/exact.md), of an engine with ``ServingConfig(exact=True)``.
            None: as that says.

    Raises:
        ValueError: a field has a value or type that is not allowed.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    ignore_eos: bool = False
    exact: bool | None = None

    def __post_init__(self) -> None:
        require(
            is_int(self.max_tokens) and self.max_tokens >= 1,
            f"max_tokens must be an integer >= 1, got {shown(self.max_tokens)}",
        )
        require(
            is_finite(self.temperature) and self.temperature >= 0,
            f"temperature must be a finite number >= 0 (0: greedy), got {shown(self.temperature)}",
        )
        require(
            self.temperature <= MAX_TEMPERATURE,
            f"temperature must be at most {MAX_TEMPERATURE:g}, got {shown(self.temperature)}",
        )
        require(
            is_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1] (1: all), got {shown(self.top_p)}"
        )
        require(
            is_int(self.top_k) and self.top_k >= 0, f"top_k must be an integer >= 0 (0: all), got {shown(self.top_k)}"
        )
        require(
            is_finite(self.min_p) and 0 <= self.min_p <= 1,
            f"min_p must be in [0, 1] (0: all), got {shown(self.min_p)}",
        )
        require(
            is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty must be a finite number > 0 (1: none), got {shown(self.repetition_penalty)}",
        )
        low, high = PENALTIES
        require(
            low <= self.repetition_penalty <= high,
            f"repetition_penalty must be from {low:g} to {high:g} (1: none), got {shown(self.repetition_penalty)}",
        )
        low, high = COUNTED_PENALTIES
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            require(
                is_finite(value) and low <= value <= high,
                f"{name} must be from {low:g} to {high:g} (0: none), got {shown(value)}",
            )
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        require(
            self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            f"logprobs must be None or an integer from 0 to {MAX_LOGPROBS}, got {shown(self.logprobs)}",
        )
        require(
            self.seed is None or (is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            f"seed must be None or a signed 64-bit integer, got {shown(self.seed)}",
        )
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        require(
            self.grammar is None or isinstance(self.grammar, str),
            f"grammar must be text or None, got {shown(self.grammar)}",
        )
        for name in ("json_schema", "grammar"):
            given = getattr(self, name)
            require(
                given is None or len(given) <= MAX_GRAMMAR,
                f"{name} may have {MAX_GRAMMAR:,} characters at most, got {len(given or ''):,}",
            )
        require(self.grammar is None or self.json_schema is None, "grammar and json_schema are both given: take one")
        require(
            self.exact is None or isinstance(self.exact, bool), f"exact must be true or false, got {shown(self.exact)}"
        )
        require(isinstance(self.ignore_eos, bool), f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")
        require(
            not self.ignore_eos or (self.grammar is None and self.json_schema is None),
            "ignore_eos goes without grammar and json_schema: nothing may follow the end of what they describe",
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
    low, high = BIASES
    for token, bias in pairs:
        require(is_int(token) and token >= 0, f"logit_bias must have token ids, got {shown(token)}")
        require(
            is_finite(bias) and low <= bias <= high,
            f"logit_bias must have biases from {low:g} to {high:g}, got {shown(bias)}",
        )
    return tuple(sorted((token, float(bias)) for token, bias in dict(pairs).items()))


def _stops(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple: one, several, or none."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else None
    require(
        stops is not None and all(isinstance(one, str) for one in stops), f"stop must be strings, got {shown(stop)}"
    )
    require(all(stops), "stop must not have an empty string: it would end the answer at once")
    require(len(stops) <= MAX_STOPS, f"stop may have {MAX_STOPS} strings at most, got {len(stops)}")
    longest = max(map(len, stops), default=0)
    require(longest <= MAX_STOP, f"stop may have strings of {MAX_STOP} characters at most, got {longest}")
    return stops
