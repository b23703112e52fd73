"""What it costs to keep the blocks of a cache in host memory, in parts that run and fail on their own.

    python -m benchmarks offload prefill --lengths 32k --chunks 0 8k

prefill: time and memory to read a prompt. The part is the rows' benchmark; docs/benchmarking.md says what each row
means. Parts that are settled are in git (NOTES.md).
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from functools import cached_property

import torch

from hf_sparsekv import unoptimize
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.results import device_name, versions

from ..arguments import host_bytes, new_parser, rows_file
from ..decoding import free
from ..report import Report
from ..shapes import case_name, known_config, parse_tokens, random_model

PARTS = ("prefill",)  # modules of this folder
PREFILLS = ("hf_dynamic", "hf_offloaded", "two_level:lag", "two_level:lag+offload")


class Session:
    """What the parts share: the arguments, and a model that the first part that needs one makes."""

    def __init__(self, args: Namespace, model: torch.nn.Module | None = None) -> None:
        self.args, self._model = args, model
        self.device = torch.device(args.device)
        self.host_bytes = host_bytes(args)

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

    def run(self, part: str) -> int:
        """One part; 1 if anything in it failed for other reasons than memory."""
        module = importlib.import_module(f".{part}", __package__)
        with Report(part, self.case, rows_file(self.args), None) as report, report.measuring(0, 0, part):
            module.run(part, self, report)
        if self._model is not None or "model" in self.__dict__:
            unoptimize(self.model)  # a runner that has met an error does not capture again
        free()
        return report.close()


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("offload", __doc__, "model", "dtype", "fused", "host-gb")
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--device", default="cuda")
    add = parser.add_argument_group("prefill").add_argument
    add("--lengths", nargs="+", type=parse_tokens, default=[32768, 131072], metavar="TOKENS")
    add("--chunks", nargs="+", type=parse_tokens, default=[0, 8192, 16384], help="0: one chunk")
    add("--caches", nargs="+", default=list(PREFILLS), metavar="CACHE")
    add("--repeat", type=int, help="timed runs; default 3, beyond 64k tokens 1")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the parts; 1 if anything failed for other reasons than memory, or there is no such device."""
    args = arguments().parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no CUDA device; prefill also runs with --device cpu and a small --model")
        return 1
    print(device_name(), versions())
    session = Session(args)
    return max([session.run(part) for part in args.parts])


if __name__ == "__main__":
    raise SystemExit(main())
