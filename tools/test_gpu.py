"""Run all tests that need a GPU, and add a row to benchmarks/results/gpu_tests.csv. Ends when a worker dies.

    make test-gpu
    make test-gpu GPU_TEST_OPTIONS="--workers 20"
    CUDA_VISIBLE_DEVICES=0,1 make test-gpu          # the tests of two GPUs as well

The environment needs a CUDA build of torch, Triton, pytest, pytest-xdist and pytest-timeout.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks/results/gpu_tests.csv"
NAMES = (
    *("date", "commit", "card", "gpus", "workers", "passed", "failed", "skipped", "seconds", "versions", "selected"),
)
GPU_GIB, HOST_GIB = 3.5, 5  # what a worker takes at most, seen with 15 workers on an H200


def default_workers(gpu_bytes: int, host_bytes: int, cores: int) -> int:
    """Workers that the machine has cores and memory for. All of them use the first GPU most of the time."""
    by_memory = min(gpu_bytes / (GPU_GIB * 2**30), host_bytes / (HOST_GIB * 2**30))
    return max(1, min(cores - 1, int(by_memory)))


def counts(report: Path) -> tuple[int, int, int, list[str]]:
    """Tests that passed, failed and were skipped, and the names of those that failed, of a JUnit report."""
    passed, skipped, failed = 0, 0, {}
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {part.tag for part in case}
        if kinds & {"failure", "error"}:
            failed[f"{case.get('classname')}::{case.get('name')}"] = None
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, len(failed), skipped, list(failed)


def host_bytes() -> int:
    """Host memory that this process may use: the machine's, or less in a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="processes; default: by cores and memory")
    parser.add_argument("--csv", type=Path, default=ROWS, help="where the row is added")
    parser.add_argument("--commit", help="what the row says, for a copy of the tree without its history")
    parser.add_argument("pytest", nargs="*", help="what pytest gets beside, after --: files, -k, ...")
    asked = parser.parse_args(argv)

    sys.path.insert(0, str(ROOT))
    import torch

    from hf_sparsekv.results import commit, versions

    if not torch.cuda.is_available():
        print("no CUDA device: these tests need one (make test runs the others)", file=sys.stderr)
        return 2
    gpus, card = torch.cuda.device_count(), torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory
    workers = asked.workers or default_workers(memory, host_bytes(), len(os.sched_getaffinity(0)))
    report = ROOT / f"build/gpu-tests-{os.getpid()}.xml"
    report.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", str(workers), "--max-worker-restart", "0"]
    command += ["-q", f"--junitxml={report}", *asked.pytest]
    print(" ".join(command), flush=True)
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    seconds = time.monotonic() - began
    if not report.exists():
        print(f"pytest wrote no report (exit status {code}): no row is added", file=sys.stderr)
        return code or 1
    passed, failed, skipped, names = counts(report)
    report.unlink()
    print(f"\n{card}, {gpus} visible: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s")
    for name in names:
        print("failed:", name)
    if code not in (0, 1):
        print(f"pytest ended with status {code}: not all tests have run")
    new = not asked.csv.exists()
    asked.csv.parent.mkdir(parents=True, exist_ok=True)
    day, some = datetime.date.today().isoformat(), " ".join(asked.pytest)
    with asked.csv.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(NAMES)
        writer.writerow(
            (
                day,
                asked.commit or commit(),
                card,
                gpus,
                workers,
                passed,
                failed,
                skipped,
                round(seconds),
                versions(),
                some,
            )
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
