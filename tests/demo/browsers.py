"""A Chromium for the tests of the demo."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The path of a Chromium: the system's, or the one that Playwright has downloaded."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    if importlib.util.find_spec("playwright") is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).is_file() else None


def missing() -> str | None:
    """Why there can be no browser test here; None if there can."""
    for module in ("gradio", "playwright", "pypdf"):
        if importlib.util.find_spec(module) is None:
            return f"the {module} package is missing: pip install -e '.[dev]'"
    return None if find() else "there is no Chromium: run `make browser`"
