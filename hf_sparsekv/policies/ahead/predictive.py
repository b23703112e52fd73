"""The predictive method: what it needs of a cache, and which policy its predictor and its device stand for."""

from __future__ import annotations

from hf_sparsekv_config.labels import whole_tokens
from hf_sparsekv_config.predictive import PredictiveConfig, on_second_device
from hf_sparsekv_config.sparse import OffloadConfig

from ..base import Policy
from ..by_need import expected
from ..device_tokens import add_device_tokens
from ..label_index import label_bytes
from ..memory import Memory, Request, mean_bytes
from ..registry import register
from ..shared import Labelled
from .earlier_queries import EarlierQueriesPolicy
from .layer_ahead import LayerAheadPolicy
from .predicted_tokens import ids_bytes, room_for
from .query_ring import queries_bytes
from .second_device.policy import SecondDevice


class Predictive(Labelled):
    """State that the layers share: all expect queries by the layer before, or all by earlier ones."""

    saved_as = "PredictivePolicy"  # of any predictor: the configuration says which

    def __init__(self, policy: type[Policy], config: PredictiveConfig, offload: OffloadConfig | None) -> None:
        super().__init__(LayerAheadPolicy if config.by_layer else policy, config, offload)
        self.rows_join = config.by_layer
        self.whole_tokens = whole_tokens(config)
        if config.by_layer:
            self.foresight = config.prediction

    @classmethod
    def of(cls, policy: type[Policy], config: PredictiveConfig, offload: OffloadConfig | None) -> Labelled:
        return (SecondDevice if on_second_device(config) else cls)(policy, config, offload)

    @classmethod
    def place(cls, config: PredictiveConfig, offload: OffloadConfig | None) -> OffloadConfig | None:
        rank = config.cache_rank
        if offload is None:
            return OffloadConfig() if rank == "host" else None
        if rank == "stream":
            raise ValueError("cache_rank='stream' keeps all blocks on the device: leave offload out, or cache_rank")
        if on_second_device(config):
            raise ValueError(f"with cache_rank={rank!r} blocks do not go to host memory: leave offload out")
        return offload

    @classmethod
    def crossover(cls, config: PredictiveConfig) -> str | None:
        return None if on_second_device(config) else "predictive"

    @classmethod
    def reserves(cls, config: PredictiveConfig) -> int:
        return room_for(config)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        config = request.config
        if on_second_device(config):
            return SecondDevice.needs(request)
        memory = Memory(blocks=request.blocks)
        memory.tables = ids_bytes(request) + (0 if config.by_layer else queries_bytes(request))
        memory.labels = sum(request.block_capacity * label_bytes(request, layer) for layer in request.layers)
        memory.means = mean_bytes(request) if config.means else 0
        held = request.full_blocks * config.block_size
        begun = held > whole_tokens(config) and request.context >= config.start_length
        if request.offload is not None and begun:
            by_need = expected(request.table * config.block_size)
            add_device_tokens(memory, request, config.budget if config.threshold is None else by_need)
        return memory


register(
    "predictive",
    PredictiveConfig,
    about="tokens chosen beforehand for a predicted query (AsyncSpade, InfiniGen)",
    shared=Predictive,
)(EarlierQueriesPolicy)
