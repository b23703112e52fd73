"""Rotary factors that depend on the longest position of a forward pass, and passes in which they do not.

Rotary embeddings of ``rope_type="longrope"`` rotate *all* tokens of a pass by their long factors once one position is
past ``original_max_position_embeddings``. ``"dynamic"`` ones rescale with the longest position seen so far. In one
``generate()`` that is transformers' own behaviour. With continuous batching one request's answer would depend on the
others, and shared keys would have other factors than the queries.

:func:`fixed_rotary` gives such a model the factors of one length. :class:`PassRotary` computes LongRoPE as transformers
does. It chooses the factors on the device, because the host cannot choose during a captured step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = "_sparsekv_fixed"  # on a forward that fixed_rotary() made


class Switch(NamedTuple):
    """A rotary embedding whose factors depend on the longest position of the pass.

    Args:
        module: the embedding.
        layer_type: type of the layers that use these factors; None: all layers.
        kind: its ``rope_type``.
        tokens: longest context in which the factors do not depend on the pass.
    """

    module: nn.Module
    layer_type: str | None
    kind: str
    tokens: int

    @property
    def grows(self) -> bool:
        """Whether the factors follow the longest context so far; otherwise there are two sets of them."""
        return "dynamic" in self.kind


def switches(model: nn.Module) -> list[Switch]:
    """The rotary embeddings of ``model`` that depend on the pass, one entry for each layer type."""
    found = []
    for module in model.modules():
        kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
        given = getattr(config, "rope_parameters", None)
        if given is None or not isinstance(kinds, str | dict):
            continue
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            own = given if layer_type is None else given.get(layer_type) or {}
            if kind == "longrope" or (kind != "default" and "short_mscale" in own):  # PhiMoE has two scales
                tokens = int(own["original_max_position_embeddings"])
            elif "dynamic" in kind:
                tokens = int(module.original_max_seq_len)
            else:
                continue
            found.append(Switch(module, layer_type, kind, tokens))
    return found


def unfixed(model: nn.Module, max_length: int) -> str | None:
    """Why rows of up to ``max_length`` tokens would change each other's rotary factors. None: they would not."""
    for one in switches(model):
        if max_length > one.tokens and not hasattr(one.module.__dict__.get("forward"), _FIXED):
            return (
                f"the rotary factors of this model (rope_type={one.kind!r}) change for all tokens of a forward pass "
                f"once one is past position {one.tokens}: requests would change each other's answers. Use it inside "
                f"`with hf_sparsekv.fixed_rotary(model, {max_length}):`, or make rows of at most {one.tokens} tokens"
            )
    return None


class _View:
    """A rotary embedding with other factors, for its own forward: everything else is the module's."""

    def __init__(self, module: nn.Module, own: dict[str, Any]) -> None:
        self.__dict__.update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Factors:
    """Factors of one rotary embedding for contexts of one length, as transformers would compute them there.

    Args:
        length: tokens of the context; of LongRoPE only which side of the switch it is on matters.
    """

    def __init__(self, module: nn.Module, found: list[Switch], length: int) -> None:
        self.module, self.found, self.length = module, found, length
        self._views: dict[torch.device, _View] = {}

    def on(self, device: torch.device) -> _View:
        """The stand-in for the module that :func:`_plain` runs on."""
        if device not in self._views:
            self._views[device] = _View(self.module, self._own(device))
        return self._views[device]

    def _own(self, device: torch.device) -> dict[str, Any]:
        own: dict[str, Any] = {}
        for one in self.found:
            _, layer_type, kind, tokens = one
            config = self.module.config
            prefix = "" if layer_type is None else f"{layer_type}_"
            given = _of(layer_type)
            if self.length <= tokens:  # as transformers: the very numbers that the model began with
                inv_freq, scaling = getattr(self.module, f"{prefix}original_inv_freq").to(device), None
            else:
                # Growing factors need a tensor, as transformers passes it: its arithmetic has 32 bits.
                length = torch.tensor(self.length, device=device) if one.grows else tokens + 1
                inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length, **given)
                inv_freq = inv_freq.to(device)
            if "short_mscale" in config.rope_parameters and layer_type is None:
                # PhiMoE: its forward takes the short factors on both sides, and chooses what it multiplies by.
                scaling = config.rope_parameters["long_mscale" if self.length > tokens else "short_mscale"]
                inv_freq = ROPE_INIT_FUNCTIONS[kind](config, device)[0].to(device)
                own["rope_init_fn"] = lambda *_, made=(inv_freq, scaling): made
                own["config"] = SimpleNamespace(rope_parameters={"rope_type": "default"})
            own[f"{prefix}inv_freq"] = inv_freq
            if scaling is not None:
                own[f"{prefix}attention_scaling"] = scaling
        return own


