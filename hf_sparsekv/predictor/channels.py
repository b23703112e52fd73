"""Label channels: the few key channels that carry most of the score (Double Sparsity; AsyncTLS section 4.1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from ..kv.state import Held, State
from ..whole_file import replacing

FORMAT = "hf-sparsekv-channels-2"
PIECE = 4096  # tokens whose moments are taken at once, in float32
_SHAPE_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


class KeyMoments(State):
    """Running mean and spread of one layer's keys, per row and channel.

    Deviations are from the mean of their own batch, never from zero (Chan's formulas). The spread of a channel with a
    mean of 400 keeps its digits in float32.

    Attributes:
        seen: float32 ``[batch]``, tokens without padding; None before the first.
        centre: float32 ``[batch, H, D]``, their mean.
        squares: float32 ``[batch, H, D]``, sum of squared deviations from it.
    """

    TENSORS: ClassVar = {
        name: Held(trial=True, dropped=True, file=f"stats_{name}") for name in ("seen", "centre", "squares")
    }

    seen: Any  # Tensor | None: never None once there were tokens

    def update(self, k: Tensor, valid: Tensor | None) -> None:
        """Add keys ``[batch, H, n, D]``, as :meth:`ChannelStats.update` does."""
        for lo in range(0, k.shape[2], PIECE):
            x = k[:, :, lo : lo + PIECE].detach().float()
            ok = None if valid is None else valid[:, None, lo : lo + PIECE, None]
            if ok is None:
                seen, first = x.new_full((len(x),), x.shape[2]), x[:, :, 0]
                mean = first if x.shape[2] == 1 else x.mean(2)
                squares = None if x.shape[2] == 1 else (x - mean[:, :, None]).square_().sum(2)
            else:
                seen = ok.sum((1, 2, 3), dtype=torch.float32)
                mean = x.masked_fill(~ok, 0).sum(2) / seen.clamp_min(1)[:, None, None]
                squares = (x - mean[:, :, None]).masked_fill_(~ok, 0).square_().sum(2)
            self._add(seen, mean, squares)

    def merge(self, other: KeyMoments) -> None:
        """Add what another one has seen."""
        self._add(other.seen, other.centre, other.squares)

    def _add(self, seen: Tensor, mean: Tensor, squares: Tensor | None) -> None:
        if self.seen is None:
            self.seen, self.centre = seen, mean.clone()
            self.squares = torch.zeros_like(mean) if squares is None else squares
            return
        # In place: a captured step repeats it there.
        total, off = self.seen + seen, mean - self.centre
        share = (seen / total.clamp_min(1))[:, None, None]
        if squares is not None:
            self.squares.add_(squares)
        self.squares.addcmul_(off.square(), self.seen[:, None, None] * share)
        self.centre.addcmul_(off, share)
        self.seen.copy_(total)

    def norms(self) -> Tensor:
        """Centre and spread of each channel, float32 ``[batch, H, 2, D]``; finite, spreads above zero.

        The spread is the standard deviation with one more token, which deviates as much as the head's channels do on
        average. A channel that is constant here may change later, and few tokens are weak evidence.
        """
        seen, squares = self.seen[:, None, None], self.squares.nan_to_num(nan=0.0, posinf=0.0)
        usual = squares.mean(-1, keepdim=True) / seen.clamp_min(1)
        spread = ((squares + usual) / (seen + 1)).sqrt()
        spread = torch.where((spread > 0) & spread.isfinite(), spread, 1.0)
        return torch.stack((self.centre.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), spread), 2)


class ChannelStats(State):
    """Running channel magnitudes of one layer's queries and keys, per row.

    A channel's importance is ``I(j) = rms(q[j]) * std(k[j])``, the queries over the heads of the group. A channel that
    is the same in all keys adds the same to all logits, which softmax ignores. (AsyncTLS and Double Sparsity rank by
    largest and by mean magnitudes, which such a channel raises.)

    Attributes:
        q: float32 ``[batch, Hq, D]`` running sum of squares; None before the first token.
        moments: of the keys.
        tokens: as many as were seen.
        keys_only: keys are used in place of queries, which are not known yet.
    """

    TENSORS: ClassVar = {
        "q": Held(trial=True, dropped=True, file="stats_q"),
    }
    HOST: ClassVar = {"tokens": 0, "keys_only": False}
    PARTS: ClassVar = ("moments",)

    q: Any  # Tensor | None: never None once there were tokens
    tokens: int
    keys_only: bool

    def __init__(self) -> None:
        super().__init__()
        self.moments = KeyMoments()

    def update(self, q: Tensor, k: Tensor, valid: Tensor | None) -> None:
        """Add ``q [batch, Hq, n, D]``, ``k [batch, H, n, D]``; padding (``valid [batch, n]`` False) is left out.

        The same tensor twice: there are no queries. Its keys stand for them until there are.
        """
        unseen = q is k
        known = self.q is not None and not self.keys_only and (unseen or self.q.shape[1] == q.shape[1])
        if not known and not unseen:
            self.q = None  # here they are
        self.keys_only = unseen and not known
        self.moments.update(k, valid)
        if not (known and unseen):
            now = magnitudes(q, valid)
            # In place after the first time: a captured step repeats it.
            self.q = now if self.q is None else self.q.add_(now)
        self.tokens += q.shape[2]

    def take(self, q: Tensor, k: Tensor) -> None:
        """Begin with ``k [batch, H, n, D]``, and with the :func:`magnitudes` of the queries ``q``."""
        self.moments.update(k, None)
        self.q, self.tokens = q.clone(), k.shape[2]

    def of_rows(self, rows: slice) -> ChannelStats:
        """The statistics of some rows, over the same memory."""
        new, mine = ChannelStats(), self.moments
        new.q, new.tokens = self.q[rows], self.tokens
        new.moments.seen, new.moments.centre, new.moments.squares = (
            held[rows] for held in (mine.seen, mine.centre, mine.squares)
        )
        return new

    def merge(self, other: ChannelStats) -> None:
        """Add what another one has seen."""
        self.q = self.q + other.q
        self.moments.merge(other.moments)
        self.tokens += other.tokens

    def scores(self) -> Tensor:
        """Importance of each channel, float32 ``[batch, H, D]``, NaN as ``-inf``.

        (Sums rank like means: the counts are common.)
        """
        k = self.moments.squares.sqrt()
        batch, heads, dim = k.shape
        q = self.q.view(batch, heads, -1, dim).sum(2)
        inf = float("inf")
        return (q.sqrt() * k).nan_to_num_(nan=-inf, posinf=inf, neginf=-inf)

    def ranking(self, most: int | None = None) -> Tensor:
        """Channels by falling importance, int32 ``[batch, H, D]``; among equals the lower channel first.

        ``most``: so many of them, the first ones.
        """
        return self.scores().sort(dim=-1, descending=True, stable=True).indices[..., :most].int().contiguous()

    def norms(self) -> Tensor:
        """:meth:`KeyMoments.norms`."""
        return self.moments.norms()


def magnitudes(x: Tensor, valid: Tensor | None) -> Tensor:
    """Sums of squares of ``x [batch, heads, n, D]`` for :class:`ChannelStats`, float32 ``[batch, heads, D]``.

    ``valid [batch, n]``: False for padding, which is left out.
    """
    x = x.detach() if x.requires_grad else x
    x = x.float() if x.itemsize > 4 else x
    if valid is not None:
        x = x.masked_fill(~valid[:, None, :, None], 0)
    return torch.linalg.vector_norm(x, 2, dim=2, dtype=torch.float32).square_()


@dataclass(frozen=True)
class LabelChannels:
    """Channel rankings of a model, made by :func:`hf_sparsekv.tuning.channels.calibrate`.

    Args:
        ranking: int32 ``[layers, H, D]``, channels by falling importance; -1 in layers without full attention.
        model: what identifies the architecture (``model_type``, sizes, head counts).
        name: the model's name or path when it was calibrated, for people.
        tokens: calibration tokens seen.
        norms: float32 ``[layers, H, 2, D]``, centre and spread of each channel (:meth:`KeyMoments.norms`), in the
            model's order.

    Raises:
        ValueError: the ranking is none (kernels read keys at these channels), or does not fit the model; or the norms
            do not fit the ranking.
    """

    ranking: Tensor
    model: dict
    name: str
    tokens: int
    norms: Tensor

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
        norms, shape = self.norms, (*ranking.shape[:2], 2, ranking.shape[2])
        if norms.dtype != torch.float32 or norms.shape != shape or not are_norms(norms):
            raise ValueError(
                f"norms are float32 {list(shape)}, finite, with spreads above zero; got {norms.dtype} "
                f"{list(norms.shape)}"
            )

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file, which appears when it is whole.

        Raises:
            OSError: ``path`` cannot be written; its directory has to exist.
        """
        meta = {
            "format": FORMAT,
            "model": json.dumps(self.model),
            "name": self.name,
            "tokens": str(self.tokens),
        }
        held = {"ranking": self.ranking.contiguous(), "norms": self.norms.contiguous()}
        with replacing(path) as file:
            file.write(save(held, metadata=meta))

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
                ranking, norms = file.get_tensor("ranking"), file.get_tensor("norms")
        except FileNotFoundError:
            raise ValueError(f"the channel file {path} does not exist: make it with `hf-sparsekv calibrate`") from None
        except ValueError:
            raise
        except Exception as error:  # safetensors' own error type for a file of another kind
            raise ValueError(f"{path} is not a channel file ({error})") from None
        try:
            model, tokens = json.loads(meta["model"]), int(meta["tokens"])
            return cls(ranking, model, meta["name"], tokens, norms)
        except KeyError as error:
            why = f"it does not say its {error.args[0]}"
        except RecursionError:
            why = "its header is nested too deeply"
        except ValueError as error:
            why = str(error)
        raise ValueError(f"the channel file {path} is damaged ({why}): make it again with `hf-sparsekv calibrate`")

    def alike(self, other: LabelChannels) -> bool:
        """Whether labels come out the same with both."""
        return torch.equal(self.ranking, other.ranking) and torch.equal(self.norms, other.norms)

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


def are_norms(norms: Tensor) -> bool:
    """Whether centres and spreads ``[..., 2, r]`` are such that labels can be divided by them."""
    return bool(norms.isfinite().all()) and bool((norms.select(-2, 1) > 0).all())


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


def first_layer(config):
    """The configuration of a decoder's first layer: where layers differ, the decoder's own gives no such values."""
    return config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config


def describe(config) -> dict:
    """The fields in which a channel file must agree with a model's (text) configuration."""
    check_config(config)
    config = first_layer(config.get_text_config(decoder=True))
    facts = {key: getattr(config, key, None) for key in _SHAPE_KEYS}
    facts["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return facts
