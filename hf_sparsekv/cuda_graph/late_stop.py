"""``generate()``'s loop without its wait for the GPU: it learns one step later whether all rows have ended.

After each token transformers' loop asks the GPU whether it was the last. Meanwhile the GPU idles while Python prepares
the next step, a third of a millisecond or more for each token. transformers has a variant of the loop that asks about
the previous step, ``DeferredStopCheck``. It uses this variant on Apple's GPUs (5.17 to 5.24). :func:`defer` makes one
model use it over our caches. The model gets a subclass of its class, as with ``torch.nn.utils.parametrize``. Its
``_sample()`` runs transformers' code with :class:`LateStop` in place of ``DeferredStopCheck``.

When an end-of-sequence token or a stop string ends a text, one step too many has run. Its token is dropped, and removed
from a cache that the caller keeps. The random numbers that it drew are given back. Where the caller could notice this
step, the loop stays unchanged. The caller's own criteria, processors and functions would see its token, and a monitor
(``streamer.waits``) its counters.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation import utils

from ..cache_name import given_cache
from ..layers.cache_state import CacheState
from ..layers.kinds import face, ready_for_steps
from ..model_watch import kind_of
from ..random_state import random_state, set_random_state

_REPLACED = "DeferredStopCheck"
_OWN = "PrefixConstrainedLogitsProcessor"  # calls a function of the caller's


class LateStop:
    """Replaces ``DeferredStopCheck``: called after each token, it reports whether the previous one was the last.

    It waits for the first token. No work overlaps with a prefill, and readers want to see that token soon.

    Args:
        input_ids: ``[batch, n]`` on the device.
        max_length: number of tokens at which the loop ends in any case; None: no limit.
        cache: the cache of the loop.
        cache_is_returned: whether the caller keeps the cache.
        streamer: gets tokens one step later; None: there is none.
    """

    def __init__(self, input_ids, max_length, cache, cache_is_returned, streamer=None) -> None:
        self.max_length, self.streamer = max_length, streamer
        self.kept = cache if cache_is_returned else None
        pinned = input_ids.is_cuda
        self.slots = [
            (
                torch.zeros((), dtype=torch.bool, pin_memory=pinned),
                torch.zeros(input_ids.shape[0], dtype=torch.long, pin_memory=pinned),
                torch.Event(device=input_ids.device, blocking=True),
            )
            for _ in range(2)
        ]
        self.device = input_ids.device
        self.states: list[Tensor] = [torch.empty(0)] * 2  # of the random number generator after these tokens
        self.made = self.heard = 0  # tokens that were generated, and those that the host has read
        self.ended = False
        if hasattr(streamer, "runs_ahead"):
            streamer.runs_ahead()

    @staticmethod
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        """Whether one step too many can run and be undone."""
        if is_assistant or not _runs_ahead(device) or not isinstance(cache, CacheState):
            return False
        ready_for_steps(cache)
        kinds = map(face, cache.layers)
        return not cache_is_returned or all(one.why_eager(cache) is None and one.can_take_back(1) for one in kinds)

    def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
        """Note new ``tokens [batch]``; ``unfinished_sequences [batch]`` marks the rows that continue."""
        ended, copied, event = self.slots[self.made % 2]
        ended.copy_(unfinished_sequences.max() == 0, non_blocking=True)
        if self.streamer is not None:
            copied.copy_(tokens, non_blocking=True)
        event.record()
        self.states[self.made % 2] = random_state(self.device)
        self.made += 1
        self._hear(max(1, self.made - 1))
        return self.ended or (self.max_length is not None and length >= self.max_length)

    def _hear(self, tokens: int) -> None:
        """Read up to ``tokens`` tokens, at most up to the last one of the text."""
        while self.heard < tokens and not self.ended:
            ended, copied, event = self.slots[self.heard % 2]
            event.synchronize()
            self.heard += 1
            self.ended = bool(ended)
            if self.streamer is not None:
                try:
                    self.streamer.put(copied.clone())
                except BaseException:
                    self._rewind()
                    raise

    def _rewind(self) -> None:
        """Leave the generator as the last token that was read has left it."""
        set_random_state(self.device, self.states[(self.heard - 1) % 2])

    def finish(self) -> int:
        """Number of steps too many; the cache has been cropped by them."""
        self._hear(self.made)
        undone = self.made - self.heard
        if undone:
            self._rewind()
            if self.kept is not None:
                self.kept.crop(-undone)
        return undone


def _runs_ahead(device: torch.device) -> bool:
    """Whether the host may go on while ``device`` works. (Tests without a GPU replace this.)"""
    return device.type == "cuda"


def _of_transformers(one: object) -> bool:
    """Whether ``one`` is a criterion or processor of transformers, which sees only tokens and logits.

    Or one of ours that says that a step too many does no harm.
    """
    if getattr(one, "runs_ahead", False) is True:
        return True
    return type(one).__module__.startswith("transformers.") and type(one).__name__ != _OWN


class LateStopping:
    """Base class that comes before the model's own class."""

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **kwargs: Any
    ):
        cache = given_cache(kwargs)
        noticed = not all(map(_of_transformers, (*logits_processor, *stopping_criteria)))
        noticed |= getattr(kwargs.get("streamer"), "waits", False)
        loop: Any = GenerationMixin._sample
        if noticed or synced_gpus or not isinstance(cache, CacheState):
            return loop(self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, **kwargs)
        late = FunctionType(loop.__code__, {**loop.__globals__, _REPLACED: LateStop}, loop.__name__, loop.__defaults__)
        before, cache.going_on = cache.going_on, True
        try:
            return late(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        finally:
            cache.going_on = before


def defer(model: nn.Module) -> None:
    """Make ``model.generate()`` not wait after each token, if its loop is transformers' own."""
    kind = type(model)
    known = hasattr(utils, _REPLACED) and _REPLACED in GenerationMixin._sample.__code__.co_names
    if known and getattr(kind, "_sample", None) is GenerationMixin._sample:
        model.__class__ = _stopping_late(kind)


@functools.cache
def _stopping_late(kind: type) -> type:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (LateStopping, kind), named)


def wait(model: nn.Module) -> None:
    """Undo :func:`defer`."""
    kind = kind_of(model)
    if kind.__bases__[:1] == (LateStopping,):
        model.__class__ = kind.__bases__[1]
