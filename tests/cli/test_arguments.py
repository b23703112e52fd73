"""Help and wrong usage, before anything heavy is imported, and the same as the commands themselves say."""

from __future__ import annotations

import pytest
from command_arguments import whole
from typer.testing import CliRunner

from hf_sparsekv.cli.app import app
from hf_sparsekv_cli import arguments


def test_they_are_those_of_the_commands():
    """If not: ``python tests/helpers/command_arguments.py``."""
    assert arguments.FILE.read_text(encoding="utf-8") == whole()


def all_commands() -> list[list[str]]:
    found = [[]]
    for name, about in arguments.data()["commands"].items():
        found += [[name], *([name, inner] for inner in about.get("commands", ()))]
    return [words for words in found if "context" not in arguments.command(words)]  # help is another program's


@pytest.mark.parametrize("words", all_commands(), ids=lambda words: " ".join(words) or "itself")
def test_help_is_the_same(words):
    """With and without the implementation."""
    light, heavy = (
        CliRunner().invoke(one, [*words, "--help"], prog_name="hf-sparsekv") for one in (arguments.app(), app)
    )
    assert light.exit_code == heavy.exit_code == 0
    assert light.stdout == heavy.stdout
