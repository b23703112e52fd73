"""The file of a saved cache: safetensors, with a header that says how the tensors belong together.

It is written piece by piece, so nothing but a piece is held twice in memory. (``safetensors.torch.save_file`` wants all
tensors at once, which would double a cache on the device; the format itself is a header and the bytes.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..version import __version__

FORMAT, VERSION = "hf-sparsekv-cache", "1"
PIECE = 1 << 26  # bytes that are read or written at once

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}

Pieces = Callable[[], Iterator[Tensor]]  # makes a tensor's rows, some at a time
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass
class Layer:
    """A layer in the file's header: what is not a tensor. ``window`` is None in a sparse layer.

    ``key_dim``, ``value_dim``: of what ``update()`` got; with ``latent`` (MLA) keys are as wide as both.
    """

    device: str
    dtype: str
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    length: int
    latent: bool = False
    window: int | None = None
    kept: int = 0  # columns of a sliding layer
    record_past: bool = False
    sealed: int = 0
    padded: bool = False
    near: int = 0
    blocks: int = 0
    index: dict[str, list] = field(default_factory=dict)  # name: [dtype, shape of a block's]
    policy: str = ""
    channels: int | None = None
    previous: int | None = None
    stats_tokens: int | None = None  # still calibrating
    query_heads: int | None = None
    chosen: int | None = None  # tokens of the next step's selection
    ring: list[int] | None = None  # query heads, and the queries that are kept of each
    state: dict[str, list] = field(default_factory=dict)  # name: [dtype, shape] of what else the policy keeps

    @property
    def query_dim(self) -> int:
        """Channels of a query."""
        return self.key_dim + self.value_dim * self.latent

    def tensors(self, block_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of the layer's tensors."""
        dtype, rows, width = _NAMES[self.dtype], (self.batch, self.heads), self.key_dim + self.value_dim
        if self.window is not None:
            shape = (*rows, self.kept)
            return {"keys": (dtype, (*shape, self.key_dim)), "values": (dtype, (*shape, self.value_dim))}
        found = {
            "near_kv": (dtype, (*rows, self.near, width)),
            "near_valid": (torch.bool, (self.batch, self.near)),
            "seen": (torch.int32, (self.batch,)),
        }
        if self.blocks:
            found["blocks"] = (dtype, (self.blocks, self.heads, block_size, width))
            found["flags"] = (torch.uint8, (self.blocks, block_size))
            found["table"] = (torch.int32, (self.batch, self.sealed))
            found |= {name: (_NAMES[kind], (self.blocks, *shape)) for name, (kind, shape) in self.index.items()}
        if self.channels is not None:
            found["channels"] = (torch.int32, (*rows, self.channels))
        if self.previous is not None:
            found["previous"] = (torch.int32, (*rows, self.previous))
        if self.chosen is not None:
            found["chosen"] = (torch.int32, (*rows, self.chosen))
        if self.ring is not None:
            found["queries"] = (dtype, (self.batch, *self.ring, self.query_dim))
            found["queries_from"] = (torch.int32, (self.batch,))
        if self.query_heads is not None:
            found["stats_q"] = (torch.float32, (self.batch, self.query_heads, self.query_dim))
            found["stats_k"] = (torch.float32, (*rows, self.query_dim))
        return found | {name: (_NAMES[kind], tuple(shape)) for name, (kind, shape) in self.state.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` of ``torch.bfloat16``.

    Raises:
        ValueError: a dtype that files do not hold.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"tensors of {dtype} cannot be saved")
    return str(dtype).removeprefix("torch.")


def all_tensors(layers: list[Layer], block_size: int) -> Shapes:
    """Tensors of all layers, ``layers.<index>.<name>``."""
    return {
        f"layers.{index}.{name}": about
        for index, layer in enumerate(layers)
        for name, about in layer.tensors(block_size).items()
    }


def write(path: Path, state: dict, shapes: Shapes, pieces: Mapping[str, Pieces]) -> None:
    """Write the file beside its place and move it there when it is whole.

    Raises:
        OSError: its place cannot be written to.
        RuntimeError: the cache changed meanwhile.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent}: make it, or save elsewhere than at {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: give the path of a file")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "hf_sparsekv": __version__,
        "transformers": transformers.__version__,
        "state": json.dumps(state, default=os.fspath),
    }
    header, end = {"__metadata__": metadata}, 0
    order = sorted(shapes, key=lambda name: -shapes[name][0].itemsize)  # so that every tensor is aligned
    for name in order:
        dtype, shape = shapes[name]
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        file = part.open("wb")
    except OSError as error:  # it names the hidden file
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                for tensor in pieces[name]():
                    data = tensor.detach().cpu().contiguous().flatten()
                    file.write(data.view(torch.uint8).numpy())
            if file.tell() != 8 + len(text) + end:
                raise RuntimeError("the cache changed while it was saved: nothing was written")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def damaged(path, why: str) -> ValueError:
    """The error for a file that contradicts itself."""
    return ValueError(f"{path} is damaged ({why}): prefill and save again")


class Reader:
    """An open file.

    Attributes:
        state: what the header says, see :func:`write`.
        layers: its layers.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another file, of another version, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no saved cache at {path}: make one with cache.save(path)")
        try:
            self._file = safe_open(self.path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a saved cache, or it is truncated ({error}): save again") from None
        metadata = self._file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is not a saved cache: make one with cache.save(path)")
        version, release = metadata.get("version"), metadata.get("hf_sparsekv")
        if version != VERSION:
            raise ValueError(
                f"{path} has format version {version}, of hf-sparsekv {release}; this "
                f"one, {__version__}, reads version {VERSION}: load it with that release, or prefill and save again"
            )
        try:
            self.state = json.loads(metadata["state"])
            self.layers = [Layer(**layer) for layer in self.state["layers"]]
            shapes = all_tensors(self.layers, self.state["config"]["block_size"])
            ranking, *_ = (self.state[name] for name in ("channel_file", "cache", "model", "record_past"))
            if ranking is not None:
                shapes["channel_file"] = (torch.int32, tuple(ranking["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"its header: {error!r}") from None
        self._check(shapes)

    def _check(self, shapes: Shapes) -> None:
        held = set(self._file.keys())
        for name in sorted(shapes.keys() ^ held):
            raise damaged(self.path, f"tensor {name} is {'missing' if name in shapes else 'not expected'}")
        for name, (dtype, shape) in shapes.items():
            found = self._file.get_slice(name)
            if (found.get_dtype(), tuple(found.get_shape())) != (_DTYPES[dtype], shape):
                raise damaged(self.path, f"tensor {name} is {found.get_dtype()} {found.get_shape()}")

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU; a copy, because safetensors gives what lives in the file."""
        return self._file.get_tensor(name).clone()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows ``start .. stop - 1`` of a tensor, on the CPU."""
        return self._file.get_slice(name)[start:stop]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_) -> None:
        self._file.__exit__(None, None, None)
