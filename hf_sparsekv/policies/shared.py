"""What the layers of one cache have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..config import OffloadConfig, SparseConfig
from ..predictor.channels import LabelChannels

if TYPE_CHECKING:
    from .base import Policy


class Shared:
    """Created once per cache by ``Policy.share()``; creates the policies of its sparse layers.

    Attributes:
        channels: label channels from a file, for methods that have labels.
        places: where the cache's memory is: the keys of ``cache.memory_bytes()``.
    """

    channels: LabelChannels | None = None
    places: tuple[str, ...] = ("device", "host")

    def __init__(self, policy: type[Policy], config: SparseConfig, offload: OffloadConfig | None) -> None:
        self.kind, self.config, self.offloaded = policy, config, offload is not None

    def __deepcopy__(self, memo: dict) -> Shared:
        return self  # copies of a cache choose in the same way

    def policy(self, layer_idx: int) -> Policy:
        """The policy of a layer behind the dense ones."""
        return self.kind(self.config, layer_idx, self.offloaded)

    def check_model(self, text_config) -> None:
        """Raise ``ValueError`` for a model that this cache cannot serve."""

    def check_file(self, loading: bool) -> None:
        """Raise ``ValueError`` if the cache cannot be saved, or loaded."""

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Inside, steps are tried out for a capture: nothing that they choose is brought anywhere."""
        yield

    def resume(self) -> None:
        """End a :meth:`trial` whose own end was interrupted."""

    def rejoin(self, stream: torch.cuda.Stream) -> None:
        """A captured step ends: what it has begun beyond this device is awaited by ``stream``."""


class Labelled(Shared):
    """Of a method with token labels, whose channels may come from a file.

    Raises:
        ValueError: the channel file is missing, or something else.
    """

    def __init__(self, policy: type[Policy], config: SparseConfig, offload: OffloadConfig | None) -> None:
        super().__init__(policy, config, offload)
        self.channels = None if config.channel_file is None else LabelChannels.load(config.channel_file)

    def policy(self, layer_idx: int) -> Policy:
        return self.kind(self.config, layer_idx, self.offloaded, self.channels)

    def check_model(self, text_config) -> None:
        if self.channels is not None:
            self.channels.check(text_config)
