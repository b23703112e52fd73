"""``python -m benchmarks``: what it runs, lists and refuses; and where the old command sends people."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import forked
import pytest
import yaml

from benchmarks import generate
from benchmarks.__main__ import BENCHMARKS, main
from hf_sparsekv_eval.cache_specs import parse_cache

ROOT = Path(__file__).parents[2]


def help_of(name: str, capsys) -> str:
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("what", ["operator", "step"])
def test_needs_a_gpu_but_explains_itself(what, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([what]) == 1
    assert f"{what} needs a CUDA device" in capsys.readouterr().err
    assert "--shapes" in help_of(what, capsys)


@pytest.mark.slow
def test_help_and_list(capsys):
    done = forked.run(["-m", "benchmarks", "--help"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in BENCHMARKS)
    assert main([]) == main(["paged"]) == 2
    assert "there is no benchmark 'paged'" in capsys.readouterr().err
    assert "--new-tokens" in help_of("generate", capsys)
    assert main(["--list"]) == 0
    known = capsys.readouterr().out
    for line in (
        r"qwen2\.5-7b +28 layers, 28 query and 4 KV heads of 128",
        r"gemma3-12b .* 40 layers slide over 1024 tokens",
        r"hf_offloaded +DynamicCache\(offloading=True\), eager",
        r"two_level:lag +tokens within the previous step's blocks",
    ):
        assert re.search(line, known), line


def test_fails_when_a_variant_does(tiny, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise ValueError("broken")

    monkeypatch.setattr(generate, "fill_cache", fail)
    command = ["generate", "--model", str(tiny), "--device", "cpu", "--context", "300", "--no-csv"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "hf_dynamic: FAILED: broken" in out
    assert "rows appended" not in out


def test_every_module_is_imported():
    """Everything that a probe takes from the package is there, under that name."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        if path.name != "__main__.py":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def test_lists_of_caches_are_valid():
    """Every setting is known, and none is there twice."""
    specs = [
        parse_cache(text) for text in yaml.safe_load((ROOT / "benchmarks/ruler_probes.yaml").read_text())["caches"]
    ]
    assert len({f"{spec.method} {spec.make()!r}" for spec in specs}) == len(specs) > 20


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ("generate --model qwen3-9b", 1, "there is no model 'qwen3-9b': did you mean 'qwen3-8b'?"),
        ("generate --model smal", 1, "there is no model 'smal': did you mean 'small'?"),
        ("generate --model nosuch/model", 1, "the hub is out of reach"),
        ("generate --model TINY --context 4k", 1, "more than the 4,096 tokens that TINY was made for: give fewer"),
        ("generate --device cuda:77", 2, "argument --device: there is no device cuda:77"),
        ("generate --device tpu0", 2, "'tpu0' is no device; write for example cpu"),
        ("generate --batch 0", 2, "argument --batch: '0' is no number from 1 on"),
        ("generate --new-tokens -3", 2, "--new-tokens"),
        ("generate --context 0", 2, "'0' is no length"),
        ("generate --caches two_levl", 2, "there is no variant 'two_levl' (did you mean 'two_level'?)"),
        ("generate --contxt 3k", 2, "unrecognized arguments: --contxt 3k (did you mean '--context'?)"),
        ("generate --dtype bfloat", 2, "(did you mean 'bfloat16'?) (python -m benchmarks generate --help)"),
    ],
)
def test_what_cannot_be_measured_is_one_line(args, status, says, tiny, tmp_path, capsys):
    """No traceback, no half minute of waiting for a hub, and no rows."""
    command = [word.replace("TINY", str(tiny)) for word in args.split()]
    if "--device" not in command:
        command += ["--device", "cpu"]
    try:
        found = main([*command, "--csv", str(tmp_path / "rows.csv")])
    except SystemExit as end:
        found = end.code
    told = [line for line in capsys.readouterr().err.splitlines() if line]  # a progress bar leaves an empty one
    assert found == status, told
    assert len(told) == 1 and told[0].startswith("error: ") and says.replace("TINY", str(tiny)) in told[0], told
    assert not list(tmp_path.glob("rows.csv"))
