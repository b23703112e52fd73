"""Seconds of a prompt in a whole model: exact, and sparse at given densities.

    python -m benchmarks prompt --at 32k:0.3 128k:0.12
    python -m benchmarks prompt --at 32k 128k --chunk 16k --offload

Random weights. Lists of the given density are drawn (:mod:`.drawn_lists`); without a density, only exact prompts.
``--mass`` adds what is chosen by mass. Metrics: prompt_s, without the first pass over a cache; prompt_s:first;
density; peak_gb.
"""

from __future__ import annotations

import contextlib
import time
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace

import torch

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig, optimize, unoptimize
from hf_sparsekv.attention.flash_4 import flash_attention_4
from hf_sparsekv.cache_name import over
from hf_sparsekv.results import device_name, versions

from .arguments import new_parser, rows_file
from .drawn_lists import draw
from .report import Report
from .shapes import case_name, known_config, parse_shape, parse_tokens, random_model, text_config


@torch.no_grad()
def passed(model, cache: OffloadedSparseCache, batch: int, tokens: int, chunk: int):
    """Seconds of a prompt in an empty cache, and the cache's statistics."""
    cache.reset()
    ids = torch.randint(0, min(1000, text_config(model).vocab_size), (batch, tokens), device=model.device)
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    begin = time.perf_counter()
    for piece in ids.split(chunk, dim=1):
        model(piece, **over(model, cache), use_cache=True, logits_to_keep=1)
    wait()
    return time.perf_counter() - begin, cache.stats()


def parse_place(text: str) -> tuple[int, int, float | None]:
    """``32k``, ``4x16k`` or ``32k:0.3``: rows, tokens and density.

    Raises:
        ArgumentTypeError: it is none of them.
    """
    shape, colon, density = text.partition(":")
    batch, tokens = parse_shape(shape if "x" in shape else f"1x{shape}")
    try:
        share = float(density) if colon else None
    except ValueError:
        raise ArgumentTypeError(f"{density!r} in {text!r} is no number: a density is a share of blocks") from None
    if share is not None and not 0 < share <= 1:
        raise ArgumentTypeError(f"the density {share} of {text!r} is not above 0 and at most 1")
    if share is not None and batch > 1:
        raise ArgumentTypeError(f"{text!r}: lists of a density are drawn for one row")
    return batch, tokens, share


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed for other reasons than memory."""
    parser = new_parser("prompt", __doc__, "model")
    add = parser.add_argument
    add("--at", nargs="+", type=parse_place, default=[(1, 32768, 0.3), (1, 131072, 0.12)], metavar="TOKENS[:DENSITY]")
    add("--chunk", type=parse_tokens, default=None, help="tokens of a pass; default: all")
    add("--layers", type=int, default=None, help="of the model; default: all")
    add("--mass", type=float, default=None, help="also what is chosen by this share of the mass")
    add("--offload", action="store_true", help="in host memory")
    add("--times", type=int, default=3, help="of each; the first does not count")
    add("--exact", action=BooleanOptionalAction, default=True, help="exact prompts as well")
    add("--flash-attention-4", action="store_true", help="which has to be installed")
    args = parser.parse_args(argv)
    print(device_name(), versions())
    gpu = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")
    model = random_model(known_config(args.model, args.layers), dtype, torch.device(device))
    model.set_attn_implementation("sparsekv")
    if gpu:
        optimize(model)
    case = case_name(args.model) + ("" if args.layers is None else f":layers={args.layers}")
    flash = flash_attention_4() if args.flash_attention_4 else contextlib.nullcontext()
    with flash, Report("prompt", case, rows_file(args), None) as report:
        measure(model, report, args)
    if gpu:
        unoptimize(model)
    return report.close()


def measure(model, report: Report, args: Namespace) -> None:
    """All prompts that were asked for."""
    densities: dict[tuple[int, int], list[float]] = {}
    for batch, tokens, density in args.at:
        densities.setdefault((batch, tokens), []).extend([] if density is None else [density])
    sparse = TokenConfig(prefill=0.9, prefill_below=0)
    for (batch, tokens), shares in densities.items():
        if args.exact or not shares:
            one(model, report, args, batch, tokens, "exact", TokenConfig())
        for density in shares:
            draw(density)
            one(model, report, args, batch, tokens, f"density={density:g}", sparse)
            draw(None)
        if args.mass is not None:
            config = TokenConfig(prefill=args.mass, prefill_below=0)
            one(model, report, args, batch, tokens, f"mass={args.mass:g}", config)


def one(model, report: Report, args: Namespace, batch: int, tokens: int, name: str, config: TokenConfig) -> None:
    """One kind of prompt: ``--times`` passes over one cache, or host memory would be pinned again each time."""
    chunk = min(tokens, args.chunk or tokens)
    name += f":chunk={chunk}" * (chunk < tokens) + ":offload" * args.offload + ":fa4" * args.flash_attention_4
    torch.cuda.empty_cache()
    with report.measuring(batch, tokens, name):
        if gpu := torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        cache = OffloadedSparseCache(config, OffloadConfig() if args.offload else None)
        found = [passed(model, cache, batch, tokens, chunk) for _ in range(args.times)]
        warm = [seconds for seconds, _ in found]
        report.add("prompt_s", warm[1:] or warm, "s")
        report.add("prompt_s:first", warm[0], "s")
        if gpu:
            report.add("peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")
        if (density := found[-1][1].prompt_density) is not None:
            report.add("density", density, "share")


if __name__ == "__main__":
    raise SystemExit(main())
