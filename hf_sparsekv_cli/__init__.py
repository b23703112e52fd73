"""The ``hf-sparsekv`` command: version, help, completion and wrong usage without torch.

Importing anything of ``hf_sparsekv`` imports torch and transformers, which takes seconds. So the commands' arguments
are declared here, and the functions that do their work are imported once the arguments are known to be right.
"""

from __future__ import annotations

import sys


def version() -> str:
    """The package's, without importing it."""
    import runpy
    from importlib.util import find_spec
    from pathlib import Path

    return runpy.run_path(str(Path(find_spec("hf_sparsekv").origin).with_name("version.py")))["__version__"]


def main() -> None:
    """Entry point of the console script."""
    from .ending import ending

    with ending():
        _main()


def _main() -> None:
    if sys.argv[1:] == ["--version"]:  # not even typer
        print(f"hf-sparsekv {version()}")
        return
    from .app import app
    from .names import NAME

    app(prog_name=NAME)
