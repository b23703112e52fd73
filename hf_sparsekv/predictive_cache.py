"""The cache whose tokens are chosen a step before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .cache import SparseCache
from .config import OffloadConfig, PredictiveConfig
from .policies.base import Policy
from .policies.predictive import PredictivePolicy
from .predictor.channels import LabelChannels
from .second_device.policy import SecondDevicePolicy
from .second_device.replica import Rank


class AsyncPredictiveCache(SparseCache):
    """Sparse decoding over tokens that were chosen a step before, for a predicted query (AsyncSpade).

    Prefill is exact. Beside each decode step the next step's query is predicted from the latest ones, all tokens in
    full blocks are scored for it, and the best are handed to the next step, which attends to them, to the sinks and to
    everything newer.

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsekv")
        out = model.generate(**inputs, past_key_values=AsyncPredictiveCache(PredictiveConfig(token_budget=2048)))

    Args:
        config: what to predict and to select, and where.
        offload: how to offload; ``None`` keeps all KV on the device, unless ``config.cache_rank`` is ``"host"``.
        model_config: the model's configuration. Needed for models with linear-attention layers only.

    Raises:
        ValueError: ``config`` and ``offload`` want different places, or the channel file named in ``config`` is missing
            or of another model.
    """

    def __init__(
        self, config: PredictiveConfig | None = None, offload: OffloadConfig | None = None, model_config=None
    ) -> None:
        config = PredictiveConfig() if config is None else config
        if not isinstance(config, PredictiveConfig):
            raise TypeError(f"config must be a PredictiveConfig, got {type(config).__name__}")
        if offload is None and config.cache_rank == "host":
            offload = OffloadConfig()
        if offload is not None and config.cache_rank == "stream":
            raise ValueError("cache_rank='stream' keeps all blocks on the device: leave offload out, or cache_rank")
        self.channels = None if config.channel_file is None else LabelChannels.load(config.channel_file)
        self.rank = None
        if config.cache_rank not in (None, "stream", "host"):
            if offload is not None:
                raise ValueError(
                    f"with cache_rank={config.cache_rank!r} blocks do not go to host memory: leave offload out"
                )
            self.rank = Rank(torch.device(config.cache_rank))
        super().__init__(config, offload, model_config)

    def check_model(self, text_config) -> None:
        if self.channels is not None:
            self.channels.check(text_config)

    @contextmanager
    def trial(self) -> Iterator[None]:
        with super().trial(), nullcontext() if self.rank is None else self.rank.paused():
            yield

    def make_policy(self, layer_idx: int) -> Policy:
        offloaded = self.offload_config is not None
        if layer_idx < self.config.dense_layers:
            return Policy(self.config, layer_idx, offloaded and not self.offload_config.keep_dense)
        if self.rank is not None:
            return SecondDevicePolicy(self.config, layer_idx, self.channels, self.rank)
        return PredictivePolicy(self.config, layer_idx, offloaded, self.channels)
