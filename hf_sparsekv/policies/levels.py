"""The methods that choose tokens by labels for a step's own query: what they need of a cache, and which policies."""

from __future__ import annotations

from hf_sparsekv_config.labels import LabelConfig, whole_tokens
from hf_sparsekv_config.progressive import ProgressiveConfig
from hf_sparsekv_config.sparse import OffloadConfig
from hf_sparsekv_config.tokens import TokenConfig, lags, level, selection

from .ahead.lag import LaggingBlockPolicy
from .base import Policy
from .block_bounds import bounds_bytes
from .blocks import BlockPolicy
from .by_need import expected
from .device_tokens import add_device_tokens
from .label_index import label_bytes
from .memory import Memory, Request, mean_bytes
from .registry import register
from .shared import Labelled
from .token_policy import TokenPolicy


class Levels(Labelled):
    """State that the layers share: all choose tokens, by need or a fixed number; or all choose blocks."""

    saved_as = "TokenPolicy"  # of any level: the configuration says which

    def __init__(self, policy: type[Policy], config: LabelConfig, offload: OffloadConfig | None) -> None:
        if _level(config) != "token":
            policy = LaggingBlockPolicy if lags(config) else BlockPolicy
        super().__init__(policy, config, offload)
        self.rows_join = not lags(config)

    @property
    def whole_tokens(self) -> int:  # type: ignore[override]
        return 0 if _level(self.config) == "block" else whole_tokens(self.config)

    @classmethod
    def crossover(cls, config: LabelConfig) -> str:
        if config.threshold is not None or not isinstance(config, TokenConfig):
            return "progressive"
        return selection(config)

    @classmethod
    def reserves(cls, config: LabelConfig) -> int:
        return config.coarse_blocks if isinstance(config, TokenConfig) and lags(config) else 0

    @classmethod
    def needs(cls, request: Request) -> Memory:
        config, memory = request.config, Memory(blocks=request.blocks)
        of = _level(config)
        if of != "block":
            memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        if config.means:
            memory.means = mean_bytes(request)
        if of != "token":
            memory.bounds = bounds_bytes(request)
            if request.offload is not None and request.full_blocks > config.coarse_blocks:
                memory.fetch(request, config.coarse_blocks, config.coarse_blocks)
        elif request.offload is not None:
            if config.threshold is not None:
                least, chosen = 0, expected(request.table * config.block_size)
            else:
                least = chosen = config.budget
            if request.full_blocks * config.block_size > least:
                add_device_tokens(memory, request, chosen)
        return memory


def _level(config: LabelConfig) -> str:
    """The level of the selection: ``"two_level"``, ``"block"`` or ``"token"``."""
    return level(config) if isinstance(config, TokenConfig) else "token"


register(
    "token",
    TokenConfig,
    about="tokens by labels, among all or in a bounded number of blocks (AsyncTLS)",
    aliases=("two_level",),
    variants={"block_only": {"level": "block"}, "token_only": {"level": "token"}},
    shared=Levels,
)(TokenPolicy)

register(
    "progressive",
    ProgressiveConfig,
    about="tokens in order of importance until a share of the attention mass is covered (PSA)",
    knob=("mass", 0.5, 1.0),
    shared=Levels,
)(TokenPolicy)
