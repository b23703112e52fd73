"""What sparse prompts cost in one layer: attention to chosen blocks by density, and the estimates that choose them.

    python -m benchmarks.probes.sparse_prompts [--tokens 32k,128k] [--density 0.1,0.2,0.3,0.4] [--heads 32 8]
    python -m benchmarks.probes.sparse_prompts --only attention --config many=2,descriptors=True,stages=3

Milliseconds, TFLOP/s of what is computed, and the gain over the fastest dense kernel, which reads the same tensors.
Lists are drawn: half of a tile's blocks are those of its neighbours as well. Each configuration's result is compared
with the others'. ``--piece`` takes the last so many queries, over everything before them. Others' kernels run beside
ours where there are any: cuDNN's if `nvidia-cudnn-frontend` is installed, FlashAttention 4 if `flash-attn-4` is, vLLM's
if the variable VLLM names its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hf_sparsekv.attention import flash_4, parts, sparse_prompt
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.flash_4 import installed
from hf_sparsekv.ops._prompts import BLOCK, TILE, key_means, step_of
from hf_sparsekv.ops.attention.block_attention.config import Config
from hf_sparsekv.ops.attention.block_attention.config import config as usual
from hf_sparsekv.ops.attention.block_attention.triton import block_attention
from hf_sparsekv.ops.selection.prompt_choice.triton import prompt_choice
from hf_sparsekv.ops.selection.prompt_mass.config import Config as MassConfig
from hf_sparsekv.ops.selection.prompt_mass.triton import prompt_mass
from hf_sparsekv.types import AttentionParams

from ..drawn_lists import drawn_lists
from ..shapes import parse_tokens
from . import others_prompts

CONFIGS = [
    Config(many=many, descriptors=descriptors, warps=8, stages=stages)
    for descriptors in (True, False)
    for many, stages in ((2, 2), (2, 3), (1, 2), (1, 3), (1, 4))
] + [
    Config(many=2, descriptors=True, warps=8, stages=3, heads_first=True),
    Config(many=1, descriptors=True, warps=8, stages=4, heads_first=True),
    Config(many=1, descriptors=True, warps=4, stages=3),
    Config(rows=64, many=1, descriptors=True, warps=4, stages=3),
    Config(many=1, descriptors=False, warps=4, stages=2),
]
MASSES = [
    MassConfig(means=means, blocks=blocks, warps=warps, stages=stages)
    for means, blocks, warps, stages in (
        (64, 8, 8, 3),
        (128, 8, 8, 2),
        (128, 16, 8, 3),
        (64, 16, 8, 2),
        (64, 8, 4, 3),
        (128, 32, 8, 4),
    )
]


def timed(run: Callable[[], object], times: int = 5) -> float:
    """Median milliseconds."""
    run()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def far(one: Tensor, other: Tensor) -> float:
    """How much they differ, relatively."""
    return float((one - other).float().norm() / other.float().norm())


def reason(error: Exception) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__} {' '.join(str(error).split())[:400]}"


def in_pieces(query: Tensor, key: Tensor, value: Tensor, piece: int) -> Tensor:
    """Exact attention of a whole prompt, so many queries and keys at a time: keys that the L2 cache holds."""
    scale, outs = query.shape[3] ** -0.5, []
    for first, mine in enumerate(query.split(piece, 2)):
        found = None
        for at, (k, v) in enumerate(zip(key.split(piece, 2), value.split(piece, 2), strict=True)):
            if at <= first:
                out, lse = parts._cudnn(mine, k, v, at == first, scale)
                found = (out, lse) if found is None else (parts.merge(out, lse, *found), torch.logaddexp(lse, found[1]))
        outs.append(found[0])  # type: ignore[index]
    return torch.cat(outs, 2)


def dense(query: Tensor, key: Tensor, value: Tensor) -> dict[str, float]:
    """Milliseconds of torch's dense kernels, and of exact prompts as they are."""
    q, n, found = query.shape[2], key.shape[2], {}
    with torch.no_grad():
        params = AttentionParams(query.shape[3] ** -0.5)
        found["exact"] = timed(lambda: exact_attention(query, key, value, params), 3)
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash 2", SDPBackend.FLASH_ATTENTION)):
        if q < n and name == "cudnn":
            continue  # has no piece with a past
        how = {"is_causal": True} if q == n else {"attn_mask": causal_lower_right(q, n)}
        with sdpa_kernel(backend):
            try:
                run = lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)  # noqa: B023, E731
                found[name] = timed(run, 3)
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0]}")
    for piece in (q // 2, q // 4) if q == n else ():
        found[f"in {piece}"] = timed(lambda: in_pieces(query, key, value, piece), 3)  # noqa: B023
    others = {
        "flash 3": (others_prompts.flash_3, "VLLM" in os.environ),
        "flash 4": (others_prompts.flash_4, installed("flash_attn.cute")),
    }
    for name, (build, there) in others.items():
        if not there:
            continue
        try:
            run = build(query, key, value)
            off = far(run(), exact_attention(query, key, value, params))
            found[name] = timed(run, 3)
            if not off < 1e-2:
                print(f"  {name} DIFFERS by {off:.1e}")
        except Exception as error:
            print(f"  {name}: {reason(error)}")
    return found


def named(config: object) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())  # type: ignore[call-overload]


