"""State that the layers of one cache share, and a method's answers before a cache has layers.

There is one of it a cache. Some of its methods are class methods, for callers without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..predictor.channels import LabelChannels
from .base import Policy
from .memory import Memory, Request


class Shared:
    """Created once a cache (:meth:`.registry.Method.share`); creates the policies of its sparse layers.

    Attributes:
        channels: label channels from a file, for methods that have labels.
        places: where the cache's memory is: the keys of ``cache.memory_bytes()``.
        saved_as: what files of saved caches call the policies that it creates; None: by their class.
        foresight: what queries are expected from (:mod:`..attention.points`): ``"layer"`` or ``"layer:in_delta"``.
            None: none are.
        rows_join: rows may come and go: what is chosen does not outlive its step.
        whole_tokens: a row of no more tokens attends to all of them, in any batch.
    """

    channels: LabelChannels | None = None
    places: tuple[str, ...] = ("device", "host")
    saved_as: str | None = None
    foresight: str | None = None
    rows_join: bool = True
    whole_tokens: int = 0
    config: Any  # of the method's own class, as in what is asked before there is a cache

    # ------------------------------------------------------------------ before there is a cache

    @classmethod
    def of(cls, policy: type[Policy], config: Any, offload: OffloadConfig | None) -> Shared:
        """The shared state of a new cache; ``offload``: the result of :meth:`place`."""
        return cls(policy, config, offload)

    @classmethod
    def place(cls, config: Any, offload: OffloadConfig | None) -> OffloadConfig | None:
        """Where the blocks are to live, given what the user asked for. Raises ValueError for what cannot be."""
        return offload

    @classmethod
    def needs(cls, request: Request) -> Memory:
        """Bytes that the sparse layers of such a cache will take."""
        return Memory(blocks=request.blocks)

    @classmethod
    def reserves(cls, config: Any) -> int:
        """Ids of a row and KV head that the configuration alone makes a layer keep."""
        return 0

    @classmethod
    def crossover(cls, config: Any) -> str | None:
        """The selection's name in the table of crossovers."""
        return None

    # ------------------------------------------------------------------ of one cache

    def __init__(self, policy: type[Policy], config: SparseConfig, offload: OffloadConfig | None) -> None:
        self.kind: Callable[..., Policy] = policy
        self.config, self.offload, self.offloaded = config, offload, offload is not None

    def __deepcopy__(self, memo: dict) -> Shared:
        return self  # copies of a cache choose in the same way

    def of_layer(self, layer_idx: int) -> Policy:
        """The selection policy of any layer."""
        if layer_idx < self.config.dense_layers:
            return self.dense(layer_idx)
        return self.policy(layer_idx)

    def dense(self, layer_idx: int) -> Policy:
        """The policy of a layer that attends to everything."""
        return Policy(self.config, layer_idx, self.offload is not None and not self.offload.keep_dense)

    def policy(self, layer_idx: int) -> Policy:
        """The policy of a layer after the dense ones."""
        return self.kind(self.config, layer_idx, self.offloaded)

    def name_of(self, policy: Policy) -> str:
        """The name of a layer's policy in files of saved caches."""
        kind = type(policy)
        return self.saved_as if kind is self.kind and self.saved_as is not None else kind.__name__

    def check_model(self, text_config) -> None:
        """Raise ``ValueError`` for a model that this cache cannot serve."""

    def second_bytes(self, policies: Iterable[Policy]) -> int:
        """Bytes that these have allocated on a second device."""
        return 0

    def check_file(self, loading: bool) -> None:
        """Raise ``ValueError`` if the cache cannot be saved, or loaded."""

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Inside, steps are tried out for a capture: nothing that they choose is brought anywhere."""
        yield

    def resume(self) -> None:
        """End a :meth:`trial` whose own end was interrupted."""

    def rejoin(self, stream: torch.cuda.Stream | None) -> None:
        """A captured step ends: what it has begun beyond this device is awaited by ``stream``."""


class Labelled(Shared):
    """Shared state of a method with token labels, whose channels may come from a file.

    Raises:
        ValueError: the channel file is missing, or something else.
    """

    def __init__(self, policy: type[Policy], config: Any, offload: OffloadConfig | None) -> None:
        super().__init__(policy, config, offload)
        self.channels = None if config.channel_file is None else LabelChannels.load(config.channel_file)

    def policy(self, layer_idx: int) -> Policy:
        return self.kind(self.config, layer_idx, self.offloaded, self.channels)

    def check_model(self, text_config) -> None:
        if self.channels is not None:
            self.channels.check(text_config)
