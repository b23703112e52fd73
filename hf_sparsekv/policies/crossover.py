"""Where dense attention is as fast as selecting: a small table of measured GPUs, and a guess for the others.

Below some length everything can be read in the time that choosing takes, and dense attention is exact. The time of a
dense step grows with the bytes it reads. The time of a selecting step has a fixed part and a part per row, and grows
little with the length. Both take equal time where

    batch * tokens * width = fixed_bytes + batch * width * row_tokens        (width: bytes of a token, all KV heads)

so a GPU is described by two numbers a method. They are measured by ``hf-sparsekv calibrate-device``, whose file goes
before the built-in values. For a GPU that was not measured they are guessed from its memory and processors
(:func:`guess`). A GPU of unknown memory has no crossover: its steps select. A CPU copies what it chooses, so there the
time grows with the budget (:class:`CpuRule`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from hf_sparsekv_config.sparse import SparseConfig

from .. import user_file
from ..kv.store import LayerStore
from ..ops._device import H200, Gpu, gpu
from ..ops._dispatch import has_triton

# Share of a GPU's bandwidth at which a dense step seems to read, relative to a selecting step. It is above 1 because a
# selecting step also grows with the length. Whole steps of Qwen3-8B's shape: 1.08 on an H200 and 1.05 on an H100
# (docs/speed.md).
GAINS = 1.05
FORMAT = 1  # of the file; another one is not read


@dataclass(frozen=True)
class Rule:
    """Two numbers of one method on one GPU.

    Args:
        fixed_bytes: KV bytes that a dense step reads in the time by which a selecting step's fixed part is longer.
        row_tokens: tokens that it reads in the time that selecting takes for each row.
    """

    fixed_bytes: float
    row_tokens: float

    def tokens(self, batch: int, width: int) -> int:
        """Tokens a row up to which dense attention is as fast; ``width``: bytes of a token, all KV heads."""
        return max(0, int(self.row_tokens + self.fixed_bytes / (batch * width)))

    def times(self, factor: float) -> Rule:
        """The rule of a selection that takes ``factor`` times as long. The time that rows save does not grow."""
        return Rule(self.fixed_bytes * factor, max(self.row_tokens, self.row_tokens * factor))


@dataclass(frozen=True)
class Verification:
    """The time of a pass over drafts in one layer beyond a dense step, on one GPU.

    Args:
        fixed: seconds. per_byte: seconds for each byte of keys and values that both read.
    """

    fixed: float
    per_byte: float


# One layer of 32 query and 8 KV heads of 128 channels, bf16, in captured steps: by calibrate-device; its times are in
# tests/policies/test_crossover_table.py. Exact names: parts of a GPU (MIG) have names of their own, and other rates.
MEASURED = "NVIDIA H200"
BUILT_IN: dict[str, dict[str, Rule]] = {
    MEASURED: {
        "two_level": Rule(102.5e6, -636),
        "two_level:lag": Rule(49.4e6, 438),
        "block_only": Rule(26.0e6, 1157),
        "token_only": Rule(45.2e6, 611),
        # 90 % of the mass, labels of 32 channels: whole steps (the table's test has them), a line through their gains.
        "progressive": Rule(63e6, 0),
        # Latents, GLM-4.7-Flash (rows of whole steps). A layer's attention: 1 x 32k, 1 x 128k and 6 x 96k. Whole steps:
        # 6 x 16k too, with lag, for predicted queries and for tokens among all.
        "two_level:mla": Rule(59.5e6, 282),
        "two_level:lag:mla": Rule(49.2e6, 8265),
        "block_only:mla": Rule(28.6e6, -16280),
        "token_only:mla": Rule(30.0e6, 2351),
        "predictive:mla": Rule(9.77e6, 13110),
    },
    "NVIDIA H100 80GB HBM3": {
        "two_level": Rule(57.7e6, 47),
        "two_level:lag": Rule(30.8e6, 788),
        "block_only": Rule(17.7e6, 1090),
        "token_only": Rule(39.8e6, 320),
    },
}
# The same where kernels in CUDA C++ do not run: on the H200, before each method's steps had these.
WITHOUT_CUDA_KERNELS: dict[str, Rule] = {
    "two_level": Rule(57.5e6, 1189),
    "two_level:lag": Rule(42.9e6, 1632),
    "block_only": Rule(11.9e6, 1806),
    "token_only": Rule(88.1e6, 198),
    "token_only:mla": Rule(147e6, 8072),
}
# By need every query head of a KV head covers a share of its own, so more of them take longer. In attention to
# everything they do not. Two numbers above by query heads of a KV head: times these. Whole steps of four (Qwen3-8B) and
# of eight (Qwen3-32B over two H200s, Llama-3.3-70B over four: the table's test has them). More were not measured.
BY_NEED = "progressive"
GROUPS = {4: 1.0, 8: 2.8}
# Verifications in these whole steps on an H200, by their number of tokens.
VERIFICATIONS = {4: Verification(20e-6, 3.4e-15), 8: Verification(25e-6, 32e-15)}


@dataclass(frozen=True)
class CpuRule:
    """Two numbers of one method on CPUs, where chosen tokens are copied before they are attended to.

    Args:
        fixed_bytes: as in :class:`Rule`.
        chosen_tokens: tokens that a dense step reads in the time that choosing one more takes.
    """

    fixed_bytes: float
    chosen_tokens: float

    def tokens(self, batch: int, width: int, chosen: int) -> int:
        """As :meth:`Rule.tokens`, for steps that choose ``chosen`` tokens a row and KV head."""
        return int(self.chosen_tokens * chosen + self.fixed_bytes / (batch * width))


# Decode steps of the small model (3 KV heads of 64 channels, float32), one row, one thread of an EPYC. Budgets of 256
# and 1,024 tokens are as fast as transformers' cache at 3.4k and 4.6k (benchmarks/NOTES.md, steps on a CPU).
ON_CPU: dict[str, CpuRule] = {"token_only": CpuRule(4.5e6, 1.65)}


def dense_tokens(
    dense_below: int | Literal["auto"] | None,
    method: str | None,
    device: torch.device,
    offloaded: bool,
    batch: int,
    width: int,
    chosen: int = 0,
    group: int = 1,
) -> int:
    """Tokens in full blocks, a row, up to which a decode step attends densely for speed; 0 for never.

    Args:
        dense_below: as in :class:`hf_sparsekv.SparseConfig`.
        method: the table's name of what would be done instead.
        device: where the layer computes.
        offloaded: its blocks lie in host memory.
        batch: rows.
        width: bytes of a token's keys and values, all KV heads.
        chosen: tokens that a step chooses otherwise, a row and KV head.
        group: query heads of a KV head.
    """
    if dense_below != "auto":
        return (dense_below or 0) // batch
    if offloaded:  # over the link everything takes long
        return 0
    if device.type != "cuda":
        on_cpu = ON_CPU.get(method or "") if device.type == "cpu" else None
        return 0 if on_cpu is None else on_cpu.tokens(batch, width, chosen)
    rule = lookup(torch.cuda.get_device_name(device), method)
    if rule is None and has_triton():  # without its kernels nothing that is known holds
        rule = guess(gpu(device), method)
    return 0 if rule is None else rule.times(_longer(method, group)).tokens(batch, width)


def _longer(method: str | None, group: int) -> float:
    """How many times as long a selection takes as with four query heads a KV head, or fewer: rules are for these."""
    if method != BY_NEED:
        return 1.0
    (few, least), (many, most) = GROUPS.items()
    return least + (most - least) * (min(max(group, few), many) - few) / (many - few)


class Crossover:
    """Up to which length one layer's dense attention is as fast as selecting (``config.dense_below``).

    Args:
        name: the selection's in the table; None: it has none there.
        q_heads: query heads of the layer.
    """

    def __init__(self, name: str | None, config: SparseConfig, offloaded: bool, q_heads: int) -> None:
        self.name, self.config, self.offloaded, self.q_heads = name, config, offloaded, q_heads
        self._blocks: dict[int, int] = {}  # by rows: full blocks of each, on average

    def below(self, store: LayerStore) -> bool:
        """Dense attention is as fast at this batch and length.

        Full blocks are what counts: they are what there is to select from. Rows of different lengths count by their
        mean: one decision for the whole batch. Rows that hold nothing do not count.
        """
        held = store.held
        rows = max(1, sum(n > 0 for n in held.lengths))
        blocks = self._blocks.get(rows)
        if blocks is None:
            config, width = self.config, store.heads * store.token_bytes
            name = f"{self.name}:mla" if store.latent else self.name  # other kernels, other numbers
            chosen, group, device = config.budget, self.q_heads // store.heads, store.device
            tokens = dense_tokens(config.dense_below, name, device, self.offloaded, rows, width, chosen, group)
            blocks = self._blocks[rows] = tokens // store.block_size
        return sum(held.sealed) <= blocks * rows


def lookup(device_name: str, method: str | None) -> Rule | None:
    """The known rule of a method on a GPU: from the user's file, or built in."""
    name, built_in = method or "", BUILT_IN.get(device_name, {})
    return measured(device_name).rules.get(name, built_in.get(name))


