"""Label channels: the few key channels that carry most of the score (Double Sparsity; AsyncTLS section 4.1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from typing import ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from ..kv.state import Held, State
from ..whole_file import replacing

FORMAT = "hf-sparsekv-channels-1"
_SHAPE_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class ChannelStats(State):
    """Running channel magnitudes of one layer's queries and keys, per row.

    ``importance="max"`` is AsyncTLS's ``I(j) = sum_h max_t |q_h,t[j]| * max_t |k_t[j]|``, ``"mean"`` Double
    Sparsity's mean of ``|q[j] k[j]|`` over all pairs, which is the product of the means.

    Attributes:
        q: float32 ``[batch, Hq, D]`` running maximum, or sum; None before the first token. ``k``: ``[batch, H, D]``.
        tokens: as many as were seen.
        keys_only: keys are used in place of queries, which are not known yet.
    """

    TENSORS: ClassVar = {
        "q": Held(trial=True, dropped=True, file="stats_q"),
        "k": Held(trial=True, dropped=True, file="stats_k"),
    }
    HOST: ClassVar = {"tokens": 0, "keys_only": False}

    def __init__(self, importance: str) -> None:
        super().__init__()
        self.importance = importance

    def update(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        """Add ``q [batch, Hq, n, D]``, ``k [batch, H, n, D]``; padding (``valid [batch, n]`` False) is left out.

        The same tensor twice: there are no queries. Its keys stand for them until there are.
        """
        unseen = q is k
        known = self.q is not None and not self.keys_only and (unseen or self.q.shape[1] == q.shape[1])
        if not known and not unseen:
            self.q = None  # here they are
        self.keys_only = unseen and not known
        sides = [self.q] if known and unseen else []
        for x, held in ((k, self.k),) if sides else ((q, self.q), (k, self.k)):
            x = x.detach() if x.requires_grad else x
            if valid is not None:
                x = x.masked_fill(~valid[:, None, :, None], 0)
            # In place after the first time: a captured step repeats it there.
            if self.importance == "max":
                narrow = x.is_cuda and x.itemsize < 4  # there the same kernel gives float32
                now = torch.linalg.vector_norm(x, float("inf"), dim=2, dtype=torch.float32 if narrow else None).float()
                sides.append(now if held is None else torch.maximum(held, now, out=held))
            else:
                now = torch.linalg.vector_norm(x, 1, dim=2, dtype=torch.float32)
                sides.append(now if held is None else held.add_(now))
        self.q, self.k = sides
        self.tokens += q.shape[2]

    def scores(self) -> Tensor:
        """Importance of each channel, float32 ``[batch, H, D]``, NaN as ``-inf``.

        (Sums rank like means: the counts are common.)
        """
        batch, heads, dim = self.k.shape
        found = self.q.view(batch, heads, -1, dim).sum(2) * self.k
        inf = float("inf")
        return found.nan_to_num_(nan=-inf, posinf=inf, neginf=-inf)

    def ranking(self, most: int | None = None) -> Tensor:
        """Channels by falling importance, int32 ``[batch, H, D]``; among equals the lower channel first.

        ``most``: so many of them, the first ones.
        """
        return self.scores().sort(dim=-1, descending=True, stable=True).indices[..., :most].int().contiguous()


@dataclass(frozen=True)
class LabelChannels:
    """Channel rankings of a model, made by :func:`hf_sparsekv.tuning.channels.calibrate`.

    Args:
        ranking: int32 ``[layers, H, D]``, channels by falling importance; -1 in layers without full attention.
        model: what identifies the architecture (``model_type``, sizes, head counts).
        name: the model's name or path when it was calibrated, for people.
        importance: ``"max"`` or ``"mean"``.
        tokens: calibration tokens seen.

    Raises:
        ValueError: the ranking is none (kernels read keys at these channels), or does not fit the model.
    """

    ranking: Tensor
    model: dict
    name: str
    importance: str
    tokens: int

    def __post_init__(self) -> None:
        ranking = self.ranking
        if ranking.dtype != torch.int32 or ranking.ndim != 3:
            raise ValueError(
                f"a channel ranking is int32 [layers, KV heads, channels], got {ranking.dtype} {list(ranking.shape)}"
            )
        every = torch.arange(ranking.shape[2], dtype=torch.int32, device=ranking.device)
        ranked = (ranking.sort(-1).values == every).flatten(1).all(1)
        wrong = (~(ranked | (ranking == -1).flatten(1).all(1))).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"the ranking of layer {wrong[0]} does not name each of {len(every)} channels once")
        if not isinstance(self.model, dict):
            raise ValueError(f"the model's facts must be a dict, got {type(self.model).__name__}")
        layers = self.model.get("num_hidden_layers")
        if layers is not None and layers != len(ranking):
            raise ValueError(f"the channel ranking has {len(ranking)} layers, its model {layers!r}")
        if self.importance not in ("max", "mean"):
            raise ValueError(f"importance must be 'max' or 'mean', got {self.importance!r}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file, which appears when it is whole.

        Raises:
            OSError: ``path`` cannot be written; its directory has to exist.
        """
        meta = {
            "format": FORMAT,
            "model": json.dumps(self.model),
            "name": self.name,
            "importance": self.importance,
            "tokens": str(self.tokens),
        }
        with replacing(path) as file:
            file.write(save({"ranking": self.ranking.contiguous()}, metadata=meta))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> LabelChannels:
        """Read a file written by :meth:`save`.

        Raises:
            ValueError: the file is something else, or damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata() or {}
                if meta.get("format") != FORMAT:
                    raise ValueError(f"{path} is not a channel file: make one with `hf-sparsekv calibrate`")
                ranking = file.get_tensor("ranking")
        except FileNotFoundError:
            raise ValueError(f"the channel file {path} does not exist: make it with `hf-sparsekv calibrate`") from None
        except ValueError:
            raise
        except Exception as error:  # safetensors' own error type for a file of another kind
            raise ValueError(f"{path} is not a channel file ({error})") from None
        try:
            return cls(ranking, json.loads(meta["model"]), meta["name"], meta["importance"], int(meta["tokens"]))
        except KeyError as error:
            why = f"it does not say its {error.args[0]}"
        except RecursionError:
            why = "its header is nested too deeply"
        except ValueError as error:
            why = str(error)
        raise ValueError(f"the channel file {path} is damaged ({why}): make it again with `hf-sparsekv calibrate`")

    def check(self, config) -> None:
        """Raise ``ValueError`` if the channels were made for another architecture than ``config``."""
        here = describe(config)
        if here != self.model:
            other = {k: (self.model.get(k), v) for k, v in here.items() if self.model.get(k) != v}
            detail = ", ".join(
                f"{k} is {theirs} in the file, {ours} in the model" for k, (theirs, ours) in other.items()
            )
            raise ValueError(
                f"the channel file was made for another model ({self.name!r}: {detail}): calibrate this model with "
                "`hf-sparsekv calibrate`, or leave channel_file out"
            )


def check_config(config) -> None:
    """Raise ``TypeError`` for what is no model's configuration, the model itself for example."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"model_config must be the model's configuration (model.config), got {type(config).__name__}")


def check_layers(model_config, config) -> None:
    """Raise ``ValueError`` if the model that runs, of ``config``, has another number of layers than the cache."""
    expected, found = (c.get_text_config(decoder=True).num_hidden_layers for c in (model_config, config))
    if expected != found:
        raise ValueError(
            f"this cache was made for a model of {expected} layers (model_config), the one that runs has {found}: make "
            "a new cache, with model_config=model.config of this model or without it"
        )


def describe(config) -> dict:
    """What a channel file must agree on with a model's (text) configuration."""
    check_config(config)
    config = config.get_text_config(decoder=True)
    facts = {key: getattr(config, key, None) for key in _SHAPE_KEYS}
    facts["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return facts
