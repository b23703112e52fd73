"""Everything that measures: run from a checkout as ``python -m benchmarks``. Not part of the wheel."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"  # tables of rows, see hf_sparsekv.results
OLDER = "until-"  # begins the name of a folder of older rows, before the last day that is in it


def files_of(name: str) -> list[Path]:
    """The files of a table, as ``step.csv``: those in folders of older rows (:mod:`.older`), by age, then RESULTS's."""
    files = [*sorted(RESULTS.glob(f"{OLDER}*/{name}")), RESULTS / name]
    return [file for file in files if file.exists()]
