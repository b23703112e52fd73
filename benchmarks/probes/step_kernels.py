"""Where the time of a captured step goes: its kernels, and what each of a layer's adds to it.

    python -m benchmarks.probes.step_kernels [--shapes 1x32k 8x32k] [--variants captured_dense token_only]

Milliseconds of the captured step alone (median, quartiles), random weights and keys; the longest kernels by their sums;
and those of a layer in the middle, in their order: how long each took, and how much later it ended than all before it.
A kernel is launched before the one in front of it has ended and then waits, so only the latter adds up to the layer.
"""

from __future__ import annotations

import argparse

import torch

from ..baselines import VARIANTS, Variant, find, make_cache, prepare
from ..decoding import Steps, capture_seconds, free, replay_ms
from ..filling import fill_cache
from ..kernels import Kernel, launched, table
from ..shapes import known_config, parse_model, parse_shape, random_model

SPARE = 200
SHOWN = 16  # kernels: a layer and some


def quartiles(values: list[float]) -> str:
    found = torch.tensor(values).quantile(torch.tensor([0.5, 0.25, 0.75])).tolist()
    return "{:.3f} ms ({:.3f} to {:.3f})".format(*found)


def added(kernels: list[Kernel], first: int, count: int = SHOWN) -> list[tuple[Kernel, float]]:
    """``count`` kernels from ``first`` on, and microseconds that each ended behind all before it."""
    ends, found = max((one.begin + one.us for one in kernels[:first]), default=0.0), []
    for one in kernels[first : first + count]:
        found.append((one, one.begin + one.us - ends))
        ends = max(ends, one.begin + one.us)
    return found


def measure(model, variant: Variant, batch: int, context: int) -> None:
    """One cache, filled and captured."""
    prepare(model, variant, fused=True)
    cache = make_cache(model, variant, context + SPARE)
    step = Steps(model, cache, batch, SPARE - 40, fill_cache(model, cache, batch, context))
    capture_seconds(model, step)
    kernels = launched(step)
    print(f"{batch}x{context} {variant.name} {quartiles(replay_ms(model, cache))}\n{table(kernels)}")
    for kernel, us in added(kernels, len(kernels) // 2):
        print(f"{us:9.2f} us more, {kernel.us:8.2f} us {kernel.name[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=parse_model, default="qwen3-8b")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[(1, 32768), (8, 32768)])
    parser.add_argument(
        "--variants", nargs="+", default=["captured_dense", "token_only"], choices=list(VARIANTS), metavar="VARIANT"
    )
    args = parser.parse_args()
    model = random_model(known_config(args.model), torch.bfloat16, torch.device("cuda"))
    print(torch.cuda.get_device_name())
    for batch, context in args.shapes:
        for name in args.variants:
            measure(model, find(name), batch, context)
            free()


if __name__ == "__main__":
    main()
