"""The public names of hf_sparsekv and their signatures are those of tests/public_api.txt: a change is a decision.

python tests/test_public_api.py    # write the file anew; its diff is what users will notice
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hf_sparsekv

FILE = Path(__file__).with_name("public_api.txt")


def ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("hf_sparsekv", "hf_sparsekv_config")


def signature(function) -> str:
    """Parameters with annotations and defaults, as they are written."""
    about, parts = inspect.signature(function), []
    for p in about.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in "".join(part[:1] for part in parts):
            parts.append("*")
        text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        text += "" if p.annotation is p.empty else f": {p.annotation}"
        parts.append(text if p.default is p.empty else f"{text} = {p.default!r}")
    returns = "" if about.return_annotation is about.empty else f" -> {about.return_annotation}"
    return f"({', '.join(parts)}){returns}"


def described(name: str, value: object) -> list[str]:
    """Lines about one public name."""
    if inspect.isfunction(value):
        return [f"{name}{signature(value)}"]
    if not inspect.isclass(value):
        return [f"{name}: {type(value).__name__}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if ours(base))
    lines = [f"class {name}" + (f"({bases})" if bases else "")]
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name in vars(value).get("__annotations__", {}):
                default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
                lines.append(f"    {field.name}: {field.type}{default}")
    elif "__init__" in vars(value):
        lines.append(f"    __init__{signature(value.__init__)}")
    public = [base for base in value.__mro__[1:] if base.__name__ in hf_sparsekv.__all__]
    hidden = [base for base in value.__mro__[1:] if ours(base) and not any(issubclass(one, base) for one in public)]
    return list(dict.fromkeys(lines + sorted(line for kind in (value, *hidden) for line in members(kind))))


def members(kind: type) -> list[str]:
    """Public methods and properties that a class defines itself."""
    lines = []
    for name, held in vars(kind).items():
        function = held.__func__ if isinstance(held, classmethod | staticmethod) else held
        if name.startswith("_"):
            continue
        if isinstance(held, property):
            lines.append(f"    {name}: property")
        elif inspect.isfunction(function):
            lines.append(f"    {name}{signature(function)}")
    return sorted(lines)


def public_api() -> str:
    """All of it, one block a name."""
    blocks = ("\n".join(described(name, getattr(hf_sparsekv, name))) for name in sorted(hf_sparsekv.__all__))
    return "\n\n".join(blocks) + "\n"


def test_public_names_and_signatures_are_those_of_the_file():
    expected, found = FILE.read_text().splitlines(), public_api().splitlines()
    changed = "\n".join(difflib.unified_diff(expected, found, "tests/public_api.txt", "hf_sparsekv", lineterm="", n=1))
    assert not changed, (
        f"what users see has changed:\n{changed}\nIf that is meant, run `python tests/test_public_api.py`, commit "
        "tests/public_api.txt, and say it in CHANGELOG.md; a name that users have in their code keeps an alias for one "
        "release."
    )


def test_every_public_name_is_in_the_file_and_documented():
    text = FILE.read_text()
    for name in hf_sparsekv.__all__:
        assert f"class {name}" in text or f"\n{name}" in text or text.startswith(name), name
        value = getattr(hf_sparsekv, name)
        assert name == "__version__" or inspect.getdoc(value), f"{name} has no docstring"


def test_names_are_imported_from_where_type_checkers_find_them():
    tree = ast.parse(Path(hf_sparsekv.__file__).read_text())
    shown = [node for each in tree.body if isinstance(each, ast.If) for node in each.body]
    imported = {alias.name: "." * node.level + node.module for node in shown for alias in node.names}
    assert imported == hf_sparsekv._PLACE and set(imported) == set(hf_sparsekv.__all__) - {"__version__"}
    assert set(hf_sparsekv.__all__) <= set(dir(hf_sparsekv))
    with pytest.raises(AttributeError, match="has no attribute 'SparsCache'"):
        hf_sparsekv.SparsCache  # noqa: B018


IMPORT = """
import sys
from transformers import AutoModelForCausalLM, modeling_utils, masking_utils  # what loading any model imports
before = set(sys.modules)
import hf_sparsekv
new = set(sys.modules) - before
print(len(new), sorted(name for name in new if not name.startswith("hf_sparsekv")))
print(sorted({name.split(".")[1] for name in new if "." in name}))
"""


@pytest.mark.quick
def test_importing_the_package_takes_no_longer_than_importing_a_model():
    """By what is imported, not by the time that a busy machine takes. The rest comes with the first use of a name."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    count, others = done.stdout.splitlines()[0].split(" ", 1)
    assert int(count) < 50 and others == "[]", done.stdout
    parts = set(ast.literal_eval(done.stdout.splitlines()[1]))
    assert not parts & {"serving", "policies", "cuda_graph", "checking", "fusion", "predictor"}, parts


if __name__ == "__main__":
    FILE.write_text(public_api())
    print(f"{FILE}: {len(public_api().splitlines())} lines")
