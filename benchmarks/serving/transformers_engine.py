"""Transformers' continuous batching (``generate_batch``'s manager): requests are added as they arrive.

Attention is ``paged|sdpa``: the flash kernels that its fast path wants are no dependency of ours; with them it is
several times as quick by its own figures (transformers #42839), which rows of this system do not show.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_sparsekv.serving.request import Handle, Output
from hf_sparsekv.serving.sampling import Sampling

from .settings import Settings

BLOCK = 256  # tokens of a page: transformers' default
POLL = 0.05  # seconds


class TransformersSystem:
    """A :class:`.client.System`.

    Args:
        model: with ``paged|sdpa`` from here on.
        settings: as many pages as ``kv_gpu`` bytes, ``chunk`` tokens a step at most; no prefix sharing.
    """

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._attention = model.config._attn_implementation
        self._model = model
        model.set_attn_implementation("paged|sdpa")
        config = ContinuousBatchingConfig(
            block_size=BLOCK,
            num_blocks=settings.gpu_tokens // BLOCK,
            max_batch_tokens=max(settings.chunk, settings.max_rows),
            max_requests_per_batch=settings.max_rows,
            allow_block_sharing=False,
        )
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
        )
        self._manager.warmup()
        self._manager.start()
        self._handles: dict[str, tuple[Handle, float]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="results", daemon=True)
        self._thread.start()

    def submit(self, ids: Sequence[int], sampling: Sampling) -> Handle:
        """Take a request.

        Raises:
            ValueError: it is longer than ``max_length``.
            RuntimeError: the manager has ended.
        """
        if len(ids) + sampling.max_tokens > self.settings.max_length:
            raise ValueError(f"{len(ids)} + {sampling.max_tokens} tokens are more than {self.settings.max_length}")
        if not self._manager.is_running():
            raise RuntimeError("the thread of transformers' manager has ended")
        handle = Handle(f"r{time.perf_counter_ns()}", len(ids))
        with self._lock:
            self._handles[handle.id] = handle, time.perf_counter()
        self._manager.add_request(
            list(ids), request_id=handle.id, max_new_tokens=sampling.max_tokens, record_timestamps=True, eos_token_id=-1
        )
        return handle

    def _listen(self) -> None:
        while not self._closing.is_set():
            found = self._manager.get_result(timeout=POLL)
            if found is not None and found.is_finished():
                self._finish(found)
            elif found is None and not self._manager.is_running():
                break
        with self._lock:
            left, self._handles = list(self._handles.values()), {}
        for handle, _ in left:
            handle.fail(RuntimeError("the thread of transformers' manager has ended"))

    def _finish(self, found) -> None:
        with self._lock:
            handle, submitted = self._handles.pop(found.request_id)
        if found.error is not None:
            handle.fail(RuntimeError(found.error))
            return
        times = tuple(found.timestamps)
        handle.finish(
            Output(
                text="",
                token_ids=tuple(found.generated_tokens),
                finish_reason="length",
                prompt_tokens=handle.prompt_tokens,
                queued_s=found.lifespan[0] - submitted,
                ttft_s=times[0] - submitted,
                total_s=times[-1] - submitted,
                token_times=times,
            )
        )

    def close(self) -> None:
        """End the threads, and give the model its attention back."""
        self._closing.set()
        self._thread.join()
        self._manager.stop(block=True, hard_stop=True)
        self._manager.destroy()
        self._model.set_attn_implementation(self._attention)
