"""Interrupts at chosen points of the package's code, as Ctrl-C or a dying worker would raise them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path

import transformers

import hf_sparsekv

HOME = str(Path(hf_sparsekv.__file__).parent)
_THEIRS = Path(transformers.__file__).parent
MODELING = str(_THEIRS / "models")
TRANSFORMERS = (str(_THEIRS / "cache_utils.py"), str(_THEIRS / "modeling_utils.py"))
_CALLS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW") if name in dis.opmap}
_STARTS = {dis.opmap[name] for name in ("RESUME", "JUMP_BACKWARD") if name in dis.opmap}


class Points:
    """Counts the places where CPython looks for a pending signal, and raises at one of them.

    Those are: a function's beginning, a jump back, and the return of a call. Only what lies in ``code`` counts, files
    or folders: the package's own by default.

    Args:
        at: raise there; None only counts.
        error: what is raised.
        again: and once more, so many points later.
    """

    def __init__(
        self,
        at: int | None = None,
        error: type[BaseException] = KeyboardInterrupt,
        again: int = 0,
        code: tuple[str, ...] = (HOME,),
    ) -> None:
        self.left, self.error, self.again, self.code = at, error, again, code
        self.seen = 0
        self.where: list[str] = []
        self._called: set[int] = set()  # frames whose last instruction was a call

    def __enter__(self) -> Points:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error) -> None:
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._local

    def _local(self, frame, event, arg):
        if event != "opcode":
            if event == "return":
                self._called.discard(id(frame))
            return self._local
        code = frame.f_code.co_code[frame.f_lasti]
        here = id(frame) in self._called or code in _STARTS
        if code in _CALLS:
            self._called.add(id(frame))
        else:
            self._called.discard(id(frame))
        if here:
            self._point(frame)
        return self._local

    def _point(self, frame) -> None:
        self.seen += 1
        if self.left is None:
            return
        self.left -= 1
        if self.left == 0:
            self.where.append(f"{frame.f_code.co_filename.removeprefix(HOME)}:{frame.f_lineno} {frame.f_code.co_name}")
            self._called.discard(id(frame))
            if self.again:
                self.left, self.again = self.again, 0
            else:
                self.left = None
            raise self.error


def count(work: Callable[[], object], code: tuple[str, ...] = (HOME,)) -> int:
    """Points that ``work`` passes."""
    with Points(code=code) as points:
        work()
    return points.seen
