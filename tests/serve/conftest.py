"""Shared parts of the server's tests."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from tokenizers_made import byte_level


@pytest.fixture(scope="module")
def engine():
    """An engine without a model, for all tests of a file."""
    with FakeEngine(byte_level()) as engine:
        yield engine
