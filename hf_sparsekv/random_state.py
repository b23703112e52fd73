"""The state of torch's default random number generators, to leave them where another loop would.

Nothing here knows what is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the default generator of ``device``. It is on the host: nothing waits for the device."""
    module, of = _module(device)
    return module.get_rng_state(*of)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore what :func:`random_state` gave."""
    module, of = _module(device)
    module.set_rng_state(state, *of)


def _module(device: torch.device) -> tuple[Any, tuple[torch.device, ...]]:
    if device.type == "cpu":
        return torch, ()
    return getattr(torch, device.type), (() if device.type == "mps" else (device,))
