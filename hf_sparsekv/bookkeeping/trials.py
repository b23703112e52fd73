"""Trial steps before a capture, in which nothing may be brought to the device.

Apart from the cache because they concern only what it shares with other threads and streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..offload.page_table import DevicePools
from ..policies.shared import Shared


@contextmanager
def trial_steps(device_pools: DevicePools | None, shared: Shared) -> Iterator[None]:
    """Inside, steps are tried out for a capture: nothing is brought to the device."""
    with ExitStack() as stack:
        if device_pools is not None:
            stack.enter_context(device_pools.paused())
        stack.enter_context(shared.trial())
        yield


def resume(device_pools: DevicePools | None, shared: Shared) -> None:
    """End :func:`trial_steps` whose own end was interrupted."""
    if device_pools is not None:
        device_pools.resume()
    shared.resume()
