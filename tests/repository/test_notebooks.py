"""The notebooks of docs/notebooks run from top to bottom on the small model, and are kept with what they print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# What takes the time, made shorter: nothing else is changed.
SHORTER = {
    "first_steps": {"length=3000": "length=700"},
    "choose_settings": {
        "context, tokens, count = 1200, 12, 2": "context, tokens, count = 500, 4, 1",
        "(0.5, 0.75, 0.9, 0.95)": "(0.5, 0.9)",
        "(64, 128, 256, 512)": "(64, 256)",
        "(0.2, 0.4, 0.6, 0.8)": "(0.2,)",
        "length=1200": "length=500",
    },
}
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_kept_small_and_with_outputs(path):
    text = path.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert len(NOTEBOOKS) == 2 and len(text) < 80_000 and len(code) > 3
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run: make notebooks"
    outputs = [out for cell in code for out in cell["outputs"]]
    assert outputs and all(out.get("name", "stdout") == "stdout" for out in outputs)
    assert "find_spec" in "".join(code[0]["source"]), "the first cell installs the package where it is not"
    assert max(len(line.rstrip()) for cell in code for line in cell["source"]) <= 80


@pytest.mark.small_model
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path, small_model_dir, monkeypatch, tmp_path, capsys):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    text = path.read_text()
    for long, short in SHORTER[path.stem].items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    printed = "".join(out["text"] for out in outputs if out["output_type"] == "stream" and out["name"] == "stdout")
    with capsys.disabled():
        print(f"\n{printed}")
    if path.stem == "first_steps":
        assert "sparse:" in printed
        share = int(re.search(r"(\d+)% attended", printed)[1])
        assert 5 < share < 70, "so short a text is attended to as a whole, unless the notebook says otherwise"
    else:
        assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
        assert "token:mass=0.9 " in printed and "'full': " in printed
