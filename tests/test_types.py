"""mypy finds no more errors in a part of the package than tests/type_errors.txt says: that file's numbers only fall.

python tests/test_types.py    # write the file anew, after errors were mended
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("type_errors.txt")
PACKAGES = ("hf_sparsekv", "hf_sparsekv_eval", "hf_sparsekv_serve")


def part(path: str) -> str:
    """The folder or file at a package's top level."""
    return "/".join(Path(path).parts[:2])


def found() -> Counter[str]:
    """Errors of each part, with the bodies of functions without annotations checked, too."""
    command = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--no-error-summary", *PACKAGES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not run.stderr and run.returncode in (0, 1), run.stdout + run.stderr
    return Counter(part(path) for path in re.findall(r"^(\S+?):\d+: error:", run.stdout, re.M))


def known() -> Counter[str]:
    return Counter({name: int(n) for name, n in (line.split() for line in FILE.read_text().splitlines())})


@pytest.mark.slow
def test_no_part_has_more_errors_than_are_known():
    more = {name: f"{n}, known are {known()[name]}" for name, n in found().items() if n > known()[name]}
    assert not more, "see what `python -m mypy --check-untyped-defs hf_sparsekv ...` says of these"


if __name__ == "__main__":
    FILE.write_text("".join(f"{name} {n}\n" for name, n in sorted(found().items())))
