"""The shortest way to a method: a policy that chooses for each step's own query, and keeps nothing."""

from __future__ import annotations

from torch import Tensor

from ..kv.store import LayerStore
from ..types import AttentionParams
from .crossover import Crossover
from .drafting import Drafting
from .plan import CROSSOVER, DENSE, Plan, planned


class Selector(Drafting):
    """A subclass says in :meth:`select` which tokens or blocks a step attends to beside sinks and recent tokens.

    A step attends to everything, without a call of :meth:`select`, in two cases. The full blocks hold at most
    ``config.token_budget`` tokens (if it has that), or dense attention is as fast (``config.dense_below``).

    Attributes:
        granularity: ``"token"`` or ``"block"``, what :meth:`select` gives.
        captured: False if :meth:`select` waits for the device, or does not launch the same kernels each time.
        drafts: ``"together"`` if :meth:`select` asks nothing of the store but what is there of a row several times
            (:class:`..kv.query_rows.QueryRows`).
    """

    captured = True
    method: str | None = None  # its name in the table of crossovers

    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.crossover = Crossover(self.method, self.config, self.offloaded, q_heads)

    def select(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        """The selection for ``q [batch, Hq, Dk]``: int32 ``[batch, H, n]``, tokens (or blocks), -1 for none.

        Only tokens of full blocks that are no sinks may be chosen, each once. For a row, these are the tokens from
        ``store.sinks`` on, before ``store.rows[row, 1]``. In a chosen block, only these tokens are attended to. In a
        captured step shapes must not depend on ``store.full_blocks``: use ``store.table``.
        """
        raise NotImplementedError

    def plan(self, store: LayerStore) -> Plan:
        if store.full_blocks * store.block_size <= self.config.budget:
            return DENSE
        return CROSSOVER if self.crossover.below(store) else planned("every", captured=self.captured)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        return self.attend_drafts(q, store, store, plan, params)

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        ids = self.select(q, rows, params)
        if self.watch is not None:
            if self.granularity == "token":
                self.watch.mark_tokens(ids, store.block_size)
            else:
                self.watch.mark(ids)
        return rows.attend(q, ids, self.granularity, params)
