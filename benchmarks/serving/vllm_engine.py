"""vLLM in this process, on random weights of the same shape: requests are added as they arrive, ``step()`` in a loop.

Written for vLLM 0.26 (V1 engine, FlashAttention). It needs no more than ``import vllm``; ``--vllm DIR`` gives a folder
that holds it. The engine lives in a thread of its own, where it is made, too.
"""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_sparsekv.serving.request import Handle, Output
from hf_sparsekv.serving.sampling import Sampling

from ..baselines import NotRun
from .settings import Settings

CAPTURED = (1, 2, 4, 8, 16, 32, 64)  # rows
DRAINED = 3  # steps after the last request, whose results are still in flight


@dataclass
class Open:
    """A request that has not ended.

    Args:
        handle: whose.
        submitted: when.
        inner: vLLM's name for it.
        tokens, times: so far.
    """

    handle: Handle
    submitted: float
    inner: str = ""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class VllmSystem:
    """A :class:`.client.System`.

    Args:
        settings: vLLM gets ``kv_gpu`` bytes, ``chunk`` tokens a step, no prefix cache.
        site: a folder that holds vLLM, or None if it is installed.

    Raises:
        NotRun: there is no vLLM here.
    """

    def __init__(self, settings: Settings, site: Path | None = None) -> None:
        self.settings = settings
        self._new: queue.SimpleQueue[tuple[Open, list[int], Sampling] | None] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory()
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._open: dict[str, Open] = {}  # by our id
        self._scheduled: dict[str, float] = {}  # by vLLM's id
        _environment(site)
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed

    def submit(self, ids: Sequence[int], sampling: Sampling) -> Handle:
        """Take a request.

        Raises:
            RuntimeError: the engine has failed.
        """
        if self._failed is not None:
            raise RuntimeError(f"vLLM has failed: {self._failed}")
        handle = Handle(f"r{time.perf_counter_ns()}", len(ids))
        opened = self._open[handle.id] = Open(handle, time.perf_counter())
        self._new.put((opened, list(ids), sampling))
        return handle

    def close(self) -> None:
        """End the thread."""
        self._new.put(None)
        self._thread.join()
        self._folder.cleanup()

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            self._engine = self._make()
        except BaseException as error:
            self._failed = error
            self._ready.set()
            return
        self._ready.set()
        try:
            self._serve()
        except BaseException as error:
            self._failed = error
            for opened in list(self._open.values()):
                opened.handle.fail(error)

    def _make(self):
        try:
            import vllm  # noqa: F401
            from vllm import LLM
        except ImportError as error:
            raise NotRun(f"vLLM cannot be imported ({error}): install it, or give its folder with --vllm") from error
        settings, folder = self.settings, self._folder.name
        config = settings.config
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        config.save_pretrained(folder)
        rows = settings.max_rows
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            max_model_len=settings.max_length,
            max_num_seqs=rows,
            max_num_batched_tokens=max(settings.chunk, rows),
            kv_cache_memory_bytes=settings.gpu_tokens * settings.token_bytes,
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": [*(n for n in CAPTURED if n < rows), rows]},
            attention_config={"backend": "FLASH_ATTN"},
            seed=0,
        ).llm_engine

    def _serve(self) -> None:
        engine, left = self._engine, 0
        while True:
            if not self._take(wait=not (left or engine.has_unfinished_requests())):
                return
            self._drop_cancelled()
            if engine.has_unfinished_requests():
                left = DRAINED
            elif left:
                left -= 1
            else:
                continue
            begin = time.perf_counter()
            found = engine.step()
            now = time.perf_counter()
            for running in engine.engine_core.engine_core.scheduler.running:
                self._scheduled.setdefault(running.request_id, begin)
            for output in found:
                self._told(output, now)

    def _take(self, wait: bool) -> bool:
        """Add what was submitted; False if that was all that ever will be."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while True:
            try:
                item = self._new.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                return False
            opened, ids, sampling = item
            params = SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                ignore_eos=sampling.ignore_eos,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            try:
                prompt = {"prompt_token_ids": ids}
                opened.inner = self._engine.add_request(opened.handle.id, prompt, params)
            except ValueError as error:  # too long
                del self._open[opened.handle.id]
                opened.handle.fail(error)

    def _drop_cancelled(self) -> None:
        gone = [id for id, opened in self._open.items() if opened.handle.cancelled.is_set()]
        if gone:
            self._engine.abort_request(gone)
        for id in gone:
            self._end(id, "cancelled", time.perf_counter())

    def _told(self, output, now: float) -> None:
        opened = self._open.get(output.request_id)
        if opened is None:  # cancelled
            return
        tokens = [token for one in output.outputs for token in one.token_ids]
        opened.tokens += tokens
        opened.times += [now] * len(tokens)
        if output.finished:
            self._end(output.request_id, output.outputs[0].finish_reason or "length", now)

    def _end(self, id: str, how: str, now: float) -> None:
        opened = self._open.pop(id)
        first, last = (opened.times[0], opened.times[-1]) if opened.times else (now, now)
        opened.handle.finish(
            Output(
                text="",
                token_ids=tuple(opened.tokens),
                finish_reason=how,
                prompt_tokens=opened.handle.prompt_tokens,
                # One that began and ended within a step is not seen running.
                queued_s=self._scheduled.pop(opened.inner, first) - opened.submitted,
                ttft_s=first - opened.submitted,
                total_s=last - opened.submitted,
                token_times=tuple(opened.times),
            )
        )


def _environment(site: Path | None) -> None:
    """One process, no network, no reports; and where vLLM is."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_PLUGINS": "",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    if site is not None:
        folder = str(site.resolve())
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        _preload_driver()


def _preload_driver() -> None:
    """The driver's library, which vLLM's extensions name as needed and some machines keep where it is not found."""
    import ctypes
    import glob

    import torch  # noqa: F401 (brings the runtime)

    for name in (
        "libcuda.so.1",
        *glob.glob("/usr/local/nvidia/lib*/libcuda.so.1"),
        *glob.glob("/usr/lib/*/libcuda.so.1"),
    ):
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
