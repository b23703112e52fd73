"""The methods that there are: ``@register`` above a policy, in a file that ``policies/__init__.py`` imports.

Readers are ``SparseCache``, the command line, evaluation specs, the memory plan, saved caches, benchmarks and the demo.
So are the tests that hold for every method. docs/extending.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .shared import Shared

if TYPE_CHECKING:
    from .base import Policy


@dataclass(frozen=True)
class Knob:
    """The setting that trades exactness for speed.

    Args:
        name: a field of the configuration.
        least: the smallest value worth trying.
        most: with this value a step over up to 4096 tokens attends to all of them.
    """

    name: str
    least: float
    most: float


@dataclass(frozen=True)
class Method:
    """One way to choose what a decode step attends to.

    Args:
        name: what command line and specs call it.
        config: class of its configurations; ``SparseCache(config)`` makes the cache.
        policy: class of what chooses in each layer.
        about: one line, with the source.
        knob: what to turn for a faster or a more exact step.
        aliases: earlier names of the same.
        variants: further names, and the settings that each stands for.
        reference: a yardstick: evaluation offers it, the command line, benchmarks and the demo do not.
        shared: class of what all layers of a cache have in common, which may take other policies instead.
    """

    name: str
    config: type[SparseConfig]
    policy: type[Policy]
    about: str = ""
    knob: Knob = Knob("token_budget", 64, 4096)
    variants: Mapping[str, dict] = field(default_factory=dict)
    reference: bool = False
    shared: type[Shared] = Shared
    aliases: tuple[str, ...] = ()

    def share(self, config: SparseConfig, offload: OffloadConfig | None) -> Shared:
        """State that all layers of a new cache share; ``offload``: the result of :meth:`.shared.Shared.place`."""
        return self.shared.of(self.policy, config, offload)


_METHODS: dict[str, Method] = {}


def register(
    name: str,
    config: type[SparseConfig],
    *,
    about: str,
    knob: tuple[str, float, float] = ("token_budget", 64, 4096),
    variants: Mapping[str, dict] | None = None,
    reference: bool = False,
    shared: type[Shared] = Shared,
    aliases: tuple[str, ...] = (),
) -> Callable[[type[Policy]], type[Policy]]:
    """Make a policy class the method ``name``; the arguments are those of :class:`Method`.

    Raises:
        ValueError: the name or the configuration belongs to another method, or a field that is named is missing.

    A class of the same module and name takes the place of the one before: a cell of a notebook may run again.
    """

    def decorate(policy: type[Policy]) -> type[Policy]:
        before = {
            one: known for one, known in _METHODS.items() if one == name and _place(known.policy) == _place(policy)
        }
        method = Method(name, config, policy, about, Knob(*knob), dict(variants or {}), reference, shared, aliases)
        for one in before:
            del _METHODS[one]
        try:
            _check(method)
        except ValueError:
            _METHODS.update(before)
            raise
        _METHODS[name] = method
        return policy

    return decorate


def _place(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _check(method: Method) -> None:
    for one in (method.name, *method.aliases, *method.variants):
        if one in names(references=True):
            raise ValueError(f"there is a method {one!r} already: choose another name")
    if not (isinstance(method.config, type) and issubclass(method.config, SparseConfig)):
        raise ValueError(f"method {method.name!r}: config must be a subclass of SparseConfig, got {method.config!r}")
    for other in _METHODS.values():
        if other.config is method.config:
            raise ValueError(
                f"method {method.name!r}: {method.config.__name__} is the configuration of {other.name!r} already: "
                "give each method a class of its own"
            )
    fields = method.config.__dataclass_fields__
    for named in (method.knob.name, *(option for variant in method.variants.values() for option in variant)):
        if named not in fields:
            raise ValueError(f"method {method.name!r}: {method.config.__name__} has no field {named!r}")


def methods(references: bool = False) -> dict[str, Method]:
    """All methods by name, in the order of their registration; with ``references`` the yardsticks, too."""
    return {name: method for name, method in _METHODS.items() if references or not method.reference}


def called() -> dict[str, Method]:
    """The methods by each of their names, aliases included."""
    return {one: method for name, method in methods().items() for one in (name, *method.aliases)}


def names(references: bool = False) -> dict[str, tuple[Method, dict]]:
    """The same with aliases and variants: ``{name: (method, settings that the name stands for)}``."""
    found: dict[str, tuple[Method, dict]] = {}
    for name, method in methods(references).items():
        found |= {one: (method, {}) for one in (name, *method.aliases)}
        found |= {variant: (method, dict(settings)) for variant, settings in method.variants.items()}
    return found


def method_of(config: SparseConfig) -> Method:
    """The method that a configuration, or one of a subclass, belongs to.

    Raises:
        TypeError: it belongs to none.
    """
    known = {method.config: method for method in _METHODS.values()}
    for kind in type(config).__mro__:
        if kind in known:
            return known[kind]
    offered = ", ".join(method.config.__name__ for method in methods().values())
    got, hint = type(config).__name__, ""
    if isinstance(config, type):
        got, hint = f"the class {config.__name__}", f": give {config.__name__}()"
    elif isinstance(config, SparseConfig):
        hint = ": decorate its policy with register(), and import that module first (docs/extending.md)"
    raise TypeError(f"config must be the configuration of a method ({offered}), got {got}{hint}")
