"""``hf-sparsekv demo``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .output import CommandError

ROOT = Path(__file__).resolve().parent.parent.parent  # root of a checkout


def demo(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hub ids, directories, .gguf files, offered beside `probe` and `small`; the first is chosen first.",
            show_default="small",
        ),
    ] = None,
    device: opt.Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of torch on a CPU; default: all but one, which serves the page.", show_default=False),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="0.0.0.0 lets other machines in, which may then choose `probe`, `small` and the models named here, "
            "and no other hub id or directory."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Default: the first free one from 7860 on.", show_default=False),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser.")] = False,
    share: Annotated[
        bool, typer.Option("--share", help="A public link through gradio's servers; models as with --host.")
    ] = False,
) -> None:
    """Serve a page on which two caches race over a document, with the time of every token."""
    if not (ROOT / "demo" / "app.py").is_file():
        raise CommandError("the demo is not part of the installed package: run it from a checkout of the project")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    given = {"models": models, "device": device, "threads": threads, "host": host, "port": port}
    module = importlib.import_module("demo.__main__")
    if status := module.serve(module.Options(**given, browser=browser, share=share)):
        raise typer.Exit(status)
