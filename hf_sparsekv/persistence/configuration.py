"""The configuration of a saved cache, and an empty cache with it or with another one that agrees.

Separate from loading because it needs no tensor but a channel file's.
"""

from __future__ import annotations

from dataclasses import fields, replace

from hf_sparsekv_config.predictive import EARLIER
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..layers.cache_state import CacheState
from ..predictor.channels import LabelChannels
from .container import Reader, damaged


def config_fields(config: SparseConfig) -> dict:
    """The configuration as JSON values."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def empty_cache(
    made: type[CacheState],
    saved_as: type[SparseConfig],
    file: Reader,
    config: SparseConfig | None,
    offload: OffloadConfig | None,
) -> CacheState:
    """A cache without layers, of the saved configuration or of ``config`` if that agrees."""
    try:
        saved = saved_as(**file.state["config"])
        if getattr(saved, "cache_rank", None) not in (None, "stream", "host"):
            raise ValueError(f"cache_rank is {saved.cache_rank!r}, and caches of a second device are not saved")
        if (getattr(saved, "channel_file", None) is None) != (file.state["channel_file"] is None):
            raise ValueError("channel_file does not fit the rest")
        about, channels = file.state["channel_file"], None
        if about is not None:  # the original file may have been deleted or changed
            about = {name: value for name, value in about.items() if name != "shape"}
            channels = LabelChannels(file.tensor("channel_file"), **about, norms=file.tensor("channel_norms"))
    except (TypeError, ValueError) as error:
        raise damaged(file.path, f"its configuration: {error}") from None
    if config is None:
        cache = made(saved if channels is None else replace(saved, channel_file=None), offload)
        if channels is not None:
            cache.config = cache.shared.config = saved
            cache.shared.channels = channels
        return cache
    cache = made(config, offload)
    if type(config) is not saved_as:
        raise TypeError(f"config must be a {saved_as.__name__}, as {file.path} has it, got {type(config).__name__}")
    free = free_fields(saved_as)
    for name in (field.name for field in fields(config)):
        theirs, ours = getattr(saved, name), getattr(config, name)
        same = theirs == ours
        if name == "channel_file":  # contents count, not names
            own = cache.shared.channels
            same = channels is own if channels is None or own is None else channels.alike(own)
        if name not in free and not same:
            raise ValueError(
                f"{file.path} was saved with {name}={theirs!r}, which its contents depend on; got {ours!r}. Leave "
                f"config out, change only {', '.join(free)}, or prefill again"
            )
    return cache


def free_fields(config: type[SparseConfig]) -> list[str]:
    """Fields that only affect later steps: ``FREE`` of the class and of its base classes."""
    lists = (vars(kind).get("FREE", ()) for kind in config.__mro__)
    return list(dict.fromkeys(name for names in lists for name in names))


def keeps_queries(file: Reader) -> bool:
    """Whether the predictor of the saved cache keeps the queries of its steps."""
    return file.state["config"].get("predictor") == EARLIER
