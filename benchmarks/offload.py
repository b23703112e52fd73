"""Time and device memory to read a prompt: transformers' caches and ours, in one chunk and in several.

    python -m benchmarks offload prefill --lengths 32k --chunks 0 8k

Random tokens through the model's real forward pass, logits of the last token only; chunks go in one after the other, as
``generate(prefill_chunk_size=...)`` does it. ``prefill_s`` begins with an empty new cache, so an offloaded one pins its
memory within it; ``prefill_s:reused`` is a second prompt in the same cache after ``reset()``. ``prefill_gb`` is the
peak of device memory beyond what was taken before, the weights; ``pool_gb`` of it is the device pool. Other parts of
this benchmark are settled, and in git (NOTES.md).
"""

from __future__ import annotations

import time
from argparse import ArgumentParser

import torch
from torch import Tensor

from hf_sparsekv import unoptimize
from hf_sparsekv.cache_name import over
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.results import device_name, versions

from .arguments import host_bytes, new_parser, rows_file
from .baselines import Variant, check, find, make_cache, prepare
from .decoding import free
from .report import Report
from .shapes import case_name, known_config, parse_tokens, random_model, text_config

LONG = 65536  # tokens; longer prompts are timed once
WARM = 4096  # tokens, or two chunks
CACHES = ("hf_dynamic", "hf_offloaded", "two_level:lag", "two_level:lag+offload")


@torch.no_grad()
def prefill(model, cache, ids: Tensor, chunk: int) -> Tensor:
    """Read ``ids [batch, n]`` in chunks of so many tokens (0: at once); gives the last logits ``[batch, vocab]``."""
    n = ids.shape[1]
    mask, positions = torch.ones_like(ids), torch.arange(n, device=ids.device)[None]
    for start in range(0, n, chunk or n):
        end = min(start + (chunk or n), n)
        out = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            **over(model, cache),
            use_cache=True,
            logits_to_keep=1,
        )
    return out.logits[:, -1]


class Prefill:
    """One cache, length and chunk size."""

    def __init__(self, model, variant: Variant, length: int, chunk: int, most: int | None, fused: bool) -> None:
        self.model, self.length, self.chunk = model, length, chunk
        self.variant, self.host_bytes, self.fused = variant, most, fused
        generator = torch.Generator(model.device).manual_seed(0)
        shape = (1, length)
        vocabulary = text_config(model).vocab_size
        self.ids = torch.randint(0, vocabulary, shape, device=self.model.device, generator=generator)

    @property
    def label(self) -> str:
        return self.variant.label(self.fused) + (f":chunk={self.chunk}" if self.chunk else "")

    def new(self, length: int):
        return make_cache(self.model, self.variant, length, self.host_bytes)

    def seconds(self, cache=None) -> tuple[float, object]:
        """Of one prompt, into a new cache if none is given; and the cache."""
        self.synchronize()
        begin = time.perf_counter()
        cache = self.new(self.length) if cache is None else cache
        prefill(self.model, cache, self.ids, self.chunk)
        self.synchronize()
        return time.perf_counter() - begin, cache

    def synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, report: Report, repeat: int | None) -> None:
        """Rows of this combination."""
        check(self.variant, self.model, 1, self.length, self.host_bytes)
        prepare(self.model, self.variant, self.fused)
        warm = min(self.length, max(WARM, 2 * self.chunk))
        prefill(self.model, self.new(warm), self.ids[:, :warm], self.chunk)
        free()
        on_gpu = self.model.device.type == "cuda"
        if on_gpu:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        repeat = repeat or (1 if self.length > LONG else 3)
        times, cache = [], None
        for _ in range(repeat):
            cache = None  # not two at a time
            taken, cache = self.seconds()
            times.append(taken)
        report.add("prefill_s", times, "s")
        if on_gpu:
            report.add("prefill_gb", (torch.cuda.max_memory_allocated() - before) / 1e9, "GB")
        if not self.variant.ours:
            return
        if host := cache.memory_bytes()["host"]:
            report.add("host_gb", host / 1e9, "GB")
            report.add("pool_gb", cache.device_pools.nbytes / 1e9, "GB")
        times = []
        for _ in range(repeat):
            cache.reset()
            times.append(self.seconds(cache)[0])
        report.add("prefill_s:reused", times, "s")


def run(model, args, report: Report) -> None:
    """All lengths, chunks and caches."""
    fused = args.fused and model.device.type == "cuda" and why_not(model) is None
    for length in args.lengths:
        for chunk in args.chunks:
            if chunk >= length:
                continue  # the same as one chunk
            for name in args.caches:
                one = Prefill(model, find(name), length, chunk, host_bytes(args), fused)
                with report.measuring(1, length, one.label, model):
                    one.measure(report, args.repeat)
                free()


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("offload", __doc__, "model", "dtype", "fused", "host-gb")
    add = parser.add_argument
    add("part", choices=("prefill",))
    add("--device", default="cuda")
    add("--lengths", nargs="+", type=parse_tokens, default=[32768, 131072], metavar="TOKENS")
    add("--chunks", nargs="+", type=parse_tokens, default=[0, 8192, 16384], help="0: one chunk")
    add("--caches", nargs="+", default=list(CACHES), metavar="CACHE")
    add("--repeat", type=int, help="timed runs; default 3, beyond 64k tokens 1")
    return parser


def main(argv: list[str] | None = None, model: torch.nn.Module | None = None) -> int:
    """Run it, on a given model or a random one; 1 without a GPU, or if anything failed but for memory."""
    args = arguments().parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no CUDA device; prefill also runs with --device cpu and a small --model")
        return 1
    print(device_name(), versions())
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    case = case_name(args.model) + ("" if args.dtype in (None, "bfloat16") else f":{args.dtype}")
    with Report("prefill", case, rows_file(args), None) as report, report.measuring(0, 0, "prefill"):
        if model is None:
            model = random_model(known_config(args.model), getattr(torch, dtype), torch.device(args.device))
        run(model, args, report)
    if model is not None:
        unoptimize(model)
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
