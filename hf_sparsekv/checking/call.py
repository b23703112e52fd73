"""One call of ``generate()``'s loop, with what it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..cache_name import NAMES
from ..layers.cache_state import CacheState

# Arguments of passes that mean the same whatever part of a text a pass reads.
PLAIN = {*NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}


@dataclass
class Call:
    """A call of the loop of greedy decoding and sampling.

    Args:
        model, cache: whose it is.
        own: the model's own loop.
        ids: the prompts, ``[batch, n]``. processors, criteria, config, streamer, synced_gpus: as the loop gets them.
        kwargs: the model's further arguments for the prompts, the cache among them.
    """

    model: Any
    cache: CacheState
    own: Callable[..., Any]
    ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    synced_gpus: bool
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        if self.kwargs.get("attention_mask") is None and self.ids.shape[1] == getattr(self.config, "_mask_length", 0):
            # From transformers 5.18 on a mask of ones is dropped before this.
            self.kwargs["attention_mask"] = torch.ones_like(self.ids)

    def dense(self, ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig, streamer: Any, **kwargs):
        """The model's own loop over ``ids`` and these arguments; what it is to choose by is that of the call."""
        more = {"synced_gpus": self.synced_gpus, "streamer": streamer, **kwargs}
        return self.own(ids, self.processors, criteria, config, **more)

    def plain(self) -> Any:
        """The whole call by the model's own loop."""
        return self.dense(self.ids, self.criteria, self.config, self.streamer, **self.kwargs)


class Check(Protocol):
    """How the texts of a model are checked: the setting of :func:`..generating.sparse`."""

    def check(self, cache: CacheState) -> None:
        """Raise ``ValueError`` if ``cache`` cannot be used so."""
        ...

    def begin(self, cache: CacheState) -> None:
        """The texts of ``cache`` are checked so from here on; raises as :meth:`check`."""
        ...

    def generate(self, call: Call) -> Any:
        """The result of a call over such a cache."""
        ...

    def refuse(self, what: str) -> None:
        """Raise ``ValueError`` if a text cannot be checked that another loop writes: ``what`` names it."""
        ...
