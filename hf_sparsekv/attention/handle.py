"""Handles: ``update()`` returns them to the model instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kv.forward_pass import Pass
from ..kv.rows import Rows
from ..types import AttentionParams


class AttendingCache(Protocol):
    """A cache, as the attention function needs it."""

    def attend(
        self,
        module: torch.nn.Module,
        step: Step,
        query: Tensor,
        mask: Tensor | None,
        params: AttentionParams,
        dropout: float,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Attention over the layer of ``step``; or its keys and values, for the caller to attend to."""
        ...


class HandingLayer(Protocol):
    """The layer that returns handles, as these and the attention function need it.

    Attributes:
        owner: the cache.
        latent: a token is a latent with its rotary part (MLA).
    """

    @property
    def owner(self) -> AttendingCache: ...

    latent: bool

    def materialise(self, step: Step, which: str) -> Tensor:
        """All keys (``which="k"``) or values (``"v"``), those of ``step`` included: ``[batch, H, length, D]``."""
        ...


@dataclass
class Step:
    """New tokens that enter a layer.

    ``update()`` sees them before the query and the mask are known; ``attend()`` commits them.

    Args:
        layer: where they go.
        k, v: ``[batch, H, q, D]``; of MLA layers the latents and their rotary part.
        past: columns cached before them.
        absorbed: the projections of the MLA module that they come from; None for everything else.
        touched: storing them has begun; an error from here on leaves the layer incomplete.
        committed: they are stored.
        autocast: they came from inside ``torch.autocast``.
        before: what the layer held when it was given them; None: nothing.
        indices: columns that the model's indexer has chosen, int ``[batch, q, k]``, or blocks of columns for each KV
            head, ``[batch, H, q, k]``; None: it has none.
        size: columns of such a block.
        shown: the mask of these, ``[batch or 1, 1, q, n]``.
        under_way: the forward pass that brings them; None: that of a captured step, or no attention yet.
    """

    layer: HandingLayer
    k: Tensor
    v: Tensor
    past: int
    absorbed: Any = None  # Absorbed | None
    touched: bool = field(default=False)
    committed: bool = field(default=False)
    autocast: bool = False
    before: Rows | None = None
    indices: Tensor | None = None
    size: int = 1
    shown: Tensor | None = None
    under_way: Pass = None  # type: ignore[assignment]  # there from attend() on, where no step is captured

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """:attr:`k` and :attr:`v` as they are stored, without a gradient."""
        k, v = self.k, self.v
        return k.detach() if k.requires_grad else k, v.detach() if v.requires_grad else v

    @property
    def keys(self) -> Tensor:
        """Keys for a selection, ``[batch, H, q, Dk]``: whole rows, if they are latents."""
        return torch.cat((self.k, self.v), dim=-1) if self.layer.latent else self.k

    @cached_property
    def length(self) -> int:
        """Columns cached with them."""
        return self.past + self.k.shape[2]


class KVHandle(torch.Tensor):
    """Stands for all keys (or values) of a layer, new ones included: right shape, dtype and device, no storage.

    The ``sparsekv`` attention function recognises it. Any other operation on it gets the real tensor, so a model
    that looks into its keys, or another attention implementation, stays correct, only not sparse.
    """

    @staticmethod
    def __new__(cls, step: Step, which: str) -> KVHandle:
        like = step.k if which == "k" else step.v
        batch, heads, _, dim = like.shape
        shape = (batch, heads, step.length, dim)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.step, self.which = step, which
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # keeps .shape, .dtype and .device cheap

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def real(x):
            return x.materialise() if isinstance(x, KVHandle) else x

        args, kwargs = torch.utils._pytree.tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)

    def materialise(self) -> Tensor:
        """All keys (or values) of the layer as a plain tensor ``[batch, H, length, D]``."""
        return self.step.layer.materialise(self.step, self.which)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"KVHandle({self.which}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