def slower(device: torch.device, read: int) -> dict[int, float]:
    """Seconds by which verifications of one layer are slower than a dense step, by their tokens; empty: not known.

    As the user's file says, or a guess by the H200's. ``read``: bytes of keys and values that both read.
    """
    there = gpu(device)
    known, scale = measured(torch.cuda.get_device_name(device)).verifications, 1.0
    if not known and there.bandwidth is not None and H200.bandwidth is not None:
        known, scale = VERIFICATIONS, H200.bandwidth / there.bandwidth
    return {n: one.fixed + read * one.per_byte * scale for n, one in known.items()}


def faster(device: torch.device, method: str, batch: int, tokens: int, width: int, group: int) -> float | None:
    """Seconds by which a selecting step of one layer is expected to be faster than a dense one; None: not known.

    Args:
        method: the table's name of the selection.
        batch, tokens: rows, and tokens of each in full blocks.
        width: bytes of a token's keys and values, all KV heads.
        group: query heads of a KV head.
    """
    there = gpu(device)
    rule = lookup(torch.cuda.get_device_name(device), method) or guess(there, method)
    if rule is None or there.bandwidth is None:
        return None
    rule = rule.times(_longer(method, group))
    return (batch * tokens * width - rule.fixed_bytes - batch * width * rule.row_tokens) / (GAINS * there.bandwidth)


