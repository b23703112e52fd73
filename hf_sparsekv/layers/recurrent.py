"""Layers whose past is a few states of fixed size: linear attention, Mamba, short convolutions.

A step of a model of transformers writes its states where they are, so a captured step can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..tensors import no_inference_mode, take_rows
from .kinds import LayerKind, Place, layer_kind

_DICTS = ("conv_states", "recurrent_states")


@layer_kind("recurrent")
class Recurrent(LayerKind, LinearAttentionLayer):
    """transformers' own layer, whose states ``[batch, ...]`` stay at their addresses.

    Layers without any state (in transformers' lists those of experts alone) stay empty.
    """

    # Of a trial step: the states of all rows, and those that it was given.
    _whole: Sequence[tuple[str, int, Tensor]] = ()
    _given: Sequence[Tensor] = ()

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        if type(stock) is not LinearAttentionLayer:
            return None
        known = place.cache.layers[place.index : place.index + 1]
        if not known or type(known[0]) is not cls:
            return cls.over(stock)
        known[0].reset()  # the cache was: its memory is kept
        return known[0]

    def named_states(self) -> Iterator[tuple[str, int, Tensor]]:
        """Every state that is there: its dictionary, its number in it, and the tensor."""
        for name in _DICTS:
            for number, state in getattr(self, name).items():
                if state is not None:
                    yield name, number, state

    @property
    def states(self) -> list[Tensor]:
        return [state for _, _, state in self.named_states()]

    # ------------------------------------------------------------------ captured steps

    def why_eager(self, cache: Any) -> str | None:
        if self.record_past:
            return "layers with a state keep their past, for tokens that are taken back (activate_past_recording())"
        if not all(self.has_previous_state[number] for _, number, _ in self.named_states()):
            return "a layer's state is empty, though the cache holds tokens"
        return None

    def begin_capture(self, replay: Any, rows: int) -> None:
        self._whole = [*self.named_states()]
        for name, number, state in self._whole:
            if rows < len(state):
                getattr(self, name)[number] = state[:rows]
        self._given = self.states

    def check_capture(self) -> None:
        now = self.states
        if len(now) != len(self._given) or any(one is not other for one, other in zip(now, self._given)):
            raise RuntimeError("a step puts a new tensor in the place of a layer's state")

    def end_capture(self) -> None:
        for name, number, state in self._whole:
            getattr(self, name)[number] = state
        self._whole, self._given = [], []

    # ------------------------------------------------------------------ rows that come and go

    def why_no_rows(self) -> str | None:
        return None

    @no_inference_mode
    def for_rows(self, cache: Any, index: int, rows: int) -> Any:
        new = type(self)(self.number_of_states)
        for name, number, state in self.named_states():
            getattr(new, name)[number] = state.new_zeros(rows, *state.shape[1:])
            getattr(new, f"is_{name}_initialized")[number] = True
            new.has_previous_state[number] = True
        new.conv_kernel_size, new.device, new.dtype = dict(self.conv_kernel_size), self.device, self.dtype
        return new

    def add_rows(self, other: Any, found: list[tuple[Tensor, Tensor, int]]) -> None:
        theirs = {(name, number): state for name, number, state in other.named_states()}
        if theirs:  # else nothing was read into it
            found += [(state, theirs[name, number], 0) for name, number, state in self.named_states()]

    def snapshot(self) -> Any:
        return [(name, number, state.clone()) for name, number, state in self.named_states()], self.conv_kernel_size

    @no_inference_mode
    def restore(self, held: Any, tokens: int) -> None:
        states, sizes = held
        for name, number, state in states:
            getattr(self, name)[number] = state.clone()
            getattr(self, f"is_{name}_initialized")[number] = self.has_previous_state[number] = True
            self.device, self.dtype = state.device, state.dtype
        self.conv_kernel_size = dict(sizes)

    @property
    def restless(self) -> list[Tensor]:
        return self.states

    # ------------------------------------------------------------------ files

    def to_file(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        held = {f"{name}.{number}": state for name, number, state in self.named_states()}
        return held, {str(number): size for number, size in self.conv_kernel_size.items()}

    def from_file(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.conv_kernel_size = {number: values[str(number)] for number in self.conv_kernel_size}
        for place, state in tensors.items():
            name, _, number = place.partition(".")
            if name not in _DICTS or int(number) not in getattr(self, name):
                raise ValueError(f"it has no {place}")
            getattr(self, name)[int(number)] = state
            getattr(self, f"is_{name}_initialized")[int(number)] = True
            self.has_previous_state[int(number)] = True
            self.__dict__.update(device=state.device, dtype=state.dtype)

    # ------------------------------------------------------------------ as transformers' own

    @no_inference_mode
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """As transformers' own; after :meth:`reset` in memory for another batch, if that has changed."""
        self._forget_other("conv_states", state_idx, conv_states.shape[:-1], conv_states)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers' own; after :meth:`reset` in memory for another batch, if that has changed."""
        self._forget_other("recurrent_states", state_idx, recurrent_states.shape, recurrent_states)
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def _forget_other(self, name: str, number: int, shape: Sequence[int], given: Tensor) -> None:
        """Forget a state of another shape, dtype or device."""
        held = getattr(self, name)[number]
        if held is None:
            return
        mine = held.shape[: len(shape)]
        if (*mine,) != (*shape,) or held.dtype != given.dtype or held.device != given.device:
            getattr(self, name)[number] = None
            getattr(self, f"is_{name}_initialized")[number] = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    @no_inference_mode
    def _map_rows(self, index: Tensor | Callable[[Tensor], Tensor]) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; in place if there are as many rows."""
        for name, number, state in [*self.named_states()]:
            rows = index if isinstance(index, Tensor) else index(torch.arange(len(state), device=state.device))
            getattr(self, name)[number] = take_rows(state, rows)
