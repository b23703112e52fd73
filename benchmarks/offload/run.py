"""What it costs to keep the blocks of a cache in host memory, in parts that run and fail on their own.

    python -m benchmarks offload transfer prefetch
    python -m benchmarks offload overlap pool --shapes 1x128k
    python -m benchmarks offload prefill --lengths 32k --chunks 0 8k
    python -m benchmarks offload timeline --trace saved.json.gz    # draws only, no GPU needed

transfer: blocks over the link, both ways, by kernel and by copy engine. prefetch: a captured step with and without a
gather beside it. overlap, pool: time per token against the overlap of consecutive selections, and against the size of
the device pool. tenfold: KV ten times as large as the pool gives the same tokens. prefill: time and memory to read a
prompt. timeline: a profiler trace of decode steps, and its picture. The part is the rows' benchmark;
docs/offloading.md says what each row means.
"""

from __future__ import annotations

import argparse
import importlib
from functools import cached_property
from pathlib import Path

import torch

from hf_sparsekv import unoptimize
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.results import device_name, versions

from .. import RESULTS, ROOT
from ..decoding import free
from ..report import Report
from ..shapes import (
    SHAPES,
    case_name,
    known_config,
    kv_bytes,
    parse_pool,
    parse_shape,
    parse_tokens,
    random_model,
    text_config,
)

CSV = RESULTS / "offload.csv"
# part -> module, and whether it needs a GPU
PARTS = {
    "transfer": ("transfer", True),
    "prefetch": ("prefetch", True),
    "overlap": ("curves", False),
    "pool": ("curves", False),
    "tenfold": ("curves", False),
    "prefill": ("prefill", False),
    "timeline": ("timeline", True),
}
PREFILLS = ("hf_dynamic", "hf_offloaded", "two_level:lag", "two_level:lag+offload")


class Session:
    """What the parts share: the arguments, and a model that the first part that needs one makes."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module | None = None) -> None:
        self.args, self._model = args, model
        self.device = torch.device(args.device)
        self.host_bytes = None if args.host_gb is None else int(1e9 * args.host_gb)

    @cached_property
    def model(self) -> torch.nn.Module:
        if self._model is not None:
            return self._model
        usual = "bfloat16" if self.device.type == "cuda" else "float32"
        return random_model(known_config(self.args.model), getattr(torch, self.args.dtype or usual), self.device)

    @cached_property
    def fused(self) -> bool:
        return self.args.fused and self.model.device.type == "cuda" and why_not(self.model) is None

    @property
    def case(self) -> str:
        """The model's name in the rows."""
        usual = self.args.dtype in (None, "bfloat16")
        return case_name(self.args.model) + ("" if usual else f":{self.args.dtype}")

    def shapes(self, *usual: tuple[int, int]) -> list[tuple[int, int]]:
        """Those asked for, or a part's usual ones."""
        return self.args.shapes or list(usual)

    def kv_bytes(self, batch: int, context: int) -> int:
        """Bytes of all keys and values."""
        return kv_bytes(text_config(self.model), batch, context, self.model.dtype.itemsize)

    def run(self, part: str) -> int:
        """One part; 1 if anything in it failed for other reasons than memory."""
        module = importlib.import_module(f".{PARTS[part][0]}", __package__)
        path = None if self.args.no_csv else self.args.csv
        with Report(part, self.case, path, None) as report, report.measuring(0, 0, part):
            module.run(part, self, report)
        if self._model is not None or "model" in self.__dict__:
            unoptimize(self.model)  # a runner that has met an error does not capture again
        free()
        return report.close()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="offload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        metavar="BATCHxLENGTH",
        help="default: 1x32k for prefetch, 1x128k for overlap, pool, tenfold and timeline",
    )
    parser.add_argument(
        "--model",
        default="qwen3-8b",
        help=f"{', '.join(SHAPES)}; or a model's name or path (its config only: weights are random)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16; on a CPU float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True, help="fuse the small layers")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate, after those that fill the pool")
    parser.add_argument("--host-gb", type=float, help="host memory that a cache may take; default 80 %% of all")
    parser.add_argument("--csv", type=Path, default=CSV, help="rows are appended to it")
    parser.add_argument("--no-csv", action="store_true")
    group = parser.add_argument_group("transfer")
    group.add_argument("--sweep", action="store_true", help="rows for all programs x warps, not for the best only")
    group = parser.add_argument_group("prefetch")
    group.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256, 512], metavar="MiB", help="a step")
    group.add_argument("--programs", nargs="+", type=int, default=[8, 16, 32, 64])
    group.add_argument(
        "--spread",
        nargs="+",
        default=["layers", "begin"],
        choices=("layers", "begin"),
        help="a part released by each layer, as caches do; or all of it when the step begins",
    )
    group = parser.add_argument_group("overlap, pool")
    group.add_argument("--overlaps", nargs="+", type=float, default=[0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    group.add_argument(
        "--pools",
        nargs="+",
        type=parse_pool,
        default=["0.05kv", "0.1kv", "0.25kv", "0.5kv"],
        metavar="SIZE",
        help="0.25kv (share of all keys and values), 0.3 (of the free memory), 8e9 (bytes)",
    )
    group = parser.add_argument_group("prefill")
    group.add_argument("--lengths", nargs="+", type=parse_tokens, default=[32768, 131072], metavar="TOKENS")
    group.add_argument("--chunks", nargs="+", type=parse_tokens, default=[0, 8192, 16384], help="0: one chunk")
    group.add_argument("--caches", nargs="+", default=list(PREFILLS), metavar="CACHE")
    group.add_argument("--repeat", type=int, help="timed runs; default 3, beyond 64k tokens 1")
    group = parser.add_argument_group("timeline")
    group.add_argument("--trace", type=Path, help="draw this trace instead of recording one")
    group.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "offload-timeline.png", help="the picture, png or svg"
    )
    group.add_argument("--keep", type=Path, metavar="FILE", help="keep the recorded trace, such as trace.json.gz")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 1 if anything failed for other reasons than memory, or a part cannot run here."""
    args = arguments().parse_args(argv)
    on_gpu = args.device.startswith("cuda")
    needs = [name for name in args.parts if PARTS[name][1] and not (name == "timeline" and args.trace)]
    if on_gpu and not torch.cuda.is_available() and (needs or not args.trace):
        print(
            "there is no CUDA device; overlap, pool, tenfold and prefill also run with --device cpu and a small --model"
        )
        return 1
    if needs and not on_gpu:
        print(f"only a CUDA device runs {', '.join(needs)}")
        return 1
    print(device_name(), versions())
    session = Session(args)
    return max([session.run(part) for part in args.parts])


if __name__ == "__main__":
    raise SystemExit(main())
