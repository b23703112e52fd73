"""Answer the prompts by kvpress's presses and transformers' own caches, in kvpress's environment.

    python -m benchmarks.peers.run_kvpress --model DIR --prompts FILE --systems full int4:hqq SnapKV:0.25

A system is ``full`` (DynamicCache, sdpa), ``int4:BACKEND`` (QuantizedCache by hqq or quanto), or ``PRESS:KEPT``.
``PRESS`` is a class of kvpress without "Press"; ``KEPT`` is the share of keys and values that it keeps. Nothing here
imports hf_sparsekv, which wants another transformers.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache
from transformers.utils.logging import disable_progress_bar

from .answering import Sizes, System
from .measuring import parser, run
from .row_file import versions

PRESSES = ("SnapKV", "ExpectedAttention", "KVzip", "StreamingLLM")
SYSTEMS = ("full", "int4:hqq", *(f"{press}:{kept}" for press in PRESSES for kept in ("0.5", "0.25")))
# The axes that transformers recommends for each backend.
AXES = {"hqq": 1, "quanto": 0}


def tensor_bytes(held: object) -> int:
    """Bytes of all tensors in lists, dictionaries and quantised tensors."""
    if isinstance(held, dict):
        return sum(map(tensor_bytes, held.values()))
    if isinstance(held, list | tuple):
        return sum(map(tensor_bytes, held))
    if not isinstance(held, Tensor):
        return 0
    parts = [getattr(held, name, None) for name in ("_data", "_scale", "_shift")]  # quanto's; their shape is unpacked
    inner = [part for part in parts if isinstance(part, Tensor) and part is not held]
    return tensor_bytes(inner) if inner else held.untyped_storage().nbytes()


def masked_bytes(model) -> int:
    """Bytes of keys and values that a press masks rather than drops. Its layers read them; others need not."""
    total = 0
    for layer in model.model.layers:
        masked = getattr(layer.self_attn, "masked_key_indices", None)
        if masked is not None:
            total += len(masked[0]) * 2 * layer.self_attn.head_dim * model.dtype.itemsize
    return total


def sizes(model, cache) -> Sizes:
    """Every step reads all that is held, but for what is masked."""
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    held = sum(tensor_bytes(getattr(layer, name, None)) for layer in cache.layers for name in names)
    return Sizes(held, 0, held - masked_bytes(model))


def press_of(text: str):
    """``PRESS:KEPT``.

    Raises:
        SystemExit: kvpress has no such press, or it keeps no share between 0 and 1.
    """
    import kvpress

    name, _, kept = text.partition(":")
    known = sorted(one.removesuffix("Press") for one in dir(kvpress) if one.endswith("Press"))
    try:
        share = float(kept)
    except ValueError:
        share = 0.0
    if name not in known or not 0 < share <= 1:
        raise SystemExit(
            f"error: system {text!r}: write full, int4:hqq, int4:quanto, or PRESS:KEPT with a share in (0, 1]; "
            f"presses are {', '.join(known)}"
        )
    return getattr(kvpress, f"{name}Press")(compression_ratio=1 - share)


@contextmanager
def make(name: str, model) -> Iterator[System]:
    """A system by its name."""
    method, _, of = name.partition(":")
    held = partial(sizes, model)
    if name == "full":
        yield System("transformers:full", DynamicCache, held)
    elif method == "int4" and of in AXES:
        cache = partial(QuantizedCache, of, model.config, nbits=4, axis_key=AXES[of], axis_value=AXES[of])
        yield System(f"transformers:{name}", cache, held)
    else:
        press = press_of(name)
        try:
            yield System(f"kvpress:{name}", DynamicCache, held, reading=lambda: press(model))
        finally:
            for layer in model.model.layers:  # the next system masks nothing
                layer.self_attn.masked_key_indices = None


def load(args):
    """Model and tokenizer."""
    disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.model)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    args = parser(__doc__, SYSTEMS).parse_args(argv)
    more = {}
    for package in ("kvpress", "hqq", "optimum-quanto"):
        try:
            more[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return run(args, load, make, versions(**more))


if __name__ == "__main__":
    raise SystemExit(main())
