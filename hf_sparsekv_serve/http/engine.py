"""The part of an engine that the server uses.

It is a protocol, so that the server runs without a model: replicas and tests use other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from hf_sparsekv.serving.request import Handle
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv.serving.stats import EngineStats


class Engine(Protocol):
    """The attributes of :class:`hf_sparsekv.Engine` that the server uses."""

    tokenizer: PreTrainedTokenizerBase | None
    max_length: int
    eos: frozenset[int]

    @property
    def max_waiting(self) -> int: ...

    @property
    def tokens_per_row(self) -> int: ...

    @property
    def ready(self) -> bool: ...

    @property
    def failed(self) -> BaseException | None: ...

    def submit(self, prompt: str | Sequence[int], sampling: Sampling) -> Handle: ...

    def stats(self) -> EngineStats: ...