def guess(there: Gpu, method: str | None) -> Rule | None:
    """The guess for a method on a GPU that was not measured; None if its bandwidth is not known.

    Both numbers are times, told in bytes that a dense step reads meanwhile, so both grow with the bandwidth. The fixed
    time is that of launches, the same on every GPU. The time for each row goes down with the processors. (An H100,
    which has as many of them as an H200 and 0.70 of its bandwidth: docs/speed.md.)
    """
    rule = BUILT_IN[MEASURED].get(method or "")
    if not there.cuda_kernels:
        rule = WITHOUT_CUDA_KERNELS.get(method or "", rule)
    if rule is None or there.bandwidth is None:
        return None
    assert H200.bandwidth is not None
    bandwidth, processors = there.bandwidth / H200.bandwidth, there.processors / H200.processors
    return Rule(rule.fixed_bytes * bandwidth, rule.row_tokens * bandwidth / processors)


# ---------------------------------------------------------------------- the user's file


def table_path() -> Path:
    """Where ``hf-sparsekv calibrate-device`` writes its file. RuntimeError: there is no home directory."""
    return user_file.cache_directory() / "crossover.json"


class Measured(NamedTuple):
    """The entries of the user's file for one GPU: rules by method, and verifications by their tokens."""

    rules: dict[str, Rule]
    verifications: dict[int, Verification]


def measured(device_name: str) -> Measured:
    """The entries of the user's file for a GPU; empty if it has none."""
    nothing = Measured({}, {})
    try:
        return _read(str(table_path())).get(device_name, nothing)
    except RuntimeError:  # there is no home directory
        return nothing


@functools.cache  # called once for each layer
def _read(path: str) -> dict[str, Measured]:
    return user_file.read(Path(path), FORMAT, _parse)


def _parse(entry: dict) -> Measured:
    rules = {
        method: Rule(float(numbers["fixed_bytes"]), float(numbers["row_tokens"]))
        for method, numbers in entry["rules"].items()
    }
    verified = {
        int(n): Verification(float(one["fixed"]), float(one["per_byte"]))
        for n, one in entry.get("verifications", {}).items()  # files of earlier releases have none
    }
    for one in (*rules.values(), *verified.values()):
        if not all(map(math.isfinite, vars(one).values())):
            raise ValueError(f"{one} are not finite numbers")
    return Measured(rules, verified)


def save(
    device_name: str, rules: dict[str, Rule], about: dict, verifications: dict[int, Verification] | None = None
) -> Path:
    """Write what was measured on a GPU into the user's file; what it says of other GPUs stays.

    Args:
        verifications: by their tokens.
        about: what the rules were measured with (JSON values), kept beside them for people.

    Raises:
        OSError: the file cannot be written.
    """
    path = table_path()
    entry = {"rules": {method: asdict(rule) for method, rule in rules.items()}, **about}
    entry["verifications"] = {str(tokens): asdict(one) for tokens, one in (verifications or {}).items()}
    user_file.save(path, FORMAT, _parse, device_name, entry)
    _read.cache_clear()
    return path
