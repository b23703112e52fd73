"""One timed and streamed ``generate()`` call, with a sparse or a dense cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil
import torch
from rich.status import Status
from transformers import DynamicCache, TextStreamer

from ..attention.tap import QueryTap
from ..cache_name import generate_over
from ..cuda_graph.optimize import optimize, unoptimize
from ..generating import sparse
from ..serving.text import eos_of
from ..telemetry.timing import Timing, TokenTimer
from ..tuning.serving_plan import CHUNK
from .output import CommandError, messages


@dataclass(frozen=True)
class Run:
    """Result of one run: ``tokens`` without the prompt."""

    name: str
    prompt_tokens: int
    tokens: list[int]
    timing: Timing


class OtherWork:
    """Measures the processor time of other work, including other virtual machines, while a run is timed.

    Use it in a ``with`` statement around the run. The load average says less: it covers the last minute, and counts the
    command's own start and the previous run.
    """

    processors = 0.0  # average number of processors used by other work

    def __enter__(self) -> OtherWork:
        self._began, self._all, self._own = time.perf_counter(), _busy(), _own()
        return self

    def __exit__(self, *error) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-3)
        self.processors = max(0.0, (_busy() - self._all) - (_own() - self._own)) / seconds

    def disturbs(self, threads: int, processors: int) -> bool:
        """Whether a run of so many threads lacked more than a quarter of the processors that it could have used."""
        return self.processors + threads - processors > 0.25 * threads


def _busy() -> float:
    """Seconds that all processors have worked, of all processes; ``user`` holds what guests took."""
    try:
        times = psutil.cpu_times()
    except OSError:  # a sandbox does not tell
        return 0.0
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


class _Printer(TextStreamer):
    """Print text as it comes, without the tokens in ``eos``; a spinner turns until the first token."""

    def __init__(self, tokenizer, status: Status, eos: Iterable[int] = ()) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._status, self._eos = status, torch.tensor([*eos], dtype=torch.long)
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first put is the prompt
            self._status.stop()
        if self._puts > 1:  # the tokenizer may not mark them as special
            value = value[~torch.isin(value, self._eos)]
        super().put(value)


def encode(tokenizer, text: str, chat: bool | None, device: torch.device) -> dict[str, torch.Tensor]:
    """Token ids and mask of one prompt.

    Raises:
        CommandError: a chat template is asked for, but the tokenizer has none.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    if chat:
        if tokenizer.chat_template is None:
            raise CommandError("this model has no chat template: use --no-chat")
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def run_sparse(
    tokenizer,
    model,
    inputs: dict[str, torch.Tensor],
    cache,
    capture: bool,
    name: str = "token",
    mode: Mapping[str, Any] = MappingProxyType({}),
    **kwargs,
) -> Run:
    """Generate with one of our caches, called ``name``.

    ``capture``: with :func:`hf_sparsekv.optimize`, for the time of the run. Long prompts are read in chunks, as a
    server reads them, so that activations are bounded. ``mode``: arguments of ``sparse()``: exact mode, an audit.
    """
    if (n := inputs["input_ids"].shape[1]) > CHUNK:
        kwargs["prefill_chunk_size"] = -(-n // -(-n // CHUNK))  # equal sizes: a single last token would be a step
    model.set_attn_implementation("sparsekv")
    if capture:
        optimize(model)
    try:
        inside = sparse(model, cache.config, optimize=False, **mode) if mode else nullcontext()
        with inside, QueryTap(model):  # eager steps choose for the same queries as captured ones
            return _run(name, tokenizer, model, inputs, cache, kwargs)
    finally:
        unoptimize(model)


def run_dense(tokenizer, model, inputs: dict[str, torch.Tensor], **kwargs) -> Run:
    """Generate with transformers' own cache and attention."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # some models have no sdpa version
        model.set_attn_implementation("eager")
    return _run("dense", tokenizer, model, inputs, DynamicCache(config=model.config), kwargs)


def _run(name: str, tokenizer, model, inputs: dict[str, torch.Tensor], cache, kwargs: dict) -> Run:
    length = inputs["input_ids"].shape[1]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with messages.status(f"reading {length:,} tokens") as status:
        timer = TokenTimer(_Printer(tokenizer, status, eos_of(model, tokenizer)))
        out = model.generate(**inputs, **generate_over(cache), streamer=timer, pad_token_id=pad, **kwargs)
    return Run(name, length, out[0, length:].tolist(), timer.summary())
