"""What full collections of garbage leave out."""

from __future__ import annotations

import gc
import weakref

import pytest
from caches import FULL, SMALL
from engines import SERVING
from models import build

from hf_sparsekv import Engine, TokenConfig
from hf_sparsekv_serve.process import set_aside


class Ring:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_leave_out_what_was_there():
    before = Ring()
    with set_aside():
        during = Ring()
        gone = weakref.ref(before), weakref.ref(during)
        del before, during
        gc.collect()
        assert gone[0]() is not None
        assert gone[1]() is None
    gc.collect()
    assert gone[0]() is None


def test_what_fails_within_ends_it():
    with pytest.raises(RuntimeError, match="meanwhile"), set_aside():
        assert gc.get_freeze_count() > 0
        raise RuntimeError("meanwhile")
    assert gc.get_freeze_count() == 0


def test_an_engine_leaves_the_process_as_it_is():
    """Caches and models that are dropped beside it are to go."""
    before = Ring()
    with Engine(build("llama", "sparsekv"), None, TokenConfig(**SMALL, **FULL), None, SERVING):
        gone = weakref.ref(before)
        del before
        gc.collect()
        assert gone() is None
