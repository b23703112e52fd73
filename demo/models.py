"""Models: loaded once, shared by all tabs; few at a time, whatever visitors name."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from hf_sparsekv import QueryTap, gguf_file, optimize
from hf_sparsekv.cli.loading import hub_answers
from hf_sparsekv.small_model import is_fetched, small_model_path

from .language import Language

PROBE, SMALL = "probe", "small"
PROBE_PATH = Path(__file__).resolve().parent.parent / "assets" / "probe-gqa"
_KEPT = 2  # models with weights; another one takes the place of the one that was not used for longest
_LOOKED = 16  # models whose tokenizer and length are kept, those with weights included
# While it builds a model, transformers sets torch's default dtype and replaces functions of torch.nn.init. Both hold
# for the whole process: two builds at once would leave each other's settings in place.
_BUILDING = threading.Lock()


class ModelError(ValueError):
    """A model cannot be used; the message says what to do."""


@dataclass(eq=False)
class Loaded:
    """A model with all that goes with it. A reference kept beyond a race keeps its weights in memory."""

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

    def answer_tokens(self, ids: list[int]) -> int:
        """How many new tokens come before the one that ends the answer."""
        return next((i for i, token in enumerate(ids) if token in self.ends), len(ids))

    def say(self, ids: list[int]) -> tuple[str, str]:
        """The text of an answer, and of what was decoded after its end, without the tokens that end texts."""
        end, decode = self.answer_tokens(ids), self.language.tokenizer.decode
        return decode(ids[:end]).strip(), decode(ids[end:], skip_special_tokens=True)


def locate(name: str) -> str:
    """The model of a list's name, a hub id, a directory or a GGUF file; one for all spellings of a path.

    Raises:
        ModelError: nothing is there.
    """
    name = name.strip() if isinstance(name, str) else ""
    if name == PROBE:
        if not (PROBE_PATH / "model.safetensors").is_file():
            raise ModelError("the probe model is not in assets/probe-gqa: run the demo from a checkout of the project")
        return str(PROBE_PATH)
    if name == SMALL:
        if not is_fetched(small_model_path()):
            raise ModelError("the small model is not here yet: run `hf-sparsekv fetch` (93 MB), then try again")
        return str(small_model_path().resolve())
    if not name:
        raise ModelError("choose a model")
    try:
        path = Path(name).expanduser()
        if gguf_file.is_gguf(path) and path.is_file():
            return str(path.resolve())
        if name.startswith(("/", ".", "~")) or path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelError(f"there is no model in {path}: its directory needs a config.json")
            return str(path.resolve())
    except (OSError, RuntimeError) as error:  # too long, not ours to read, no such home
        raise ModelError(f"there is no model in {name[:300]}: {error}") from error
    return name


def longest(config) -> int:
    """Positions that a model was made for.

    Raises:
        ValueError: its configuration says something else than a number.
    """
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is None:
        return 32768
    if type(most) is not int or most < 1:
        raise ValueError(f"its config.json has max_position_embeddings={most!r:.40}, which is no number of tokens")
    return most


def pick_device(name: str) -> torch.device:
    """``auto``: a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@dataclass(eq=False)
class _Entry:
    """The record of one model.

    Args:
        looking, loading: held while its configuration or its weights are read.
        users: who ask for it at the moment; ``runs``: those of them who need its weights.
    """

    looking: threading.Lock = field(default_factory=threading.Lock)
    loading: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    runs: int = 0
    looked: tuple[Language, int] | None = None
    loaded: Loaded | None = None
    has_place: bool = False  # of those for weights, from before they are read


