"""4-D masks that are never made: the rule that they follow, in the place of ``batch x queries x columns`` values.

transformers makes the masks of sliding windows, chunks and padding at the beginning of a forward pass. At 128k tokens
one takes 16 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ..ops.attention.prompt_attention.reference import visible


@dataclass(frozen=True)
class Rule:
    """Which of ``n`` columns each of the last ``q`` sees: tokens up to itself, in its window and chunk.

    Args:
        columns: bool ``[batch, n]``, which columns are tokens; None: all.
        window: a query at column ``c`` sees columns ``> c - window``. None: no window.
        chunk: a query sees columns of its own chunk of so many alone. None: no chunks.
        origin: int32 ``[batch]``, the column (maybe a negative one) at which a row's chunks begin; None: 0.
    """

    columns: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    origin: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """It hides nothing but later columns."""
        return self.columns is None and self.window is None and self.chunk is None

    def within(self, window: int | None, n: int) -> Rule:
        """The rule with another window, too. Windows and chunks that hide none of ``n`` columns are left out."""
        least = min((w for w in (self.window, window) if w is not None), default=n)
        chunk = None if self.chunk is not None and self.origin is None and self.chunk >= n else self.chunk
        return replace(self, window=least if least < n else None, chunk=chunk)

    def mask(self, lo: int, hi: int, first: int, device: torch.device) -> Tensor:
        """What queries of columns ``lo .. hi - 1`` see of columns ``first .. hi - 1``: bool ``[batch or 1, 1, ..]``."""
        at = torch.arange(lo, hi, device=device)
        return visible(at, first, hi, self.columns, self.window, self.chunk, self.origin)[:, None]

    def to(self, device: torch.device) -> Rule:
        """The rule with its tensors on another device."""
        columns, origin = (t if t is None else t.to(device) for t in (self.columns, self.origin))
        return replace(self, columns=columns, origin=origin)


class CompactMask(torch.Tensor):
    """Stands for a bool mask ``[batch, 1, queries, columns]`` by its rule: right shape and device, no storage.

    Our attention function reads :attr:`rule`. Any other operation on it gets the real tensor.
    """

    rule: Rule

    @staticmethod
    def __new__(cls, rule: Rule, batch: int, queries: int, columns: int, device: torch.device) -> CompactMask:
        shape = batch, 1, queries, columns
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.rule = rule
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool) and "device" in kwargs:
            return args[0].on(kwargs["device"])  # accelerate, for layers on another device
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]

        def real(x):
            return x.materialise() if isinstance(x, CompactMask) else x

        args, kwargs = torch.utils._pytree.tree_map(real, (args, kwargs))
        return func(*args, **kwargs)

    def on(self, device: torch.device) -> CompactMask:
        """The mask for another device."""
        batch, _, queries, columns = self.shape
        return CompactMask(self.rule.to(device), batch, queries, columns, torch.device(device))

    def materialise(self) -> Tensor:
        """The mask as a plain tensor."""
        q, n = self.shape[2:]
        return self.rule.mask(n - q, n, 0, self.device).expand(self.shape)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"CompactMask(shape={tuple(self.shape)}, device={self.device}, rule={self.rule})"


def rule_of(mask_function: Callable, kv_offset: int, columns: Tensor | None) -> Rule | None:
    """The rule of one of transformers' mask functions, of causal attention in windows or chunks; None: of another one.

    Args:
        kv_offset: position of the first column.
        columns: see :class:`Rule`.
    """
    rule, causal = Rule(columns), False
    for part in _parts(mask_function):
        name, held = getattr(part, "__qualname__", ""), _closure(part)
        if part is masking_utils.causal_mask_function:
            causal = True
        elif name == "sliding_window_overlay.<locals>.inner_mask" and isinstance(held.get("sliding_window"), int):
            rule = rule.within(held["sliding_window"], 1 << 62)
        elif name == "chunked_overlay.<locals>.inner_mask" and rule.chunk is None and held.keys() == _CHUNKED:
            origin = (held["left_padding"] - kv_offset).to(torch.int32)
            rule = replace(rule, chunk=held["chunk_size"], origin=origin)
        else:
            return None
    return rule if causal else None


_CHUNKED = {"chunk_size", "left_padding"}


def _parts(function: Callable) -> list[Callable]:
    """The functions of which one is the intersection."""
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return [function]
    return [part for one in _closure(function)["mask_functions"] for part in _parts(one)]


def _closure(function: Any) -> dict[str, Any]:
    """What a function holds of the one that made it."""
    if getattr(function, "__module__", None) != masking_utils.__name__ or not getattr(function, "__closure__", None):
        return {}
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__)}