def attention(query: Tensor, key: Tensor, value: Tensor, densities: list[float], configs: list[Config]) -> None:
    """Each configuration at each density."""
    heads, q, dim = query.shape[1:]
    n = key.shape[2]
    pairs = q * (n - q) + q * (q + 1) / 2
    whole = dense(query, key, value)
    for name, ms in whole.items():
        print(f"  dense {name:8}: {ms:8.2f} ms {4 * dim * heads * pairs / ms / 1e9:6.0f} TFLOP/s")
    least = min(whole.values(), default=float("nan"))
    for density in densities:
        ids, counts = drawn_lists(heads, q, n, density, "cuda")
        work = 4 * dim * TILE * BLOCK * int(counts.sum())
        share = int(counts.sum()) * TILE * BLOCK / (heads * pairs)
        print(f"  density {share:.1%} of the visible pairs")
        first = None
        for config in configs:
            run = lambda: block_attention(query, key, value, ids, counts, dim**-0.5, n - q, config=config)  # noqa: B023, E731
            out = row(named(config), run, work, least, first)
            first = out if first is None else first
            del out
        if installed("flash_attn.cute"):
            out = torch.empty_like(query)
            run = lambda: flash_4.block_attention(query, key, value, ids, counts, dim**-0.5, n - q, out)  # noqa: B023, E731
            row("FlashAttention 4", run, work, least, first)
        if installed("cudnn") or installed("flash_attn.cute"):
            beside_others(query, key, value, ids, counts, least)


def row(
    name: str, run: Callable[[], Tensor], work: float, least: float, first: Tensor | None, skip: int = 0
) -> Tensor | None:
    """Time and print one kernel; its result, None if it refuses. ``first`` is compared from query ``skip`` on."""
    try:
        out = run()
        ms = timed(run)
    except Exception as error:  # what does not fit this GPU, or is refused
        print(f"    {name}: {reason(error)}", flush=True)
        return None
    off = 0.0 if first is None else far(out[:, :, skip:], first[:, :, skip:])
    print(
        f"    {name}: {ms:8.2f} ms {work / ms / 1e9:6.0f} TFLOP/s, {least / ms:5.2f} x dense"
        + (f", DIFFERS by {off:.1e}" if not off < 1e-2 else ""),
        flush=True,
    )
    return out


