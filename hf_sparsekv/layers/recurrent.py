"""Linear-attention layers: the states that their models change in place, in steps that are captured."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from .kinds import LayerKind, Place, layer_kind

# Models whose linear-attention layers are known to be captured well: other code may keep numbers of a step on the host.
_IN_PLACE = ("qwen4_exp_text",)


@layer_kind("recurrent")
class Recurrent(LayerKind, LinearAttentionLayer):
    """transformers' own layer, with the face of ours."""

    @classmethod
    def of(cls, stock: Any, place: Place) -> Any:
        return cls.over(stock) if type(stock) is LinearAttentionLayer else None

    @property
    def states(self) -> list[Tensor]:
        held = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in held if state is not None]

    def why_eager(self, cache: Any) -> str | None:
        text, kept = cache.model_config.get_text_config(decoder=True), self.is_conv_states_initialized
        in_place = text.model_type in _IN_PLACE and not self.record_past
        if in_place and kept[0] and all(self.has_previous_state[i] for i in kept if kept[i]):
            return None
        return super().why_eager(cache)
