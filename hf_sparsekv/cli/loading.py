"""Find and load models for the commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import typer

from hf_sparsekv_cli.options import CacheOptions, DType, wrong
from hf_sparsekv_cli.values import check_device
from hf_sparsekv_config.options import guess
from hf_sparsekv_config.sparse import SparseConfig

from .. import gguf_file
from ..attention.interface import NAME
from ..experts.mxfp4 import is_coded, keep_mxfp4
from ..policies.registry import method_of
from ..ranks import spread
from ..small_model import ModelFetchError, fetch_small_model
from ..tuning.random_model import RANDOM, numbers, random_model
from ..tuning.shapes import HUB, SHAPES, known_shape
from .output import CommandError

HUB_SECONDS = 5  # how long the hub may take to answer


def resolve_model(name: str, known: Iterable[str] = ()) -> str:
    """A name that ``from_pretrained`` takes, or a GGUF file: ``small`` is fetched if need be, a path must exist.

    Args:
        name: as given by the user.
        known: further names that the command knows, for the error.

    Raises:
        CommandError: nothing is there, or it is nearly ``small`` or a known name: that was meant.
    """
    if name == "small":
        try:
            return str(fetch_small_model())
        except ModelFetchError as error:
            raise CommandError(f"the small model: {error}") from error
    if not name.strip():
        raise CommandError("the model's name is empty")
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(file.name for file in path.iterdir() if gguf_file.is_gguf(file))
            hint = f". Name the file: {path / files[0]}" if files else ""
            raise CommandError(f"{path} holds no model: there is no config.json in it{hint}")
        return str(path)
    if gguf_file.is_gguf(path):
        if not path.is_file():
            raise CommandError(f"there is no file {name!r}")
        gguf_file.check(path)
        return str(path)
    if path.exists():
        raise CommandError(f"{path} is a file: give the directory of the model, or a .gguf file")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise CommandError(f"there is no directory {name!r}")
    if "/" not in name:
        near = difflib.get_close_matches(name.lower(), ["small", *known], n=1, cutoff=0.85)
        if not near and (shape := known_shape(name)):
            near = [HUB[shape]]
        if near:
            raise CommandError(
                f"there is no model {name!r}: did you mean {near[0]!r}? (A directory of that name: ./{name})"
            )
    return name


def check_name(name: str) -> None:
    """Raise CommandError for what :func:`load` will not find for its name alone: before anything else is begun."""
    if random_shape(name) is None:
        resolve_model(name)


def hub_answers() -> bool:
    """Whether the hub can be reached, by one request: its client repeats each for half a minute.

    False with ``HF_HUB_OFFLINE=1``.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # from any HTTP client
        return False
    return True


def _without(known: Iterable[str]) -> str:
    """Models that a command knows without the hub."""
    names = ", ".join(known)
    return f". Known without the hub: {names}" if names else ""


def _pretrained(kind, name: str, path: str, here: bool, known: Iterable[str] = (), **kwargs):
    """``kind.from_pretrained``; ``here``: of what is in a directory or in the hub's cache."""
    try:
        return kind.from_pretrained(path, local_files_only=here, **kwargs)
    except OSError as error:
        if here and not Path(path).is_dir():
            raise CommandError(
                f"cannot load {name}: it is not in the hub's cache on this machine, and the hub is out of reach. Give "
                f"a directory with the model, or go online (and unset HF_HUB_OFFLINE){_without(known)}"
            ) from error
        raise CommandError(f"cannot load {name}: {' '.join(str(error).split())}") from error


def pick_device(name: str) -> torch.device:
    """``--device`` as torch takes it."""
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandError(f"there is no device {name}: torch sees {torch.cuda.device_count()} GPUs")
    return device


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """``--dtype`` as torch takes it; None for auto."""
    return None if dtype is DType.auto else getattr(torch, dtype.value)


def placed(config: SparseConfig, options: CacheOptions) -> CacheOptions:
    """``--offload`` said, by the rule of docs/host-memory.md: blocks are on the device unless the user asks.

    ``--offload`` asks, and so does an option that only blocks in host memory have. Impossible places are wrong usage.
    """
    asked = replace(options, offload=options.offload or options.kv_dtype is not None)
    try:
        place = method_of(config).shared.place(config, asked.offload_config())
    except ValueError as error:
        raise wrong(error, {name: name for name in config.__dataclass_fields__}) from error
    if place is not None and options.offload is False:
        raise typer.BadParameter("this cache keeps its blocks in host memory: leave --no-offload out")
    return replace(options, offload=place is not None)


def load_config(name: str, known: Iterable[str] = ()):
    """The configuration of a model, without its weights.

    Args:
        name, known: as for :func:`resolve_model`; an error that the hub does not answer names ``known``, too.

    Raises:
        CommandError: there is no such model, or the hub does not answer.
    """
    from transformers import AutoConfig

    if gguf_file.is_gguf(path := resolve_model(name, known)):
        return gguf_file.load_config(path)
    return pretrained(AutoConfig, name, known)


def pretrained(kind, name: str, known: Iterable[str] = (), **kwargs):
    """``kind.from_pretrained`` of a model by the name that a user gives, as :func:`load_config`."""
    path = resolve_model(name, known)
    return _pretrained(kind, name, path, Path(path).is_dir() or not hub_answers(), known, **kwargs)


def random_shape(name: str):
    """Configuration of ``random:SHAPE``; None if ``name`` is not of that kind.

    Raises:
        CommandError: no shape of that name is known.
    """
    if not name.startswith(RANDOM):
        return None
    given = name.removeprefix(RANDOM)
    if (shape := known_shape(given)) is None:
        raise CommandError(f"there is no shape {given!r}{guess(given, SHAPES)}: known ones are {', '.join(SHAPES)}")
    return SHAPES[shape]()


def load(name: str, dtype: torch.dtype | None, device: torch.device, tensor_parallel: bool = False):
    """Tokenizer and model, with sparse attention.

    Args:
        name: as for :func:`resolve_model`; or ``random:SHAPE``, random weights of a known shape, for measurements.
        dtype: ``None``: the checkpoint's own (:func:`hf_sparsekv.gguf_file.load`: of a GGUF file).
        tensor_parallel: of the model only this rank's share, of those that torch.distributed was begun with.

    Returns:
        ``(tokenizer, model)``, the model in eval mode on ``device``.

    Raises:
        CommandError: there is no such model, or transformers has no attention interface for it (Falcon, GPT-J).
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (shape := random_shape(name)) is not None:
        vocabulary = shape.get_text_config(decoder=True).vocab_size
        return numbers(vocabulary), random_model(shape, dtype or torch.bfloat16, device, tensor_parallel)
    path = resolve_model(name)
    if gguf_file.is_gguf(path):
        if tensor_parallel:
            raise CommandError("--tensor-parallel takes no GGUF file: give a directory of safetensors, or a hub id")
        return gguf_file.load(path, dtype, device, attn_implementation=NAME)
    here = Path(path).is_dir() or not hub_answers()
    config = _pretrained(AutoConfig, name, path, here)  # first: it is small, and says best what is wrong
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=here)
    kwargs = {"dtype": dtype or "auto", "attn_implementation": NAME, "local_files_only": here}
    if is_coded(config) and not tensor_parallel:
        kwargs["config"] = keep_mxfp4(config)
    try:
        if tensor_parallel:
            model = AutoModelForCausalLM.from_pretrained(path, **spread(), **kwargs)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **kwargs)
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise CommandError(
            f"transformers runs {config.model_type} models with attention of their own only (no AttentionInterface): "
            "no sparse cache can be used with them"
        ) from error
    return tokenizer, model.eval()
