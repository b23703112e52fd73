"""The interface of selection policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config import OffloadConfig, SparseConfig
from ..kv.counters import Tally
from ..kv.state import State
from ..kv.store import LayerStore
from ..ops.seal import Index
from ..types import AttentionParams
from .crossover import dense_tokens
from .device_tokens import DeviceTokens
from .label_index import LabelIndex
from .measured import PackStats, WalkStats
from .memory import Memory, Request
from .plan import DENSE, Plan
from .shared import Shared
from .watch import BlockWatch


class Policy(State):
    """Dense attention, and the interface of everything sparser. One object a layer.

    A policy reads the cache through its :class:`LayerStore`, whether a block is on the device or the host. It declares
    what it stores (:class:`..kv.state.State`); captures, trial runs, beams, copies and files follow from that. These
    methods are called, in this order, each of which does nothing unless a subclass overrides it:

    When tokens come: :meth:`start` with the layer's first ones; :meth:`observe` with each forward's queries and keys
    (if :attr:`observes`); :meth:`index` or :meth:`sealing` when a block becomes full; :meth:`cropped` before a crop,
    and :meth:`reopened` when it has taken full blocks back.

    In a decode step:

    1. :meth:`plan`: what the step will do; everything that follows gets it. Before a step that is captured or replayed,
       :meth:`prepare` calls it; an eager step calls it after :meth:`observe`, which may end calibration.
    2. :meth:`foresee`, if the plan says so: the layer before has begun the step. Where :attr:`source` is
       ``"in_delta"``, for a query of the stream that :meth:`expected` gives; :meth:`note_added` when that layer ends.
    3. :meth:`observe`, and while a step is being captured :attr:`note`.
    4. :meth:`attend`, unless the plan is dense.
    5. Blocks that have become old are sealed.
    6. :meth:`look_ahead`: prepares the next step.
    7. :meth:`account`: counters. Not in a capture; of replayed steps once for all that were alike (see
       :attr:`each_step`), and then :meth:`replayed`: what :meth:`observe` and :meth:`look_ahead` would have left on
       the host.

    Drafts, several new tokens behind a cached past that are to be verified, go by :attr:`drafts`, and begin with
    :meth:`begin_drafts`:

    * ``"exact"``: exact attention to everything, as for prompts.
    * ``"each"``: as decode steps, one token after the other.
    * ``"together"``: tokens up to the next one that seals a block take steps 1, 3, 5 and 7 together, and
      :meth:`attend_drafts` stands for :meth:`attend` and :meth:`look_ahead`. Only of one row; those of several: each.

    For the cache as a whole, before there are layers: :meth:`place`, :meth:`share`, :meth:`needs`, :meth:`crossover`.
    For numbers of its own: :meth:`measured`. A policy that chooses tokens for the step's own query and keeps nothing is
    a :class:`.selector.Selector`, and overrides one method.
    """

    HOST: ClassVar = {
        "chosen": False,  # the last step has chosen what the next one attends to
        "paged": False,  # and has brought it to the device
    }
    PARTS: ClassVar = ("watch",)
    OWN: ClassVar = ("paged",)  # a copy's device pages hold nothing yet

    method: str | None = None  # its name in the table of crossovers
    granularity = "token"  # of what a sparse step attends to
    fetches = False  # what is chosen is copied to the device
    store_type = LayerStore
    rows_join = True  # rows may come and go: what is chosen does not outlive its step (RowBatch)
    follows = False  # :meth:`look_ahead` has something to do in steps that do not look ahead, too
    # :meth:`look_ahead` decides where the next step reads, never what: behind a piece of a prompt it waits for that
    # step, because another piece may follow, and is left out where there are no :attr:`tokens`, which it would fill.
    brings_only = False
    each_step = False  # replayed steps are accounted for one by one, as they come
    layers_per_launch = 1  # layers whose look-ahead is launched together in a captured step
    low_priority = True  # look-ahead runs on a low-priority stream, on SMs that the step leaves idle
    second_bytes = 0  # allocated on a second device
    drafts: Literal["exact", "each", "together"] = "exact"
    labels: LabelIndex | None = None
    tokens: DeviceTokens | None = None  # copies of chosen tokens
    foresight: str | None = None  # what of the layer before is asked for, see `foresees_by`
    whole_tokens = 0  # a row of no more tokens attends to all of them, whoever decodes beside it
    warns_unforeseen = False  # without hooks on the model a step does not do what was asked for: worth a warning
    source: str | None = None  # where that comes from: who has put hooks on the model says so
    stream_like: tuple[int, torch.dtype] | None = None  # and how wide the residual stream is, and of which type
    watch: BlockWatch | None  # a sparse step marks there which blocks it attends to

    # Called as note(q, valid, store, plan) in a captured step as soon as its query is known, beside the attention: for
    # what needs no more than the query and changes nothing that the step reads. ``valid``: as observe() gets it.
    note: Callable[[Tensor, Tensor | None, LayerStore, Plan], None] | None = None

    def __init__(self, config: SparseConfig, layer_idx: int, offloaded: bool) -> None:
        super().__init__()
        self.config, self.layer_idx, self.offloaded = config, layer_idx, offloaded
        self._dense_blocks: tuple[int, int] = (0, 0)  # batch, and the blocks up to which a step of it is dense

    # ------------------------------------------------------------------ of the whole cache

    @classmethod
    def place(cls, config: SparseConfig, offload: OffloadConfig | None) -> OffloadConfig | None:
        """Where the blocks are to live, given what the user asked for. Raises ValueError for what cannot be."""
        return offload

    @classmethod
    def share(cls, config: SparseConfig, offload: OffloadConfig | None) -> Shared:
        """Make what all layers of a cache have in common; called once a cache, with what :meth:`place` said."""
        return Shared(cls, config, offload)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        """Bytes that the sparse layers of such a cache will take."""
        return Memory(blocks=request.blocks)

    @classmethod
    def reserves(cls, config: SparseConfig, offloaded: bool) -> int:
        """Ids of a row and KV head that the configuration alone makes a layer keep."""
        return 0

    @classmethod
    def crossover(cls, config: SparseConfig, offloaded: bool) -> str | None:
        """The selection's name in the table of crossovers."""
        return cls.method

    @classmethod
    def foresees_by(cls, config: SparseConfig, offloaded: bool) -> str | None:
        """What queries are expected from (:mod:`..attention.points`).

        ``"layer:mid"``, ``"layer:in_delta"``, ``"layer:in"``, or ``"layer"``, which is the last.
        """
        return None

    def __init_subclass__(cls, **named) -> None:
        super().__init_subclass__(**named)
        makes, keeps = (next(c for c in cls.__mro__ if name in vars(c)) for name in ("index", "sealing"))
        if cls is makes and keeps not in (cls, Policy):
            raise TypeError(
                f"{cls.__name__}.index() would never be asked: {keeps.__name__}.sealing() says where the kernels put "
                "what is kept of blocks. Override sealing(), too: with where your fields are, or None if kernels "
                "cannot make them"
            )

    @property
    def saved_as(self) -> str:
        """What files of saved caches call the policy."""
        return type(self).__name__

    # ------------------------------------------------------------------ tokens

    def start(self, store: LayerStore, q_heads: int) -> None:
        """The layer's first tokens have arrived: claim per-block fields."""
        self._dense_blocks = (0, 0)  # perhaps another device

    @property
    def observes(self) -> bool:
        """:meth:`observe` has anything to do: over latents its arguments have to be made."""
        return type(self).observe is not Policy.observe

    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        """New queries ``[batch, Hq, n, Dk]`` and keys ``[batch, H, n, Dk]``, before they are stored.

        Of a long prompt over latents: some of the ``new`` tokens, the last 64 among them.
        """

    def index(self, kv: Tensor, start: int, rows: slice) -> dict[str, Tensor]:
        """Fields of blocks being sealed, ``kv [n, rows, H, block_size, Dk + Dv]``: if :meth:`sealing` is None.

        The first of them begins at token ``start`` of its row; ``rows``: which ones of the batch.
        """
        return {}

    def sealing(self, store: LayerStore) -> Index | None:
        """Where the fields of blocks are kept, for the kernels that seal them.

        None if these kernels cannot make them, and :meth:`index` does: steps are not captured then, because only the
        device knows which rows have a block due.
        """
        return Index(store.key_dim) if type(self).index is Policy.index else None

    def cropped(self) -> None:
        """The last tokens are about to be removed."""

    @property
    def follows_crops(self) -> bool:
        """A crop that takes back no block has to call :meth:`cropped`, too, behind the account of the steps before it.

        False: nothing that the policy keeps says how many tokens there were. So it is of one that overrides neither
        :meth:`cropped` nor :meth:`replayed`; others say so.
        """
        return (type(self).cropped, type(self).replayed) != (Policy.cropped, Policy.replayed)

    def reopened(self) -> None:
        """A deep crop has removed full blocks: drop selections that refer to them."""
        self.chosen = False

    def open_rows(self, other: Policy) -> None:
        """Make ready for rows that join, none of which is there; ``other`` has read the first one's prompt."""
        if self.labels is not None:
            self.labels.open_rows(other.labels)

    def join_row(self, row: int, other: Policy, store: LayerStore) -> None:
        """Row ``row`` is about to become the only one of ``other``: what is declared of it is copied behind this."""

    def wanted_copies(self, tokens: int) -> int:
        """Tokens of one row and KV head that a step is expected to choose of ``tokens``, if it keeps copies of them.

        0: no copies of tokens are kept on the device (:mod:`.device_tokens`), or nothing is chosen of so few.
        """
        return 0

    def crop_row(self, row: int) -> None:
        """The last tokens of a row of a batch of which rows come and go were removed."""

    # ------------------------------------------------------------------ a step

    def below_crossover(self, store: LayerStore) -> bool:
        """Dense attention is as quick as selecting at this batch and length (``config.dense_below``).

        Full blocks are what counts: they are what there is to select from. Of rows of different lengths their mean: one
        decision for the whole batch. Rows that hold nothing do not count.
        """
        held, (batch, blocks) = store.held, self._dense_blocks
        rows = max(1, sum(n > 0 for n in held.lengths))
        if batch != rows:
            config, width = self.config, store.heads * store.token_bytes
            method = self.method if not store.latent else f"{self.method}:mla"  # other kernels, other numbers
            chosen = getattr(config, "token_budget", 0)
            tokens = dense_tokens(config.dense_below, method, store.device, self.offloaded, rows, width, chosen)
            blocks = tokens // store.block_size
            self._dense_blocks = (rows, blocks)
        return sum(held.sealed) <= blocks * rows

    def plan(self, store: LayerStore) -> Plan:
        """What the next step does; also the key of its graph. Changes nothing."""
        return DENSE

    def prepare(self, store: LayerStore) -> Plan:
        """Before a step is captured or replayed: allocate what it needs, and :meth:`plan` it."""
        return self.plan(store)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        """Attention of one query per row, ``q [batch, Hq, Dk]`` to ``[batch, Hq, Dv]``."""
        return store.attend(q, None, "all", params)

    def drafts_read_less(self, new: int, store: LayerStore) -> bool:
        """So many queries of a row, each with its own selection, read less than exact attention, which reads all once.

        Where chosen tokens have copies on the device, what is read in host memory is what any of them chooses: always
        less.
        """
        budget = getattr(self.config, "token_budget", 0)
        return self.tokens is not None or new * budget < store.full_blocks * store.block_size

    def begin_drafts(self) -> None:
        """Several drafts come: what was chosen for a step that never came is not for them."""

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        """Attention of the last ``n`` tokens of the only row, ``q [n, Hq, Dk]`` to ``[n, Hq, Dv]``, if not dense.

        What the next step finds chosen or brought beforehand is left here as well.

        Args:
            rows: the store as a batch of ``n`` rows, each of which ends with one of these tokens
                (:class:`..kv.query_rows.QueryRows`): for scores, selection and attention.
        """
        raise NotImplementedError(f"{type(self).__name__}.drafts is 'together': write attend_drafts()")

    def foresee(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        """The layer before has begun this step, and expects ``q [batch, Hq, Dk]`` of this layer.

        If ``plan.foresees``. A captured step runs it beside the layer before; :meth:`attend` comes behind it.
        """

    def expected(self, stream: Tensor, store: LayerStore) -> Tensor:
        """What the layer before is expected to give, ``[batch, 1, hidden]``, if its input is ``stream``."""
        return stream

    def note_added(
        self,
        before: Tensor,
        after: Tensor,
        length: int | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """The layer before has ended, for the last of ``length`` tokens: its input and output ``[batch, 1, hidden]``.

        After steps that were foreseen, and after several tokens. A captured step runs it beside the rest, without
        ``length``, which is the host's (:meth:`replayed`). ``mask [batch, columns]``: 0 for padding. ``valid``: bool
        ``[batch, 1]``, rows that have a token; nothing is noted of the others.
        """

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        """The step's attention is done and its blocks are sealed: prepare the next step, if ``plan.ahead``.

        ``q``: its query, or the last one of a prompt. A step that does not look ahead voids what was chosen before it.
        """
        if not plan.ahead:
            self.chosen = self.paged = False

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        """Decode steps are over: counters. ``q``: the query of the last one."""
        store.counters.count_steps("all" if plan.dense else self.granularity, tally)
        store.counters.crossover += plan.crossover * tally.steps

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        """After replays: update host state that captured steps do not."""
        if not plan.ahead:
            self.chosen = self.paged = False

    def measured(self) -> tuple[WalkStats | PackStats, ...]:
        """What progressive selections have read, and what was copied to keep chosen tokens at hand. Synchronises."""
        return ()
