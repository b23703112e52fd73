"""Models: loaded once, shared by all tabs."""

from __future__ import annotations

import gc
import importlib.util
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import optimize
from hf_sparsekv.evaluation.small_model import is_fetched, small_model_path

from .language import Language

PROBE, SMALL = "probe", "small"
PROBE_PATH = Path(__file__).resolve().parent.parent / "assets" / "probe-gqa"
_KEPT = 2  # loaded models; another one takes the place of the one that was not used for longest


class ModelError(ValueError):
    """A model cannot be used; the message says what to do."""


@dataclass
class Loaded:
    """A model with all that goes with it."""

    name: str
    model: torch.nn.Module
    language: Language

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def here(self) -> None:
        """The calling thread launches kernels where the model is."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        given = self.model.generation_config.eos_token_id
        given = [given] if isinstance(given, int) else list(given or ())
        own = self.language.tokenizer.eos_token_id
        return frozenset(given if own is None else [*given, own])


def locate(name: str) -> str:
    """What ``from_pretrained`` takes for a name of the list, a hub id or a path.

    Raises:
        ModelError: nothing is there.
    """
    name = name.strip()
    if name == PROBE:
        if not (PROBE_PATH / "model.safetensors").is_file():
            raise ModelError("the probe model is not in assets/probe-gqa: run the demo from a checkout of the project")
        return str(PROBE_PATH)
    if name == SMALL:
        if not is_fetched(small_model_path()):
            raise ModelError("the small model is not here yet: run `hf-sparsekv fetch` (93 MB), then try again")
        return str(small_model_path())
    if not name:
        raise ModelError("choose a model")
    if name.startswith(("/", ".", "~")):
        path = Path(name).expanduser()
        if not (path / "config.json").is_file():
            raise ModelError(f"there is no model in {path}: its directory needs a config.json")
        return str(path)
    return name


def longest(config) -> int:
    """Positions that a model was made for."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 32768


def pick_device(name: str) -> torch.device:
    """``auto``: a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


class Models:
    """The models in memory.

    Args:
        device: where they run.
        dtype: ``None``: the checkpoint's; on a CPU float32, which is quicker there than 16 bits.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype or (torch.float32 if device.type == "cpu" else None)
        self._lock = threading.Lock()
        self._loaded: dict[str, Loaded] = {}
        self._light: dict[str, tuple[Language, int]] = {}

    def look(self, name: str) -> tuple[Language, int]:
        """The language of a model and the longest context it was made for; its weights are not loaded.

        Raises:
            ModelError: there is no such model, or the hub does not answer.
        """
        with self._lock:
            if name not in self._light:
                path = locate(name)
                with _told(name):
                    config = AutoConfig.from_pretrained(path)
                    tokenizer = AutoTokenizer.from_pretrained(path)
                self._light[name] = Language(tokenizer), longest(config)
            return self._light[name]

    def load(self, name: str) -> Loaded:
        """The model, ready to run; loads it if it is not in memory.

        Raises:
            ModelError: there is no such model, or it cannot be loaded.
        """
        language, _ = self.look(name)
        with self._lock:
            found = self._loaded.pop(name, None)
            if found is None:
                while len(self._loaded) >= _KEPT:
                    del self._loaded[next(iter(self._loaded))]
                gc.collect()
                with _told(name):
                    found = Loaded(name, self._read(locate(name)), language)
            self._loaded[name] = found  # the newest comes last
            return found

    def add(self, loaded: Loaded) -> None:
        """A model made elsewhere."""
        self._loaded[loaded.name] = loaded
        self._light[loaded.name] = loaded.language, longest(loaded.model.config)

    def _read(self, path: str) -> torch.nn.Module:
        kwargs = {"dtype": self.dtype or "auto", "attn_implementation": "sparsekv"}
        if self.device.type == "cuda" and importlib.util.find_spec("accelerate"):
            model = AutoModelForCausalLM.from_pretrained(path, device_map={"": self.device}, **kwargs)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, **kwargs).to(self.device)
        model.eval()
        return optimize(model) if self.device.type == "cuda" else model


class _told:
    """Errors of loading as a sentence."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise ModelError(f"{self.name} does not fit into the memory of the GPU") from error
        if isinstance(error, OSError | ValueError | ImportError | RuntimeError) and not isinstance(error, ModelError):
            reason = " ".join(str(error).split())
            raise ModelError(f"cannot load {self.name}: {reason[:300]}") from error
