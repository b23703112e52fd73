"""Decode steps of a model on a CPU: a sparse cache beside transformers' own, step by step in turn.

    python -m benchmarks.studies.cpu_steps                       # the small model, 1k to 8k tokens
    python -m benchmarks.studies.cpu_steps --contexts 4k --budgets 256 --steps 50 --threads 2

Caches hold random keys and values, so no prompt is read; what is chosen does not change the time. The caches take steps
in turn, so that what disturbs the machine disturbs all alike. With one thread (the default) figures are its CPU time,
which other programs disturb least; with more they are time on the clock. ``all``: our cache where every step attends to
everything, as below the crossover.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser

import torch
from transformers import DynamicCache

from hf_sparsekv import TokenConfig
from hf_sparsekv.cache import SparseCache
from hf_sparsekv.cache_name import over

from ..filling import fill_cache
from ..shapes import parse_tokens, real_model

WARM = 3  # steps of each cache that are not counted


def caches(model, context: int, budgets: list[int]) -> dict[str, tuple[object, str]]:
    """Caches by the name of their column, filled, and the attention that goes with them."""
    made = {"dense": (DynamicCache(config=model.config), "sdpa")}
    settings = {"all": {"dense_below": 1 << 30}}
    settings |= {str(budget): {"token_budget": budget, "dense_below": None} for budget in budgets}
    for name, options in settings.items():
        made[name] = SparseCache(TokenConfig(**options), None, model.config), "sparsekv"
    for cache, kind in made.values():
        fill_cache(model, cache, 1, context)
        if kind == "sparsekv":
            cache.joined_rows()  # as after a prompt: layers that were filled one by one hold the same
    return made


@torch.no_grad()
def times(model, made: dict[str, tuple[object, str]], steps: int, clock) -> dict[str, list[float]]:
    """Milliseconds of each step."""
    found: dict[str, list[float]] = {name: [] for name in made}
    for step in range(WARM + steps):
        for name, (cache, kind) in made.items():
            model.set_attn_implementation(kind)
            start = clock()
            model(torch.tensor([[5]]), **over(model, cache), use_cache=True)
            if step >= WARM:
                found[name].append(1e3 * (clock() - start))
    return found


def main(argv: list[str] | None = None) -> None:
    """Print a table: medians, and the middle half of the steps."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--contexts", nargs="+", type=parse_tokens, default=[1024, 2048, 4096, 6144, 8000])
    parser.add_argument("--budgets", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    model = real_model(args.model, torch.float32, torch.device("cpu"))
    print("ms a token: median (quartiles), beside dense; columns of numbers are token budgets")
    for context in args.contexts:
        cells, dense = [f"{context:6}"], None
        for name, found in times(model, caches(model, context, args.budgets), args.steps, clock).items():
            middle = statistics.median(found)
            dense = dense or middle
            low, _, high = statistics.quantiles(found)
            cells.append(f"{name} {middle:.1f} ({low:.1f}-{high:.1f}) x{middle / dense:.2f}")
        print("  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
