"""Break the packages at random places, one place at a time, and list the breakages that no test notices.

    python tools/mutate.py --count 40                                 # hours on two cores
    python tools/mutate.py --near-only --seed 3 hf_sparsekv/kv        # the tests of that folder alone

Each breakage (tools/mutations.py) is made in a copy of the tree. The tests named after the module run first, then those
of its folder, then the selection of `make test`; with --gpus, GPU tests of operators for a broken kernel. A test that
fails in the unbroken tree, too, counts for nothing.

A script of its own, because mutmut keeps all mutants of a function in one file, which Triton and Dynamo read as source,
and cosmic-ray runs one command for all mutants and knows no tests that fail before. It imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from pathlib import Path

import mutations

PACKAGES = "hf_sparsekv", "hf_sparsekv_cli", "hf_sparsekv_config", "hf_sparsekv_eval", "hf_sparsekv_serve"
TESTS_OF = {
    "hf_sparsekv_cli": "cli",
    "hf_sparsekv_config": "cli",
    "hf_sparsekv_eval": "evaluation",
    "hf_sparsekv_serve": "serve",
}
LEFT_OUT = ".git", ".venv*", ".whl", "build", "dist", ".*_cache", ".hypothesis"


def near(root: Path, path: str) -> list[str]:
    """Test files with the module's name, those that import it, and those of its folder, in this order."""
    package, *folders = Path(path).with_suffix("").parts
    if len(folders) > 1 and folders[-1].startswith(("__init__", "triton", "reference", "_")):
        folders.pop()  # tests of an operator are named after its folder
    dotted = r"\W.*".join([package, *folders])
    imports = re.compile(rf"^ *(from|import) .*{dotted}\b", re.M)
    tests = sorted((root / "tests").rglob("test_*.py"))
    folder = root / "tests" / TESTS_OF.get(package, "")
    for name in folders:
        folder = folder / name if (folder / name).is_dir() else folder
    named = [test for test in tests if folders[-1].strip("_") in test.stem]
    importing = [test for test in tests if imports.search(test.read_text())]
    beside = sorted(folder.rglob("test_*.py")) if folder != root / "tests" else []
    return [test.relative_to(root).as_posix() for test in dict.fromkeys([*named, *importing, *beside])]


def _copy(source: Path, target: Path, *left_out: str) -> None:
    def copied(one: str, other: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # tests that run there have just removed it
            shutil.copy2(one, other)

    ignore = shutil.ignore_patterns(*LEFT_OUT, *left_out)
    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=copied)


