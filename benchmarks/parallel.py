"""A model spread over the GPUs of a machine: steps and prompts beside those of one GPU.

    python -m benchmarks parallel --ranks 2 --model qwen3-32b --shapes 1x32k 8x32k --prompts 32k 128k

Each rank makes its share of the random weights of a known shape. Each rank fills caches for its heads, as in ``step``.
``--ranks`` starts that many processes (torchrun); 1 is one GPU, measured alike. Rows are rank 0's. An error in one rank
ends all, because the others wait for it: give large shapes last.

Metrics:

- capture_s, steps_ms, tpot_ms and step_ms as in ``step``.
- ttft_s of a prompt (--chunk: read in pieces).
- peak_gb:rank0, ... of each GPU while decoding.
- limit's step_ms: the bytes that a dense step reads on each rank over the read-only bandwidth (weights_ms: of its
  weights alone).
- With --profile, sums over the kernels of one replayed step on rank 0: sums_ms (NCCL's, with waiting for other ranks),
  selection_ms, attention_ms, linear_ms, other_ms.
- With --profile, agree_ms: one agreement of the ranks' hosts, which a step unlike the one before needs.
"""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import SimpleNamespace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hf_sparsekv.cache_name import over
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.ranks import ranks_of
from hf_sparsekv.results import device_name, versions

from .arguments import new_parser, parse_count, rows_file
from .baselines import NotRun, Variant, check, find, make_cache, prepare
from .decoding import WARM_UP, Steps, capture_seconds, free, generate, in_a_row_ms, replay_ms
from .filling import Source, fill_layers, make_source
from .kernels import describe_step, launched
from .report import Report
from .shapes import case_name, known_config, kv_bytes, parse_context, random_model, text_config

DEFAULT = ("captured_dense", "mass:0.9")
STEPS, SPARE, EAGER = 32, 256, 14
AGREED = 200  # agreements that are timed
PR_SET_PDEATHSIG = 1
WARM_PROMPT = 2048  # tokens that are read before a prompt counts
KINDS = {  # of kernels, by parts of their names; the first that fits
    "sums": ("nccl", "allreduce", "all_reduce"),
    "selection": ("score", "topk", "mass_select", "select", "gather", "label", "locate", "pack", "means"),
    "attention": ("sparse_decode", "flash", "fmha", "cluster", "merge"),
    "linear": ("linear", "gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk"),
}


class Spread:
    """How the model is spread: its ranks, or the GPUs of its layers.

    Args:
        model: the whole model, this rank's share of it, or one with its layers on several GPUs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ranks = ranks_of(model)
        self.size = 1 if self.ranks is None else self.ranks.size
        config = text_config(model)
        self.config = copy.deepcopy(config)  # of this rank's heads
        self.config.num_attention_heads //= self.size
        self.config.num_key_value_heads //= self.size

    def source(self, kind: str, batch: int, context: int) -> Source:
        """Keys and queries of this rank's heads, each layer's where the layer is."""
        rank = 0 if self.ranks is None else self.ranks.rank
        share = SimpleNamespace(config=self.config, device=self.model.device, dtype=self.model.dtype)
        source = make_source(kind, share, batch, context, rank)
        source.show = False  # what they achieve: `step` prints it
        return source

    def weights(self) -> int:
        """Bytes that a step reads of this rank's share; of layers over devices, of all."""
        table = self.model.get_input_embeddings().weight
        tied = text_config(self.model).tie_word_embeddings
        held = (p for p in self.model.parameters() if tied or p is not table)
        return sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in held)

    def peaks(self) -> list[int]:
        """Bytes of GPU memory that were in use at most: of each rank, or of each GPU."""
        if self.ranks is None:
            return [torch.cuda.max_memory_allocated(i) for i in sorted(_gpus(self.model))]
        found = [None] * self.size
        dist.all_gather_object(found, torch.cuda.max_memory_allocated(), group=self.ranks.host)
        return found

    def wait(self) -> None:
        """Until all ranks are here, and their GPUs have done everything."""
        for i in _gpus(self.model):
            torch.cuda.synchronize(i)
        if self.ranks is not None:
            self.ranks.any(False)


def _gpus(model: nn.Module) -> set[int]:
    return {p.device.index for p in model.parameters() if p.device.type == "cuda"}


