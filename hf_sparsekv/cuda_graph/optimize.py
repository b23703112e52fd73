"""``optimize(model)``: decode by replaying one captured CUDA graph of the whole forward pass.

Eager decode of an 8B model takes some 50 ms a token on an H200 up to 128k tokens (transformers' own, ``hf_dynamic`` in
benchmarks/results/step.csv), because Python launches some thousand kernels; the same forward replayed takes as long as
the GPU needs. What is captured is transformers' own forward with our attention: every buffer it touches has a fixed
address, and the rows of the cache live on the device, where a step takes them further and seals what becomes old. What
is left to the host is the next token, and a look whether the next step is like this one.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

import torch

from ..fusion.fuse import Fusion, fuse, why_not
from .runner import StepRunner

_changing = threading.RLock()  # one thread at a time changes models


def _say_what_stays(fusion: Fusion | None) -> None:
    """Warn about linear layers whose weights ``fuse`` has left as they are."""
    if fusion is not None and fusion.quantised:
        kinds = ", ".join(f"{n} {name}" for name, n in fusion.quantised.items())
        warnings.warn(
            f"quantised linear layers stay as they are ({kinds}): their projections are not joined, and their own "
            "library multiplies; norms, rotary embedding and activations are fused",
            stacklevel=3,
        )


def optimize(model: torch.nn.Module, fused: bool | None = None) -> torch.nn.Module:
    """Make ``model`` decode by replaying captured steps whenever it runs over one of our caches.

    Prefill, other caches and whatever cannot be captured run as before; the reason is said once. The logits of a step
    are valid until the next step (``generate()`` copies what it needs).

    Args:
        model: a causal language model loaded with ``attn_implementation="sparsekv"``.
        fused: run norms, rotary embedding and activations as few kernels, and parallel projections as one product, on
            this model only (:func:`hf_sparsekv.fusion.fuse.fuse`). Results change by rounding. ``None``: where the
            architecture is known and Triton is there.

    Returns:
        The model itself.

    Raises:
        ValueError: the model uses another attention implementation, or ``fused=True`` is not possible.
    """
    if model.config._attn_implementation != "sparsekv":
        raise ValueError(
            f"optimize() needs attn_implementation='sparsekv', the model has {model.config._attn_implementation!r}: "
            "call model.set_attn_implementation('sparsekv') first"
        )
    with _changing:
        if (runner := runner_of(model)) is not None:
            runner.watch.touch()
            return model
        runner = StepRunner(model)
        try:
            if fused is not False:
                reason = why_not(model)
                if reason is None:
                    runner.fusion = fuse(model)
                elif fused:
                    raise ValueError(f"fused=True is not possible: {reason}")
            runner.install()
        except BaseException:
            runner.remove()
            raise
        _say_what_stays(runner.fusion)
        return model


def unoptimize(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`optimize`."""
    with _changing:
        runner = runner_of(model)
        if runner is not None:
            runner.remove()
        return model


def runner_of(model: torch.nn.Module) -> StepRunner | None:
    """The runner that :func:`optimize` installed, with its counts ``captures`` and ``replays``."""
    return getattr(model.__dict__.get("forward"), "_sparsekv_runner", None)


@contextlib.contextmanager
def unnoticed(model: torch.nn.Module) -> Iterator[None]:
    """Inside, what this thread does to ``model`` is no change: hooks that do nothing in captured steps come or go."""
    runner = runner_of(model)
    with contextlib.nullcontext() if runner is None else runner.watch.ignoring():
        yield
