"""What a GPU's link is, and what is chosen from measurements of it."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.tuning import transfer
from hf_sparsekv.tuning.link import UNKNOWN, link_name
from hf_sparsekv.tuning.transfer import Point, Settings

GPU = torch.device("cuda", 0)


# ---------------------------------------------------------------------- the link


@pytest.fixture
def sysfs(monkeypatch, tmp_path):
    """Makes ``/sys`` of a GPU's link."""
    gpu = type("Properties", (), {"pci_domain_id": 1, "pci_bus_id": 0x3B, "pci_device_id": 2})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    def make(**files: str):
        folder = tmp_path / "bus/pci/devices/0001:3b:02.0"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    "speed, width, name",
    [
        ("32.0 GT/s PCIe", "16", "PCIe 5.0 x16"),
        ("16.0 GT/s PCIe", "8", "PCIe 4.0 x8"),
        ("8 GT/s", "16", "PCIe 3.0 x16"),  # as older kernels write it
        ("2.5 GT/s PCIe", "1", "PCIe 1.0 x1"),
        ("64.0 GT/s PCIe", "16", "PCIe 6.0 x16"),
        ("33.0 GT/s PCIe", "16", UNKNOWN),
        ("Unknown", "16", UNKNOWN),
        ("32.0 GT/s PCIe", "0", UNKNOWN),
        ("32.0 GT/s PCIe", "63", UNKNOWN),
        ("32.0 GT/s PCIe", "wide", UNKNOWN),
        ("", "", UNKNOWN),
    ],
)
def test_link(sysfs, speed, width, name):
    root = sysfs(max_link_speed=speed, current_link_speed="2.5 GT/s PCIe", current_link_width=width)
    assert link_name(GPU, root) == name


def test_link_that_nobody_tells(sysfs, monkeypatch, tmp_path):
    assert link_name(GPU, tmp_path) == UNKNOWN  # no folder: a container, or not Linux
    sysfs(max_link_speed="32.0 GT/s PCIe")
    assert link_name(GPU, tmp_path) == UNKNOWN
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert link_name(GPU, tmp_path) == UNKNOWN  # a torch that does not know the address

    def fail(device):
        raise RuntimeError("no CUDA")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert link_name(GPU, tmp_path) == UNKNOWN


# ---------------------------------------------------------------------- choosing


def points(large: dict, small: dict | None = None, warps: int = 4) -> list[Point]:
    """``{programs: (rate, slow-down)}``"""
    small = large if small is None else small
    return [Point(s, n, warps, *found) for s, sizes in ((False, large), (True, small)) for n, found in sizes.items()]


def test_the_least_slow_down_near_the_best_rate():
    large = {8: (46.0, None), 16: (50.8, 0.08), 32: (50.9, 0.06), 64: (51.0, 0.3)}
    assert transfer.choose(points(large)) == Settings(32, 32, 4), "not the fewest: it costs less"
    large[32] = (50.9, 0.075)
    assert transfer.choose(points(large)).programs == 16, "as little within the noise: the fewest"
    small = {16: (39.0, None), 32: (48.0, 0.1), 64: (48.5, 0.2)}
    assert transfer.choose(points(large, small)) == Settings(16, 32, 4)


def test_large_blocks_decide_the_warps():
    many = {16: (50.0, 0.1), 32: (50.0, 0.1)}
    few = {16: (45.0, 0.01), 32: (50.0, 0.05)}
    found = points(many, {64: (50.0, 0.0)}, warps=4) + points(few, {16: (30.0, 0.0), 32: (30.0, 0.2)}, warps=2)
    assert transfer.choose(found) == Settings(32, 16, 2)


def test_what_was_not_measured():
    for found in ([], points({16: (6.0, 0.0)}, {})):
        with pytest.raises(ValueError, match="rates of large and of small blocks"):
            transfer.choose(found)
    with pytest.raises(ValueError, match="was not measured"):
        transfer.choose(points({16: (6.0, 0.0), 32: (6.0, None)}))
