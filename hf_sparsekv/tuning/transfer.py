"""How blocks are copied over the link: a small table of measured GPUs and links.

A kernel reads pinned memory in place. Few of its programs fill the link, and each program more takes processors from
the decode step that runs beside it. How many are needed depends on the GPU and on the link: ``hf-sparsekv
calibrate-device`` measures it, and its file goes before the built-in values. What was not measured gets
:data:`DEFAULT`.

Without Triton nothing here applies. (The copy engine takes no processors, but the host must wait for the list of blocks
and begin each copy: on an H200 5 GB/s, where the kernel reaches 51.)
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from ..removed import Options, removed
from . import user_file
from .link import UNKNOWN, link_name

FORMAT = 1  # of the file; another one is not read
NEAR = 0.97  # of the best rate is near enough
NOISE = 0.01  # slow-downs that differ by less are the same


@dataclass(frozen=True)
class Settings(Options):
    """How blocks cross one link.

    Args:
        programs: of the kernel, for blocks of 16 KB and more.
        programs_small: for smaller blocks.
        warps: of each program.
    """

    programs: int = 16
    programs_small: int = 32
    warps: int = 4

    def __post_init__(self) -> None:
        for name in ("programs", "programs_small", "warps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.warps not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"warps must be a power of two up to 32, got {self.warps}")

    def __str__(self) -> str:
        return f"{self.programs} programs ({self.programs_small} for small blocks) of {self.warps} warps"


# On an H200, 16 programs bring 256 MiB within a captured step for 6 to 10 % of its time, 64 for 20 to 31 %, at the same
# 51 GB/s. Small blocks need twice as many (rows of 4 KB: 46 GB/s). `bench offload transfer prefetch`, `--sweep`.
DEFAULT = Settings()
# A machine that does not tell its link is taken to have the usual one.
BUILT_IN: dict[tuple[str, str], Settings] = {
    ("NVIDIA H200", "PCIe 5.0 x16"): DEFAULT,
    ("NVIDIA H200", UNKNOWN): DEFAULT,
}


@dataclass(frozen=True)
class Known:
    """Settings of one GPU and its link, and where they come from: ``"measured"``, ``"built in"`` or ``"default"``."""

    settings: Settings
    source: str


def settings(device: torch.device) -> Settings:
    """What holds for copies to ``device``. Looked up once per device: no file is read in a step."""
    if device.type != "cuda":
        return DEFAULT
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _of_gpu(index: int) -> Settings:
    return lookup(torch.cuda.get_device_name(index), link_name(index)).settings


def lookup(device_name: str, link: str) -> Known:
    """What is known about a GPU on a link: from the user's file, built in, or nothing."""
    try:
        users = _read(str(table_path()))
    except RuntimeError:  # there is no home directory
        users = {}
    measured = users.get(_name(device_name, link))
    if measured is not None:
        return Known(measured, "measured")
    built_in = BUILT_IN.get((device_name, link))
    return Known(DEFAULT, "default") if built_in is None else Known(built_in, "built in")


# ---------------------------------------------------------------------- the user's file


def table_path() -> Path:
    """The file that ``hf-sparsekv calibrate-device`` writes, whether or not it is there."""
    return user_file.location("transfer.json")


def _name(device_name: str, link: str) -> str:
    return f"{device_name}, {link}"


@functools.cache
def _read(path: str) -> dict[str, Settings]:
    return user_file.read(Path(path), FORMAT, _settings)


def _settings(entry: dict) -> Settings:
    for name, option in removed(Settings).items():
        if name in entry["settings"] and not option.means_now(entry["settings"][name]):
            raise ValueError(f"{name}={entry['settings'][name]!r} is gone: {option.instead}")
    return Settings(**{field.name: entry["settings"][field.name] for field in fields(Settings)})


def save(device_name: str, link: str, found: Settings, about: dict) -> Path:
    """Write what was measured on a GPU and link into the user's file; what it says of others stays.

    Args:
        about: what was measured (JSON values), kept beside the settings for people.

    Raises:
        OSError: the file cannot be written.
    """
    path = table_path()
    user_file.save(path, FORMAT, _settings, _name(device_name, link), {"settings": asdict(found), **about})
    _read.cache_clear()
    _of_gpu.cache_clear()
    return path


# ---------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Point:
    """The kernel with so many programs and warps.

    Args:
        small: blocks of 4 KB instead of 32.
        gbps: 10^9 bytes a second, with nothing beside it.
        slowdown: share by which a captured chain of kernels takes longer beside it; None if that was not measured.
    """

    small: bool
    programs: int
    warps: int
    gbps: float
    slowdown: float | None = None


def near_best(points: list[Point]) -> list[Point]:
    """Those that reach :data:`NEAR` of the best rate."""
    best = max(point.gbps for point in points)
    return [point for point in points if point.gbps >= NEAR * best]


def choose(points: list[Point]) -> Settings:
    """The least slow-down among those near the best rate; where several are alike, the fewest programs.

    Both sizes of blocks share the number of warps, which large blocks decide: they are what prefetching copies.

    Args:
        points: of both sizes, each size with the warps of the other; slow-downs at least of those near the best rate.

    Raises:
        ValueError: a size was not measured.
    """
    large = _least([p for p in points if not p.small])
    small = _least([p for p in points if p.small and p.warps == large.warps])
    return Settings(large.programs, small.programs, large.warps)


def _least(points: list[Point]) -> Point:
    if not points:
        raise ValueError("rates of large and of small blocks are needed, with the same warps")
    near = near_best(points)
    if any(p.slowdown is None for p in near):
        raise ValueError("the slow-down of some of those near the best rate was not measured")
    least = min(p.slowdown for p in near)
    alike = [p for p in near if p.slowdown <= least + NOISE]
    return min(alike, key=lambda p: (p.programs, p.slowdown))
