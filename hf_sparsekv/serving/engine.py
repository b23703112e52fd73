"""Continuous batching over one sparse cache.

    with Engine(model, tokenizer, "accurate", offload=OffloadConfig()) as engine:
        handles = [engine.submit(prompt, Sampling(max_tokens=200)) for prompt in prompts]
        for piece in engine.stream("Once upon a time"):
            print(piece.text, end="")
        answers = [handle.result().text for handle in handles]

One thread owns the model and the GPU (:mod:`.loop`); any thread may submit, read and cancel. While an engine is open,
no other code may call its model. A tensor parallel model has an engine of its own kind
(:class:`hf_sparsekv_serve.ranks.TensorParallelEngine`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..cuda_graph.optimize import runner_of
from .grammar import Grammars
from .in_flight import Request
from .loop import Loop
from .opening import opened
from .prompt_logprobs import MOST
from .request import Busy, Closed, Handle, Output, Piece, TooLong
from .sampling import Sampling
from .stats import EngineStats
from .text import Detokenizer, eos_of
from .work import Work


class Engine:
    """Serves requests with one model, by continuous batching, until it is closed.

    Args:
        model: a causal language model of transformers on one device. All its layers must attend to their whole past.
        tokenizer: encodes prompts and decodes answers. None: prompts are token ids, and answers have no text.
        config: the selection method: a preset's name, or a configuration. The method must select for each step
            independently (two-level without ``lag``, progressive). None: the defaults.
        offload: keep full blocks in host memory: ``True``, or a configuration. Otherwise all KV is on the model's
            device.
        serving: limits and scheduling. None: the defaults.

    Attributes:
        max_length: most tokens of a prompt and its answer together: as asked for, or less if memory holds less.
        eos: tokens that end an answer; they are never part of its text.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the model, the method or a value is not supported; the message says why.
    """

    _work_type: type[Work] = Work  # an engine over several processes has another one

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: SparseConfig | str | None = None,
        offload: OffloadConfig | bool | None = None,
        serving: ServingConfig | None = None,
    ) -> None:
        self._work_type.check(model)
        self._refused: Counter[str] = Counter()
        self._closing = threading.Lock()
        self._ids = itertools.count(1)
        self.eos = eos_of(model, tokenizer)
        with contextlib.ExitStack() as stack:
            made = opened(model, config, offload, serving, stack)
            self.model, self.tokenizer, self.serving = model, tokenizer, made.serving
            self.max_length, self.vocabulary, self._blocks = made.max_length, made.vocabulary, made.blocks
            self._limit = made.limit
            self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, self.eos)
            work = self._work_type(model, made.rows, made.serving)
            stack.callback(work.close)  # if what follows fails; the loop closes it, too, and once is enough
            self._grammars = Grammars(tokenizer, self.vocabulary, self.eos)
            stack.callback(self._grammars.close)
            self._loop = Loop(work, self._blocks, self.eos, self.vocabulary, self._grammars)
            self._stack = stack.pop_all()
        self._cache, self._rows, self._intake = made.cache, made.rows, self._loop.intake
        self._loop.start()
        work.watch(self._loop.lost)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._intake.closed else "failed" if self.failed else "ready" if self.ready else "draining"
        return (
            f"Engine({type(self.model).__name__}, {self._cache.config.brief()}, max_rows={self.serving.max_rows}, "
            f"max_length={self.max_length}, {state})"
        )

    # ------------------------------------------------------------------ requests

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self._intake.refusal is None

    @property
    def max_waiting(self) -> int:
        """Most requests that may wait, from :class:`.ServingConfig`."""
        return self.serving.max_waiting

    @property
    def tokens_per_row(self) -> int:
        """Tokens of a prompt and its answer that memory has for each of ``max_rows`` requests at a time."""
        return max(1, self._blocks // self.serving.max_rows - 1) * self._cache.config.block_size

    @property
    def failed(self) -> BaseException | None:
        """The error of the decode step that ended the engine, or None. After it, no request is served."""
        return self._intake.failed

    def submit(self, prompt: str | Sequence[int] | Tensor, sampling: Sampling | None = None) -> Handle:
        """Submit a request and return its handle at once.

        Args:
            prompt: text, or token ids ``[n]``.
            sampling: None: the defaults of :class:`.Sampling`.

        Raises:
            ValueError: the prompt cannot be served; the message says why.
            Busy: too many requests wait.
            Closed: the engine takes no more requests.
            RuntimeError: the machine starts no process for a grammar.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling or None, got {type(sampling).__name__}")
        if (why := self._intake.refusal) is not None:  # before a long prompt is looked at
            self._refused["closed"] += 1
            raise Closed(f"the engine takes no requests: it {why}")
        ids = self._encode(prompt)
        total = len(ids) + sampling.max_tokens
        if total > self.max_length:
            raise TooLong(
                f"a prompt of {len(ids)} tokens and an answer of up to {sampling.max_tokens} are {total}, more than "
                f"the {self.max_length} that {self._limit}: shorten the prompt, or ask for fewer tokens",
                *(len(ids), sampling.max_tokens, self.max_length),
            )
        if (told := sampling.prompt_logprobs) is not None and len(ids) * (1 + told) > MOST:
            raise ValueError(
                f"prompt_logprobs must be at most {max(0, MOST // len(ids) - 1)} for a prompt of {len(ids)} tokens, "
                f"got {told}: {MOST:,} log probabilities of a prompt are kept at most. Shorten it, or ask for fewer"
            )
        if (most := max(sampling.stop_token_ids, default=0)) >= self.vocabulary:
            raise ValueError(f"stop_token_ids has token {most}, which is outside the vocabulary of {self.vocabulary}")
        if (most := max(dict(sampling.logit_bias), default=0)) >= self.vocabulary:
            raise ValueError(f"logit_bias has token {most}, which is outside the vocabulary of {self.vocabulary}")
        size = self._cache.config.block_size
        blocks = -(-total // size) + 1
        if self.serving.max_wait_s is not None and (wait := self._intake.wait_s) > self.serving.max_wait_s:
            self._refused["wait_s"] += 1
            raise Busy(
                f"it would wait some {wait:.1f} s, more than max_wait_s={self.serving.max_wait_s:g}",
                wait - self.serving.max_wait_s,
            )
        exact = self.serving.exact if sampling.exact is None else sampling.exact
        if exact and not self.serving.exact:
            raise ValueError(
                "exact is not there: open the engine with ServingConfig(exact=True), or the server with --exact"
            )
        try:
            constraint = self._grammars.constraint(sampling)
        except (Busy, Closed) as error:
            self._refused["grammars" if isinstance(error, Busy) else "closed"] += 1
            raise
        handle = Handle(f"request-{next(self._ids)}", len(ids), self._intake.look)
        text = None
        if self._detokenizer is not None:
            text = self._detokenizer.stream(ids, sampling.stop, sampling.text_tokens)
        elif sampling.stop:
            raise ValueError("stop strings need a tokenizer: give the engine one")
        keys: list[bytes] = []
        index = self._loop.blocks.index
        if index is not None and told is None:  # blocks that are full before the last tokens, which are recomputed
            config = self._cache.config
            last = max(2, config.window + config.max_draft)  # a single token would be a decode step
            keys = index.keys(ids, max(0, (len(ids) - last) // size))
        request = Request(handle, ids, sampling, time.perf_counter(), blocks, keys, text=text, constraint=constraint)
        request.exact = exact
        try:
            self._loop.submit(request)
        except (Busy, Closed) as error:
            self._refused["waiting" if isinstance(error, Busy) else "closed"] += 1
            raise
        return handle

    def submit_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling | None = None, **template: Any
    ) -> Handle:
        """Submit a conversation, formatted by the tokenizer's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            template: for ``tokenizer.apply_chat_template``.

        Raises:
            ValueError: there is no template, or it refuses the messages; see also :meth:`submit`.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: submit() a prompt instead")
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **template, "tokenize": True, "return_dict": False}
            )
        except Exception as error:  # templates raise whatever they like
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return self.submit(ids, sampling)

    def stream(self, prompt: str | Sequence[int] | Tensor, sampling: Sampling | None = None) -> Iterator[Piece]:
        """Yield the pieces of an answer as they arrive. Closing the iterator early cancels the request."""
        handle = self.submit(prompt, sampling)

        def pieces() -> Iterator[Piece]:
            try:
                yield Piece("", ())
                yield from handle
            finally:
                handle.cancel()

        found = pieces()
        next(found)  # start it: a generator that has not started never runs its `finally`
        return found

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int] | Tensor], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Output]:
        """Answer all prompts, in their order. It submits as many as the queue takes, and more as others finish.

        Args:
            sampling: one for all prompts, or one for each.

        Raises:
            Exception: the error of the first request that failed; the others are cancelled.
        """
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} samplings were given for {len(prompts)} prompts: give one, or one for each")
        handles: list[Handle] = []
        try:
            for prompt, one in zip(prompts, each):
                while True:
                    try:
                        handles.append(self.submit(prompt, one))
                        break
                    except Busy:
                        if all(handle.done for handle in handles):  # others' requests wait
                            time.sleep(0.01)
                        else:
                            next(handle for handle in handles if not handle.done).result()
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def _encode(self, prompt: str | Sequence[int] | Tensor) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt of text needs a tokenizer: give the engine one, or token ids")
            ids = self.tokenizer(prompt).input_ids
        elif isinstance(prompt, Tensor):
            if prompt.ndim != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
                raise ValueError(f"token ids must be integers [n], got {prompt.dtype} {list(prompt.shape)}")
            ids = prompt.tolist()
        else:
            ids = list(prompt)
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
                raise ValueError("a prompt must be text or token ids, which are integers")
        if not ids:
            raise ValueError("the prompt is empty: give it at least one token")
        known = self.model.get_input_embeddings().num_embeddings
        low, high = min(ids), max(ids)
        if low < 0 or high >= known:
            raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {known}")
        return ids

    # ------------------------------------------------------------------ the end

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until all requests in the engine have ended.

        Args:
            timeout: seconds to wait. None: no limit.

        Returns:
            Whether they have ended.
        """
        self._intake.drain()  # from here on also callers that have just seen `ready` are refused
        until = None if timeout is None else time.monotonic() + timeout
        while not (self._loop.idle or self.failed or self._intake.closed):
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Cancel all requests, end the threads, and restore the model. A second call does nothing.

        If several threads call it, the first one closes the engine, and the others wait for it.
        """
        self._intake.close()
        with self._closing, self._stack:  # the stack is empty the second time
            self._loop.stop()

    def stats(self) -> EngineStats:
        """Current state and counters of the engine. Cheap; any thread may call it."""
        loop, counts, rows = self._loop, self._loop.counts, self._rows
        running = list(loop.room.running)
        runner = runner_of(self.model)
        used, limit = (0, None) if self._cache.budget is None else (self._cache.budget.used, self._cache.budget.limit)
        return EngineStats(
            running=sum(request.candidate.runs for request in running),
            waiting=self._intake.queued,
            held=sum(not request.candidate.runs for request in running),
            prefilling=int(loop.order.reading is not None),
            requests=counts.requests,
            finished=counts.finished,
            cancelled=counts.cancelled,
            failed=counts.failed,
            refused=dict(self._refused),
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            cached_tokens=counts.cached_tokens,
            steps=counts.steps,
            step_s=counts.step_s,
            prefill_s=1e-3 * loop.work.pace.spent_ms,
            drafted=self._cache.row_table.exactness.drafted,
            accepted=self._cache.row_table.exactness.accepted,
            captures=0 if runner is None else runner.captures,
            device_tokens=rows.slots,
            device_tokens_used=rows.slots - rows.free_slots,
            host_bytes=used,
            host_limit=limit,
            link_bytes=loop.link.last(),
            queue_s=counts.queue_s.samples(),
            ttft_s=counts.ttft_s.samples(),
            between_s=counts.between_s.samples(),
            total_s=counts.total_s.samples(),
            prompts=loop.prompts.last(),
        )
