"""The file of a saved cache: safetensors, with a header that describes how the tensors belong together.

It is written in pieces, so that only one piece is in memory twice. (``safetensors.torch.save_file`` needs all tensors
at once, which would double a cache on the device. The format itself is a header and the bytes.)
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..version import __version__
from ..whole_file import replacing

FORMAT, VERSION = "hf-sparsekv-cache", "4"
PIECE = 1 << 26  # bytes that are read or written at once

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}

Pieces = Callable[[], Iterator[Tensor]]  # makes a tensor's rows, some at a time
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass
class Layer:
    """A layer in the file's header, without its tensors. ``window`` is None unless it is a sliding layer.

    ``kind`` is that of :mod:`..layers.kinds`, which ``module`` registers; layers that :attr:`selects` is not true of,
    and which have no window, consist of ``state`` and ``facts``.
    ``key_dim`` and ``value_dim`` are the widths passed to ``update()``; with ``latent`` (MLA) keys are as wide as both.
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
    near: int = 0
    blocks: int = 0
    index: dict[str, list] = field(default_factory=dict)  # name: [dtype, shape of a block's]
    policy: str = ""
    channels: int | None = None
    previous: int | None = None
    stats_tokens: int | None = None  # still calibrating
    query_heads: int | None = None
    chosen: int | None = None  # tokens of the next step's selection
    ring: list[int] | None = None  # number of query heads, and of queries per head
    state: dict[str, list] = field(default_factory=dict)  # name: [dtype, shape] of the policy's other tensors
    facts: dict[str, Any] = field(default_factory=dict)  # other values
    kind: str = "full"
    module: str = ""
    kv_dtype: str | None = None  # dtype of codes in the blocks; their scales are part of the index

    def measure(self, found: dict[str, Tensor]) -> None:
        """Set the sizes of the selection's tensors."""
        for name in ("channels", "previous", "chosen"):
            setattr(self, name, found[name].shape[2] if name in found else None)
        self.query_heads = found["stats_q"].shape[1] if "stats_q" in found else None
        self.ring = list(found["queries"].shape[1:3]) if "queries" in found else None

    @property
    def selects(self) -> bool:
        """A policy chooses what its steps attend to: it has a near buffer."""
        return self.near > 0

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
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        if self.selects:
            found["near_kv"] = (dtype, (*rows, self.near, width))
        if self.blocks:
            stored = dtype if self.kv_dtype is None else _NAMES[self.kv_dtype]
            found["blocks"] = (stored, (self.blocks, self.heads, block_size, width))
            found |= {name: (_NAMES[kind], (self.blocks, *shape)) for name, (kind, shape) in self.index.items()}
        if self.channels is not None:
            found["channels"] = (torch.int32, (*rows, self.channels))
            found["norms"] = (torch.float32, (*rows, 2, self.channels))
        if self.previous is not None:
            found["previous"] = (torch.int32, (*rows, self.previous))
        if self.chosen is not None:
            found["chosen"] = (torch.int32, (*rows, self.chosen))
        if self.ring is not None:
            found["queries"] = (dtype, (self.batch, *self.ring, self.query_dim))
            found["queries_from"] = (torch.int32, (self.batch,))
        if self.query_heads is not None:
            found["stats_q"] = (torch.float32, (self.batch, self.query_heads, self.query_dim))
            found |= dict.fromkeys(("stats_centre", "stats_squares"), (torch.float32, (*rows, self.query_dim)))
            found["stats_seen"] = (torch.float32, (self.batch,))
        return found | {name: (_NAMES[kind], tuple(shape)) for name, (kind, shape) in self.state.items()}


# ---------------------------------------------------------------------- valid headers


class Kind(NamedTuple):
    """Allowed values of a header field: a description, and a test that accepts any JSON value."""

    what: str
    holds: Callable[[object], bool]


def _integer(least: int) -> Kind:
    # Kernels count columns and blocks in int32.
    return Kind(f"an integer from {least} to 2^31 - 1", lambda x: type(x) is int and least <= x < 1 << 31)


def _or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.what}, or null", lambda x: x is None or kind.holds(x))


