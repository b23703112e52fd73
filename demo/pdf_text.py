"""Print the text of a PDF file; run in a process of its own, because files are not to be trusted."""

from __future__ import annotations

import logging
import sys

MEMORY = 2 << 30
SECONDS = 25
MAX_PAGES = 2000


def limit() -> None:
    """Give this process little memory and time."""
    try:
        import resource
    except ImportError:  # not on Windows: the time limit of the caller remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def text_of(path: str, most: int) -> str:
    """The text of the pages, up to ``most`` characters and then the rest of that page."""
    from pypdf import PdfReader

    reader = PdfReader(path)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted: save it without a password")
    if len(reader.pages) > MAX_PAGES:
        raise ValueError(f"it has {len(reader.pages)} pages, at most {MAX_PAGES} can be read")
    pages, size = [], 0
    for page in reader.pages:
        pages.append(page.extract_text())
        size += len(pages[-1])
        if size > most:
            break
    return "\n\n".join(pages)


def main() -> int:
    """Exit status 1 and one line on standard error if the file cannot be read."""
    from .documents import MAX_CHARACTERS

    limit()
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        text = text_of(sys.argv[1], MAX_CHARACTERS)
    except Exception as error:  # pypdf raises anything over a damaged file
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
