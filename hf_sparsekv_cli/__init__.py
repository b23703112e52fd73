"""The ``hf-sparsekv`` command's entry: version, help, completion and wrong usage without torch.

Importing anything of ``hf_sparsekv`` imports torch and transformers, which takes seconds. So these are answered from
here, by :mod:`.arguments`, and only right usage reaches :mod:`hf_sparsekv.cli.app`. Outside of the package because
Python imports a package before a module in it.
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
    from .ending import ending

    with ending():
        _main()


def _main() -> None:
    if sys.argv[1:] == ["--version"]:  # not even typer
        print(f"hf-sparsekv {version()}")
        return
    from .arguments import app
    from .names import NAME

    app(_run)(prog_name=NAME)


def _run() -> None:
    """Import the commands and let the one that is asked for do its work."""
    if sys.stderr is None or not sys.stderr.isatty():  # the bars of transformers would fill a log; ours are lines there
        os.environ.setdefault("TQDM_DISABLE", "1")
    from hf_sparsekv.cli.app import main as run

    run()
