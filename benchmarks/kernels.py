"""Where the GPU's time goes: its kernels, by CUDA's own clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Kernel:
    """One launch: microseconds from the first one's beginning, and how long it took."""

    name: str
    begin: float
    us: float


def launched(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of ``run()``, in their order. A profiler makes short ones a few per cent longer."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    events = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    )
    return [Kernel(name, start - events[0][0], us) for start, us, name in events]


def table(kernels: list[Kernel], most: int = 24) -> str:
    """Milliseconds and launches of each kernel, the longest first."""
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel.name] += kernel.us / 1e3
        launches[kernel.name] += 1
    lines = [f"{launches.total()} kernels, {times.total():.2f} ms"]
    lines += [f"{ms:9.3f} ms {launches[name]:5} x {name[:120]}" for name, ms in times.most_common(most)]
    return "\n".join(lines)
