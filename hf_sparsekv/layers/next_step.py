"""Preparation of a layer's next decode step, and the step's work before its token is stored.

A prompt prepares it, too, and captured steps begin in the same way as eager ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.mla import Absorbed
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..tensors import no_autocast


class NextStep:
    """The beginning of one layer's next decode step.

    Attributes:
        query: of a prompt's last token, ``[batch, Hq, Dk]``. Its selection is copied to the device when the step
            begins: only the last of a prompt's pieces needs it. None: nothing is left to copy.
    """

    def __init__(self) -> None:
        self.query: Tensor | None = None

    @no_autocast
    @torch.no_grad()
    def after_prompt(self, store: LayerStore, policy: Policy, query: Tensor, absorbed: Absorbed | None) -> None:
        """A prompt, or a piece of it, is cached: prepare the first decode step, which its last query stands for.

        Args:
            query: ``[batch, Hq, q, Dk]``, as the model gives it. ``absorbed``: of an MLA module.
        """
        self.query = None
        last = query[:, :, -1] if absorbed is None else absorbed.queries(query[:, :, -1:])[:, :, 0]
        plan = policy.plan(store)
        if not plan.ahead:
            policy.look_ahead(last, store, plan)
            return
        plan = policy.prepare(store)
        if not plan.brings:
            with store.writer.after_saving(last, store.pages) as last:
                policy.look_ahead(last, store, plan)
        elif policy.tokens is not None:
            self.query = last.clone()  # a view would keep all of the prompt's queries alive

    def begin(self, store: LayerStore, policy: Policy) -> None:
        """The step begins: blocks are in place, and there is room for marks of those that it attends to."""
        if store.writer.saved is not None:
            store.writer.wait()
        if self.query is not None:
            self._bring(store, policy)
        if policy.watch is not None:
            policy.watch.fit(store)

    @no_autocast
    @torch.no_grad()
    def _bring(self, store: LayerStore, policy: Policy) -> None:
        query, self.query = self.query, None
        assert query is not None
        plan = policy.plan(store)
        if plan.ahead:
            policy.look_ahead(query, store, plan)

    def map_rows(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was."""
        if self.query is not None:
            self.query = self.query[index.to(self.query.device)]
