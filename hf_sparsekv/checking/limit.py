"""Texts whose tokens are all within a limit: where one is beyond it, the text goes back, and full attention goes on.

What is cached is what full attention has computed, as in exact mode, which this is with a limit of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_sparsekv_config.audit import AuditConfig

from ..kv.audited import Audited
from ..layers.cache_state import CacheState
from .call import Call
from .choice import Choice
from .exact import can_draft, check_cache
from .loop import Loop
from .rules import Within
from .schedule import Interval
from .text import Text

_MOST = 1 << 40  # tokens: no limit


@dataclass(frozen=True)
class Limited:
    """An audit with a limit, ``config.max_loss``, as :func:`..generating.sparse` was asked for it."""

    config: AuditConfig

    def check(self, cache: CacheState) -> None:
        """Raise ``ValueError`` if ``cache`` cannot be used so."""
        check_cache(cache, "max_loss")
        if cache.offload_config is not None and cache.offload_config.kv_dtype is not None:
            raise ValueError(
                "max_loss compares with full attention, and keys and values of kv_dtype are rounded: leave kv_dtype out"
            )

    def begin(self, cache: CacheState) -> None:
        """Have ``cache`` attend to everything, except where the loop drafts; raises as :meth:`check`."""
        self.check(cache)
        cache.row_table.exactness.begin(self)

    def generate(self, call: Call) -> Any:
        """The text of rounds of drafts; or that of full attention, where drafts cannot be taken back."""
        shows_drafts = call.streamer is not None and self.config.release == "drawn"
        if shows_drafts and not hasattr(call.streamer, "take_back"):
            raise ValueError(
                f"release='drawn' shows tokens that may be taken back, and {type(call.streamer).__name__} has no "
                "method take_back(tokens): give it one, or release='checked'"
            )
        text = Text(call.model, call.ids, call.criteria, call.config, call.kwargs)
        interval, limit = self.config.interval, self.config.max_loss
        assert limit is not None
        exactness = call.cache.row_table.exactness
        log = exactness.audited or Audited()
        if not can_draft(call, text, interval, interval):
            call.criteria = until = text.until(_MOST)
            out = call.plain()
            log.by_full += until.tokens
            exactness.audited = log
            return out
        # One draft less: the exact pass has the token before them, too.
        choice = Choice(call.processors, call.config.do_sample)
        return Loop(call, text, choice, Interval(max(1, interval - 1)), Within(limit), log, shows_drafts).run()

    def refuse(self, what: str) -> None:
        """Nothing: each pass attends to everything there."""

    def __str__(self) -> str:
        return f"within {self.config.max_loss} each {self.config.interval} tokens"
