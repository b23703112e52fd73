"""Drafts that attend to selections, as decode steps of their own would.

Exact attention to everything, as for prompts, needs none of this.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..kv.store import LayerStore
from ..types import AttentionParams
from .base import Policy
from .plan import Plan


class Drafting(Policy):
    """Several new tokens over a cached past are to be verified. They begin with :meth:`begin_drafts`.

    By :attr:`drafts`:

    * ``"each"``: as decode steps, one token after the other.
    * ``"together"``: tokens up to the next one that seals a block go through a step's :meth:`observe`, attention and
      :meth:`account` together, and :meth:`attend_drafts` stands for :meth:`attend` and :meth:`look_ahead`. Only of one
      row; those of several: each.
    """

    drafts: Literal["exact", "each", "together"] = "each"

    def begin_drafts(self) -> None:
        """Several drafts come: what was chosen for a step that never came is not for them."""

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        """Attention of the last ``n`` tokens of the only row, ``q [n, Hq, Dk]`` to ``[n, Hq, Dv]``, if not dense.

        It also leaves the next step's selection and copies here.

        Args:
            rows: the store as a batch of ``n`` rows, which end with one of these tokens each
                (:class:`..kv.query_rows.QueryRows`): for scores, selection and attention.
        """
        raise NotImplementedError(f"{type(self).__name__}.drafts is 'together': write attend_drafts()")
