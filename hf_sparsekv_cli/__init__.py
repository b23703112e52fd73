"""The ``hf-sparsekv`` command's entry: its version, help, and the completion of its commands' names without torch.

Importing anything of ``hf_sparsekv`` imports torch and transformers, which takes seconds. So these are answered from
here, and everything else by :mod:`hf_sparsekv.cli.app`. Outside of the package because Python imports a package before
a module in it.
"""

from __future__ import annotations

import os
import sys


def version() -> str:
    """The package's, without importing it."""
    import runpy
    from importlib.util import find_spec
    from pathlib import Path

    return runpy.run_path(str(Path(find_spec("hf_sparsekv").origin).with_name("version.py")))["__version__"]


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:] == ["--version"]:  # not even typer
        print(f"hf-sparsekv {version()}")
        return
    from .names import NAME, asks_for_names, names_only

    if asks_for_names(sys.argv[1:], os.environ):
        names_only()(prog_name=NAME)
    else:
        from hf_sparsekv.cli.app import main as run

        run()
