"""What all tests share: no network, the small real model, and skips for what this machine lacks."""

from __future__ import annotations

import importlib.util
import itertools
import os
import zlib
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

from hf_sparsekv.evaluation.small_model import is_fetched, small_model_path

pytest.register_assert_rewrite("captured", "saved_files")  # modules with assertions of several files' tests


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {device}"


def _pairs(item: pytest.Item) -> set:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if len(params) < 2:
        raise pytest.UsageError(f"{item.nodeid} is marked pairwise but has {len(params)} parameters: two are needed")
    return set(itertools.combinations(sorted((name, repr(value)) for name, value in params.items()), 2))


def _not_needed(items: list[pytest.Item]) -> set[pytest.Item]:
    """What tests marked ``pairwise`` need not run: with and without a GPU each pair of parameters' values is there."""
    groups: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            groups.setdefault((item.parent, item.originalname, "gpu" in item.keywords), []).append(item)
    dropped = set()
    for group in groups.values():
        pairs = {item: _pairs(item) for item in group}
        missing = set().union(*pairs.values())
        while missing:
            # Ties by a hash: in order, the first value of every parameter would meet the first of all others alone.
            best = max(pairs, key=lambda item: (len(pairs[item] & missing), zlib.crc32(item.nodeid.encode())))
            missing -= pairs.pop(best)
        dropped |= pairs.keys()
    return dropped


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = _not_needed(items)
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_model = pytest.mark.skip(reason="needs the small model: run `hf-sparsekv fetch`")
    has_gpu, has_model = torch.cuda.is_available(), is_fetched(small_model_path())
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(no_gpu)
        if "small_model" in item.keywords and not has_model:
            item.add_marker(no_model)


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """Directory of the small real model; tests that use it are marked ``small_model``."""
    return small_model_path()
