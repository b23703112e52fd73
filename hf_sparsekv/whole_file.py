"""Files that appear when they are whole: written beside their place, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file for what is to lie at ``path``; it takes that place when the block ends, and none on an error.

    Each writer has a file of its own in the same directory. Threads and processes may write to one path at a time: the
    last one to end wins. The file has the permissions that ``open()`` gives.

    Raises:
        OSError: the place cannot be written to; the error names ``path``.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # /dev/null would become a file
        raise OSError(errno.EINVAL, "a device or pipe, which no file may replace", str(path))
    part, file = _open_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _naming(path):
            os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8, with its line ends as they are: readers find the old file or the new one, whole.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    with replacing(path) as file:
        file.write(text.encode())


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        # File systems limit names to 255 bytes, which the path's own name may take up already.
        part = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")
        with _naming(path), suppress(FileExistsError):
            return part, part.open("xb")  # O_EXCL: a link that lies there is not followed


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors inside name ``path``, not the hidden file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
