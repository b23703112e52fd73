"""Selection by need: as many tokens of each row and KV head as cover a share of the attention mass (Twilight's top-p).

A step's own query and an expected one use the same selection.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_sparsekv_config.labels import LabelConfig

from ..kv.memory import new_memory
from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..ops.selection.mass_select import MASS_ONE, TOTALS, Selection, mass_select
from ..ops.selection.mass_select.reference import LENGTHS
from ..ops.selection.partial_sums import PartialSums
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .label_index import LabelIndex
from .measured import WalkStats


class ByNeed(State):
    """How one layer selects by need, and what was counted of its selections.

    Attributes:
        totals: int64, see :func:`..ops.selection.mass_select.mass_select`.
    """

    TENSORS: ClassVar = {"totals": Held(rows=None, trial=True)}

    totals: Tensor | None

    def __init__(self, config: LabelConfig) -> None:
        super().__init__()
        self.config = config

    @no_inference_mode
    def start(self, store: LayerStore) -> None:
        """The layer's first tokens have arrived."""
        self.totals = new_memory("totals", (len(TOTALS) + LENGTHS,), torch.int64, store.device, zeros=True)

    def reset(self) -> None:
        super().reset()
        if self.totals is not None:
            self.totals.zero_()

    def select(
        self,
        q: Tensor,
        store: LayerStore,
        labels: LabelIndex,
        params: AttentionParams,
        *,
        counted: bool = True,
        stored: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Selection:
        """The tokens of full blocks that ``q [batch, Hq, Dk]`` needs beside the recent ones.

        Args:
            counted: :meth:`measured` counts them.
            stored: int32 ``[batch]``, how many of each row's tokens this layer has stored; None: all of ``store.rows``.
            out: where ids and count are written; ids ``[batch, H, n]`` of all tokens in the blocks of ``store.table``.
        """
        config = self.config
        assert config.threshold is not None
        sums = None
        if params.softcap is None and config.group_reduce == "all":
            sums = PartialSums(store.recent_kv, stored, params.scale)
        return mass_select(
            labels.scores(q, store, reduce="none", fill=False, sums=sums),
            q,
            labels.channels_of(store),
            store.recent_kv,
            store.rows,
            sinks=store.sinks,
            scale=params.scale,
            softcap=params.softcap,
            sink_logits=params.sink_logits,
            threshold=config.threshold,
            min_tokens=config.min_tokens,
            max_tokens=config.max_tokens,
            group_reduce=config.group_reduce,
            totals=self.totals if counted else None,
            stored=stored,
            out=out,
            sums=sums,
        )

    def measured(self, layer: int) -> WalkStats | None:
        """Counts of selected tokens so far; None before there are tokens. Synchronises."""
        if self.totals is None:
            return None
        counted = self.totals.tolist()
        found = dict(zip(TOTALS, counted))
        walks = found["walks"]
        return WalkStats(
            layer=layer,
            walks=walks,
            tokens_used=found["used"],
            capped=found["capped"],
            mass=found["mass"] / MASS_ONE / walks if walks else None,
            least_mass=1 - found["worst"] / MASS_ONE if walks else None,
            histogram=tuple(counted[len(TOTALS) :]),
        )


def expected(tokens: int) -> int:
    """Tokens of one row and KV head that a selection is expected to choose of so many.

    Room is made for several such selections, a quarter of the tokens.
    """
    return max(1, tokens // 32)
