"""State and steps shared by methods that choose tokens by their labels.

Labels, and copies of chosen tokens on the device, are kept alike for every choice.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hf_sparsekv_config.labels import LabelConfig, whole_tokens

from ..kv.counters import Tally
from ..kv.read_back import reindex
from ..kv.store import LayerStore
from ..ops.selection.topk_select import token_select
from ..ops.storage.seal import Index
from ..predictor.channels import LabelChannels
from ..tensors import no_inference_mode, reads_here
from ..types import AttentionParams
from .base import Policy
from .by_need import ByNeed, expected
from .crossover import Crossover
from .device_tokens import DeviceTokens
from .label_index import LabelIndex
from .measured import PackStats, WalkStats
from .plan import CROSSOVER, DENSE, Plan, planned

FIRST = 1024  # tokens that are brought to the device before the first step by need


class LabelledPolicy(Policy):
    """State: the label channels; with blocks in host memory, copies of chosen tokens on the device.

    Attributes:
        need: how many tokens a step attends to, where that is not fixed.
        copies_tokens: such copies are kept, where there is device memory for them.
        whole_tokens: so many tokens in full blocks are all attended to.
    """

    method: str  # its name in the table of crossovers
    HOST: ClassVar = {"_taken": None}  # tokens, and how many count or None: from a step's attention to its end
    PARTS: ClassVar = ("need",)
    OWN: ClassVar[tuple[str, ...]] = ("_taken", "tokens")  # a copy's first step reads its tokens where they live

    need: ByNeed | None
    _taken: tuple[Tensor, Tensor | None] | None

    def __init__(
        self,
        config: LabelConfig,
        layer_idx: int,
        offloaded: bool,
        channels: LabelChannels | None = None,
    ) -> None:
        super().__init__(config, layer_idx, offloaded)
        self.labels = LabelIndex(config, layer_idx, channels)
        self.need = None if config.threshold is None else ByNeed(config)
        self.budget = config.budget
        self.whole_tokens = whole_tokens(config)
        self.fetches = self.copies_tokens = offloaded

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self.crossover = Crossover(self.method, self.config, self.offloaded, q_heads)
        if self.labels is not None:
            self.labels.start(store)
        if self.need is not None:
            self.need.start(store)
        self.tokens = DeviceTokens.begin(self.tokens, store)
        if self.config.means:
            store.keep_means(self.config.tail_tokens)

    # ------------------------------------------------------------------ labels

    @property
    def observes(self) -> bool:
        return self.labels is not None and self.labels.calibrating

    @no_inference_mode
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        if self.labels is not None and self.labels.observe(q, k, valid) and store.full_blocks:
            reindex(store, self)  # blocks that were sealed before there were channels

    def sealing(self, store: LayerStore) -> Index:
        index = Index(store.key_dim)
        return index if self.labels is None else self.labels.sealing(store, index)

    # ------------------------------------------------------------------ a step

    def plan_all(self, store: LayerStore) -> Plan | None:
        """The plan of a step that attends to all tokens: channels are not known, few are cached, or it is as fast."""
        if self.labels is not None and self.labels.calibrating:
            return planned(learns=True, captured=self.labels.goes_on)
        if store.full_blocks * store.block_size <= self.whole_tokens:
            return DENSE
        return CROSSOVER if self.crossover.below(store) else None

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        if self.launch.each_step:
            self.audit(q, store, plan, tally)
        super().account(q, store, plan, tally)
        if self.labels is not None and (scored := self.labels_scored(plan, tally)):
            store.counters.index_bytes += self.labels.nbytes_read(store, scored)
        if not plan.dense:
            store.count_means(tally)

    def audit(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        """A step is about to be counted, of a policy whose host works in each step: check what it has chosen."""

    def labels_scored(self, plan: Plan, tally: Tally) -> int:
        """Full blocks whose labels the steps have read, of all rows together."""
        return 0 if plan.dense else tally.blocks

    # ------------------------------------------------------------------ chosen tokens

    def tokens_for(self, q: Tensor, store: LayerStore, params: AttentionParams) -> tuple[Tensor, Tensor | None]:
        """``TokenIds [batch, H, n]`` for ``q [batch, Hq, Dk]``, and how many count, ``[batch, H]`` (None: all)."""
        if self.need is None:
            return self.best_tokens(q, store), None
        assert self.labels is not None
        found = self.need.select(q, store, self.labels, params)
        return found.ids, found.count

    def attend_to(
        self,
        q: Tensor,
        ids: Tensor,
        store: LayerStore,
        params: AttentionParams,
        paged: bool,
        used: Tensor | None = None,
    ) -> Tensor:
        """Attention to tokens ``ids [batch, H, K]``, ``used [batch, H]`` of them count (None: all).

        ``paged``: those that have copies on the device are read there.
        """
        if self.watch is not None:
            self.watch.mark_tokens(ids, store.block_size, used)
        if not paged:
            return store.attend(q, ids, "token", params, used=used)
        tokens = self.tokens
        assert tokens is not None
        places = tokens.locate(ids, store, used)
        return store.attend(q, places, "token", params, pages=tokens.pages, used=used, columns=ids)

    def wanted_copies(self, tokens: int) -> int:
        """Tokens of one row and KV head that a step is expected to choose of ``tokens``, if it keeps copies of them.

        0: no copies of tokens are kept on the device (:mod:`.device_tokens`), or nothing is chosen of so few.
        """
        if not self.copies_tokens:
            return 0
        if self.need is not None:
            return expected(tokens)
        return self.budget if tokens > self.budget else 0

    def enter(self, store: LayerStore) -> DeviceTokens | None:
        """Make room for copies of chosen tokens on the device; None: there are none."""
        if self.copies_tokens:
            chosen = self.wanted_copies(store.block_table.shape[1] * store.block_size)
            self.tokens = DeviceTokens.enter(self.tokens, store, chosen)
        return self.tokens

    def bring(self, ids: Tensor, store: LayerStore, used: Tensor | None = None) -> bool:
        """Copy chosen tokens to the device, if copies are kept: whether they are.

        Drafts copy the union of their selections, as one selection, before they attend. The selections nearly agree,
        and each token crosses the link once.
        """
        tokens = self.enter(store)
        if tokens is None:
            return False
        tokens.bring(ids, store, used)
        return True

    def bring_taken(self, q: Tensor, store: LayerStore) -> None:
        """Bring what the step that has just ended has attended to; after a prompt what its last query ``q`` wants."""
        taken, self._taken = self._taken, None
        tokens = self.enter(store)
        if tokens is None:
            return
        ids, used = (self.best_tokens(q, store), None) if taken is None else taken
        tokens.bring(reads_here(ids), store, None if used is None else reads_here(used))

    def best_tokens(self, q: Tensor, store: LayerStore) -> Tensor:
        """``TokenIds [batch, H, n]`` of the best labels for ``q [batch, Hq, Dk]``."""
        assert self.labels is not None
        scores = self.labels.scores(q, store, fill=False)
        most = self.budget if self.need is None else min(FIRST, scores.shape[-1])
        return token_select(scores, None, most, store.block_size, rows=store.rows)

    def reopened(self) -> None:
        super().reopened()
        self._taken = None
        if self.tokens is not None:
            self.tokens.forget()  # these columns may get other tokens

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        if plan.learns:
            assert self.labels is not None
            self.labels.stats.tokens += tally.steps

    def measured(self) -> tuple[WalkStats | PackStats, ...]:
        walked = None if self.need is None else self.need.measured(self.layer_idx)
        copied = None if self.tokens is None else self.tokens.measured()
        return tuple(found for found in (walked, copied) if found is not None)
