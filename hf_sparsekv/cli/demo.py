"""``hf-sparsekv demo``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

from .output import CommandError

ROOT = Path(__file__).resolve().parent.parent.parent  # root of a checkout


def demo(
    *,
    models: list[str] | None,
    device: str,
    threads: int | None,
    host: str,
    port: int | None,
    browser: bool,
    share: bool,
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
