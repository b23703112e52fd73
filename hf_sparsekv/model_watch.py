"""Detects changes of a model since a step was captured: modules, parameters, hooks, attributes, addresses.

A model of 36 layers has some 550 modules and 400 parameters. Reading all addresses takes 27 us, and reading all modules
some 50 us (one core of a server). Both cost too much for each decode step. So changes report themselves, and a step
compares one object:

* Each module's class becomes a subclass whose ``__setattr__`` reports every change of an attribute. These include
  replaced modules and parameters, ``training``, ``scaling`` and ``forward``. Methods that change other things report
  it, too (``_apply`` of ``model.to()``, those of PEFT that merge and scale).
* The dictionaries in which a module keeps children, parameters, buffers and hooks report new entries.
* A weak reference to the memory of each parameter reports when it is freed, as by ``parameter.data = other``.

Each step also compares configurations, and the number of hooks in dictionaries that had some before. One change is not
reported: ``.data =`` while other code holds the old memory (joined parameters hold each other's). The old memory is not
freed, so a replay never reads freed memory. To notice this change, each step compares a few addresses.
:meth:`ModelWatch.check` compares all of them, where there is time: before a prompt, or before a new graph.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_torch
from torch.utils.hooks import RemovableHandle

_KEY = "_sparsekv_watches"  # an attribute of watched modules
_DICTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_METHODS = ("_apply", "merge", "unmerge", "set_scale", "scale_layer", "unscale_layer")
_FREE = ("_experts_implementation_internal",)  # ignored in configurations: captured steps set their own
_PIECE = 12  # addresses that each step compares


class _Watches(list):
    """The watches of a module. A copy of the module has none."""

    def touch(self) -> None:
        for watch in self:
            watch.touch()

    def __deepcopy__(self, memo: dict) -> _Watches:
        return _Watches()

    def __reduce__(self) -> tuple:
        return _Watches, ()


class _Watched:
    """Base class that comes before the class of a watched module."""

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__
        same = name in held and held[name] is value
        super().__setattr__(name, value)
        if not same and (name in held or name == "__class__"):  # otherwise one of its dictionaries has reported it
            _touch(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _touch(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)  # copies and files have the original class
        if isinstance(made, tuple) and made[1][:1] == (type(self),):
            return made[0], (kind_of(self), *made[1][1:]), *made[2:]
        return made


def _touch(module: nn.Module) -> None:
    watches = module.__dict__.get(_KEY)
    if watches is not None:
        watches.touch()


def _telling(name: str):
    """A method that calls the one of this name, and reports a change."""

    def method(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(_Watched, self), name)(*args, **kwargs)
        finally:
            _touch(self)

    method.__name__ = name
    return method


@cache
def _watched(kind: type) -> type:
    """A subclass of ``kind`` that reports changes. It keeps the name, because transformers compares names in places."""
    body: dict[str, Any] = {name: _telling(name) for name in _METHODS if callable(getattr(kind, name, None))}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Watched, kind), body)


def kind_of(module: nn.Module) -> type:
    """The original class of a module that may be watched."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[:1] == (_Watched,) else kind


