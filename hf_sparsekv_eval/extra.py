"""Errors for missing packages of the extra ``eval``.

Most tasks run without the extra: only code that needs one of its packages imports it.
"""

from __future__ import annotations

import importlib.util


def needs(what: str, package: str) -> None:
    """Refuse ``what`` if ``package`` is not installed.

    Raises:
        ValueError: it is not; the message says how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{what} needs {package}: install the extra, `pip install '.[eval]'` in a checkout, or "
            f"`pip install {package}`"
        )
