"""The end of a process that does nothing but serve."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = """
from hf_sparsekv_serve.process import end_after

def follows():
    {body}

end_after(follows)
"""


@pytest.mark.parametrize(("body", "code"), [("pass", 0), ("raise RuntimeError('lost')", 1), ("raise SystemExit", 1)])
def test_its_exit_code_says_whether_it_has_failed(body, code):
    """A supervisor starts a process again that ends with another code than 0."""
    ended = subprocess.run([sys.executable, "-c", ENDS.format(body=body)], capture_output=True, text=True)
    assert ended.returncode == code and ("lost" in ended.stderr) == ("lost" in body)
