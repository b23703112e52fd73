"""Everything that measures: run from a checkout as ``python -m benchmarks``. Not part of the wheel."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"  # tables of rows, see hf_sparsekv.results
