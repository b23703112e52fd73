"""No request waits for a compiler: the engine's start has launched whatever requests do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest

pytest.importorskip("triton")

from first_requests import CASES, short, waited_for


@pytest.mark.few(case=("sparse-offloaded", "sparse-latents"))
@pytest.mark.parametrize("case", CASES)
def test_requests_launch_no_other_kernels_than_the_start(case):
    """Nor the same ones with other constants, sizes or alignments."""
    script = Path(__file__).with_name("first_requests.py")
    done = forked.run([str(script), case], env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {case: {}}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:decode steps run eagerly")
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_for_requests(case):
    with short():
        assert waited_for(case) == {}
