"""A GPU's link, and doctor's line about it."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.cli import doctor
from hf_sparsekv.offload.link import UNKNOWN, link_name
from hf_sparsekv.ops import _device

GPU = torch.device("cuda", 0)


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


def test_doctor_shows_the_link(monkeypatch):
    gpu = type("Properties", (), {"name": "Made-up GPU", "total_memory": 1 << 34, "major": 8, "minor": 9})
    gpu.shared_memory_per_block_optin = 99 << 10
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(doctor, "nvidia_smi", lambda: [])
    monkeypatch.setattr(doctor, "measured_rate", lambda index: 48e9)
    monkeypatch.setattr(doctor, "link_name", lambda index: ("PCIe 5.0 x16", UNKNOWN)[index])
    facts = [_device.Gpu(142, 96 << 20, 99 << 10, rate) for rate in (864e9, None)]
    monkeypatch.setattr(doctor, "gpu", lambda device: facts[device.index])
    monkeypatch.setattr(doctor, "has_triton", lambda: True)
    monkeypatch.setattr(doctor, "why_not", lambda index, least=9: (None, "no clusters" if least == 9 else None)[index])
    rows = [value for _, value in doctor.gpus()]
    guessed = "crossover guessed from 864 GB/s and 142 processors: `hf-sparsekv calibrate-device` measures it"
    assert rows[1::7] == [guessed, "crossover not known: all steps select"]
    assert rows[2::7] == ["kernels in CUDA C++: used", "kernels in CUDA C++: no clusters"]
    assert rows[3::7] == ["quantised linear layers by a table: used"] * 2
    assert rows[4] == "99 KB of shared memory a program"
    assert rows[5::7] == ["link PCIe 5.0 x16", "link unknown"]
    assert rows[6] == "pinned host to device: 48.0 GB/s"
