"""Time per output token through ``generate()``, as people use it: a model, a cache, a context.

    python -m benchmarks generate --model qwen3-8b --context 32k --caches hf_dynamic two_level:lag
    python -m benchmarks generate --model small --device cpu --context 512 --new-tokens 8

Known shapes get random weights; models by name or path their own. The cache is filled directly unless --prefill has
generate() read the context. On a GPU our caches decode by captured steps, on a CPU eagerly. Where dense attention is
known to be as fast as selecting they attend densely, as users' caches do (rows end in +dense).
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace

import torch

from hf_sparsekv import unoptimize
from hf_sparsekv.cli.output import CommandError
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.results import device_name, versions
from hf_sparsekv.tuning.shapes import SHAPES

from .arguments import KNOWN, host_bytes, new_parser, parse_count, rows_file
from .baselines import VARIANTS, Variant, check, chose_dense, find, forget_compiled, make_cache, prepare
from .decoding import free, generate
from .filling import fill_cache
from .report import Report
from .shapes import case_name, known_config, parse_context, parse_model, random_model, real_model

DEFAULT = ("hf_dynamic", "two_level", "two_level:lag")
CHOICES = [name for name, variant in VARIANTS.items() if variant.kind != "sdpa"]


def measure(model, variant: Variant, report: Report, args: Namespace) -> None:
    """All figures of one cache."""
    limit = host_bytes(args)
    check(variant, model, args.batch, args.context, limit)
    prepare(model, variant, args.fused, capture=args.capture)
    room = args.context + 1 + args.new_tokens
    cache = make_cache(model, variant, room, limit)
    after = None if args.prefill else fill_cache(model, cache, args.batch, args.context, args.kv)
    on_gpu, compiled = model.device.type == "cuda", variant.name == "hf_static_compile"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        found = generate(
            model,
            cache,
            args.batch,
            args.new_tokens,
            prompt=args.context if args.prefill else None,
            sample=args.sample,
            eos=True,
            compiled=compiled,
            each=after,
        )
    finally:
        if compiled:
            forget_compiled(model)
    if variant.ours and chose_dense(cache):
        report.rename(variant.label(args.fused) + "+dense" + suffix(variant, args))
    report.add("tpot_ms", found.tpot_ms)
    if args.prefill:
        report.add("ttft_s", found.first_ms / 1e3, "s")
    if compiled:
        report.add("capture_s", found.set_up_ms / 1e3, "s")
    if on_gpu:
        report.add("peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")
    if variant.ours:
        report.note(str(cache.stats()))


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("generate", __doc__, "dtype", "device", "fused", "kv", "host-gb")
    add, flag = parser.add_argument, BooleanOptionalAction
    add("--model", default="qwen3-8b", type=parse_model, help=f"{KNOWN}; `small`")
    add("--random-weights", action="store_true", help="of a name or path read the configuration only")
    add("--batch", type=parse_count, default=1)
    add("--context", type=parse_context, default=32768, metavar="TOKENS", help="512, 32k")
    add("--new-tokens", type=parse_count, default=64)
    caches = {"nargs": "+", "type": cache_name, "default": [cache_name(name) for name in DEFAULT], "metavar": "CACHE"}
    add("--caches", **caches, help=f"{', '.join(CHOICES)}; ours also with +offload")
    add("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    add("--prefill", action="store_true", help="read the context, and measure ttft_s, too")
    add("--capture", action=flag, default=True, help="captured decode steps")
    return parser


def suffix(variant: Variant, args: Namespace) -> str:
    """The other settings in the rows' names."""
    eager = variant.ours and args.device.startswith("cuda") and not args.capture
    replayed = variant.ours and args.kv != "random" and not args.prefill
    return "+eager" * eager + ":sample" * args.sample + f":kv={args.kv}" * replayed


def cache_name(text: str) -> Variant:
    """For argparse: a cache, with a message that names the others."""
    try:
        variant = find(text, crossover=True)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if variant.kind == "sdpa":
        raise ArgumentTypeError(f"{text} is no cache; `benchmarks step` measures it")
    return variant


def load(args: Namespace) -> torch.nn.Module:
    """The model that the arguments ask for.

    Raises:
        CommandError: there is no such model, or it was not made for so many tokens.
    """
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    if args.model in SHAPES or args.random_weights:
        usual = torch.bfloat16 if device.type == "cuda" else torch.float32
        return random_model(known_config(args.model), dtype or usual, device)
    most = known_config(args.model).max_position_embeddings
    if args.context + args.new_tokens > most:
        raise CommandError(
            f"--context {args.context:,} and --new-tokens {args.new_tokens:,} are more than the {most:,} tokens that "
            f"{args.model} was made for: give fewer, or --random-weights"
        )
    return real_model(args.model, dtype, device)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed for other reasons than memory."""
    args = arguments().parse_args(argv)
    print(device_name(), versions())
    model = load(args)
    on_gpu = model.device.type == "cuda"
    args.capture &= on_gpu
    args.fused &= args.capture and why_not(model) is None
    case = case_name(args.model)
    if model.dtype != torch.bfloat16:
        case += f":{str(model.dtype).removeprefix('torch.')}"
    with Report("generate", case, rows_file(args), len(args.caches)) as report:
        for variant in args.caches:
            with report.measuring(args.batch, args.context, variant.label(args.fused) + suffix(variant, args)):
                measure(model, variant, report, args)
            unoptimize(model)  # a runner that has met an error does not capture again
            free()
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
