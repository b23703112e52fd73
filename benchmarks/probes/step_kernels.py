"""A captured step with kernels in CUDA C++ that are not the default, one by one and together; and its kernels.

    python -m benchmarks.probes.step_kernels [--shapes 1x32k 8x32k] [--variants captured_dense token_only] [--kernels]

Milliseconds of the captured step alone (median, quartiles), random weights and keys. With ``--kernels`` each step's
longest kernels, and those of a layer in their order: where the sum is less than the step, the GPU waits.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from itertools import combinations
from unittest import mock

import torch

from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.ops.small_linear import skinny
from hf_sparsekv.ops.small_linear import triton as linear

from ..baselines import VARIANTS, Variant, find, make_cache, prepare
from ..decoding import Steps, capture_seconds, free, replay_ms
from ..filling import fill_cache
from ..kernels import launched, table
from ..shapes import known_config, parse_model, parse_shape, random_model

SPARE = 200
NEW = {  # what is not the default: where it is turned on, and how
    "linear": (linear, "SKINNY", skinny.Skinny()),
}


def ways() -> list[tuple[str, ...]]:
    """None of them, each by itself, more and more together."""
    return [some for n in range(len(NEW) + 1) for some in combinations(NEW, n)]


def quartiles(values: list[float]) -> str:
    found = torch.tensor(values).quantile(torch.tensor([0.5, 0.25, 0.75])).tolist()
    return "{:.3f} ms ({:.3f} to {:.3f})".format(*found)


def measure(model, variant: Variant, batch: int, context: int, show: bool) -> None:
    """One cache, captured anew with each of :func:`ways`."""
    prepare(model, variant, fused=True)
    cache = make_cache(model, variant, context + SPARE)
    after = fill_cache(model, cache, batch, context)
    for names in ways():
        runner_of(model).graphs.pop(cache, None)
        with ExitStack() as stack:
            for name in names:
                module, constant, value = NEW[name]
                stack.enter_context(mock.patch.object(module, constant, value))
            step = Steps(model, cache, batch, SPARE - 40, after)
            capture_seconds(model, step)
            kernels = launched(step) if show else []
            found = quartiles(replay_ms(model, cache))
        print(f"{batch}x{context} {variant.name:16} {' + '.join(names) or 'default':20} {found}", flush=True)
        if show:
            print(table(kernels))
            middle = len(kernels) // 2
            for kernel in kernels[middle : middle + 16]:
                print(f"{kernel.begin - kernels[middle].begin:9.2f} us {kernel.us:8.2f} us {kernel.name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=parse_model, default="qwen3-8b")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[(1, 32768), (8, 32768)])
    parser.add_argument(
        "--variants", nargs="+", default=["captured_dense", "token_only"], choices=list(VARIANTS), metavar="VARIANT"
    )
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    model = random_model(known_config(args.model), torch.bfloat16, torch.device("cuda"))
    print(torch.cuda.get_device_name())
    for batch, context in args.shapes:
        for name in args.variants:
            measure(model, find(name), batch, context, args.kernels)
            free()


if __name__ == "__main__":
    main()
