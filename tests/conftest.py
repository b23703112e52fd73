"""What all tests share: no network, the small real model, and skips for what this machine lacks."""

from __future__ import annotations

import gc
import importlib.util
import os
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """Directory of the small real model; tests that use it are marked ``small_model``."""
    return small_model_path()
