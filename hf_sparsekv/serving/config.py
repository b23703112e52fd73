"""What an engine may take, and how it shares the GPU between prompts and answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .request import _is_finite, _is_int, _require


@dataclass(frozen=True)
class ServingConfig:
    """How an engine serves.

    Attributes:
        max_rows: requests that are in the batch at a time, those that are held back included.
        max_length: tokens that a prompt and its answer may have together; None: the model's context.
        max_tokens: tokens that all requests in the batch may have together, each counted with the longest answer that
            it asked for. It is what memory is reserved for: on the GPU, or in host memory if the cache is offloaded.
            None: as many as fit.
        max_waiting: requests that may wait; more are refused. 0: whatever cannot start at once (a row and memory are
            free, and no other prompt is being read).
        max_wait_s: seconds that a request may be expected to wait; None: any.
        prefill_ms: milliseconds of the GPU's time for a prompt between two decode steps (an aim: no less than a layer
            of a chunk is run; without ``layer_segments`` no less than 512 tokens). While others wait behind it, up to
            four times as many; a prompt that takes no longer than that is read while a longer one waits. ``inf``: a
            whole chunk, and prompts one after the other.
        chunk: tokens of a prompt that a forward pass reads at most, 3 or more: a single one would be a decode step.
        layer_segments: a chunk's forward pass is cut between layers, so that chunks may be long (SparseServe, section
            3.4). False: chunks are as short as ``prefill_ms`` asks, which reads an offloaded past more often.
        prefix_cache: full blocks of prompts and answers stay, as long as there is room for them, for prompts that begin
            alike.
        working_set: requests are held back while what they select does not fit the GPU beside the others'
            (SparseServe, section 3.3). Offloaded caches only.

    Raises:
        ValueError: a field has another value or type than allowed.
    """

    max_rows: int = 32
    max_length: int | None = None
    max_tokens: int | None = None
    max_waiting: int = 256
    max_wait_s: float | None = None
    prefill_ms: float = 20.0
    chunk: int = 16384
    layer_segments: bool = True
    prefix_cache: bool = True
    working_set: bool = True

    def __post_init__(self) -> None:
        least = {"max_rows": 1, "max_length": 1, "max_tokens": 1, "max_waiting": 0, "chunk": 3}
        for name, lowest in least.items():
            value, optional = getattr(self, name), name in ("max_length", "max_tokens")
            _require(
                (optional and value is None) or (_is_int(value) and value >= lowest),
                f"{name} must be an integer >= {lowest}{' or None' if optional else ''}, got {value!r}",
            )
        _require(
            self.max_wait_s is None or (_is_finite(self.max_wait_s) and self.max_wait_s >= 0),
            f"max_wait_s must be None or a number >= 0, got {self.max_wait_s!r}",
        )
        _require(
            not isinstance(self.prefill_ms, bool)
            and isinstance(self.prefill_ms, int | float)
            and self.prefill_ms > 0
            and not math.isnan(self.prefill_ms),
            f"prefill_ms must be a number > 0, got {self.prefill_ms!r}",
        )
        for name in ("layer_segments", "prefix_cache", "working_set"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be True or False, got {value!r}")
