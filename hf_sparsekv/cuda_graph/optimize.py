"""``optimize(model)``: decode by replaying one captured CUDA graph of the whole forward pass.

Eager decode of an 8B model takes some 50 ms a token on an H200, up to 128k tokens. Python launches some thousand
kernels (transformers' own, ``hf_dynamic`` in benchmarks/results/step.csv). A replay of the same forward takes only the
GPU's time.

The graph holds transformers' own forward with our attention. Every buffer has a fixed address. The cache's lengths are
on the device, where each step advances them and moves old tokens into full blocks. The host only supplies the next
token, and checks whether the next step equals this one.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

import torch

from ..fusion.fuse import Fusion, fuse, why_not
from .runner import StepRunner

_changing = threading.RLock()  # serialises changes of models


def _say_what_stays(fusion: Fusion | None) -> None:
    """Warn about linear layers whose weights ``fuse`` has not changed."""
    if fusion is not None and fusion.quantised:
        kinds = ", ".join(f"{n} {name}" for name, n in fusion.quantised.items())
        warnings.warn(
            f"quantised linear layers stay as they are ({kinds}): their projections are not joined, and their own "
            "library multiplies; norms, rotary embedding and activations are fused",
            stacklevel=3,
        )


def optimize(model: torch.nn.Module, fused: bool | None = None) -> torch.nn.Module:
    """Make ``model`` decode by replaying captured steps whenever it runs over one of our caches.

    Experts run by our kernels (``experts_implementation="sparsekv"``), in all passes.

    Short prompts are captured too, once some of a size have been read. Longer ones and other caches run as before, and
    so do steps that cannot be captured, with one warning that says why. The logits of a step are valid until the next
    step (``generate()`` copies what it needs).

    Args:
        model: a causal language model loaded with ``attn_implementation="sparsekv"``.
        fused: fuse norms, rotary embedding and activations into few kernels, and parallel projections into one product
            (:func:`hf_sparsekv.fusion.fuse.fuse`). It affects this model only, and changes results by rounding.
            ``None``: if the architecture is known and Triton is available.

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
    """Inside, ignore changes by this thread: it adds or removes hooks that do nothing in captured steps."""
    runner = runner_of(model)
    with contextlib.nullcontext() if runner is None else runner.watch.ignoring():
        yield
