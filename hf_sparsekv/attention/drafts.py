"""Whether a forward pass over a cache verifies drafts, found in transformers' own loop."""

from __future__ import annotations

import sys
from typing import Protocol

from ..cache_name import given_cache


class DraftedCache(Protocol):
    """A cache whose passes are known.

    Attributes:
        draft_passes: passes of several tokens over cached ones verify drafts, or do not; None: nothing was said.
    """

    draft_passes: bool | None


_LOOP = "_assisted_decoding"  # method of GenerationMixin for prompt lookup and assistants


def are_drafts(cache: DraftedCache, tokens: int) -> bool:
    """The forward pass under way, of so many tokens over cached ones, is known to verify drafts."""
    return verified_tokens(cache) == tokens if cache.draft_passes is None else cache.draft_passes


def verified_tokens(cache: object) -> int:
    """Tokens that ``generate()`` gives its model over ``cache`` for verification; 0 if there are none.

    Drafts and a short piece of a prompt look the same in a forward pass. The loop notifies a cache at its start
    (``activate_past_recording()``), but not at its end. So we search the call stack for the loop that owns this cache,
    as ``update()`` does for the module that calls it. The loop's first pass reads the rest of the prompt and does not
    count. Tokens without such a loop are no drafts. (The local names are those of transformers 5.17 to 5.24. If a later
    release renamed them, tests would fail, and passes would be exact.)
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _LOOP:
            there = frame.f_locals
            given = there.get("model_kwargs")
            if isinstance(given, dict) and given_cache(given) is cache:
                return 0 if there.get("is_first_iteration", True) else there.get("candidate_length", -1) + 1
        frame = frame.f_back
    return 0
