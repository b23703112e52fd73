"""What does ``with sparse(model)`` cost at its beginning and end, and for each generate() within?

    python -m benchmarks.probes.entering [--model qwen3-8b] [--context 32768] [--layers N]

For keys and values on the device and in host memory, and for a model that was optimised beforehand: seconds to enter
and to leave; seconds of a ``generate()`` of two tokens, the first and the second time (prompt, new cache, capture); ms
a token; device memory that is more afterwards. The last line is transformers alone. Prints only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import hf_sparsekv
from hf_sparsekv.results import versions

from ..shapes import known_config, random_model

TOKENS = 64


def seconds(run: Callable[[], object]) -> float:
    """Until the device has done it."""
    synchronise()
    began = time.perf_counter()
    run()
    synchronise()
    return time.perf_counter() - began


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def held() -> int:
    """Bytes on the GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def tokens(model, ids: torch.Tensor) -> str:
    """Seconds of two tokens, twice, and ms for each further one."""

    def ask(n: int) -> float:
        go = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        return seconds(lambda: model.generate(ids, **go))

    first, second, all_of_them = ask(2), ask(2), ask(2 + TOKENS)
    return f"2 tokens {first:.2f}, {second:.2f} s; a token {(all_of_them - second) / TOKENS * 1e3:.2f} ms"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(known_config(args.model, args.layers), dtype, device)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(1, model.config.vocab_size, (1, args.context), device=device)
    print(versions())
    before = held()
    for about, offload, mine in (("device", False, False), ("host", True, False), ("optimised before", False, True)):
        if mine:
            model.set_attn_implementation("sparsekv")
            hf_sparsekv.optimize(model)
        for again in ("", ", again"):
            inside = hf_sparsekv.sparse(model, offload=offload)
            enter = seconds(inside.__enter__)
            said = tokens(model, ids)
            leave = seconds(lambda done=inside: done.__exit__(None, None, None))
            more = (held() - before) / 2**20
            print(f"{about + again:24} enter {enter:.3f}, leave {leave:.3f} s; {said}; {more:+.0f} MiB", flush=True)
    hf_sparsekv.unoptimize(model).set_attn_implementation("sdpa")
    print(f"{'transformers':24} {tokens(model, ids)}")


if __name__ == "__main__":
    main()
