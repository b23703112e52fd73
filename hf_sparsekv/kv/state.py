"""State that outlives a step, declared once: captures, trial runs, beams, copies, files and sizes follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..tensors import no_inference_mode, take_rows


class Held(NamedTuple):
    """How a :class:`State` keeps one of its tensors.

    Args:
        rows: the dimension of the batch's rows, which beams and ``batch_select_indices()`` reorder; None: it has none.
        captured: captured graphs hold its address.
        trial: a step reads what the step before has written, so a trial run has to put it back.
        shared: copies share it, because it is only ever replaced, never written in place; else they clone it.
        dropped: ``reset()`` forgets it; else it keeps its memory, and ``start()`` sees to its contents.
        counted: :attr:`State.nbytes` counts it.
        file: its name in files of saved caches. None: what a loaded cache begins with does as well.
        when: the host value that says whether it holds anything. Only then it is saved; loading sets it.
    """

    rows: int | None = 0
    captured: bool = True
    trial: bool = False
    shared: bool = False
    dropped: bool = False
    counted: bool = False
    file: str | None = None
    when: str | None = None


def _getter(names: tuple[str, ...]) -> Callable[[object], tuple]:
    """A fast getter of these attributes."""
    if not names:
        return lambda state: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda state: (get(state),)


def _has_rows(part: Any) -> bool:
    """A state, or one of a list of such, has tensors with rows."""
    return any(one._row_dims for one in (part if isinstance(part, list) else [part]))


class State:
    """An object whose attributes are declared, those of its base classes included.

    Attributes:
        TENSORS: tensors; each may be None.
        HOST: host values that a step changes, and what they begin with.
        PARTS: attributes that are states themselves, lists of such, or None.
        OWN: host values and parts that copies begin without, because they belong to one cache's device memory.
    """

    TENSORS: ClassVar[dict[str, Held]] = {}
    HOST: ClassVar[dict[str, Any]] = {}
    PARTS: ClassVar[tuple[str, ...]] = ()
    OWN: ClassVar[tuple[str, ...]] = ()
    _begins: ClassVar[dict[str, Any]] = {}  # all of these, as they begin: a prompt makes several for each layer
    _captured: ClassVar[Any] = staticmethod(lambda state: ())  # the tensors whose addresses graphs know
    _held: ClassVar[Any] = staticmethod(lambda state: ())  # the parts
    _of_rows: ClassVar[Any] = staticmethod(
        lambda state: ()
    )  # the tensors that have rows, and the parts that a copy has
    _row_dims: ClassVar[tuple[int | None, ...]] = ()  # of these, the dimension of the rows; None: a part

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = [base for base in cls.__bases__ if issubclass(base, State)]
        for name in ("TENSORS", "HOST"):
            merged = {key: value for base in (*bases, cls) for key, value in getattr(base, name).items()}
            setattr(cls, name, merged)
        for name in ("PARTS", "OWN"):
            setattr(cls, name, tuple(dict.fromkeys(key for base in (*bases, cls) for key in getattr(base, name))))
        cls._begins = {**dict.fromkeys((*cls.TENSORS, *cls.PARTS)), **cls.HOST}
        of_rows: dict[str, int | None] = {
            name: held.rows for name, held in cls.TENSORS.items() if held.rows is not None
        }
        of_rows |= {name: None for name in cls.PARTS if name not in cls.OWN}
        getters = {
            "_captured": tuple(name for name, held in cls.TENSORS.items() if held.captured),
            "_held": cls.PARTS,
            "_of_rows": tuple(of_rows),
        }
        for name, of in getters.items():
            setattr(cls, name, staticmethod(_getter(of)))
        cls._row_dims = tuple(of_rows.values())

    def __init__(self) -> None:
        self.__dict__.update(self._begins)

    def _parts(self) -> Iterator[tuple[str, list[State]]]:
        for name in self.PARTS:
            part = getattr(self, name)
            if part is not None:
                yield name, part if isinstance(part, list) else [part]

    def _tensors(self) -> Iterator[tuple[str, Tensor, Held]]:
        for name, held in self.TENSORS.items():
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor, held

    def reset(self) -> None:
        """Forget everything that came from tokens."""
        for name, value in self.HOST.items():
            setattr(self, name, value)
        for name, held in self.TENSORS.items():
            if held.dropped:
                setattr(self, name, None)
        for _, parts in self._parts():
            for part in parts:
                part.reset()

    # ------------------------------------------------------------------ capture

    @property
    def addresses(self) -> tuple[int, ...]:
        """Changes when a tensor that a captured step uses has moved."""
        found: list[int] = []
        self.add_addresses(found)
        return tuple(found)

    def add_addresses(self, found: list[int]) -> None:
        """Append :attr:`addresses` to ``found``. Runs for every layer in every replay, hence no generators."""
        for tensor in self._captured(self):
            found.append(0 if tensor is None else tensor.data_ptr())
        for part in self._held(self):
            if part is None:
                continue
            if type(part) is list:
                for one in part:
                    one.add_addresses(found)
            else:
                part.add_addresses(found)

    def snapshot(self) -> dict:
        """State that a trial step changes: tensors by value, host values as they are."""
        return {
            "host": {name: getattr(self, name) for name in self.HOST},
            "tensors": {name: tensor.clone() for name, tensor, held in self._tensors() if held.trial},
            "parts": {name: [part.snapshot() for part in parts] for name, parts in self._parts()},
        }

    def restore_host(self, saved: dict) -> None:
        """Put back what :meth:`snapshot` kept, except the contents of tensors."""
        for name, value in saved["host"].items():
            setattr(self, name, value)
        for name in self._made(saved):
            setattr(self, name, None)
        for part, held in self._saved_parts(saved):
            part.restore_host(held)

    def made_since(self, saved: dict) -> list[str]:
        """Names of tensors that a trial step has made: every replay would make them again, and lose what they held."""
        parts = [name for part, held in self._saved_parts(saved) for name in part.made_since(held)]
        return self._made(saved) + parts

    def _made(self, saved: dict) -> list[str]:
        return [name for name, _, held in self._tensors() if held.trial and name not in saved["tensors"]]

    def restore_device(self, saved: dict) -> None:
        """Put back the contents of tensors."""
        for name, value in saved["tensors"].items():
            getattr(self, name).copy_(value)
        for part, held in self._saved_parts(saved):
            part.restore_device(held)

    def _saved_parts(self, saved: dict) -> Iterator[tuple[State, dict]]:
        for name, parts in self._parts():
            yield from zip(parts, saved["parts"].get(name, ()))

    # ------------------------------------------------------------------ rows and copies

    @no_inference_mode
    def map_rows(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was."""
        for name, tensor, held in self._tensors():
            if held.rows is None:
                continue
            if held.shared:
                setattr(self, name, tensor.index_select(held.rows, index.to(tensor.device)))
            else:
                setattr(self, name, take_rows(tensor, index, held.rows))
        for _, parts in self._parts():
            for part in parts:
                part.map_rows(index)

    def first_rows(self, n: int):
        """The first ``n`` rows, for a step of these alone: another object over the same memory.

        Its tensors are views, so writes in place are seen here. Every other attribute is its own.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        for name, tensor, held in self._tensors():
            if held.rows is not None:
                setattr(new, name, tensor.narrow(held.rows, 0, n))
        for name, parts in self._parts():
            views = [part.first_rows(n) for part in parts]
            setattr(new, name, views if isinstance(getattr(self, name), list) else views[0])
        return new

    def add_rows(self, other: State, found: list[tuple[Tensor, Tensor, int]]) -> None:
        """Append what a row of this and one of ``other``, of the same kind, are kept in, and the dimension of rows.

        Runs for every layer whenever a row comes, hence no generators.

        Raises:
            ValueError: one of the two has a tensor that the other lacks, or has in another size.
        """
        for nth, (mine, theirs, dim) in enumerate(zip(self._of_rows(self), self._of_rows(other), self._row_dims)):
            if mine is None or theirs is None:
                if mine is not theirs and (dim is not None or _has_rows(mine or theirs)):
                    raise self._unlike(nth, "that of the batch has it" if theirs is None else "that of the row has it")
            elif dim is not None:
                if mine.numel() * theirs.shape[dim] != theirs.numel() * mine.shape[dim]:
                    raise self._unlike(nth, f"they are {list(mine.shape)} and {list(theirs.shape)}")
                found.append((mine, theirs, dim))
            elif type(mine) is list:
                for part, like in zip(mine, theirs):
                    part.add_rows(like, found)
            elif mine._row_dims:
                mine.add_rows(theirs, found)

    def _unlike(self, nth: int, why: str) -> ValueError:
        """The error of a row that would lose what the ``nth`` attribute with rows holds."""
        names = [name for name, held in self.TENSORS.items() if held.rows is not None]
        name = (*names, *(part for part in self.PARTS if part not in self.OWN))[nth]
        return ValueError(
            f"a row cannot join: of the two {type(self).__name__}, {name!r} is not alike ({why}). Make it in start() "
            "for all rows, in a size that does not grow with the text, or set rows_join = False in the method's Shared "
            "(docs/extending.md)"
        )

    @no_inference_mode
    def copy(self):
        """An independent object in the same state."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        for name, tensor, held in self._tensors():
            if not held.shared:
                setattr(new, name, tensor.clone())
        for name, parts in self._parts():
            if name not in self.OWN:
                copies = [part.copy() for part in parts]
                setattr(new, name, copies if isinstance(getattr(self, name), list) else copies[0])
        for name in self.OWN:
            setattr(new, name, self.HOST.get(name))
        return new

    @property
    def nbytes(self) -> int:
        """Bytes on the device, as far as they are counted."""
        own = sum(tensor.nbytes for _, tensor, held in self._tensors() if held.counted)
        return own + sum(part.nbytes for _, parts in self._parts() for part in parts)

    # ------------------------------------------------------------------ files

    def undeclared(self) -> list[str]:
        """Tensors that nothing above follows, because :attr:`TENSORS` does not name them."""
        known = self.TENSORS.keys() | self.HOST.keys()
        found = [name for name, value in vars(self).items() if isinstance(value, Tensor) and name not in known]
        return found + [name for _, parts in self._parts() for part in parts for name in part.undeclared()]

    def file_names(self) -> set[str]:
        """Names that :meth:`from_file` knows."""
        found = {held.file for held in self.TENSORS.values() if held.file}
        return found.union(*(part.file_names() for _, parts in self._parts() for part in parts))

    def to_file(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Tensors for a file of the saved cache, of rows of ``lengths`` tokens, by their names there."""
        found = {
            held.file: tensor
            for _, tensor, held in self._tensors()
            if held.file and (held.when is None or getattr(self, held.when))
        }
        for _, parts in self._parts():
            for part in parts:
                found |= part.to_file(lengths)
        return found

    def from_file(self, found: dict[str, Tensor], device: torch.device, lengths: Sequence[int]) -> None:
        """Take over the result of :meth:`to_file`. A choice that no longer fits (another budget) is left out."""
        for name, held in self.TENSORS.items():
            if held.file is None or (value := found.get(held.file)) is None:
                continue
            mine = getattr(self, name)
            if held.when is None and (mine is None or mine.shape != value.shape):
                setattr(self, name, value.to(device))
            elif mine is not None and mine.shape == value.shape:
                mine.copy_(value)
                if held.when is not None:
                    setattr(self, held.when, True)
        for _, parts in self._parts():
            for part in parts:
                part.from_file(found, device, lengths)
