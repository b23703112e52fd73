"""Forward passes of models with linear-attention layers: whether each has come to all layers, and to its end there.

These layers change states in place and do not tell how many tokens a state holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .kinds import face

_HALF_WAY = (
    "this cache is incomplete: an earlier forward pass stopped between or inside linear-attention layers. Call reset() "
    "and prefill again"
)


class LinearPasses:
    """Counts, by layer, forward passes that have come to it, and those that have stored a recurrent state.

    Attributes:
        linear: the model has linear-attention layers; without any nothing is counted.
    """

    def __init__(self) -> None:
        self.linear = False
        self._passes: Counter[int] = Counter()
        self._states: Counter[int] = Counter()

    def learn(self, layers: Sequence[CacheLayerMixin]) -> None:
        """The model has these layers."""
        self.linear = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)

    def came(self, layer_idx: int) -> None:
        """A forward pass has come to this layer: of ours, it has stored its tokens."""
        self._passes[layer_idx] += 1

    def stored(self, layer_idx: int) -> None:
        """A forward pass has stored a recurrent state in this layer."""
        self._states[layer_idx] += 1

    def take(self, other: LinearPasses) -> None:
        """The forward passes of ``other`` are these."""
        self._passes, self._states = other._passes.copy(), other._states.copy()

    def clear(self) -> None:
        """Nothing is cached."""
        self._passes.clear()
        self._states.clear()

    def check(self, layer_idx: int, layers: Sequence[CacheLayerMixin], model_config: PreTrainedConfig | None) -> None:
        """When a forward pass begins, with this layer, earlier ones have come to all layers, and to their end there.

        Raises:
            RuntimeError: one has not.
        """
        passes, states = self._passes, self._states
        if not passes or layer_idx > min(passes):
            return
        assert model_config is not None  # or no layer would be known to be linear
        kinds = getattr(model_config.get_text_config(decoder=True), "layer_types", None) or []
        linear = [i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
        named = {i for i in linear if kinds[i : i + 1] == ["linear_attention"]}  # others may be layers without a state
        counted = {passes[i] for i, layer in enumerate(layers) if face(layer).selects}
        asked = any(passes[i] for i in linear)  # models of transformers 5.23 ask for no state: nothing counts theirs
        counted |= {passes[i] for i in linear if passes[i] or (asked and i in named)}
        # Kernels that store the state themselves in single steps do so in all layers.
        ended = {states[i] == passes[i] for i in linear if states[i]}
        if len(counted) > 1 or len(ended) > 1:
            raise RuntimeError(_HALF_WAY)

    def check_asked(
        self, layer_idx: int, layers: Sequence[CacheLayerMixin], model_config: PreTrainedConfig | None
    ) -> None:
        """As :meth:`check`, when a layer asks for its state; and the first pass did come here."""
        self.check(layer_idx, layers, model_config)
        if not self._passes[layer_idx] and max(self._passes.values(), default=0) > 1:
            raise RuntimeError(_HALF_WAY)
