"""The interface of selection policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig

from ..kv.counters import Tally
from ..kv.store import LayerStore
from ..types import AttentionParams
from .indexing import Indexing
from .launch import Launch
from .measured import PackStats, WalkStats
from .plan import DENSE, Plan

if TYPE_CHECKING:
    from .ahead.foresight import Foresight
    from .device_tokens import DeviceTokens
    from .label_index import LabelIndex
    from .watch import BlockWatch


class Policy(Indexing):
    """Dense attention, and the interface of everything sparser. One object a layer.

    A policy reads the cache through its :class:`LayerStore`, whether a block is on the device or the host. It declares
    what it stores (:class:`..kv.state.State`); captures, trial runs, beams, copies and files follow from that. These
    methods are called, in this order; each does nothing unless a subclass overrides it:

    When tokens come: :meth:`start` with the layer's first ones. :meth:`observe` with each forward's queries and keys
    (if :attr:`observes`). :meth:`index` or :meth:`sealing` when a block becomes full (:class:`.indexing.Indexing`).
    :meth:`cropped` before a crop, and :meth:`reopened` when it has taken full blocks back.

    In a decode step:

    1. :meth:`plan`: what the step will do; everything that follows gets it. Before a step that is captured or replayed,
       :meth:`prepare` calls it; an eager step calls it after :meth:`observe`, which may end calibration.
    2. ``foresee()``, if the plan asks for it: only policies with :attr:`foresight` have it.
    3. :meth:`observe`, and while a step is being captured :attr:`note`.
    4. :meth:`attend`, unless the plan is dense.
    5. Blocks that have become old are sealed.
    6. :meth:`look_ahead`: prepares the next step.
    7. :meth:`account`: counters. Not in a capture; of replayed steps once for all that were alike (see
       ``launch.each_step``), and then :meth:`replayed`: what :meth:`observe` and :meth:`look_ahead` would have left on
       the host.

    Drafts are several new tokens over a cached past that are to be verified. They attend to everything, as prompts do
    (:attr:`drafts` is ``"exact"``), unless the policy is a :class:`.drafting.Drafting`.

    State of the whole cache is in :class:`.shared.Shared`. A policy reports its own numbers through :meth:`measured`. A
    policy that chooses tokens for the step's own query and keeps nothing is a :class:`.selector.Selector`, and
    overrides one method.

    Attributes:
        watch: a sparse step marks there which blocks it attends to; None: disabled.
        labels: of the tokens in full blocks, by which they are scored.
        tokens: copies of chosen tokens on the device.
        foresight: the query that the layer before expects of this one, in the same step.
        params: of the layer's attention, as its latest pass has them; None before one: tokens may come without.
        launch: how a captured step runs what comes after the attention.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("watch", "labels", "tokens", "foresight")

    granularity = "token"  # of what a sparse step attends to
    fetches = False  # what is chosen is copied to the device
    store_type = LayerStore
    drafts: Literal["exact", "each", "together"] = "exact"  # others: :class:`.drafting.Drafting`
    launch = Launch()

    # Only policies with `foresight` have the first; only `Drafting` policies have the others.
    foresee: Callable[[Tensor, LayerStore, Plan], None]
    begin_drafts: Callable[[], None]
    attend_drafts: Callable[[Tensor, LayerStore, LayerStore, Plan, AttentionParams], Tensor]

    # A captured step calls note(q, valid, store, plan) as soon as its query is known, beside the attention. The hook
    # needs only the query, and changes nothing that the step reads. ``valid``: as observe() gets it.
    note: Callable[[Tensor, Tensor | None, LayerStore, Plan], None] | None = None

    def __init__(self, config: SparseConfig, layer_idx: int, offloaded: bool) -> None:
        super().__init__()
        self.layer_idx, self.offloaded = layer_idx, offloaded
        self.config: Any = config  # of the method's own class, which its policies name
        self.watch: BlockWatch | None = None
        self.labels: LabelIndex | None = None
        self.tokens: DeviceTokens | None = None
        self.foresight: Foresight | None = None
        # Replays do not set it, so it stays. A list, which views of rows share.
        self._params: list[AttentionParams | None] = []

    @property
    def params(self) -> AttentionParams | None:
        return self._params[0] if self._params else None

    @params.setter
    def params(self, params: AttentionParams | None) -> None:
        self._params[:] = [params]

    # ------------------------------------------------------------------ tokens

    def start(self, store: LayerStore, q_heads: int) -> None:
        """The layer's first tokens have arrived: claim per-block fields."""

    @property
    def observes(self) -> bool:
        """:meth:`observe` has anything to do: over latents its arguments have to be made."""
        return type(self).observe is not Policy.observe

    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        """New queries ``[batch, Hq, n, Dk]`` and keys ``[batch, H, n, Dk]``, before they are stored.

        A long prompt over latents gives a sample of the ``new`` tokens, the last 64 among them.
        """

    def cropped(self) -> None:
        """The last tokens are about to be removed."""

    @property
    def follows_crops(self) -> bool:
        """A crop that takes back no block has to call :meth:`cropped`, too, after the account of the steps before it.

        False: nothing that the policy keeps says how many tokens there were. So it is of one that overrides neither
        :meth:`cropped` nor :meth:`replayed`; others say so.
        """
        return (type(self).cropped, type(self).replayed) != (Policy.cropped, Policy.replayed)

    def reopened(self) -> None:
        """A deep crop has removed full blocks: drop selections that refer to them."""

    # ------------------------------------------------------------------ a step

    def plan(self, store: LayerStore) -> Plan:
        """The next step's work; also the key of its graph. Changes nothing."""
        return DENSE

    def prepare(self, store: LayerStore) -> Plan:
        """Before a step is captured or replayed: allocate what it needs, and :meth:`plan` it."""
        return self.plan(store)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        """Attention of one query per row, ``q [batch, Hq, Dk]`` to ``[batch, Hq, Dv]``."""
        return store.attend(q, None, "all", params)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        """The step's attention is done and its blocks are sealed: prepare the next step, if ``plan.ahead``.

        ``q``: its query, or the last one of a prompt.
        """

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        """Decode steps are over: counters. ``q``: the query of the last one, of the rows that it ran."""
        store.counters.count_steps("all" if plan.dense else self.granularity, tally)
        store.counters.crossover += plan.crossover * tally.steps

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        """After replays: update host state that captured steps do not."""

    def measured(self) -> tuple[WalkStats | PackStats, ...]:
        """Counts of tokens that selections by need have read, and of tokens copied to the device. Synchronises."""
        return ()
