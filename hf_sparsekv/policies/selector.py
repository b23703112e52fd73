"""The shortest way to a method: a policy that chooses tokens for each step's own query, and keeps nothing."""

from __future__ import annotations

from torch import Tensor

from ..attention.exact import AttentionSpec
from ..kv.store import LayerStore
from .base import Policy


class Selector(Policy):
    """A subclass says in :meth:`select` which tokens a step attends to beside sinks and recent tokens.

    While the full blocks hold no more than ``config.token_budget`` tokens (if there is such a field) and while dense
    attention is as quick (``config.dense_below``), a step attends to everything, and nobody is asked.
    """

    captured = True  # False: select() waits for the device, or does not launch the same kernels each time

    def select(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        """The tokens for ``q [batch, Hq, Dk]``: columns, int32 ``[batch, H, n]``, -1 for none.

        Only tokens of sealed blocks that are neither padding nor sinks may be chosen, each once: those whose flag is
        1. In a captured step shapes must not depend on ``store.sealed``: go by ``store.table``.
        """
        raise NotImplementedError

    def _dense(self, store: LayerStore) -> bool:
        few = store.sealed * store.block_size <= getattr(self.config, "token_budget", 0)
        return few or self.below_crossover(store)

    def mode(self, store: LayerStore) -> str | None:
        if not self.captured:
            return None
        return "dense" if self._dense(store) else "select"

    def attend(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        if self._dense(store):
            return store.attend(q, None, "all", spec)
        tokens = self.select(q, store, spec)
        if self.watch is not None:
            self.watch.mark_tokens(tokens, store.block_size)
        return store.attend(q, tokens, "token", spec)

    def account(self, store: LayerStore) -> None:
        dense = self._dense(store)
        store.count_step("all" if dense else "token")
        if dense:
            few = store.sealed * store.block_size <= getattr(self.config, "token_budget", 0)
            store.counters.crossover += not few
