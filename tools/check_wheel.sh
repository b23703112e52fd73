#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel with its dependencies into a clean environment and imports it there.
# usage: tools/check_wheel.sh PYTHON [DIST]     (a Python that has the packages `build` and `twine`; PIP_FLAGS goes to pip install)
# What was built is kept in DIST, if that is given.
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
keep=${2:+$(pwd)/$2}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --outdir "$work/dist" . > "$work/build.log" 2>&1 || { tail -20 "$work/build.log" >&2; exit 1; }
"$python" -m twine check --strict "$work"/dist/*
"$python" -m venv "$work/venv"
# shellcheck disable=SC2086
"$work/venv/bin/python" -m pip install --quiet ${PIP_FLAGS:-} -c constraints.txt "$work"/dist/*.whl
cd "$work" # away from the source tree: only the installed wheel can be imported
venv/bin/python - <<'PYTHON'
import importlib.util
from importlib import resources

import hf_sparsekv

found = [name for name in ("triton", "pandas", "matplotlib") if importlib.util.find_spec(name)]
assert resources.files(hf_sparsekv).joinpath("py.typed").is_file(), "py.typed is missing"
print(f"hf-sparsekv {hf_sparsekv.__version__} imports; optional packages there: {', '.join(found) or 'none'}")
PYTHON
venv/bin/hf-sparsekv --version
if [ -n "$keep" ]; then
    mkdir -p "$keep"
    cp "$work"/dist/* "$keep"
fi