def beside_others(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, counts: Tensor, least: float) -> None:
    """Ours and cuDNN's kernels at equal lists, on the grids that they have."""
    q, dim, n = *query.shape[2:], key.shape[2]
    for keys in (BLOCK, TILE):
        mask = others_prompts.whole_blocks(ids, counts, n, n - q, keys)
        mine = others_prompts.lists_of(mask.repeat_interleave(keys // BLOCK, -1))
        work = 4 * dim * TILE * keys * int(mask.sum())
        print(f"    whole blocks of {keys} keys alone, equal lists")
        run = lambda: block_attention(query, key, value, *mine, dim**-0.5, n - q)  # noqa: B023, E731
        first = row("  ours", run, work, least, None)
        for name, run in others_prompts.block_kernels(query, key, value, mask, keys):
            row(f"  {name}", run, work, least, first, TILE)


def estimates(query: Tensor, key: Tensor, value: Tensor, configs: list[MassConfig]) -> None:
    """What choosing costs, a slab of tiles at a time as prompts do it."""
    heads, q, dim = query.shape[1:]
    n, scale = key.shape[2], dim**-0.5
    means = key_means(key)
    slab, step = sparse_prompt.queries_at_once(heads, q, n), step_of(n)
    wanted = torch.full((1, heads), 0.95, device="cuda")
    print(f"  means {timed(lambda: key_means(key)):.2f} ms; {slab} queries at once")

    def mass(config: MassConfig | None = None) -> list[tuple[Tensor, Tensor]]:
        made = None
        for lo in range(0, q, slab):
            made = prompt_mass(query[:, :, lo : lo + slab], key, means, scale, n - q + lo, None, step, config=config)
        return [] if made is None else [made]

    for config in configs:
        try:
            print(f"  estimates {named(config)}: {timed(lambda: mass(config)):8.2f} ms", flush=True)  # noqa: B023
        except Exception as error:
            print(f"  estimates {named(config)}: {type(error).__name__} {str(error).splitlines()[0][:100]}")
    (made,) = mass()
    rows = q - (q - 1) // slab * slab
    choose = timed(lambda: prompt_choice(*made, wanted, n - rows, rows, n))
    print(f"  choice of the last {rows} queries: {choose:.2f} ms, of all about {choose * q / rows / 2:.2f} ms")
    for share in (0.9, 0.98):
        audit = sparse_prompt.PromptAudit()
        ms = timed(lambda: sparse_prompt.sparse_attention(query, key, value, scale, share, audit), 3)  # noqa: B023
        taken = float(audit.table[:, 2].sum() / audit.table[:, 3].sum())  # type: ignore[index]
        print(f"  all together at {share}, of drawn keys: {ms:8.2f} ms, density {taken:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="32k,128k")
    parser.add_argument("--piece", type=parse_tokens, default=None, help="so many last queries; default: all")
    parser.add_argument("--density", default="0.1,0.2,0.3,0.4")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="query heads, KV heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--only", choices=("attention", "estimates"), default=None)
    parser.add_argument("--config", action="append", default=[], help="fields of a configuration, or `usual`")
    args = parser.parse_args()
    print(torch.cuda.get_device_name())
    for tokens in map(parse_tokens, args.tokens.split(",")):
        q = min(tokens, args.piece or tokens)
        print(f"{q} queries over {tokens} keys, {args.heads[0]} / {args.heads[1]} heads of {args.dim}")
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(1, rows, heads, args.dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for rows, heads in ((q, args.heads[0]), (tokens, args.heads[1]), (tokens, args.heads[1]))
        )
        # Some keys matter to all, as they do in texts.
        key[:, :, torch.rand(tokens, device="cuda") < 0.02] *= 4
        configs = CONFIGS
        if args.config:
            mine = usual(query, args.dim, args.dim)
            configs = [mine if text == "usual" else eval(f"Config({text})") for text in args.config]
        if args.only != "estimates":
            attention(query, key, value, list(map(float, args.density.split(","))), configs)
        if args.only != "attention":
            estimates(query, key, value, MASSES)


if __name__ == "__main__":
    main()
