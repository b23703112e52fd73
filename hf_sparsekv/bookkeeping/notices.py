"""Warnings that a cache gives once.

Apart from the cache because its behaviour does not depend on them.
"""

from __future__ import annotations

import warnings


class Notices:
    """What a cache warns of, and whether it has.

    Args:
        name: of the cache's class.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._bypass = self._own_queries = False

    def bypass(self) -> None:
        """A model reads all keys and values instead of attending sparsely."""
        if not self._bypass:
            self._bypass = True
            warnings.warn(
                f"something other than the sparsekv attention function reads the keys of {self.name}: the "
                "result is right, but dense and slow. Load the model with attn_implementation='sparsekv'",
                stacklevel=3,
            )

    def own_queries(self) -> None:
        """Nothing is chosen beforehand."""
        if not self._own_queries:
            self._own_queries = True
            warnings.warn(
                f"{self.name} chooses each layer's tokens by that layer's own query, in place: right, but "
                "not hidden by the layer before, because nothing hands over what that expects. Call "
                "optimize(model), or predict_ahead(model) for eager steps; a TokenConfig is this without the warning",
                stacklevel=3,
            )
