"""Errors as they are reported and kept: one line for the client, and a traceback without its frames' variables.

The loop's thread, the output thread and submitting threads all report errors this way.
"""

from __future__ import annotations

import traceback


def described(error: BaseException) -> str:
    """An error's type and message in one line."""
    return f"{type(error).__name__}: {error}"


def clear_frames(error: BaseException) -> None:
    """Clear the variables in an error's traceback: they hold activations of a chunk, caches and their blocks.

    The traceback itself keeps its lines. Frames that still run keep their variables.
    """
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]