def _list(kind: Kind, length: int | None = None) -> Kind:
    what = f"a list of {'' if length is None else f'{length} times '}{kind.what}"
    return Kind(
        what, lambda x: type(x) is list and (length is None or len(x) == length) and all(kind.holds(y) for y in x)
    )


def _object(kind: Kind) -> Kind:
    return Kind(f"an object of {kind.what}", lambda x: type(x) is dict and all(kind.holds(y) for y in x.values()))


def _is_plain(x: object) -> bool:
    if type(x) is float:
        return math.isfinite(x)
    return -(1 << 63) <= x < 1 << 63 if type(x) is int else x is None or type(x) in (str, bool)


COUNT, SIZE = _integer(0), _integer(1)
FLAG = Kind("true or false", lambda x: type(x) is bool)
TEXT = Kind("a text", lambda x: type(x) is str)
PLAIN = Kind("a text, a finite number, true, false or null", _is_plain)
FACT = Kind(f"{PLAIN.what}, or a list of them", lambda x: _is_plain(x) or _list(PLAIN).holds(x))
DEVICE = Kind(  # on "meta" there are no numbers
    "a device such as 'cuda:0'", lambda x: type(x) is str and re.fullmatch(r"(?!meta)[a-z]+(:\d{1,3})?", x) is not None
)
FLOATS = tuple(name for name, dtype in _NAMES.items() if dtype.is_floating_point)
FLOAT = Kind(f"one of {', '.join(FLOATS)}", lambda x: type(x) is str and x in FLOATS)
FIELD = Kind(
    "[dtype, sizes]",
    lambda x: type(x) is list and len(x) == 2 and type(x[0]) is str and x[0] in _NAMES and _list(SIZE).holds(x[1]),
)
ANYTHING = Kind("anything", lambda x: True)

STATE = {
    "cache": TEXT,
    "method": TEXT,
    "config": _object(PLAIN),  # which its own class checks
    "model": _or_null(_object(FACT)),
    "channel_file": ANYTHING,  # null, or as below
    "record_past": FLAG,
    "rows": ANYTHING,  # as below
    "layers": Kind("a list that is not empty", lambda x: type(x) is list and len(x) > 0),  # as below
}
ROWS = {
    "lengths": _list(COUNT),  # tokens of each row
    "sealed": _list(COUNT),  # its full blocks
    "padding": _or_null(SIZE),  # columns of the padding mask; later columns are all valid. null: no padding
    "inexact_from": _or_null(COUNT),  # first column that full attention has not computed. null: none
}
CHANNEL_FILE = {
    "shape": _list(SIZE, 3),
    "model": _object(FACT),
    "name": TEXT,
    "tokens": COUNT,
}
LAYER = {
    "device": DEVICE,
    "dtype": FLOAT,
    **dict.fromkeys(("batch", "heads", "key_dim", "length"), SIZE),
    **dict.fromkeys(("latent", "record_past"), FLAG),
    **dict.fromkeys(("kept", "near", "blocks", "value_dim"), COUNT),  # a latent may have no rotary part
    **dict.fromkeys(("window", "channels", "previous", "query_heads", "chosen"), _or_null(SIZE)),
    "stats_tokens": _or_null(COUNT),
    "index": _object(FIELD),
    **dict.fromkeys(("policy", "kind", "module"), TEXT),
    "facts": _object(PLAIN),
    "ring": _or_null(_list(SIZE, 2)),
    "state": _object(FIELD),
    "kv_dtype": Kind("'int8' or null", lambda x: x in (None, "int8")),
}
_LAYER_DEFAULTS = {x.name for x in fields(Layer) if x.default is not MISSING or x.default_factory is not MISSING}


def _check_fields(held: object, kinds: Mapping[str, Kind], where: str, defaults: Set[str] = frozenset()) -> None:
    """Raise ``ValueError`` unless ``held`` is an object with these fields; those with ``defaults`` may be missing."""
    if type(held) is not dict:
        raise ValueError(f"{where} is {reprlib.repr(held)}, not an object")
    for name in held:
        if name not in kinds:
            raise ValueError(f"{reprlib.repr(name)} in {where} is not known")
    for name, kind in kinds.items():
        if name not in held:
            if name not in defaults:
                raise ValueError(f"{name} in {where} is missing")
        elif not kind.holds(held[name]):
            raise ValueError(f"{name} in {where} is {reprlib.repr(held[name])}, not {kind.what}")


