"""Many measurements in one go: jobs of jobs.yaml over the GPUs of this machine, each on GPUs of its own.

    python -m benchmarks.jobs --list
    python -m benchmarks.jobs suite steps-32b-2 , traces --out runs/today --seconds 900

Jobs begin in the order given, as soon as enough GPUs are free. One that does not fit yet lets later ones pass. ``,``
waits for all before it. A job that would not end within ``--seconds`` by its ``least`` does not begin. One that takes
longer than its ``limit`` is killed with all its processes. Output goes to OUT/NAME.txt, rows to OUT/NAME.csv ($ROWS in
a command). Some commands need VLLM, a folder that holds vLLM.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".yaml")
BARRIER = ","
NEEDS = ("VLLM",)
PORTS = 8100, 20  # the first job's first, and how many each GPU has


@dataclass(frozen=True)
class Job:
    """A measurement.

    Args:
        gpus: how many it needs.
        limit, least: seconds after which it is killed, and that it takes at least.
        run: for bash, in the repository's root.
    """

    name: str
    gpus: int
    limit: float
    least: float
    run: str

    @property
    def missing(self) -> list[str]:
        """Environment variables that its command needs and that are not set."""
        return [name for name in NEEDS if re.search(rf"\${name}\b", self.run) and name not in os.environ]


@dataclass
class Running:
    """A job that has begun."""

    job: Job
    process: subprocess.Popen
    gpus: tuple[str, ...]
    begun: float


def known(path: Path = FILE) -> dict[str, Job]:
    """The jobs of a file, by name; texts of ``common`` stand for ``{NAME}`` in their commands."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    jobs = {}
    for name, entry in data["jobs"].items():
        run = entry["run"]
        for short, text in data.get("common", {}).items():
            run = run.replace("{" + short + "}", text)
        jobs[name] = Job(name, entry.get("gpus", 1), entry["limit"], entry.get("least", 20), run)
    return jobs


def first_that_fits(todo: list[Job | None], free: int, busy: bool) -> int | None:
    """The place of the job that begins next, or of a barrier (None) that is reached; None: wait."""
    for place, job in enumerate(todo):
        if job is None:
            return place if place == 0 and not busy else None
        if job.gpus <= free:
            return place
    return None


class Jobs:
    """Runs jobs.

    Args:
        gpus: what CUDA_VISIBLE_DEVICES may name.
        out: where output and rows go.
        end: time after which nothing runs any more.
    """

    def __init__(self, gpus: list[str], out: Path, end: float) -> None:
        self.gpus, self.free, self.out, self.end = gpus, list(gpus), out, end
        self.running: list[Running] = []
        self._begun = time.time()

    def __call__(self, todo: list[Job | None]) -> bool:
        """True if all of them have ended well."""
        self.out.mkdir(parents=True, exist_ok=True)
        todo, good = list(todo), True
        try:
            while todo or self.running:
                good &= self._reap()
                place = first_that_fits(todo, len(self.free), bool(self.running))
                if place is None:
                    time.sleep(0.1)
                elif (job := todo.pop(place)) is not None:
                    good &= self._begin(job)
        finally:  # an interrupt: what jobs have started would go on, in sessions of their own
            self.end = 0.0
            self._reap()
        return good

    def _begin(self, job: Job) -> bool:
        if time.time() + job.least > self.end:
            self._say(f"{job.name}: no time is left")
            return False
        gpus, self.free = tuple(self.free[: job.gpus]), self.free[job.gpus :]
        rows, port = self.out / f"{job.name}.csv", PORTS[0] + PORTS[1] * self.gpus.index(gpus[0])
        more = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "ROWS": str(rows.resolve()), "PORT": str(port)}
        with open(self.out / f"{job.name}.txt", "w") as log:
            process = subprocess.Popen(
                ["bash", "-c", job.run],
                cwd=ROOT,
                env={**os.environ, **more, "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(Running(job, process, gpus, time.time()))
        self._say(f"{job.name} begins on {', '.join(gpus)}")
        return True

    def _reap(self) -> bool:
        good, still = True, []
        for one in self.running:
            code, now = one.process.poll(), time.time()
            late = code is None and (now - one.begun > one.job.limit or now > self.end)
            if code is None and not late:
                still.append(one)
                continue
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)  # its leftover child processes, too
            one.process.wait()
            self.free += one.gpus
            good &= code == 0
            self._say(f"{one.job.name} {'was killed' if late else f'ended with {code}'} after {now - one.begun:.0f} s")
        self.running = still
        return good

    def _say(self, text: str) -> None:
        print(f"{time.time() - self._begun:6.0f} s  {text}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"names; {BARRIER} waits for all before it")
    parser.add_argument("--list", action="store_true", help="show the jobs")
    parser.add_argument("--out", type=Path, default=ROOT / "build/jobs")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all (default: 3600)")
    parser.add_argument("--gpus", help="0,1: those to use; default: all that are visible")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args(argv)
    jobs = known(args.file)
    if args.list:
        for job in jobs.values():
            print(f"{job.name:16} {job.gpus} GPUs, up to {job.limit:.0f} s")
        return 0
    unknown = [name for name in args.jobs if name != BARRIER and name not in jobs]
    if unknown or not args.jobs:
        parser.error(f"{', '.join(unknown) or 'no job'}: one of {', '.join(jobs)}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = [one for one in (args.gpus or visible).split(",") if one]
    todo = [None if name == BARRIER else jobs[name] for name in args.jobs]
    for job in filter(None, todo):
        if job.gpus > len(gpus):
            parser.error(f"{job.name} needs {job.gpus} GPUs, and there are {len(gpus)}")
        if job.missing:
            parser.error(f"{job.name} needs {' and '.join(job.missing)} (see --help)")
    return 0 if Jobs(gpus, args.out, time.time() + args.seconds)(todo) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