class _Telling:
    """A dictionary that reports new and removed entries."""

    watches: _Watches | None = None
    was: dict | None = None  # the original dictionary, restored at the end

    def _tell(self) -> None:
        if self.was:
            self.was.clear()  # old entries may keep memory alive that nothing else uses
        if self.watches is not None:
            self.watches.touch()

    def back(self) -> dict:
        """The original dictionary, with the current entries."""
        if not self.was and self:
            self.was.update(self)
        return self.was

    def __setitem__(self, key: Any, value: Any) -> None:
        same = key in self and self[key] is value
        super().__setitem__(key, value)
        if not same:
            self._tell()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._tell()

    def __deepcopy__(self, memo: dict) -> dict:
        new = memo[id(self)] = self._plain()
        new.update(copy.deepcopy(dict(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(self._plain()), (), None, None, iter(self.items())

    def copy(self) -> dict:
        new = self._plain()
        new.update(self)
        return new

    def _plain(self) -> dict:
        return OrderedDict() if isinstance(self, OrderedDict) else {}


def _changing(name: str):
    def method(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(_Telling, self), name)(*args, **kwargs)
        finally:
            self._tell()

    method.__name__ = name
    return method


for _name in ("clear", "pop", "popitem", "setdefault", "update", "__ior__"):
    setattr(_Telling, _name, _changing(_name))


class _Dict(_Telling, dict):
    pass


class _Ordered(_Telling, OrderedDict):
    def move_to_end(self, key: Any, last: bool = True) -> None:
        super().move_to_end(key, last)
        self._tell()


class ModelWatch:
    """Detects changes of one model, from :meth:`begin` to :meth:`end`.

    :meth:`refresh` takes the current state as unchanged; before the first call the model counts as changed. Several
    watches may watch the same modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own: int | None = None  # thread whose changes are ignored
        self._mine = False  # whether that thread has made some
        self._clear()
        self._seen: object = None

    def _clear(self) -> None:
        """Note a change, and drop all references into the model, which may keep memory alive."""
        self._state = object()
        self._free: list[weakref.ref] = []
        self._plain: tuple[list[dict], list[dict]] = [], []
        self._hooks: tuple[list[dict], list[dict], list[int], int] = [], [], [], 0
        self._pieces: list[tuple[list[Tensor], list[int]]] = [([], [])]
        self._turn = 0

    def touch(self) -> None:
        """Note a change."""
        if self._own == threading.get_ident():
            self._mine = True
        else:
            self._clear()

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Inside, ignore this thread's changes: they are undone, or are part of how the model works."""
        before, self._own = self._own, threading.get_ident()
        try:
            yield
        finally:
            self._own = before
            hooks, _, lengths, _ = self._hooks
            if before is None and (self._mine or [*map(len, hooks)] != lengths):
                self._mine = False
                if self._state is self._seen:  # other memory may be read from here on
                    self._seen = None
                    self.refresh()

    # ------------------------------------------------------------------ asking

    def same(self) -> bool:
        """Whether nothing has changed since :meth:`refresh`. Takes a few microseconds."""
        if self._state is not self._seen:
            return False
        live, known = self._plain
        hooks, _, lengths, number = self._hooks
        tensors, addresses = self._pieces[self._turn]
        self._turn = (self._turn + 1) % len(self._pieces)
        if (
            [*map(len, hooks)] == lengths
            and (RemovableHandle.next_id == number or self._same_hooks())
            and (live == known or self._alike())
            and [*map(_address, tensors)] == addresses
        ):
            return True
        self._clear()
        return False

    def check(self) -> bool:
        """As :meth:`same`, but compares all addresses."""
        if not self.same():
            return False
        if all([*map(_address, tensors)] == addresses for tensors, addresses in self._pieces):
            return True
        self._clear()
        return False

    def _same_hooks(self) -> bool:
        """Whether hooks here are the same, after some were registered anywhere (they have global numbers)."""
        hooks, known, lengths, _ = self._hooks
        self._hooks = hooks, known, lengths, RemovableHandle.next_id
        return hooks == known

    def _alike(self) -> bool:
        """Whether configurations differ only in entries that do not matter to a captured step."""
        live, known = self._plain
        for one, other in zip(live, known):
            if any(one.get(key) != other.get(key) for key in one.keys() | other.keys() if key not in _FREE):
                return False
        self._plain = live, [dict(one) for one in live]
        return True

    # ------------------------------------------------------------------ watching

    def begin(self) -> None:
        """Start to watch. The model counts as changed until :meth:`refresh`."""
        self._take()

    def refresh(self) -> None:
        """Take the current state as unchanged from here on."""
        if self._state is self._seen:
            return
        polled = self._take()
        configs = {id(one): one for m in self.model.modules() if hasattr(one := m.__dict__.get("config"), "__dict__")}
        hooks = [*polled, of_torch._global_forward_hooks, of_torch._global_forward_pre_hooks]
        live = [config.__dict__ for config in configs.values()]
        tensors = list({id(t): t for module in self.model.modules() for t in _tensors(module)}.values())
        self._clear()
        state = self._state
        self._plain = live, [dict(one) for one in live]
        self._hooks = hooks, [dict(one) for one in hooks], [*map(len, hooks)], RemovableHandle.next_id
        self._free = [weakref.ref(t.untyped_storage(), self._gone) for t in tensors]
        pieces = [tensors[i : i + _PIECE] for i in range(0, len(tensors), _PIECE)] or [[]]
        self._pieces = [(piece, [*map(_address, piece)]) for piece in pieces]
        self._seen = state  # not `self._state`: memory may have been freed meanwhile

    def _gone(self, storage: weakref.ref) -> None:
        self._clear()

    def _take(self) -> list[dict]:
        """Watch all modules. Returns dictionaries of hooks that had entries before; their handles refer to them."""
        polled = []
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # its contents are not in Python
            held = module.__dict__
            watches = held.setdefault(_KEY, _Watches())
            if self not in watches:
                watches.append(self)
                self._modules.add(module)
            for name in (*_DICTS, *_HOOKS):
                mine = held[name]
                if name in _HOOKS and mine and not isinstance(mine, _Telling):
                    polled.append(mine)
                    continue
                if not isinstance(mine, _Telling):
                    was, mine = mine, (_Ordered if isinstance(mine, OrderedDict) else _Dict)(mine)
                    mine.was, held[name] = was, mine
                mine.watches = watches
            if not isinstance(module, _Watched):
                module.__class__ = _watched(type(module))
        return polled

    def end(self) -> None:
        """Restore the modules. (Dictionaries with hooks stay, because handles refer to them.)

        After an interrupt, of this or of :meth:`begin`, a second call does the rest. The mark of a watched module is
        set first and removed last.
        """
        for module in {*self._modules, *self.model.modules()}:
            held = module.__dict__
            watches = held.get(_KEY)
            if watches is None:
                continue
            if self in watches:
                watches.remove(self)
            if watches:
                continue
            if isinstance(module, _Watched):
                module.__class__ = kind_of(module)
            for name in (*_DICTS, *_HOOKS):
                mine = held[name]
                if isinstance(mine, _Telling):
                    mine.watches = None
                    if name in _DICTS or not mine:
                        held[name] = mine.back()
            held.pop(_KEY, None)
        self._modules.clear()
        self._clear()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors of a module that a captured step may read: parameters, buffers and other attributes."""
    if isinstance(module, torch.jit.ScriptModule):
        yield from (*module.parameters(recurse=False), *module.buffers(recurse=False))
        return
    held = module.__dict__
    fused = getattr(held.get("_fused"), "kept", None)  # a copy of scales, which a fused layer reads
    scales = getattr(fused, "_scales", None)
    for one in (*held["_parameters"].values(), *held["_buffers"].values(), *held.values(), scales):
        if isinstance(one, Tensor):
            yield from _plain_tensors(one)


def _plain_tensors(t: Tensor) -> Iterator[Tensor]:
    """``t``, or the tensors that it consists of (torchao's)."""
    if hasattr(t, "__tensor_flatten__"):
        for name in t.__tensor_flatten__()[0]:
            if isinstance(one := getattr(t, name), Tensor):  # a DTensor lists its mesh, too
                yield from _plain_tensors(one)
    elif not t.is_meta and t.layout is torch.strided:
        yield t


_address = Tensor.data_ptr
