"""One layer of a step that is being captured: it launches what every replay repeats, and nothing else.

Nothing here may depend on what the host knows of this step's tokens. The host's share is :func:`.step.account`. The
layers of the step share a :class:`.replay.Replay`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.handle import Step
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.plan import Plan
from ..tensors import no_autocast
from ..types import AttentionParams
from .cache_state import OWN_QUERIES, FullLayer, next_layer, warn_once
from .dense_drafts import attend_at_once
from .drafts import attend_together, store_together
from .replay import Replay
from .step import attend


class CapturedLayer:
    """One layer's part of a step that is being captured. It exists as long as the model runs for it.

    Args:
        replay: shared by the layers of the step.
        plan: what the step does here, decided before it.

    Attributes:
        query: the step's, once it has attended, ``[batch, Hq, Dk]``; of drafts the last one's, ``[1, Hq, Dk]``.
    """

    query: Tensor | None = None

    def __init__(self, replay: Replay, plan: Plan) -> None:
        self.replay, self.plan = replay, plan
        # Waits for what is being chosen beside the layer before; and what that reads.
        self._foreseen: tuple[Callable[[], None], Tensor] | None = None

    def run_step(self, layer: FullLayer, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
        """As :func:`.step.run`; rows that get a token are read on the device."""
        store, policy, owner, own = layer.store, layer.policy, layer.owner, not step.committed
        plan, replay, q = self.plan, self.replay, query[:, :, 0]
        if own:
            step.touched = True
            self._store_token(store, policy, step, query)
            step.committed = True
            owner.passed(layer.index)
        if policy.foresight is not None and not (plan.dense or owner.met):
            warn_once(owner, OWN_QUERIES)
        if self._foreseen is not None:
            (wait, _), self._foreseen = self._foreseen, None
            wait()
        if not own:
            return attend(store, policy, q, replace(plan, ahead=False), params)
        out = attend(store, policy, q, plan, params)

        def ahead() -> None:
            store.seal_due(policy)
            policy.look_ahead(q, store, plan)

        self.query = q
        if plan.ahead or policy.launch.always:
            replay.on_side_stream(ahead)
        else:
            replay.late(ahead)
        if next_layer(owner, layer.index) is None:
            replay.run_late()
        return out

    def _store_token(self, store: LayerStore, policy: Policy, step: Step, query: Tensor) -> None:
        replay, q = self.replay, query[:, :, 0]
        valid = replay.valid
        if policy.observes:
            store.announce(1, valid)
            policy.observe(query, step.keys, valid, store)
        note = policy.note
        if note is not None:
            replay.on_side_stream(lambda: note(q, valid, store, self.plan))
        store.append(*step.kept, valid)

    def run_drafts(self, layer: FullLayer, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
        """As :func:`.drafts.run`, of the only row; or of all rows, where drafts attend to everything."""
        store, policy = layer.store, layer.policy
        step.touched = True
        assert self.replay.drafts is not None
        taken, queries, there, due, at_once = self.replay.drafts
        self.query = query[:, :, -1]
        if at_once:
            out = attend_at_once(store, query, *step.kept, there, params)
        store_together(store, policy, step, query, taken, due)
        if not at_once:
            out = attend_together(store, policy, query, self.plan, params, queries, there)
        step.committed = True
        layer.owner.passed(layer.index)
        return out

    @no_autocast
    @torch.no_grad()
    def foresee(self, store: LayerStore, policy: Policy, query: Callable[[], Tensor], stream: Tensor) -> None:
        """Choose for ``query()`` beside the layer before; ``stream``, which that reads, is kept until then."""
        if self.plan.foresees:
            wait = self.replay.ahead(lambda: policy.foresee(query(), store, self.plan))
            self._foreseen = wait, stream

    def note_added(self, policy: Policy, before: Tensor, after: Tensor, managed: bool) -> None:
        """See :meth:`.sparse_layer.SparseLayer.note_added`; ``managed``: rows come and go."""
        if self.plan.foresees:
            valid, foresight = self.replay.valid if managed else None, policy.foresight
            assert foresight is not None
            self.replay.behind(lambda: foresight.note_added(before, after, valid=valid))
