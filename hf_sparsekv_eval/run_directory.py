"""The directory of a run, which one process at a time writes to.

The locks of its files know nothing of an evaluation.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"


class Lock:
    """The directory ``out``, made if it is not there, for one run; the system frees it when the process dies."""

    def __init__(self, out: Path) -> None:
        self.path = out / LOCK
        self.made = [path for path in (out, *out.parents) if not path.exists()]
        self.held: int | None = None
        for _ in range(100):  # a run that ends may just now remove its lock file and an empty directory
            with contextlib.suppress(FileNotFoundError):
                out.mkdir(parents=True, exist_ok=True)
                if fcntl is None or self._take():
                    return
        raise ValueError(f"{out} comes and goes: choose another directory with --out")

    def _take(self) -> bool:
        """Whether the file that was locked is still the one at the path."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(
                f"another run writes to {self.path.parent}: wait until it has ended, or choose another directory "
                "with --out"
            ) from None
        except OSError as error:  # some network file systems
            warnings.warn(
                f"{self.path.parent} cannot be locked ({error.strerror}): start no second run there", stacklevel=4
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(self.path)):
                self.held = file
                return True
        os.close(file)
        return False

    def release(self) -> None:
        """Unlock, and leave neither a lock nor a directory in which nothing was written."""
        if self.held is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self.held)
        with contextlib.suppress(OSError):  # not empty
            for path in self.made:
                path.rmdir()
