"""The wheel, and the package without its optional dependencies."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Everything that pyproject.toml does not name under `dependencies`.
OPTIONAL = (
    "triton",
    "pandas",
    "matplotlib",
    "datasets",
    "gradio",
    "liger_kernel",
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "llguidance",
    "ray",
)

PACKAGES = ("hf_sparsekv", "hf_sparsekv_cli", "hf_sparsekv_config", "hf_sparsekv_eval", "hf_sparsekv_serve")

# As if they were not installed: packages that only ask whether something is there find nothing, too.
BLOCK = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in {blocked!r} else find_spec(name, *rest)
"""

WITHOUT = """
import sys
import torch
from transformers import AttentionInterface, AttentionMaskInterface
torch.cuda.is_available = lambda: False

def functions():
    return [{name: table()[name] for name in table().valid_keys()}
            for table in (AttentionInterface, AttentionMaskInterface)]

before = functions()
import hf_sparsekv
assert hf_sparsekv.__file__.startswith(sys.path[0]), hf_sparsekv.__file__
after = functions()
assert after[0].pop("paged|sparsekv") is not None
for old, new in zip(before, after):
    assert new.pop("sparsekv") is not None and "sparsekv" not in old
    assert old == new, "more than the new name was touched"
from hf_sparsekv_cli.app import app
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=1)
model = LlamaForCausalLM._from_config(config, attn_implementation="sparsekv")
settings = hf_sparsekv.TokenConfig(token_budget=32, block_size=16, window=16, num_blocks=2, dense_layers=0,
                                      calibration_tokens=32)
cache = hf_sparsekv.OffloadedSparseCache(settings)
model.generate(torch.arange(200)[None] % 64, max_new_tokens=8, do_sample=False, eos_token_id=None,
               past_key_values=cache)
assert cache.stats().sparse_calls > 0, cache.stats()

loaded = sorted(set(sys.modules) & set(blocked))
assert not loaded, loaded
print("fine")
"""


def python(code: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_block_blocks(tmp_path):
    done = python(BLOCK.format(blocked=("numpy",)) + "import numpy", tmp_path)
    assert "No module named 'numpy'" in done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # No isolation: the build needs no network.
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(_copy(out))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def _copy(out: Path) -> Path:
    """A copy of the sources, so that building leaves nothing in the tree."""
    import shutil

    source = out / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests", "benchmarks", "tools"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        scripts = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    sources = {str(p.relative_to(ROOT)) for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    assert sources <= names
    assert {f"{name}/py.typed" for name in PACKAGES if name != "hf_sparsekv_cli"} <= names
    assert "hf_sparsekv_eval/data/longbench.json" in names
    assert {n.partition("/")[0] for n in names} == {*PACKAGES, names_info(names)}
    assert any(n.endswith("/LICENSE") for n in names)
    assert "hf-sparsekv = hf_sparsekv_cli:main" in scripts
    assert "License-Expression: Apache-2.0" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not any(name in line for line in required for name in OPTIONAL), required


@pytest.mark.slow
def test_sdist_contents(tmp_path):
    """What builds the wheel, and no tests: those need the checkout's models and recordings."""
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, _copy(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        sizes = {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}
    sources = {str(p.relative_to(ROOT)) for name in PACKAGES for p in (ROOT / name).rglob("*.py")}
    given = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
    assert sources | given <= sizes.keys()
    others = {name.partition("/")[0] for name in sizes} - given
    assert others == {*PACKAGES, "hf_sparsekv.egg-info", "PKG-INFO", "setup.cfg"}
    assert max(sizes.values()) < 100_000


def long_description(repository: str) -> str:
    spec = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.long_description((ROOT / "README.md").read_text(), repository, "v1.2")


def test_the_long_description_leads_somewhere(wheel):
    """On an index relative links lead nowhere: a release makes them absolute. One made here has them as they are."""
    text = long_description("https://example.org/project/")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert "(https://example.org/project/blob/v1.2/docs/speed.md)" in text and "actions/workflows" not in text
    assert 'src="https://example.org/project/raw/v1.2/docs/first-light.svg"' in text
    assert 'hf-sparsekv[gpu] @ git+https://example.org/project"' in text
    assert long_description("") == (ROOT / "README.md").read_text()
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "**Do not use it**" in metadata


def names_info(names: set[str]) -> str:
    return next(n.partition("/")[0] for n in names if ".dist-info/" in n)


@pytest.mark.quick
@pytest.mark.slow
def test_the_wheel_works_without_optional_packages(wheel, tmp_path):
    """On its own; importing it touches nothing of transformers' but the new name."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + BLOCK.format(blocked=OPTIONAL)
    done = python(code + f"blocked = {OPTIONAL!r}\n" + WITHOUT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("fine")


def test_the_commit_is_the_package_s_own(tmp_path, monkeypatch):
    """Not that of a repository in whose virtual environment it happens to be installed."""
    from hf_sparsekv import results

    there = tmp_path / "site-packages" / "hf_sparsekv"
    there.mkdir(parents=True)
    (there / "file").write_text("")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "theirs")):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(results, "__file__", str(there / "results.py"))
    assert results.commit() == "unknown"
    (there / "commit.txt").write_text("abc1234\n")
    assert results.commit() == "abc1234"