class Bench:
    """One model, measured in all its variants."""

    def __init__(self, spread: Spread, report: Report, args: Namespace) -> None:
        self.spread, self.report, self.args, self.model = spread, report, args, spread.model
        gpus = _gpus(self.model)
        self.captures = len(gpus) == 1
        self.fused = args.fused and self.captures and why_not(self.model) is None
        self.host_bytes = None if args.host_gb is None else int(1e9 * args.host_gb)
        self.how = f":ranks={spread.size}"

    def label(self, variant: Variant) -> str:
        """Name of a variant's rows."""
        eager = variant.ours and not self.captures
        replayed = variant.ours and self.args.kv != "random"
        return variant.label(self.fused) + "+eager" * eager + f":kv={self.args.kv}" * replayed + self.how

    def filled(self, variant: Variant, batch: int, context: int):
        """A full cache, and what to call after each step."""
        source = self.spread.source(self.args.kv, batch, context)
        cache = make_cache(self.model, variant, context + self.args.tokens + SPARE, self.host_bytes)
        fill_layers(source, cache)
        return cache, source.start(cache)

    def step(self, variant: Variant, batch: int, context: int) -> None:
        """Decode steps over a full cache."""
        model, report, args = self.model, self.report, self.args
        check(variant, model, batch, context, self.host_bytes)
        prepare(model, variant, self.fused, self.captures)
        cache, after = self.filled(variant, batch, context)
        for gpu in _gpus(model):
            torch.cuda.reset_peak_memory_stats(gpu)
        self.spread.wait()
        captured = variant.ours and variant.captured and self.captures
        if captured:
            report.add("capture_s", capture_seconds(model, Steps(model, cache, batch, 8, after)), "s")
            steps = Steps(model, cache, batch, STEPS + WARM_UP, after)
            report.add("steps_ms", in_a_row_ms(steps, STEPS))
        tokens = args.tokens if captured else min(args.tokens, EAGER)
        report.add("tpot_ms", generate(model, cache, batch, tokens, each=after).tpot_ms)
        for gpu, peak in enumerate(self.spread.peaks()):
            report.add(f"peak_gb:rank{gpu}", peak / 1e9, "GB")
        if variant.ours:
            report.note(str(cache.stats()))
        if not captured:
            return
        if args.profile:
            self.profile(Steps(model, cache, batch, 4, after))
        self.spread.wait()
        report.add("step_ms", replay_ms(model, cache))

    def profile(self, step: Steps) -> None:
        """Where a replayed step's time goes, on rank 0."""
        ranks = self.spread.ranks
        if ranks is not None:
            times = []
            for _ in range(AGREED):
                begin = time.perf_counter()
                ranks.any(False)
                times.append(1e3 * (time.perf_counter() - begin))
            self.report.add("agree_ms", times)
        step()
        kernels = launched(step) if ranks is None or ranks.rank == 0 else step() and []
        print(describe_step(kernels) if kernels else "", flush=True)
        spent = dict.fromkeys((*KINDS, "other"), 0.0)
        for kernel in kernels:
            name = kernel.name.lower()
            spent[next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), "other")] += kernel.us
        for kind, us in spent.items():
            self.report.add(f"{kind}_ms", us / 1e3)

    @torch.no_grad()
    def prompt(self, variant: Variant, tokens: int) -> None:
        """One prompt of so many tokens."""
        prepare(self.model, variant, self.fused, self.captures)
        self._read(variant, min(WARM_PROMPT, tokens))
        for gpu in _gpus(self.model):
            torch.cuda.reset_peak_memory_stats(gpu)
        self.report.add("ttft_s", self._read(variant, tokens), "s")
        for gpu, peak in enumerate(self.spread.peaks()):
            self.report.add(f"peak_gb:prompt:rank{gpu}", peak / 1e9, "GB")

    def _read(self, variant: Variant, tokens: int) -> float:
        """Seconds."""
        model, chunk = self.model, self.args.chunk or tokens
        generator = torch.Generator(model.device).manual_seed(0)
        most = min(1000, text_config(model).vocab_size)
        ids = torch.randint(0, most, (1, tokens), device=model.device, generator=generator)
        cache = make_cache(model, variant, tokens + SPARE, self.host_bytes)
        self.spread.wait()
        begin = time.perf_counter()
        for piece in ids.split(chunk, dim=1):
            model(piece, **over(model, cache), use_cache=True, logits_to_keep=1)
        self.spread.wait()
        return time.perf_counter() - begin


def measure(spread: Spread, report: Report, args: Namespace, rate: float) -> None:
    """All prompts, and then all variants of each shape."""
    bench = Bench(spread, report, args)
    itemsize = spread.model.dtype.itemsize
    weights = spread.weights()
    for tokens in args.prompts:
        variant = next(one for one in reversed(args.variants) if one.ours)
        label = bench.label(variant) + ":prompt" + (f":chunk={args.chunk}" if args.chunk else "")
        with report.measuring(1, tokens, label, spread.model), leaving(spread, report):
            bench.prompt(variant, tokens)
        free()
    for batch, context in args.shapes:
        with report.measuring(batch, context, "limit" + bench.how):
            read = weights + kv_bytes(spread.config, batch, context, itemsize)
            report.add("step_ms", 1e3 * read / rate)
            report.add("weights_ms", 1e3 * weights / rate)
        for variant in args.variants:
            with report.measuring(batch, context, bench.label(variant), spread.model), leaving(spread, report):
                bench.step(variant, batch, context)
            free()


