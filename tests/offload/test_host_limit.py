"""How much host memory there is, as control groups, zones and balloons tell it; and which CPUs lie near a GPU."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from inside import cpus_are, machine_of

from hf_sparsekv import OffloadConfig
from hf_sparsekv.offload import host_limit, host_pages
from hf_sparsekv.offload.host_limit import HostBudget, host_memory_limit
from hf_sparsekv.offload.host_pages import PAGE
from hf_sparsekv.offload.host_pool import HostArena

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of files; MemTotal in GiB, present pages in GiB."""

    def make(total, files=None, present=None, vmstat=""):
        machine_of(monkeypatch, tmp_path)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": total << 30}))
        files = {**(files or {}), "proc/vmstat": vmstat}
        if present:
            zones = [f"Node 0, zone   Normal\n  pages free 7\n        present  {part}\n" for part in present]
            files["proc/zoneinfo"] = "\n".join(zones)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return host_memory_limit() / 2**30

    return make


PAGES = (1 << 30) // PAGE  # of a GiB


def test_limit_of_a_plain_machine(machine):
    assert machine(64) == 64


def test_limit_of_a_machine_whose_memory_shows_up_late(machine):
    assert machine(31, present=[3 * PAGES, 125 * PAGES]) == 128


@pytest.mark.parametrize(
    "vmstat", [f"nr_balloon_pages {100 * PAGES}\n", f"balloon_inflate {130 * PAGES}\nballoon_deflate {30 * PAGES}\n"]
)
def test_limit_of_a_machine_with_a_balloon(machine, vmstat):
    assert machine(27, present=[128 * PAGES], vmstat=vmstat) == 28


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/memory.max": f"{16 << 30}\n"}, 16),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 64),
        ({"sys/fs/cgroup/memory.max": f"{100 << 30}\n"}, 64),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 << 30}\n"}, 8),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job.scope\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{20 << 30}\n",
                "sys/fs/cgroup/user.slice/job.scope/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/job.scope/memory.high": f"{24 << 30}\n",
            },
            20,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/slurm/job_1\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": f"{12 << 30}\n",
            },
            12,
        ),
        ({"proc/self/cgroup": "0::/a/path/of/the/host\n", "sys/fs/cgroup/memory.max": f"{30 << 30}\n"}, 30),
    ],
)
def test_limit_of_a_container(machine, files, limit):
    assert machine(64, files) == limit


def test_the_default_limit_is_looked_up_at_each_growth(machine):
    budget = HostBudget(OffloadConfig())
    machine(10)
    with pytest.raises(MemoryError, match=r"limit is 8\.00 GiB \(80% of what this machine or its container has\): "):
        budget.take(9 << 30)
    machine(20)
    budget.take(9 << 30)
    assert budget.used == 9 << 30
    assert HostBudget(OffloadConfig(max_host_bytes=5)).limit == 5


def test_the_default_limit_is_looked_up_once_for_all_layers(monkeypatch):
    looked, limits = [], iter((10 << 30, 5 << 30, 5 << 30))

    def look() -> int:
        looked.append(1)
        return next(limits)

    now = [0.0]
    monkeypatch.setattr(host_limit, "host_memory_limit", look)
    monkeypatch.setattr(host_limit.time, "monotonic", lambda: now[0])
    budget = HostBudget(OffloadConfig())
    for _ in range(36):
        budget.check(6 << 30)
    assert len(looked) == 1
    now[0] = 2.0  # seconds later it may be less
    with pytest.raises(MemoryError, match=r"limit is 4\.00 GiB"):
        budget.check(6 << 30)


def test_the_default_limit_is_one_of_all_caches(machine):
    """Each alone would promise the same 80 % of the machine; one with a limit of its own has that."""
    machine(10)
    one, other, own = HostBudget(OffloadConfig()), HostBudget(OffloadConfig()), limited(3 << 30)
    one.take(5 << 30)
    message = r"needs 4\.00 GiB of host memory, the limit is 8\.00 GiB .*; other caches of this process hold 5\.00"
    with pytest.raises(MemoryError, match=message + r" GiB: drop caches that are done, shorten the context"):
        other.take(4 << 30)
    assert other.used == 0
    other.take(2 << 30)
    with pytest.raises(MemoryError, match=r"needs 4\.00 GiB of host memory, the limit is 3\.00 GiB: shorten"):
        own.take(4 << 30)
    own.take(3 << 30)
    one.give(5 << 30)
    other.take(1 << 30)
    with pytest.raises(MemoryError, match=r"other caches of this process hold 3\.00 GiB"):
        other.take(3 << 30)
    del own
    other.take(3 << 30)


def limited(size: int) -> HostBudget:
    return HostBudget(OffloadConfig(max_host_bytes=size))


def test_small_sizes_are_told_in_units_that_show_them():
    budget = HostBudget(OffloadConfig(max_host_bytes=100))
    with pytest.raises(MemoryError, match=r"needs 1\.5 MiB of host memory, the limit is 100 B: shorten"):
        budget.take(3 << 19)


def test_limit_of_this_machine():
    limit = host_memory_limit()
    assert 1 << 28 < limit < 1 << 46
    assert limit <= 1.2 * psutil.virtual_memory().total or limit % PAGE == 0


def test_cpus_near_the_gpu(tmp_path, monkeypatch):
    gpu = type("Properties", (), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    cpus_are(monkeypatch, 6)
    nodes = tmp_path / "devices/system/node"
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(cpus + "\n")
        if node == 0:
            assert host_pages.near_cpus.__wrapped__(GPU, tmp_path) is None  # one node: nothing to choose
    assert host_pages.near_cpus.__wrapped__(GPU, tmp_path) is None  # the GPU's node is not told
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    for told, cpus in (("-1", None), ("0", {0, 1, 4, 5}), ("1", {2, 3})):
        (folder / "numa_node").write_text(told + "\n")
        assert host_pages.near_cpus.__wrapped__(GPU, tmp_path) == cpus
    before = os.sched_getaffinity(0)
    arena = HostArena(3 * PAGE, HostBudget(OffloadConfig()), torch.device("cpu"), pin=False)
    host_pages.touch(arena.address, arena.committed, cpus=set(list(before)[:1]))
    assert os.sched_getaffinity(0) == before
