"""Documents: the bundled text, uploads, and what is made of them: so many tokens, a fact hidden among them."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

MAX_UPLOAD = 8 << 20  # bytes of a file
MAX_CHARACTERS = 4 << 20  # of text, pasted or read from a file
SUFFIXES = (".txt", ".md", ".pdf")
_PDF_SECONDS = 30


class DocumentError(ValueError):
    """A document cannot be used; the message is for the reader."""


def bundled() -> str:
    """Alice's Adventures in Wonderland (Lewis Carroll, 1865; in the public domain)."""
    return resources.files("demo").joinpath("texts", "alice.txt").read_text(encoding="utf-8")


def read_upload(path: str | Path) -> str:
    """The text of an uploaded file.

    Raises:
        DocumentError: too large, of another kind, damaged, or without text.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DocumentError(f"{path.name}: only {', '.join(SUFFIXES)} files can be read")
    size = path.stat().st_size
    if size > MAX_UPLOAD:
        raise DocumentError(f"{path.name} has {size / 2**20:.1f} MB; at most {MAX_UPLOAD >> 20} MB can be read")
    return check(_pdf(path) if suffix == ".pdf" else _plain(path), path.name)


def check(text: str, name: str = "the text") -> str:
    """``text``, if it can be used.

    Raises:
        DocumentError: it is empty or too long.
    """
    if not text.strip():
        raise DocumentError(f"{name} holds no text (scanned pages are pictures: they would need OCR)")
    if len(text) > MAX_CHARACTERS:
        raise DocumentError(f"{name} has {len(text):,} characters; at most {MAX_CHARACTERS:,} can be read")
    return text


def _plain(path: Path) -> str:
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        raise DocumentError(f"{path.name} is not UTF-8 text: save it as UTF-8") from None
    if "\0" in text:
        raise DocumentError(f"{path.name} is no text file")
    return text


def _pdf(path: Path) -> str:
    """In a process of its own, with a limit of memory and time: a file may be made to exhaust both."""
    command = [sys.executable, "-m", "demo.pdf_text", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PDF_SECONDS, check=False, cwd=_root())
    except subprocess.TimeoutExpired:
        raise DocumentError(f"{path.name} took longer than {_PDF_SECONDS} s to read: is it a usual PDF?") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise DocumentError(f"{path.name} cannot be read as PDF: {lines[-1] if lines else 'it took too much memory'}")
    return done.stdout.decode("utf-8", errors="replace")


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def fit(ids: list[int], length: int) -> list[int]:
    """``ids``, repeated or cut to ``length``."""
    if not ids:
        raise DocumentError("the document has no tokens")
    return (ids * -(-length // len(ids)))[:length]


def hide(ids: list[int], fact: list[int], depth: float, breaks: frozenset[int] = frozenset()) -> list[int]:
    """Put ``fact`` into ``ids`` at ``depth`` (0 first, 1 last), after the next token of ``breaks`` if one is near."""
    at = round(depth * len(ids))
    for near in range(at, min(at + 64, len(ids))):
        if ids[near - 1] in breaks:
            at = near
            break
    return [*ids[:at], *fact, *ids[at:]]
