"""The metadata that a policy keeps of full blocks. The kernels that fill blocks write it, or the policy does.

Stores ask for it when a block becomes full, independently of the steps.
"""

from __future__ import annotations

from torch import Tensor

from ..kv.state import State
from ..kv.store import LayerStore
from ..ops.storage.seal import Index


class Indexing(State):
    """Fields of blocks. By default there are none."""

    def __init_subclass__(cls, **named) -> None:
        super().__init_subclass__(**named)
        makes, keeps = (next(c for c in cls.__mro__ if name in vars(c)) for name in ("index", "sealing"))
        if cls is makes and keeps not in (cls, Indexing):
            raise TypeError(
                f"{cls.__name__}.index() would never be asked: {keeps.__name__}.sealing() says where the kernels put "
                "what is kept of blocks. Override sealing(), too: with where your fields are, or None if kernels "
                "cannot make them"
            )

    def index(self, kv: Tensor, start: int, rows: slice) -> dict[str, Tensor]:
        """Fields of blocks being sealed, ``kv [n, rows, H, block_size, Dk + Dv]``: if :meth:`sealing` is None.

        The first of them begins at token ``start`` of its row; ``rows``: which ones of the batch.
        """
        return {}

    def sealing(self, store: LayerStore) -> Index | None:
        """Where the fields of blocks are kept, for the kernels that seal them.

        None if these kernels cannot make them, and :meth:`index` does. Steps are not captured then: only the device
        knows which rows have a block due.
        """
        return Index(store.key_dim) if type(self).index is Indexing.index else None
