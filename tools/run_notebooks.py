"""Run the notebooks of docs/notebooks and keep what they print and draw: ``make notebooks``.

Outputs are what the site shows. Warnings and times of cells are dropped, so that a second run changes little.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]


def kept(output) -> bool:
    """Whether it is printed text or a picture."""
    if output["output_type"] == "stream":
        return output["name"] == "stdout"
    return "image/png" in output.get("data", {})


def run(path: Path, timeout: float = 600) -> None:
    """Run one in its folder, and write it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if kept(output)]
            for output in cell.outputs:
                output.get("data", {}).pop("text/plain", None)
    language = {"language_info": {"name": "python"}}
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]} | language
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        print(path.name)
        sys.stdout.flush()
        run(path)
