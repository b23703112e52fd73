"""Find and load models for the commands."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import typer

from ..attention.interface import NAME
from ..evaluation.small_model import is_fetched, small_model_path
from .output import CommandError


def resolve_model(name: str) -> str:
    """A name that ``from_pretrained`` takes: ``small`` becomes a path, a path must exist.

    Raises:
        CommandError: nothing is there.
    """
    if name == "small":
        path = small_model_path()
        if not is_fetched(path):
            raise CommandError("the small model is not here yet: run `hf-sparsekv fetch`")
        return str(path)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CommandError(f"{path} holds no model: there is no config.json in it")
        return str(path)
    if path.exists():
        raise CommandError(f"{path} is a file: give the directory of the model")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not name.strip():
        raise CommandError(f"there is no directory {name!r}")
    return name


def pick_device(name: str) -> torch.device:
    """``--device`` as torch takes it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"{name!r} is no device; write for example cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is not supported: sparse caches run on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandError(f"there is no device {name}: torch sees {torch.cuda.device_count()} GPUs")
    return device


def load_config(name: str):
    """The configuration of a model, without its weights.

    Raises:
        CommandError: there is no such model, or the hub does not answer.
    """
    from transformers import AutoConfig

    path = resolve_model(name)
    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        raise CommandError(f"cannot load {name}: {' '.join(str(error).split())}") from error


def load(name: str, dtype: torch.dtype | None, device: torch.device):
    """Tokenizer and model, with sparse attention.

    Returns:
        ``(tokenizer, model)``, the model in eval mode on ``device``.

    Raises:
        CommandError: there is no such model, or transformers has no attention interface for it (Falcon, GPT-J).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = load_config(name)  # first: it is small, and says best what is wrong
    path = resolve_model(name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    kwargs = {"dtype": dtype or "auto", "attn_implementation": NAME}
    try:
        if device.type == "cuda" and importlib.util.find_spec("accelerate"):
            # Straight to the GPU; without accelerate by way of host memory.
            model = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **kwargs)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **kwargs).to(device)
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise CommandError(
            f"transformers runs {config.model_type} models with attention of their own only (no AttentionInterface): "
            "no sparse cache can be used with them"
        ) from error
    return tokenizer, model.eval()