@contextmanager
def leaving(spread: Spread, report: Report) -> Iterator[None]:
    """An error inside ends this process if others wait for it: torchrun ends them. Earlier measurements are kept."""
    try:
        yield
    except NotRun:  # on all ranks
        raise
    except Exception:
        if spread.size > 1:
            traceback.print_exc()
            report.write()
            leave(1)
        raise


def leave(status: int) -> NoReturn:
    """End at once: gloo's threads may outlive the interpreter, and abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def find_variant(text: str) -> Variant:
    """For argparse."""
    try:
        return find(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("parallel", __doc__, "shapes", "model", "dtype", "device", "fused", "kv", "host-gb")
    parser.set_defaults(shapes=[(1, 32768), (1, 131072), (8, 32768)], kv="replayed")
    add = parser.add_argument
    add("--ranks", type=parse_count, default=1, help="processes, of a GPU each (default: 1)")
    add("--layers", type=parse_count, help="the model's first layers only; its rows say so")
    add("--no-shapes", dest="shapes", action="store_const", const=[], help="prompts only")
    default = [find(name) for name in DEFAULT]
    add("--variants", nargs="+", type=find_variant, default=default, metavar="VARIANT", help="as of step; +offload")
    add("--prompts", nargs="+", type=parse_context, default=[], metavar="TOKENS", help="to read: 32k 128k")
    add("--chunk", type=parse_context, metavar="TOKENS", help="of a prompt at once; default: all")
    add("--tokens", type=parse_count, default=48, help="to generate (default: 48)")
    add("--profile", action="store_true", help="also where a step's time goes")
    return parser


def start_ranks(size: int, argv: list[str]) -> int:
    """Run this command in so many processes; torchrun's exit status."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    environment = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", **os.environ}
    return subprocess.run([*torchrun, "-m", "benchmarks", "parallel", *argv], env=environment).returncode


def load(args: Namespace) -> nn.Module:
    """The model, spread as the arguments say."""
    config = known_config(args.model, args.layers)
    longest = max([context for _, context in args.shapes] + args.prompts)
    config.max_position_embeddings = max(config.max_position_embeddings, longest + args.tokens + SPARE)
    on_gpu = args.device.startswith("cuda")
    dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    return random_model(config, dtype, torch.device(args.device), args.ranks > 1)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed for other reasons than memory."""
    argv = sys.argv[1:] if argv is None else argv
    args = (parser := arguments()).parse_args(argv)
    if not args.shapes and not args.prompts:
        parser.error("nothing to measure: give --shapes or --prompts")
    there = torch.cuda.device_count()
    if args.device.startswith("cuda") and there < args.ranks:
        parser.error(f"{args.ranks} GPUs are asked for, and torch sees {there}")
    if args.ranks > 1 and "LOCAL_RANK" not in os.environ:
        return start_ranks(args.ranks, argv)
    rank = begin(args) if args.ranks > 1 else 0
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if rank else sys.stdout):
        print(device_name(), versions())
        begun = time.perf_counter()
        model = load(args)
        print(f"{args.model}: made in {time.perf_counter() - begun:.1f} s", flush=True)
        rate = bandwidth(model.device)
        free()
        case = case_name(args.model) + ("" if args.layers is None else f":layers={args.layers}")
        total = len(args.shapes) * (1 + len(args.variants)) + len(args.prompts)
        with Report("parallel", case, None if rank else rows_file(args), total) as report:
            measure(Spread(model), report, args, rate)
        status = report.close()
    if args.ranks > 1:
        leave(status)
    return status


def begin(args: Namespace) -> int:
    """This process's rank among those that torchrun has started, which meet. It does not outlive torchrun."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if args.device.startswith("cuda"):
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        dist.init_process_group("nccl", device_id=here)
    else:
        dist.init_process_group("gloo")
    return dist.get_rank()


def bandwidth(device: torch.device) -> float:
    """Bytes a second that are read; of a CPU unknown."""
    if device.type != "cuda":
        return float("nan")
    from .operators.limits import read_bandwidth  # needs Triton

    rate = read_bandwidth(device)
    print(f"read-only bandwidth {rate / 1e12:.2f} TB/s")
    return rate


if __name__ == "__main__":
    raise SystemExit(main())
