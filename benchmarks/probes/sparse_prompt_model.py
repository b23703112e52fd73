"""Cost of a sparse prompt in a whole model, at given densities: seconds until its first token.

    python -m benchmarks.probes.sparse_prompt_model [--model qwen3-8b] [--at 32k:0.3 128k:0.12] [--chunk 16k --offload]

Lists of the given density are drawn (:mod:`..drawn_lists`). ``--mass`` adds a row with what was chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig, optimize, unoptimize
from hf_sparsekv.attention.flash_4 import flash_attention_4
from hf_sparsekv.cache_name import over

from ..drawn_lists import draw
from ..shapes import known_config, parse_model, parse_tokens, random_model


@torch.no_grad()
def passed(model, cache: OffloadedSparseCache, tokens: int, chunk: int):
    """Seconds of a prompt in an empty cache, and the cache's statistics."""
    cache.reset()
    ids = torch.randint(0, 1000, (1, tokens), device=model.device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for piece in ids.split(chunk, dim=1):
        model(piece, **over(model, cache), use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize()
    return time.perf_counter() - begin, cache.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=parse_model, default="qwen3-8b")
    parser.add_argument("--at", nargs="+", default=["32k:0.3", "128k:0.12"], metavar="TOKENS:DENSITY")
    parser.add_argument("--chunk", type=parse_tokens, default=None, help="tokens of a pass; default: all")
    parser.add_argument("--layers", type=int, default=None, help="of the model; default: all")
    parser.add_argument("--mass", type=float, default=None)
    parser.add_argument("--offload", action="store_true", help="in host memory as well")
    parser.add_argument("--times", type=int, default=3, help="of each; the median but for the first")
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True, help="exact prompts as well")
    parser.add_argument("--flash-attention-4", action="store_true", help="which has to be installed")
    args = parser.parse_args()
    with flash_attention_4() if args.flash_attention_4 else contextlib.nullcontext():
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """All prompts that were asked for."""
    model = random_model(known_config(args.model, args.layers), torch.bfloat16, torch.device("cuda"))
    model.set_attn_implementation("sparsekv")
    optimize(model)
    print(torch.cuda.get_device_name(), args.model, "by FlashAttention 4" if args.flash_attention_4 else "")
    by_length: dict[int, list[float]] = {}
    for text in args.at:
        tokens, _, density = text.partition(":")
        by_length.setdefault(parse_tokens(tokens), []).append(float(density))
    for tokens, densities in by_length.items():
        chunk = min(tokens, args.chunk or tokens)

        def show(name: str, config: TokenConfig, tokens: int = tokens, chunk: int = chunk) -> None:
            for offload in (None, OffloadConfig()) if args.offload else (None,):
                cache = OffloadedSparseCache(config, offload)  # one, or host memory would be pinned again each time
                found = [passed(model, cache, tokens, chunk) for _ in range(args.times)]
                warm, stats = [one[0] for one in found[1:] or found], found[-1][1]
                taken = "" if stats.prompt_density is None else f", density {stats.prompt_density:.1%}"
                if offload is not None:
                    taken += f", offloaded: {stats.host_to_device_bytes / 1e9:.1f} GB from host memory"
                print(
                    f"{tokens:7} tokens, chunks of {chunk:7}, {name:14}: {statistics.median(warm):7.3f} s "
                    f"({min(warm):.3f} to {max(warm):.3f}, first {found[0][0]:.2f})" + taken,
                    flush=True,
                )

        if args.exact:
            show("exact", TokenConfig())
        config = TokenConfig(prefill=0.9, prefill_below=0)
        for density in densities:
            draw(density)
            show(f"density {density}", config)
            draw(None)
            torch.cuda.empty_cache()
        if args.mass is not None:
            show(f"mass {args.mass}", TokenConfig(prefill=args.mass, prefill_below=0))
    unoptimize(model)


if __name__ == "__main__":
    main()