def _plain(module: nn.Module) -> Callable[..., Any]:
    """The module's forward without what looks at the longest position, as a function of a module."""
    return inspect.unwrap(type(module).forward)


def _of(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


def _device(module: nn.Module) -> torch.device | None:
    return next((buffer.device for buffer in module.buffers()), None)


class _Swap:
    """Gives modules another forward, and back the one that they had."""

    def __init__(self) -> None:
        self._held: list[tuple[nn.Module, Any]] = []

    def give(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._held.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def undo(self) -> None:
        while self._held:
            module, before = self._held.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before


def _by_module(found: list[Switch]) -> dict[nn.Module, list[Switch]]:
    by: dict[nn.Module, list[Switch]] = {}
    for one in found:
        by.setdefault(one.module, []).append(one)
    return by


@contextmanager
def fixed_rotary(model: nn.Module, max_length: int) -> Iterator[list[Switch]]:
    """Inside, rotate all tokens by the factors of a context of ``max_length`` tokens, whatever else is in the batch.

    It is for continuous batching (``cache.rows()``). An :class:`..Engine` does it for its own ``max_length``. It does
    not change models whose rotary factors do not depend on the pass.

    Args:
        model: a model of transformers.
        max_length: tokens of the longest context. The factors are those that transformers uses for such a prompt.

    Yields:
        The embeddings whose factors differ from those of a short context. Rows of at most ``tokens`` tokens get other
        answers than from ``generate()`` outside.

    Raises:
        ValueError: ``max_length`` is not positive.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be positive, got {max_length}")
    found, swap = switches(model), _Swap()
    try:
        for module, own in _by_module(found).items():
            swap.give(module, _fixed_forward(module, _Factors(module, own, max_length)))
        yield [one for one in found if max_length > one.tokens]
    finally:
        swap.undo()


def _fixed_forward(module: nn.Module, factors: _Factors) -> Callable[..., Any]:
    plain, device = _plain(module), _device(module)
    if device is not None and device.type != "meta":
        factors.on(device)  # before any capture: a graph cannot hold copies from the host

    @functools.wraps(type(module).forward)  # others look whether it takes a layer_type
    @torch.no_grad()
    def forward(x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None) -> Any:
        return plain(factors.on(x.device), x, position_ids, **_of(layer_type))

    setattr(forward, _FIXED, True)
    return forward


class PassRotary:
    """LongRoPE as transformers computes it, but chosen on the device, so that captured steps are right at any length.

    It computes both tables, and the device takes one. (transformers reads the longest position from the device, which
    no capture allows.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._found = _by_module(switches(model))
        self._swap = _Swap()

    def install(self) -> None:
        """Give the model's LongRoPE embeddings such a forward, except fixed ones."""
        for module, found in self._found.items():
            here = module.__dict__.get("forward")
            if not any(one.grows for one in found) and not hasattr(here, _FIXED):
                self._swap.give(module, self._forward(module, found))

    def remove(self) -> None:
        """Restore the model."""
        self._swap.undo()

    def why_not(self) -> str | None:
        """Why no captured step can hold the model's rotary embeddings as they are now; None: it can."""
        for module, found in self._found.items():
            if any(one.grows for one in found) and not hasattr(module.__dict__.get("forward"), _FIXED):
                return (
                    "the model's rotary factors (rope_type='dynamic') are recomputed when a context is longer than "
                    "all before, which a replay cannot"
                )
        return None

    @staticmethod
    def _forward(module: nn.Module, found: list[Switch]) -> Callable[..., Any]:
        plain, device = _plain(module), _device(module)
        each = {
            one.layer_type: (one.tokens, _Factors(module, [one], one.tokens), _Factors(module, [one], one.tokens + 1))
            for one in found
        }
        if device is not None and device.type != "meta":
            for _, short, long in each.values():
                short.on(device), long.on(device)

        @functools.wraps(type(module).forward)
        @torch.no_grad()
        def forward(x: Tensor, position_ids: Tensor | None = None, layer_type: str | None = None) -> Any:
            given = _of(layer_type)
            if layer_type not in each:  # the factors of these layers do not depend on the pass
                return plain(module, x, position_ids, **given)
            tokens, *both = each[layer_type]
            short, long = (plain(factors.on(x.device), x, position_ids, **given) for factors in both)
            past = position_ids.max() >= tokens
            if isinstance(short, Tensor):
                return torch.where(past, long, short)
            return tuple(torch.where(past, b, a) for a, b in zip(short, long))

        return forward