class Models:
    """The models in memory: at most 2 with weights, and tokenizers of 16.

    Each has locks of its own. A hub that is slow to answer for one name delays no other.

    Args:
        device: where they run.
        dtype: ``None``: the checkpoint's; on a CPU float32, which is faster there than 16 bits.
        listed: only these may be named; ``None``: any hub id and any directory.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None = None, listed: Collection[str] | None = None
    ) -> None:
        self.device = device
        self.dtype = dtype or (torch.float32 if device.type == "cpu" else None)
        self.listed = None if listed is None else tuple(dict.fromkeys(listed))
        self.gone: Callable[[], None] = lambda: None  # called when weights have left memory, before others come
        self._lock = threading.Lock()  # of the entries; never held while a file is read
        self._entries: dict[str, _Entry] = {}  # what was used last comes last

    def look(self, name: str) -> tuple[Language, int]:
        """The language of a model and the longest context it was made for; its weights are not loaded.

        Raises:
            ModelError: there is no such model, it may not be named, its files are damaged, or the hub does not answer.
        """
        path = self._path(name)
        with self._entry(path) as entry:
            return self._looked(entry, name, path)

    @contextmanager
    def use(self, name: str) -> Iterator[Loaded]:
        """The model, ready to run, and in memory until the end of the ``with`` statement.

        Raises:
            ModelError: as :meth:`look`, or the model cannot be loaded, or the places for weights are all in use.
        """
        path = self._path(name)
        with self._entry(path, runs=1) as entry:
            language, _ = self._looked(entry, name, path)
            with entry.loading:
                if entry.loaded is None:
                    _fetch(path)  # first: a download that stalls or fails takes no place
                    self._take_place(entry)
                    try:
                        gc.collect()  # models have cycles
                        self.gone()
                        with _told(name):
                            entry.loaded = Loaded(name, self._read(path), language)
                    finally:
                        entry.has_place = entry.loaded is not None
                loaded = entry.loaded
            yield loaded

    def load(self, name: str) -> Loaded:
        """The model, ready to run; another one may take its place here at any time.

        Raises:
            ModelError: as :meth:`use`.
        """
        with self.use(name) as loaded:
            return loaded

    def _path(self, name: str) -> str:
        # The name itself: clients must not learn whether another spelling is a directory here.
        if self.listed is not None and name not in self.listed:
            raise ModelError(
                f"this server offers {', '.join(self.listed)} and no other models: choose one of them (whoever runs "
                "it can add others)"
            )
        return locate(name)

    @contextmanager
    def _entry(self, path: str, runs: int = 0) -> Iterator[_Entry]:
        """The entry of a path, which stays while somebody uses it."""
        with self._lock:
            entry = self._entries.pop(path, None) or _Entry()
            self._entries[path] = entry
            entry.users += 1
            entry.runs += runs
        try:
            yield entry
        finally:
            with self._lock:
                entry.users -= 1
                entry.runs -= runs
                if entry.looked is None and not entry.users:
                    del self._entries[path]  # there is no such model
                for key in [k for k, e in self._entries.items() if not e.users and not e.has_place]:
                    if len(self._entries) > _LOOKED:
                        del self._entries[key]

    def _looked(self, entry: _Entry, name: str, path: str) -> tuple[Language, int]:
        if entry.looked is None:
            with entry.looking:
                if entry.looked is None:
                    with _told(name):
                        if gguf_file.is_gguf(path):
                            config, tokenizer = gguf_file.load_config(path), gguf_file.load_tokenizer(path)
                        else:
                            here = Path(path).is_dir() or not hub_answers()
                            config = AutoConfig.from_pretrained(path, local_files_only=here)
                            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=here)
                        entry.looked = Language(tokenizer), longest(config)
        return entry.looked

    def _take_place(self, entry: _Entry) -> None:
        """A place for the weights of ``entry``: a free one, or that of the model that was not used for longest."""
        with self._lock:
            others = [e for e in self._entries.values() if e.has_place]
            idle = [e for e in others if not e.runs]
            for other in idle[: max(0, len(others) - _KEPT + 1)]:
                other.loaded, other.has_place = None, False
                others.remove(other)
            if len(others) >= _KEPT:
                raise ModelError(
                    f"races with {len(others)} other models run, and there is room for {_KEPT}: wait until one has "
                    "ended, or take a model of theirs"
                )
            entry.has_place = True

    def _read(self, path: str) -> torch.nn.Module:
        kwargs = {"dtype": self.dtype or "auto", "attn_implementation": "sparsekv"}
        with _BUILDING:
            if gguf_file.is_gguf(path):
                model = gguf_file.load(path, self.dtype, self.device, attn_implementation="sparsekv")[1]
            else:
                model = AutoModelForCausalLM.from_pretrained(path, device_map={"": self.device}, **kwargs)
        model.eval()
        if self.device.type == "cuda":
            return optimize(model)
        QueryTap(model).install()  # as long as there is the model
        return model


def _fetch(path: str) -> None:
    """Bring safetensors from the hub into its local cache: what takes long, before the lock of building."""
    if os.path.exists(path):
        return
    with contextlib.suppress(Exception):  # other formats come while it is built, which also says what is wrong
        try:
            cached_file(path, "model.safetensors")
        except OSError:
            get_checkpoint_shard_files(path, cached_file(path, "model.safetensors.index.json"))


class _told:
    """Errors of loading as a sentence."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise ModelError(f"{self.name} does not fit into the memory of the GPU") from error
        if not isinstance(error, Exception) or isinstance(error, ModelError):
            return
        reason = " ".join(str(error).split())[:300]
        if not isinstance(
            error, OSError | ValueError | ImportError | RuntimeError
        ):  # transformers expected no such file
            reason = f"its config.json, tokenizer or weights are damaged ({type(error).__name__}: {reason})"
        raise ModelError(f"cannot load {self.name}: {reason}") from error