class Runs:
    """Runs of pytest over copies of the tree."""

    def __init__(self, root: Path, asked: argparse.Namespace) -> None:
        self.asked, self.began, self.root = asked, time.monotonic(), root
        self.work = Path(tempfile.mkdtemp(prefix="mutate-"))
        self.base, self.known = self.work / "base", self.work / "known"
        self.known.touch()  # tests that fail in the base, one a line
        _copy(root, self.base, "__pycache__")
        self.marks = re.search(r"^NOT_SLOW := (.*)", (root / "Makefile").read_text(), re.M)[1]
        self.side_by_side = threading.Semaphore(max(1, asked.jobs // asked.workers))  # runs of the whole selection
        self.under_way: set[subprocess.Popen] = set()
        self.last_gpu = 0

    def pytest(self, tree: Path, failed: Path, limit: float, *options: str, first=(), gpu: bool = False) -> int | None:
        """The exit status, or None if time was up. ``failed`` gets a line for each failure at once."""
        scratch = tempfile.mkdtemp(dir=self.work)
        shutil.copy(self.known, f"{scratch}/known")  # all workers of a run have to collect the same tests
        self.last_gpu += gpu
        paths = (str(tree), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", ""))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env["CUDA_VISIBLE_DEVICES"] = str(self.last_gpu % self.asked.gpus) if gpu else ""
        env |= {"MUTATE_FAILED": str(failed), "MUTATE_KNOWN": f"{scratch}/known", "MUTATE_FIRST": "\n".join(first)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutate", "-p", "no:cacheprovider"]
        command += [
            f"--basetemp={scratch}/tmp",
            f"--timeout={self.asked.test_limit}",
            "-m",
            "gpu" if gpu else self.marks,
        ]
        with open(f"{scratch}.log", "wb") as log:
            run = subprocess.Popen(
                [*command, *options], cwd=tree, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.under_way.add(run)
        try:
            return run.wait(max(1, min(limit, self.began + self.asked.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.stop(run)
            shutil.rmtree(scratch, ignore_errors=True)

    def stop(self, run: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        self.under_way.discard(run)

    def killer(self, tree: Path, limit: float, *options: str, **how) -> str | None:
        """A test that fails in ``tree`` and not in the base; "" if none does, None if time was up before."""
        while True:
            failed, again = (Path(tempfile.mkstemp(dir=self.work)[1]) for _ in range(2))
            status = self.pytest(tree, failed, limit, "-x", *options, **how)
            names = list(dict.fromkeys(failed.read_text().splitlines()))
            if not names and status in (0, 5, None):
                return None if status is None else ""
            same = names or [*options, "--collect-only"]
            of_base = self.pytest(self.base, again, limit, *same, gpu=how.get("gpu", False))
            here = again.read_text().splitlines()
            if of_base is None:
                return None
            if not names and of_base not in (0, 5):
                raise RuntimeError(f"pytest fails in the unbroken tree, too: {options}")
            if new := [name for name in names if name not in here] or [f"pytest ends with {status}"] * (not names):
                return new[0]
            with self.known.open("a") as known:
                known.write("".join(f"{name}\n" for name in here))

    def result(self, mutation: mutations.Mutation) -> dict[str, object]:
        """Break a copy, run tests until one fails, and delete the copy."""
        began, asked, path = time.monotonic(), self.asked, mutation.path
        tree = Path(tempfile.mkdtemp(dir=self.work)) / "tree"
        _copy(self.base, tree)  # with its compiled modules
        source = (tree / path).read_bytes()
        (tree / path).write_bytes(mutation.apply(source))
        for compiled in (tree / path).parent.glob(f"__pycache__/{Path(path).stem}.*"):
            compiled.unlink()
        kernel = "/ops/" in path and (not path.endswith(".py") or b"triton.jit" in source)
        first = near(tree, path)
        by, stage = self.killer(tree, asked.near_limit, *first) if first else "", "near"
        if not by and kernel and asked.gpus:
            general = [test.relative_to(tree).as_posix() for test in sorted(tree.glob("tests/ops/test_*.py"))]
            tests = [*(test for test in first if test.startswith("tests/ops/")), *general]
            by, stage = self.killer(tree, asked.limit, "-n", "8", *dict.fromkeys(tests), first=first, gpu=True), "gpu"
        elif not by and not asked.near_only:
            with self.side_by_side:
                by, stage = self.killer(tree, asked.limit, "-n", str(asked.workers), first=first), "whole"
        shutil.rmtree(tree.parent, ignore_errors=True)
        status = "killed" if by else "survived" if by == "" else "out of time"
        before = source[mutation.start : mutation.end].decode()
        seconds = round(time.monotonic() - began)
        return {**asdict(mutation), "before": before, "status": status, "stage": stage, "test": by, "seconds": seconds}

    def run(self) -> dict[str, object]:
        """All results, written after each one."""
        asked, results = self.asked, []
        chosen = mutations.chosen(self.root, asked.within, asked.count, asked.seed)
        report = {"seed": asked.seed, "count": len(chosen), "within": asked.within, "tests": self.marks}
        if asked.baseline:
            whole = (self.base, self.known, asked.limit, "-n", str(asked.jobs), "--continue-on-collection-errors")
            first = threading.Thread(target=self.pytest, args=whole, daemon=True)
            first.start()
            first.join(asked.baseline)
        with ThreadPoolExecutor(asked.jobs) as pool:
            try:
                for done in as_completed([pool.submit(self.result, mutation) for mutation in chosen]):
                    if error := done.exception():  # the others go on
                        print(f"{type(error).__name__}: {error}", file=sys.stderr)
                        continue
                    results.append(done.result())
                    print(_line(results[-1]), flush=True)
                    report["seconds"] = round(time.monotonic() - self.began)
                    report["failing before"] = len(set(self.known.read_text().splitlines()))
                    report |= Counter(one["status"] for one in results)
                    asked.out.write_text(json.dumps({**report, "mutations": results}, indent=1) + "\n")
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for run in list(self.under_way):
                    self.stop(run)
        shutil.rmtree(self.work, ignore_errors=True)
        return report


def _line(one: dict) -> str:
    before, text = (" ".join(str(one[name]).split())[:50] for name in ("before", "text"))
    place = f"{one['path']}:{one['line']}"
    return f"{one['status']:11} {one['stage']:5} {one['seconds']:4} s  {place}  {before} -> {text}  {one['test'] or ''}"


# The rest but `main` is for pytest, which gets this file as a plugin.
@cache
def _known() -> frozenset[str]:
    return frozenset(Path(os.environ["MUTATE_KNOWN"]).read_text().splitlines())


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    return collection_path.relative_to(config.rootpath).as_posix() in _known() or None


def pytest_collection_modifyitems(config, items: list) -> None:
    first = os.environ["MUTATE_FIRST"].splitlines()
    dropped = [item for item in items if item.nodeid in _known()]
    items[:] = [item for item in items if item.nodeid not in _known()]
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in first)
    config.hook.pytest_deselected(items=dropped)


def pytest_runtest_logreport(report) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MUTATE_FAILED"], "a") as failed:
            failed.write(f"{report.nodeid}\n")


pytest_collectreport = pytest_runtest_logreport


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("within", nargs="*", default=list(PACKAGES), help="folders and files; default: the packages")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--workers", type=int, default=2, help="processes of a run of the whole selection")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs for tests of broken kernels")
    parser.add_argument("--near-only", action="store_true", help="leave out the whole selection")
    parser.add_argument(
        "--baseline", type=float, metavar="SECONDS", help="run all unbroken first, at most so long alone"
    )
    parser.add_argument("--near-limit", type=float, default=600, metavar="SECONDS", help="then come all tests")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for a run of all tests")
    parser.add_argument("--test-limit", type=float, default=300, metavar="SECONDS", help="for one test")
    parser.add_argument("--deadline", type=float, default=1e6, metavar="SECONDS", help="for everything")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"), help="JSON, written after each result")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs of pytest end with this script
    print(json.dumps(Runs(Path.cwd(), parser.parse_args(argv)).run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
