"""What a prompt costs, whole and in chunks: milliseconds until its launches return, and until they are done.

    python -m benchmarks.probes.prompt_chunks [--model qwen3-8b] [--length 18k] [--chunk 2k] [--offload]
    python -m benchmarks.probes.prompt_chunks --length 32k --chunk 32k --kernels     # where the GPU's time goes

Random weights, no other request. The first pass of a process compiles kernels and makes cuDNN's plans, so each is made
three times, each time into a new cache. Where both times are alike, the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig, optimize, unoptimize
from hf_sparsekv.cache_name import over

from ..kernels import launched, table
from ..shapes import known_config, parse_model, parse_tokens, random_model

WHOLE = (512, 1024, 2048, 4096, 8192)
TIMES = 3


@torch.no_grad()
def passed(model, cache, tokens: int) -> tuple[float, float]:
    """One forward pass over so many new tokens."""
    ids = torch.randint(0, 1000, (1, tokens), device=model.device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model(ids, **over(model, cache), use_cache=True, logits_to_keep=1)
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e3 * host, 1e3 * (time.perf_counter() - begin)


def report(name: str, model, make, length: int, chunk: int) -> None:
    """Chunks of one prompt, then whole prompts."""
    for _ in range(TIMES):
        cache = make()
        found = [passed(model, cache, chunk) for _ in range(0, length, chunk)]
    for nth, (host, both) in enumerate(found):
        print(f"{name:6} {chunk:6} tokens behind {nth * chunk:6}: {host:7.1f} {both:7.1f} ms", flush=True)
    for tokens in WHOLE:
        host, both = [passed(model, make(), tokens) for _ in range(TIMES)][-1]
        print(f"{name:6} {tokens:6} tokens, whole       : {host:7.1f} {both:7.1f} ms", flush=True)


def show_kernels(model, cache, length: int, chunk: int) -> None:
    """Milliseconds and launches of each kernel in the last chunk of a prompt, the longest first."""
    for _ in range(chunk, length, chunk):
        passed(model, cache, chunk)
    print(table(launched(lambda: passed(model, cache, chunk))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=parse_model, default="qwen3-8b")
    parser.add_argument("--length", type=parse_tokens, default=18 * 1024, metavar="TOKENS")
    parser.add_argument("--chunk", type=parse_tokens, default=2048, metavar="TOKENS")
    parser.add_argument("--offload", action="store_true", help="ours keeps full blocks in host memory")
    parser.add_argument("--kernels", action="store_true", help="of ours: how long each kernel takes, in the last chunk")
    args = parser.parse_args()
    model = random_model(known_config(args.model), torch.bfloat16, torch.device("cuda"))
    print(torch.cuda.get_device_name())
    report("sdpa", model, DynamicCache, args.length, args.chunk)
    model.set_attn_implementation("sparsekv")
    optimize(model)
    offload = OffloadConfig() if args.offload else None

    def made() -> OffloadedSparseCache:
        return OffloadedSparseCache(TokenConfig(), offload)

    report("ours", model, made, args.length, args.chunk)
    if args.kernels:
        show_kernels(model, made(), args.length, args.chunk)
    unoptimize(model)


if __name__ == "__main__":
    main()
