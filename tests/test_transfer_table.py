"""How blocks are copied: the table of GPUs and links, its file, the command that measures, and who uses it."""

from __future__ import annotations

import contextlib
import json
import warnings
from dataclasses import replace

import pytest
import torch
from test_cli import error, run
from test_transfer_choice import points

from hf_sparsekv.cli import calibrate_device as command
from hf_sparsekv.cli import doctor
from hf_sparsekv.tuning import crossover, transfer
from hf_sparsekv.tuning.link import UNKNOWN, link_name
from hf_sparsekv.tuning.transfer import DEFAULT, Point, Settings

H200, FIVE, FOUR = "NVIDIA H200", "PCIe 5.0 x16", "PCIe 4.0 x16"
GPU = torch.device("cuda", 0)
ELSE = Settings(8, 64, 2)


@pytest.fixture
def empty_table(monkeypatch, tmp_path):
    """No file of the user's; its place is free to write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    transfer._of_gpu.cache_clear()
    yield transfer.table_path()
    transfer._of_gpu.cache_clear()


@pytest.fixture
def gpus(monkeypatch, empty_table):
    """Two GPUs of one kind on different links; returns their names and links, to be changed."""
    there = {0: (H200, FIVE), 1: (H200, FOUR)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: there[index][0])
    monkeypatch.setattr(transfer, "link_name", lambda index: there[index][1])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return there


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    "wrong",
    [{"programs": 0}, {"programs_small": 1.5}, {"programs": True}, {"warps": 3}, {"warps": 64}],
)
def test_wrong_settings(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Settings(**wrong)


def test_sources(empty_table):
    assert transfer.lookup(H200, FIVE) == transfer.lookup(H200, UNKNOWN) == transfer.Known(DEFAULT, "built in")
    for name, link in ((H200, FOUR), ("NVIDIA H200 MIG 1g.18gb", FIVE), ("Other GPU", UNKNOWN)):
        assert transfer.lookup(name, link) == transfer.Known(DEFAULT, "default")
    assert transfer.save(H200, FOUR, ELSE, {"date": "today"}) == empty_table
    assert transfer.lookup(H200, FOUR) == transfer.Known(ELSE, "measured")
    assert transfer.lookup(H200, FIVE).source == "built in", "another link of the same GPU"
    transfer.save(H200, FIVE, replace(ELSE, warps=8), {})
    assert transfer.lookup(H200, FIVE) == transfer.Known(replace(ELSE, warps=8), "measured")
    assert transfer.lookup(H200, FOUR).settings == ELSE, "it stays"
    entry = json.loads(empty_table.read_text())["devices"][f"{H200}, {FOUR}"]
    assert entry == {"settings": {"programs": 8, "programs_small": 64, "warps": 2}, "date": "today"}
    assert [path.name for path in empty_table.parent.iterdir()] == ["transfer.json"]


def test_beside_the_crossovers(empty_table):
    """Two files of one directory; neither touches the other."""
    transfer.save(H200, FIVE, ELSE, {})
    crossover.save(H200, {"two_level": crossover.Rule(0.0, 7.0)}, {})
    assert {path.name for path in empty_table.parent.iterdir()} == {"transfer.json", "crossover.json"}
    assert transfer.lookup(H200, FIVE).settings == ELSE
    assert crossover.lookup(H200, "two_level").row_tokens == 7


GOOD = '"programs": 8, "programs_small": 8, "warps": 4'
BROKEN = {
    "empty": "",
    "cut off": '{"format": 1, "devices": {"NVIDIA H200, PCIe 5.0 x16": {"settings": {"pro',
    "another format": f'{{"format": 2, "devices": {{"x": {{"settings": {{{GOOD}}}}}}}}}',
    "a list": "[]",
    "no settings": '{"format": 1, "devices": {"x": {}}}',
    "settings missing": '{"format": 1, "devices": {"x": {"settings": {"programs": 4}}}}',
    "no number": f'{{"format": 1, "devices": {{"x": {{"settings": {{{GOOD.replace("4", "null")}}}}}}}}}',
    "a back end that is gone": f'{{"format": 1, "devices": {{"x": {{"settings": {{"backend": "dma", {GOOD}}}}}}}}}',
    "deep": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_once(gpus, empty_table, text):
    empty_table.parent.mkdir(exist_ok=True)
    empty_table.write_text(text)
    transfer._read.cache_clear()
    with pytest.warns(UserWarning, match=r"transfer\.json cannot be used .*calibrate-device"):
        assert transfer.settings(GPU) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transfer.lookup(H200, FIVE).source == "built in"
        transfer.save(H200, FIVE, ELSE, {})
        assert transfer.settings(GPU) == ELSE, "it has been written anew"


def test_no_home_directory(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(transfer, "table_path", fail)
    assert transfer.lookup(H200, FIVE) == transfer.Known(DEFAULT, "built in")


# ---------------------------------------------------------------------- who uses it


def test_looked_up_once_a_device(gpus, monkeypatch):
    transfer.save(H200, FOUR, ELSE, {})
    assert [transfer.settings(torch.device("cuda", i)) for i in (0, 1)] == [DEFAULT, ELSE]
    monkeypatch.setattr(transfer, "lookup", lambda *args: pytest.fail("nothing is to be looked up in a step"))
    assert [transfer.settings(torch.device("cuda", i)) for i in (1, 0, 1)] == [ELSE, DEFAULT, ELSE]
    assert transfer.settings(torch.device("cuda")) == DEFAULT  # the current device


def test_nothing_is_looked_up_without_a_gpu(monkeypatch):
    monkeypatch.setattr(transfer, "_of_gpu", lambda index: pytest.fail("there is no GPU"))
    assert transfer.settings(torch.device("cpu")) == DEFAULT


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a GPU")
@pytest.mark.parametrize("tokens, programs", [(4, 3), (2, 5)], ids=["large", "small"])
def test_the_operator_takes_them(monkeypatch, tokens, programs):
    pytest.importorskip("triton")
    from hf_sparsekv.ops.block_copy import config as known
    from hf_sparsekv.ops.block_copy import triton as copying

    launched, kernel = [], copying.block_copy_kernel

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **options):
                launched.append((*grid, options["num_warps"]))
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(copying, "block_copy_kernel", Kernel())
    monkeypatch.setattr(known, "SMALL", 128)
    monkeypatch.setattr(known, "settings", lambda device: Settings(3, 5, 2))
    kv, frames = torch.randn(4, 2, tokens, 8), torch.zeros(8, tokens, 8)
    copies = torch.arange(8, dtype=torch.int32)[:, None].expand(8, 2).contiguous()
    number = torch.tensor([8], dtype=torch.int32)
    copying.block_copy(kv, frames, copies, number)
    copying.block_copy(kv, frames, copies, number, config=known.Config(4, 8))
    assert launched == [(programs, 2), (4, 8)]
    assert torch.equal(frames, kv.flatten(0, 1))


def test_files_of_a_release_that_knew_back_ends(gpus, empty_table):
    """One with the kernel's is as good as ever; one with the copy engine's says what has become of it."""
    entry = {"settings": {"backend": "uva", "programs": 8, "programs_small": 64, "warps": 2}, "copy_engine_gbps": 5.0}
    for backend, known in (("uva", ELSE), ("dma", DEFAULT)):
        entry["settings"]["backend"] = backend
        empty_table.parent.mkdir(exist_ok=True)
        empty_table.write_text(json.dumps({"format": 1, "devices": {f"{H200}, {FIVE}": entry}}))
        transfer._read.cache_clear()
        says = pytest.warns(UserWarning, match=r"backend='dma' is gone: leave it out\. Blocks are copied by the kernel")
        with contextlib.nullcontext() if backend == "uva" else says:
            assert transfer.lookup(H200, FIVE).settings == known
    with pytest.raises(ValueError, match="Settings no longer has backend: leave it out"):
        Settings(backend="uva")


# ---------------------------------------------------------------------- calibrate-device and doctor


@pytest.fixture
def imitated(monkeypatch, gpus):
    """The command without a GPU: measurements are made up."""
    pytest.importorskip("triton")
    from hf_sparsekv.tuning import block_copies as tuning

    large = {8: (46.0, None), 16: (50.8, 0.08), 64: (51.0, 0.3)}
    small = {16: (39.0, None), 64: (48.0, 0.1)}
    found = tuning.Measured(points(large, small), 53.0)
    monkeypatch.setattr(command.loading, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(command, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(command, "link_name", lambda device: gpus[0][1])
    monkeypatch.setattr(command, "measure_transfer", lambda *args: found)
    monkeypatch.setattr(command, "measure", lambda *args: pytest.fail("the crossover is not to be measured"))
    return gpus


def test_calibrate_device_writes_the_table(imitated, empty_table):
    imitated[0] = ("Made-up GPU", FOUR)
    out = run("calibrate-device", "--no-crossover", "--dry-run")
    assert "Made-up GPU, PCIe 4.0 x16" in out.stdout
    assert [line.split() for line in out.stdout.splitlines() if "chosen" in line] == [
        ["32", "KB", "16", "4", "50.8", "8.0%", "chosen"],
        ["4", "KB", "64", "4", "48.0", "10.0%", "chosen"],
        ["chosen:", "16", "programs", "(64", "for", "small", "blocks)", "of", "4", "warps"],
    ]
    assert "one large copy: 53.0 GB/s" in out.stdout
    assert not empty_table.exists()
    assert transfer.settings(GPU) == DEFAULT
    assert run("calibrate-device", "--no-crossover").stdout.splitlines()[-1] == str(empty_table)
    assert transfer.settings(GPU) == Settings(16, 64, 4), "what is there takes it from now on"
    entry = json.loads(empty_table.read_text())["devices"]["Made-up GPU, PCIe 4.0 x16"]
    assert entry["versions"] and entry["date"] and len(entry["points"]) == 5
    assert entry["limit_gbps"] == 53.0


def test_calibrate_device_without_room(imitated, empty_table, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(command, "measure_transfer", full)
    assert "need 0.7 GB of GPU memory to be measured: --no-transfer" in error("calibrate-device")
    assert not empty_table.exists()


def test_calibrate_device_with_nothing_to_do():
    message = error("calibrate-device", "--no-transfer", "--no-crossover", status=2)
    assert "leave nothing to measure" in message


def test_what_doctor_says(gpus):
    line = doctor._copies(H200, FIVE)
    assert line == "link PCIe 5.0 x16; block copies: 16 programs (32 for small blocks) of 4 warps (built in)"
    assert doctor._copies(H200, FOUR).endswith("(not measured, see `hf-sparsekv calibrate-device`)")
    transfer.save(H200, FOUR, Settings(8, 8, 2), {})
    assert doctor._copies(H200, FOUR).endswith("8 programs (8 for small blocks) of 2 warps (measured)")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a GPU")
def test_what_is_measured(monkeypatch):
    """All copies run in the interpreter and bring the blocks; clocks and streams are made up."""
    pytest.importorskip("triton")
    from hf_sparsekv.tuning import block_copies as tuning

    beside, timed = [], []

    def gbps(size, launch, repeats=7):
        launch()
        timed.append(size)
        return [1.0, float(len(timed)), 1e3]

    class Chain:
        def __init__(self, device, most_ms):
            self.expected_ms = most_ms

        def ms(self, launch=None):
            if launch is not None:
                launch()
                beside.append(launch)
            return 2.0 if launch is None else 2.5

    empty = torch.empty
    pattern = torch.arange(1 << 16).remainder(251).to(torch.uint8)
    monkeypatch.setattr(
        torch, "empty", lambda n, pin_memory=False, **kw: pattern.clone() if pin_memory else empty(n, **kw)
    )
    for name, value in (("POOL", 1 << 16), ("FRAMES", 1 << 15), ("SIZE", 1 << 13), ("DIM", 2)):
        monkeypatch.setattr(tuning, name, value)
    monkeypatch.setattr(tuning, "PROGRAMS", (2, 4))
    monkeypatch.setattr(tuning, "WARPS", (1, 2))
    monkeypatch.setattr(tuning, "gbps", gbps)
    monkeypatch.setattr(tuning, "Chain", Chain)
    seen = []
    found = tuning.measure(torch.device("cpu"), seen.append)
    assert len(seen) == 2
    assert [(p.small, p.programs, p.warps) for p in sorted(found.points, key=lambda p: p.gbps)] == [
        (small, programs, warps) for small in (False, True) for programs in (2, 4) for warps in (1, 2)
    ]
    assert timed == [1 << 13] * 9
    assert found.limit == 1.0
    # The rates rise: of each size and warps the later one is the best, others are far from it or near.
    measured = [p for p in found.points if p.slowdown is not None]
    assert len(measured) == len(beside) == 4
    assert {(p.programs, p.slowdown) for p in measured} == {(4, 0.25)}
    assert transfer.choose(found.points).programs == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only without a GPU")
@pytest.mark.parametrize("small", [False, True])
def test_the_blocks_that_are_measured(monkeypatch, small):
    pytest.importorskip("triton")
    from hf_sparsekv.tuning import block_copies as tuning

    host = torch.randint(256, (1 << 19,), dtype=torch.uint8)
    one = tuning.Blocks(host, torch.zeros(1 << 18, dtype=torch.uint8), tuning.TOKENS[small])
    block = 4096 if small else 32768
    assert one.take(3 * block + 5) == 3 * block
    flat, listed = one.kv.flatten(0, 1), one.copies.long()
    one.copy(2, 1)
    assert torch.equal(one.frames[listed[:3, 1]], flat[listed[:3, 0]])
    assert not one.frames[listed[3:, 1]].any()
    assert one.take(1) == block
    assert one.take(1 << 30) == 1 << 18


@pytest.mark.gpu
def test_calibrate_device_on_a_gpu(empty_table):
    """The command itself: a table near the link's rate, and a file that is used from then on."""
    out = run("calibrate-device", "--no-crossover").stdout
    assert "chosen" in out
    there = json.loads(empty_table.read_text())["devices"]
    (name, entry), device = *there.items(), torch.device("cuda", 0)
    assert name == f"{torch.cuda.get_device_name(0)}, {link_name(device)}"
    assert transfer.settings(device) == transfer._settings(entry)
    assert transfer.lookup(*name.rsplit(", ", 1)).source == "measured"
    measured = [p for p in entry["points"] if p["slowdown"] is not None]
    assert measured and all(p["slowdown"] > -0.5 for p in measured)
    assert max(p["gbps"] for p in entry["points"]) > 0.5 * entry["limit_gbps"]
    assert transfer.choose([Point(**p) for p in entry["points"]]) == transfer.settings(device)
