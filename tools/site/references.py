"""Sphinx roles in docstrings (``:class:`X```) as links to the pages of the API, for mkdocstrings.

An extension of griffe, which reads the sources without importing them. What is not a public name stays code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`~?([^`]+)`")
PUBLIC = Path(__file__).parents[2] / "tests/public_api.txt"


def names() -> dict[str, set[str]]:
    """Public names, with the methods and properties of classes."""
    found: dict[str, set[str]] = {}
    for line in PUBLIC.read_text().splitlines():
        if match := re.match(r"(?:class )?(\w+)", line):
            members = found.setdefault(match.group(1), set())
        elif match := re.match(r"    ([a-z]\w*)(\(|: property)", line):  # fields are in their class's description
            members.add(match.group(1))
    return found


class References(griffe.Extension):
    """Rewrites every docstring that mkdocstrings shows."""

    def __init__(self) -> None:
        self.names = names()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = self.linked(obj.docstring.value, obj)

    def linked(self, text: str, obj: griffe.Object) -> str:
        """``text`` with its roles as references of mkdocs-autorefs, or as code."""

        def replaced(match: re.Match) -> str:
            name = match.group(1).removeprefix("hf_sparsekv.")
            owner, _, member = name.rpartition(".")
            if not owner and name not in self.names:  # a method of the class that the docstring is in
                inside = obj if obj.is_class else obj.parent
                owner, member = inside.name if inside else "", name
            if owner in self.names and member not in self.names[owner]:
                return f"[`{name}`][hf_sparsekv.{owner}]"
            if name in self.names:
                return f"[`{name}`][hf_sparsekv.{name}]"
            if member in self.names.get(owner, ()):
                return f"[`{name}`][hf_sparsekv.{owner}.{member}]"
            return f"`{name}`"

        return ROLE.sub(replaced, text)
