"""Progressive caches on the command line."""

from __future__ import annotations

import re

from test_cli import TEXT, run, tiny

__all__ = ["tiny"]  # a fixture


def test_generate_progressively(tiny):
    options = ("--cache", "progressive", "--threshold", 0.5, "--block-size", 16, "--dense-layers", 0)
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *options, "--max-blocks", 30)
    assert any(line.startswith("progressive") for line in result.stderr.splitlines())
    assert re.search(r"[\d.]+ blocks a walk for an estimated mass of \d+\.\d+%", " ".join(result.stderr.split()))
    options = ("--cache", "progressive", "--threshold", 1)
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *options, "--compare", "dense")
    assert "both gave the same 8 tokens" in result.stderr


def test_options_of_the_other_cache_are_refused(tiny):
    given = ("generate", tiny, "--prompt", "abc", "--cache")
    assert "--token-budget has no meaning with --cache progressive" in flat(
        run(*given, "progressive", "--token-budget", 5, status=2).stderr
    )
    assert "--threshold has no meaning with --cache two_level" in flat(
        run(*given, "two_level", "--threshold", 0.5, status=2).stderr
    )
    assert "--threshold must lie in (0, 1]" in flat(run(*given, "progressive", "--threshold", 2, status=2).stderr)
    assert "--compare progressive is the cache itself" in flat(
        run(*given, "progressive", "--compare", "progressive", status=2).stderr
    )
    assert "--token-budget has no meaning without a sparse cache" in flat(
        run(*given, "dense", "--token-budget", 5, status=2).stderr
    )
    assert "--no-offload has no meaning without" in flat(run(*given, "dense", "--no-offload", status=2).stderr)
    assert "--compare takes dense" in flat(run(*given, "progressive", "--compare", "two_level", status=2).stderr)


def flat(text: str) -> str:
    """Without the frame and the line breaks of usage errors."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_plan_of_a_progressive_cache(tiny):
    out = run("plan", tiny, "--context", 3000, "--cache", "progressive").stdout
    assert re.search(r"token labels +- +-", out)
    assert "plan compares" in flat(run("plan", tiny, "--context", 10, "--cache", "dense", status=2).stderr)
