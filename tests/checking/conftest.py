"""Exact mode: each test begins as a new process does."""

from __future__ import annotations

import pytest

from hf_sparsekv.checking import paces


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """Models of earlier tests are the same objects."""
    monkeypatch.setattr(paces, "_OF_MODELS", type(paces._OF_MODELS)())
