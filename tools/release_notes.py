"""Print a version's part of CHANGELOG.md, as the notes of its release.

usage: python tools/release_notes.py 0.1.0

Relative links lead nowhere in a release's notes: with REPOSITORY_URL and REPOSITORY_REF in the environment they become
links to the repository.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(changelog: str, version: str, repository: str = "", ref: str = "main") -> str:
    """The text under ``## version``.

    Raises:
        ValueError: there is no such part, or nothing is in it.
    """
    parts = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2]))
    text = found.get(version, "").strip()
    if not text:
        raise ValueError(f"CHANGELOG.md has nothing under `## {version}`; it has {', '.join(found)}")
    if not repository:
        return text + "\n"

    def absolute(match: re.Match) -> str:
        label, target = match.groups()
        at = target if re.match(r"[a-z]+:", target) else f"{repository.rstrip('/')}/blob/{ref}/{target}"
        return f"[{label}]({at})"

    return re.sub(r"\[([^\[\]]*)\]\(([^()\s]+)\)", absolute, text) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        made = notes(
            CHANGELOG.read_text(encoding="utf-8"),
            sys.argv[1].removeprefix("v"),
            os.environ.get("REPOSITORY_URL", ""),
            os.environ.get("REPOSITORY_REF", "main"),
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    sys.stdout.write(made)
