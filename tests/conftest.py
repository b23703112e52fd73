"""What all tests share: no network, the small real model, and skips for what this machine lacks."""

from __future__ import annotations

import gc
import heapq
import importlib.util
import itertools
import os
import zlib
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
from groups import pytest_xdist_make_scheduler  # noqa: F401  (a hook)

from hf_sparsekv.small_model import is_fetched, small_model_path

# Modules with assertions of several files' tests.
pytest.register_assert_rewrite("captured", "command_line", "saved_files")
from command_line import tiny  # noqa: E402, F401 (a fixture)


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {device}"


def _values(item: pytest.Item) -> set:
    """A test's parameters with their values."""
    return {(name, repr(value)) for name, value in _params(item).items()}


def _params(item: pytest.Item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _pairs(item: pytest.Item, alone: tuple[str, ...]) -> set:
    """Of a test's parameters with their values all pairs; those named ``alone`` are in none."""
    values = sorted(_values(item))
    if len(values) < 2:
        raise pytest.UsageError(f"{item.nodeid} is marked pairwise but has {len(values)} parameters: two are needed")
    paired = itertools.combinations([value for value in values if value[0] not in alone], 2)
    return set(values) | set(paired)


def _cover(group: list[pytest.Item], found: list[set]) -> list[pytest.Item]:
    """Few tests that have everything that was found in one of them."""
    missing, kept = set().union(*found), []
    # Ties by a hash: in order, the first value of every parameter would meet the first of all others alone.
    best = [(-len(found), -zlib.crc32(group[i].nodeid.encode()), i) for i, found in enumerate(found)]
    heapq.heapify(best)
    while missing:
        gain, order, i = heapq.heappop(best)
        left = len(found[i] & missing)
        if left == -gain:
            missing -= found[i]
            kept.append(group[i])
        else:
            heapq.heappush(best, (-left, order, i))  # it once had more: the next may have the most now
    return kept


def _grids(items: list[pytest.Item], *marked: str) -> Iterator[tuple[frozenset, list[pytest.Item]]]:
    """Tests with one of these markers that differ in parameters alone, and their markers."""
    groups: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        marks = frozenset(mark.name for mark in item.iter_markers())  # which of them run on a machine
        if marks.intersection(marked):
            groups.setdefault((item.parent, item.originalname, marks), []).append(item)
    for (_, _, marks), group in groups.items():
        yield marks, group


def _not_needed(items: list[pytest.Item]) -> set[pytest.Item]:
    """What tests marked ``pairwise`` need not run: of those with the same markers each pair of values is there."""
    dropped = set()
    for marks, group in _grids(items, "pairwise"):
        alone = () if "gpu" in marks else group[0].get_closest_marker("pairwise").kwargs.get("once", ())
        dropped |= set(group) - set(_cover(group, [_pairs(item, alone) for item in group]))
    return dropped


def _not_telling(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests marked ``few`` or ``pairwise`` that ``make test`` leaves out: others have each of their values."""
    left_out = set()
    for marks, group in _grids(items, "few", "pairwise"):
        if "gpu" in marks or "slow" in marks:
            continue
        few = group[0].get_closest_marker("few")
        telling = few.kwargs if few else {}
        among = [item for item in group if all(_params(item)[name] in values for name, values in telling.items())]
        among = among or group  # named on the command line
        left_out |= set(group) - set(_cover(among, [_values(item) for item in among]))
    return left_out


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = _not_needed(items)
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
    for item in _not_telling(items):
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
    """What is imported by now is never garbage: left out, each of the tests' many ``gc.collect()`` takes far less."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A server that has run in this process has put it back."""
    yield
    if not gc.get_freeze_count():
        pytest_collection_finish()


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """Directory of the small real model; tests that use it are marked ``small_model``."""
    return small_model_path()
