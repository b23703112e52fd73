"""Shared parts of all tests: no network, the small real model, and skips for what this machine lacks."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Before transformers is imported: a test that asks the hub is a mistake and should fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch is imported: workers that each take all cores fight, and tests run into their time limits.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Before triton is imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        import interpreter

        interpreter.install()

import transformers
from grids import not_needed, not_telling
from groups import pytest_xdist_make_scheduler  # noqa: F401  (a hook)

from hf_sparsekv.small_model import is_fetched, small_model_path

# Modules with assertions of several files' tests.
gc.disable()  # until all tests are collected: nothing of them is garbage
pytest.register_assert_rewrite("captured", "command_line", "saved_files")
from command_line import tiny  # noqa: E402, F401 (a fixture)


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {device}"


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = not_needed(items)
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
    for item in not_telling(items):
        item.add_marker(pytest.mark.slow)
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_model = pytest.mark.skip(reason="needs the small model: run `hf-sparsekv fetch`")
    has_gpu, has_model = torch.cuda.is_available(), is_fetched(small_model_path())
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(no_gpu)
        if "small_model" in item.keywords and not has_model:
            item.add_marker(no_model)


def pytest_collection_finish() -> None:
    """Modules imported by now are never garbage: left out, each of the tests' many ``gc.collect()`` takes far less."""
    gc.collect()
    gc.freeze()
    gc.enable()


_unfreeze, _thawed = gc.unfreeze, []


def _noted() -> None:
    _unfreeze()
    _thawed.append(True)


gc.unfreeze = _noted  # to count what is frozen would take longer than most tests do


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A server that has run in this process has put it back."""
    yield
    if _thawed:
        _thawed.clear()
        pytest_collection_finish()


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """Directory of the small real model; tests that use it are marked ``small_model``."""
    return small_model_path()
