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


SHOWN = 16  # kernels: a layer and some


def added(kernels: list[Kernel], first: int, count: int = SHOWN) -> list[tuple[Kernel, float]]:
    """``count`` kernels from ``first`` on, and microseconds that each ended after all before it.

    A kernel is launched before the one in front of it has ended and then waits: only what it adds makes a step longer.
    """
    ends, found = max((one.begin + one.us for one in kernels[:first]), default=0.0), []
    for one in kernels[first : first + count]:
        found.append((one, one.begin + one.us - ends))
        ends = max(ends, one.begin + one.us)
    return found


def describe_step(kernels: list[Kernel]) -> str:
    """The longest kernels of a step by their sums; and those of a layer in the middle, with what each adds."""
    lines = [f"{us:9.2f} us more, {one.us:8.2f} us {one.name[:100]}" for one, us in added(kernels, len(kernels) // 2)]
    return "\n".join([table(kernels), *lines])
