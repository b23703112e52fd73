"""The method that is taken by default: what it needs of a cache, and which policies its ``level`` stands for."""

from __future__ import annotations

from ..config import OffloadConfig
from .ahead.lag import LaggingBlockPolicy
from .base import Policy
from .block_bounds import bounds_bytes
from .blocks import BlockPolicy
from .by_need import expected
from .device_tokens import add_device_tokens
from .label_index import label_bytes
from .memory import Memory, Request, mean_bytes
from .need_options import whole_tokens
from .registry import register
from .shared import Labelled
from .token import TokenPolicy
from .token_config import TokenConfig, has_tail, lags, level, selection


class Levels(Labelled):
    """What its layers have in common: all choose tokens, or all blocks."""

    saved_as = "TwoLevelPolicy"  # of any level: the configuration says which

    def __init__(self, policy: type[Policy], config: TokenConfig, offload: OffloadConfig | None) -> None:
        if config.threshold is not None:
            # Imported here: methods are listed in the order of their modules, and the default comes first.
            from .progressive import ProgressivePolicy

            policy = ProgressivePolicy
        elif level(config) != "token":
            policy = LaggingBlockPolicy if lags(config) else BlockPolicy
        super().__init__(policy, config, offload)
        self.rows_join = not lags(config)

    @property
    def whole_tokens(self) -> int:  # type: ignore[override]
        return 0 if level(self.config) == "block" else whole_tokens(self.config)

    @classmethod
    def crossover(cls, config: TokenConfig) -> str:
        return selection(config)

    @classmethod
    def reserves(cls, config: TokenConfig) -> int:
        return config.coarse_blocks if lags(config) else 0

    @classmethod
    def needs(cls, request: Request) -> Memory:
        config, memory = request.config, Memory(blocks=request.blocks)
        of = level(config)
        if of != "block":
            memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        if has_tail(config):
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


register(
    "token",
    TokenConfig,
    about="tokens by labels, among all or in a bounded number of blocks (AsyncTLS)",
    aliases=("two_level",),
    variants={"block_only": {"level": "block"}, "token_only": {"level": "token"}},
    shared=Levels,
)(TokenPolicy)
