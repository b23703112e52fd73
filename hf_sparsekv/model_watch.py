"""Whether a model is still the one that a step was captured of: modules, parameters, hooks, attributes, addresses.

A model of 36 layers has some 550 modules and 400 parameters. To ask each for its address takes 27 us, and for what it
holds some 50 us (one core of a server), which is too much for each decode step. So changes are noticed where they are
made, and a step compares one object:

* each module's class becomes a subclass of its own, whose ``__setattr__`` tells of every attribute that is set (so of
  modules and parameters that are replaced, ``training``, ``scaling``, a ``forward``), and whose methods that change
  what is not an attribute tell of it (``_apply`` of ``model.to()``, those of PEFT that merge and scale);
* the dictionaries in which a module keeps children, parameters, buffers and hooks tell of what is put in;
* a weak reference to the memory of each parameter tells when that is free: ``parameter.data = other``.

Configurations are compared in each step, and how many hooks there are where some were before. One change nobody tells
of: ``.data =`` while somebody else holds the memory before it (joined parameters hold each other's). That memory is
not free, so nothing that is gone is read. For it a few addresses are asked for in each step, and all of them in
:meth:`ModelWatch.check`, which is for whoever has the time: before a prompt, or before a new graph.
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
_FREE = ("_experts_implementation_internal",)  # of configurations: captured steps have their own
_PIECE = 12  # addresses that each step asks for


class _Watches(list):
    """Who wants to hear of a module's changes. A copy of the module is nobody's."""

    def touch(self) -> None:
        for watch in self:
            watch.touch()

    def __deepcopy__(self, memo: dict) -> _Watches:
        return _Watches()

    def __reduce__(self) -> tuple:
        return _Watches, ()


class _Watched:
    """What the class of a watched module is put behind."""

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__
        same = name in held and held[name] is value
        super().__setattr__(name, value)
        if not same and (name in held or name == "__class__"):  # elsewhere one of its dictionaries has told
            _touch(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        _touch(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)  # copies and files are of the class that it was
        if isinstance(made, tuple) and made[1][:1] == (type(self),):
            return made[0], (kind_of(self), *made[1][1:]), *made[2:]
        return made


def _touch(module: nn.Module) -> None:
    watches = module.__dict__.get(_KEY)
    if watches is not None:
        watches.touch()


def _telling(name: str):
    """A method that does what the one of this name does, and tells of it."""

    def method(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(_Watched, self), name)(*args, **kwargs)
        finally:
            _touch(self)

    method.__name__ = name
    return method


@cache
def _watched(kind: type) -> type:
    """``kind``, telling of changes. Its name stays: transformers goes by names in places."""
    body: dict[str, Any] = {name: _telling(name) for name in _METHODS if callable(getattr(kind, name, None))}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Watched, kind), body)


def kind_of(module: nn.Module) -> type:
    """The class of a module that may be watched: the one that it had before."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[:1] == (_Watched,) else kind


class _Telling:
    """A dictionary that tells of what is put in and taken out."""

    watches: _Watches | None = None
    was: dict | None = None  # what was in its place, which comes back

    def _tell(self) -> None:
        if self.was:
            self.was.clear()  # what is in there may hold memory that nobody else wants
        if self.watches is not None:
            self.watches.touch()

    def back(self) -> dict:
        """What was in its place, with what is here now."""
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
    """Notices changes of one model.

    :meth:`begin` and :meth:`end` say for how long, :meth:`refresh` what is to be taken for unchanged: before the first
    one everything has changed. Several may watch the same modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._own: int | None = None  # a thread whose changes are not told
        self._mine = False  # it has made some
        self._clear()
        self._seen: object = None

    def _clear(self) -> None:
        """Something has changed. What is known of the model is let go: it may hold memory that nobody else wants."""
        self._state = object()
        self._free: list[weakref.ref] = []
        self._plain: tuple[list[dict], list[dict]] = [], []
        self._hooks: tuple[list[dict], list[dict], list[int], int] = [], [], [], 0
        self._pieces: list[tuple[list[Tensor], list[int]]] = [([], [])]
        self._turn = 0

    def touch(self) -> None:
        """Something has changed."""
        if self._own == threading.get_ident():
            self._mine = True
        else:
            self._clear()

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Inside, what this thread changes is none: it is put back, or is how the model works."""
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
        """Nothing has changed since :meth:`refresh`. A few microseconds."""
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
        """As :meth:`same`, with all addresses."""
        if not self.same():
            return False
        if all([*map(_address, tensors)] == addresses for tensors, addresses in self._pieces):
            return True
        self._clear()
        return False

    def _same_hooks(self) -> bool:
        """Somewhere hooks were registered, which have numbers of their own: here, too?"""
        hooks, known, lengths, _ = self._hooks
        self._hooks = hooks, known, lengths, RemovableHandle.next_id
        return hooks == known

    def _alike(self) -> bool:
        """Only what does not matter to a captured step differs."""
        live, known = self._plain
        for one, other in zip(live, known):
            if any(one.get(key) != other.get(key) for key in one.keys() | other.keys() if key not in _FREE):
                return False
        self._plain = live, [dict(one) for one in live]
        return True

    # ------------------------------------------------------------------ watching

    def begin(self) -> None:
        """Watch. What is there has still to be looked at, by :meth:`refresh`."""
        self._take()

    def refresh(self) -> None:
        """What is there is to be taken for unchanged from here on, if it is not already."""
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
        self._seen = state  # not what it is now: memory may have become free meanwhile

    def _gone(self, storage: weakref.ref) -> None:
        self._clear()

    def _take(self) -> list[dict]:
        """Watch all modules. Gives the dictionaries of hooks that were there before: their handles know no other."""
        polled = []
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # what it is made of is not in Python
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
        """Leave the modules as they were. (Dictionaries of hooks stay where there are some: handles know them.)

        After an interrupt, of this or of :meth:`begin`, a second call does the rest: what says that a module is watched
        comes first and goes last.
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
    """What a captured step may read of a module's own: parameters, buffers and other attributes, where they lie."""
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
    """``t``, or what it is made of (torchao's)."""
    if hasattr(t, "__tensor_flatten__"):
        for name in t.__tensor_flatten__()[0]:
            if isinstance(one := getattr(t, name), Tensor):  # a DTensor lists its mesh, too
                yield from _plain_tensors(one)
    elif not t.is_meta and t.layout is torch.strided:
        yield t


_address = Tensor.data_ptr
