"""Limits of an engine, and how it shares the GPU between prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .options import Count, Number, Options, Positive

MOST_ROWS = 4096  # in each step, the host does something for each


@dataclass(frozen=True)
class ServingConfig(Options):
    """Limits and scheduling of an :class:`.Engine`.

    Attributes:
        max_rows: most requests in the batch at a time, including those that are held back; 4,096 at most. Each takes a
            millisecond of the engine's start.
        max_length: most tokens of a prompt and its answer together. None: the model's context.
        max_tokens: most tokens of all requests in the batch together. Each request counts with the longest answer that
            it asked for. The engine reserves memory for so many tokens: on the GPU, or in host memory if the cache is
            offloaded. None: as many as fit.
        max_waiting: most requests that may wait; the engine refuses more. 0: it refuses a request that cannot start at
            once. To start, a request needs a free row and memory, and no other prompt may be in prefill.
        max_wait_s: longest expected wait in seconds; the engine refuses a request that would wait longer. None: no
            limit.
        prefill_ms: target of GPU milliseconds for prefill between two decode steps. The least is one layer of a chunk,
            or without ``layer_segments`` 512 tokens, 1,024 of a sparse prompt. While other prompts wait, prefill takes
            up to four times as long.
            A prompt that fits that time is read while a longer one waits. ``inf``: read a whole chunk at a time, and
            prompts one after the other.
        chunk: most tokens of a prompt that a forward pass reads, 3 or more. (A single token would be a decode step.)
        layer_segments: pause a chunk's forward pass between layers, so that chunks may be long (SparseServe, section
            3.4). False: chunks are as short as ``prefill_ms`` asks, which reads an offloaded past more often.
        prefix_cache: keep full blocks of prompts and answers, while memory allows, for prompts with the same prefix.
        working_set: hold a request back while its working set does not fit the GPU together with those of the others
            (SparseServe, section 3.3). Offloaded caches only.

        exact: the tokens of requests are those of full attention (docs/exact.md). A request may say ``exact=False``.
            Resident caches only.
        flash_attention_4: read prompts by FlashAttention 4, in the whole process while the engine is open. The engine
            raises the errors of :func:`.flash_attention_4`. The engine's start compiles its kernels.

    Raises:
        ValueError: a field has another value or type than allowed.
    """

    max_rows: Annotated[int, Number(1, MOST_ROWS)] = 32
    max_length: Positive | None = None
    max_tokens: Positive | None = None
    max_waiting: Count = 256
    max_wait_s: Annotated[float, Number(0, unit="s")] | None = None
    prefill_ms: Annotated[float, Number(0, above=True, infinite=True, unit="ms")] = 20.0
    chunk: Annotated[int, Number(3)] = 16384
    layer_segments: bool = True
    prefix_cache: bool = True
    working_set: bool = True
    exact: bool = False
    flash_attention_4: bool = False
