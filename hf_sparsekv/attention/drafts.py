"""Whether a forward pass over a cache verifies drafts: what transformers' own loop says of it."""

from __future__ import annotations

import sys

from ..cache_name import given_cache

_LOOP = "_assisted_decoding"  # of GenerationMixin: prompt lookup, assistants


def verified_tokens(cache: object) -> int:
    """The tokens that ``generate()`` gives its model over ``cache`` to be verified; 0 if none are.

    A pass does not tell drafts from a short piece of a prompt, and the loop tells a cache that it has begun
    (``activate_past_recording()``) but not that it is over. So it is looked up in the call stack, as ``update()`` looks
    up the module that calls it: the loop whose cache this is, behind its first pass, which reads what is left of the
    prompt. What is not found there is no draft. (The local names are those of transformers 5.17 to 5.24; tests with
    either would fail if a later release renamed them, and passes would be exact.)
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
