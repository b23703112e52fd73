"""The link between a GPU and the host: its folder in Linux' sysfs, its name, and its measured rate."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

UNKNOWN = "unknown"
# Transfers a second of each generation of PCI Express (PCI-SIG's base specifications), as sysfs writes them.
_GENERATIONS = {"2.5": "1.0", "5.0": "2.0", "8.0": "3.0", "16.0": "4.0", "32.0": "5.0", "64.0": "6.0", "128.0": "7.0"}


def pci_folder(device: torch.device | int, root: Path = Path("/sys")) -> Path:
    """The GPU's folder in sysfs. AttributeError, RuntimeError or AssertionError: torch does not know its address."""
    gpu = torch.cuda.get_device_properties(device)
    name = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return root / "bus/pci/devices" / name


def link_name(device: torch.device | int, root: Path = Path("/sys")) -> str:
    """For example ``"PCIe 5.0 x16"``; :data:`UNKNOWN` where the system does not report it.

    The generation is the GPU's highest, because an idle link runs slower. The width is the current one, because a slot
    may have fewer lanes. A GPU in a slot of an older generation is therefore reported with the GPU's generation.
    """
    try:
        folder = pci_folder(device, root)
        speed = (folder / "max_link_speed").read_text()  # "32.0 GT/s PCIe", "Unknown"
        width = int((folder / "current_link_width").read_text())
    except (OSError, ValueError, AttributeError, RuntimeError, AssertionError):
        return UNKNOWN
    match = re.match(r"\d+(\.\d+)?", speed)
    generation = match and _GENERATIONS.get(str(float(match[0])))
    return f"PCIe {generation} x{width}" if generation and 0 < width <= 32 else UNKNOWN  # 0, 63 and 255: not known


def measured_rate(device: torch.device | int) -> float:
    """Bytes a second from pinned memory to the GPU, by the best of some copies. Waits for the device."""
    nbytes = 256 << 20
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return nbytes / best
