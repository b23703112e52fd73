"""Fail unless the imported packages have the versions that a constraints file pins.

usage: python tools/check_versions.py constraints-newest.txt

Run with an overlay on PYTHONPATH, it proves that the overlay is what gets imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

IMPORTED = {"pyyaml": "yaml"}  # where the module has another name


def main(path: str) -> int:
    """Compare every ``name==version`` line with the imported module's ``__version__``, or its package's."""
    wrong = 0
    for line in Path(path).read_text().splitlines():
        name, _, wanted = line.partition("#")[0].strip().partition("==")
        if not wanted:
            continue
        module = importlib.import_module(IMPORTED.get(name, name.replace("-", "_")))
        found = getattr(module, "__version__", None) or importlib.metadata.version(name)
        print(f"{name} {found} from {Path(module.__file__).parent}")
        if found.partition("+")[0] != wanted:  # a build for other hardware is the same version
            print(f"expected {name} {wanted}", file=sys.stderr)
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