def _read_header(text: str) -> tuple[dict, list[Layer], Shapes]:
    """State, layers and tensors of a header. Raises ``ValueError`` for everything that is not one."""
    try:
        state = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_fields(state, STATE, "the state")
    _check_fields(state["rows"], ROWS, "rows")
    for index, layer in enumerate(state["layers"]):
        _check_fields(layer, LAYER, f"layer {index}", _LAYER_DEFAULTS)
    layers = [Layer(**layer) for layer in state["layers"]]
    block_size = state["config"].get("block_size")
    if not SIZE.holds(block_size):
        raise ValueError(f"block_size in the configuration is {reprlib.repr(block_size)}, not {SIZE.what}")
    shapes = all_tensors(layers, block_size, state["rows"])
    if state["channel_file"] is not None:
        _check_fields(about := state["channel_file"], CHANNEL_FILE, "channel_file")
        shapes["channel_file"] = (torch.int32, tuple(about["shape"]))
        shapes["channel_norms"] = (torch.float32, norms_shape(about["shape"]))
    return state, layers, shapes


# ---------------------------------------------------------------------- the file


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` of ``torch.bfloat16``.

    Raises:
        ValueError: a dtype that files do not hold.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"tensors of {dtype} cannot be saved")
    return str(dtype).removeprefix("torch.")


def norms_shape(ranking: Iterable[int]) -> tuple[int, ...]:
    """The shape of a channel file's norms, from its ranking's."""
    layers, heads, dim = ranking
    return layers, heads, 2, dim


def all_tensors(layers: list[Layer], block_size: int, rows: dict) -> Shapes:
    """Tensors of all layers, ``layers.<index>.<name>``, and of the rows (:data:`ROWS`)."""
    found = {
        f"layers.{index}.{name}": about
        for index, layer in enumerate(layers)
        for name, about in layer.tensors(block_size).items()
    }
    batch = len(rows["lengths"])
    if blocks := max(rows["sealed"], default=0):
        found["table"] = (torch.int32, (batch, blocks))
    if rows["padding"] is not None:
        found["valid"] = (torch.bool, (batch, rows["padding"]))
    return found


def write(path: Path, state: dict, shapes: Shapes, pieces: Mapping[str, Pieces]) -> None:
    """Write a temporary file in the same directory and rename it when it is complete.

    Raises:
        OSError: the path cannot be written to.
        RuntimeError: the cache changed during the call.
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
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for tensor in pieces[name]():
                data = tensor.detach().cpu().contiguous().flatten()
                file.write(data.view(torch.uint8).numpy())
        if file.tell() != 8 + len(text) + end:
            raise RuntimeError("the cache changed while it was saved: nothing was written")


def damaged(path, why: str) -> ValueError:
    """The error for a file that contradicts itself."""
    return ValueError(f"{path} is damaged ({why}): prefill and save again")


class Reader:
    """An open file.

    Attributes:
        state: content of the header, see :func:`write`.
        layers: the layers in the header.

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
                f"{path} has format version {version}, of hf-sparsekv {release}; this one, {__version__}, reads "
                f"version {VERSION}: load it with that release, or prefill and save again"
            )
        try:
            self.state, self.layers, shapes = _read_header(metadata.get("state", ""))
        except ValueError as error:
            raise damaged(path, f"its header: {error}") from None
        self._check(shapes)

    def _check(self, shapes: Shapes) -> None:
        held = set(self._file.keys())
        for name in sorted(shapes.keys() ^ held):
            raise damaged(self.path, f"tensor {name} is {'missing' if name in shapes else 'not expected'}")
        for name, (dtype, shape) in shapes.items():
            found = self._file.get_slice(name)
            if (found.get_dtype(), tuple(found.get_shape())) != (_DTYPES[dtype], shape):
                raise damaged(self.path, f"tensor {name} is {found.get_dtype()} {found.get_shape()}")

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

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
