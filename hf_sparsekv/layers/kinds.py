"""The face of a layer: what caches, captured steps, rows, exact mode and files ask of a layer of any kind.

A kind is one file: a class with this face, below ``@layer_kind(name)``. docs/extending.md shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from transformers import PreTrainedConfig

from ..kv.step_rows import StepRows


@dataclass(frozen=True)
class Place:
    """Where a layer is made.

    Args:
        cache: the cache, which does not have its layers yet.
        index: the layer's index.
        text: the configuration of the model's decoder.
        before: the cache's layers before this one.
        indexed: some layers of the model choose their tokens themselves, by an indexer.
    """

    cache: Any  # CacheState
    index: int
    text: PreTrainedConfig
    before: Sequence[Any]
    indexed: bool


class LayerKind:
    """A layer of a cache. A kind overrides what it can do; the rest is refused, or goes without a captured step.

    Attributes:
        kind: its name in files; empty: files know it otherwise.
        selects: a policy chooses what a step attends to: one of ``cache.sparse_layers``.
        in_columns: a captured step finds tokens by their columns, and takes padding between them for tokens.
        states: tensors that a step changes in place. A trial step puts them back.
    """

    kind: ClassVar[str] = ""
    selects: ClassVar[bool] = False
    in_columns: ClassVar[bool] = False

    @property
    def states(self) -> list[Tensor]:
        return []

    def _named(self, stranger: str) -> str:
        """The kind, in a message; ``stranger``: layers of none."""
        return f"of the kind {self.kind!r}: see LayerKind, docs/extending.md" if self.kind else stranger

    # ------------------------------------------------------------------ making

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        """The layer of this kind in place of ``stock``, transformers' own; None: the model's is of another kind."""
        return None

    @classmethod
    def over(cls, stock: Any) -> Any:
        """A layer of this class with the attributes of ``stock``, transformers' own, of a base class."""
        layer = object.__new__(cls)
        layer.__dict__.update(vars(stock))
        return layer

    def for_steps(self, cache: Any, index: int) -> Any:
        """The layer that takes this one's place before steps are captured, or this one."""
        return self

    # ------------------------------------------------------------------ captured steps

    def why_eager(self, cache: Any) -> str | None:
        """Why no step over this layer can be captured; None: it can."""
        return f"the model has layers that cannot be captured ({self._named('attention and a state in one layer')})"

    def begin_capture(self, replay: Any, rows: int) -> None:
        """A trial step of the first ``rows`` rows begins, which may be recorded: the host waits for nothing.

        ``replay``: :class:`.Replay`.
        """

    def check_capture(self) -> None:
        """The trial step has run. Raises RuntimeError if a graph of it would go wrong."""

    def end_capture(self) -> None:
        """The trial step has ended, perhaps with an error."""

    def addresses(self, steps: StepRows) -> tuple[int, ...]:
        """Addresses that a graph of the step holds. ``steps``: the rows on the layer's device."""
        return tuple(state.data_ptr() for state in self.states)

    def advance(self) -> None:
        """The host's share of a replayed step."""

    # ------------------------------------------------------------------ tokens that are taken back, rows

    def can_take_back(self, tokens: int) -> bool:
        """``crop()`` can remove the last ``tokens`` tokens, after :meth:`keep_back`."""
        return False

    def keep_back(self, tokens: int) -> None:
        """Prepare to take back the next ``tokens`` tokens."""

    def why_no_rows(self) -> str | None:
        """Why rows of this layer cannot come and go (``cache.rows()``); None: they can."""
        what = self._named("attention and a state in one layer")
        return f"rows that come and go need layers that keep each row apart, which this model's do not ({what})"

    def for_rows(self, cache: Any, index: int, rows: int) -> Any:
        """The layer of ``cache`` for ``rows`` rows, all empty: this one has read the first that is to join."""
        raise NotImplementedError

    def add_rows(self, other: Any, found: list[tuple[Tensor, Tensor, int]]) -> None:
        """Add tensors that hold rows of this layer and of ``other``, and the dimension of the rows.

        ``other``: of a prompt that is to join, or this one.
        """

    def snapshot(self) -> Any:
        """Copies of what a layer of one row holds, for :meth:`restore` of another one; None: blocks hold it all."""
        return None

    def restore(self, held: Any, tokens: int) -> None:
        """Begin with ``tokens`` tokens, as ``held`` by a layer of the same kind. This one is empty."""

    @property
    def restless(self) -> list[Tensor]:
        """Tensors ``[rows, ...]`` that a step changes in all of its rows, those without a token included."""
        return []

    # ------------------------------------------------------------------ files

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors for a file of the saved cache, and other values (plain JSON), by names of the kind's own."""
        raise NotImplementedError

    def from_file(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over what :meth:`to_file` of such a layer gave; the tensors are on the layer's device.

        Raises:
            ValueError: they do not fit. The file may be damaged or malicious.
        """
        raise NotImplementedError


_STRANGER = LayerKind()
_Kind = TypeVar("_Kind", bound=type[LayerKind])
_KINDS: list[type[LayerKind]] = []  # the first one that takes a layer makes it: those of other packages, then ours


def face(layer: Any) -> LayerKind:
    """The face of a cache's layer. One of transformers' own, of no kind, can do nothing."""
    return layer if isinstance(layer, LayerKind) else _STRANGER


def layer_kind(name: str) -> Callable[[_Kind], _Kind]:
    """Make a class the kind ``name``. A class of the same name takes the place of the one before.

    Raises:
        TypeError: it has not the face.
    """

    def decorate(kind: _Kind) -> _Kind:
        if not (isinstance(kind, type) and issubclass(kind, LayerKind)):
            raise TypeError(f"a layer kind must be a subclass of LayerKind, got {kind!r}")
        kind.kind = name
        _KINDS[:] = [kind, *(other for other in _KINDS if other.kind != name)]
        _KINDS.sort(key=lambda one: one.__module__.startswith(__package__))
        return kind

    return decorate


def has_others() -> bool:
    """Other packages have kinds, too."""
    return bool(_KINDS) and not _KINDS[0].__module__.startswith(__package__)


def kinds() -> dict[str, type[LayerKind]]:
    """The kinds by their names."""
    return {one.kind: one for one in _KINDS}


def made_layers(cache: Any, text: PreTrainedConfig, stock: Sequence[Any]) -> list[Any]:
    """The layers in place of ``stock``: each of the first kind that takes it, or transformers' own."""
    indexed = any(hasattr(layer, name) for layer in stock for name in ("update_index", "update_indexer"))
    layers: list[Any] = []
    for index, layer in enumerate(stock):
        place = Place(cache, index, text, layers, indexed)
        found = (kind.of(layer, place) for kind in _KINDS)
        layers.append(next((one for one in found if one is not None), layer))
        if cache.record_past and hasattr(layers[-1], "activate_past_recording"):
            layers[-1].activate_past_recording()
    return layers


def ready_for_steps(cache: Any) -> None:
    """Put layers that captured steps can use in place of filled ones that they cannot."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LayerKind):
            cache.layers[index] = layer.for_steps(cache, index)
