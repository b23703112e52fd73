"""A prompt that was computed without a cache enters the layers of one, or a piece that was computed after its tokens.

All layers get their tokens at once, and work that is alike in them is done once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.handle import Step
from ..kv.memory import for_layers
from ..kv.store import LayerStore
from ..kv.together import extend_together
from ..policies.base import Policy
from ..policies.label_index import calibrate_all
from ..policies.labelled import LabelledPolicy
from ..predictor.channels import ChannelStats
from ..tensors import no_autocast, no_inference_mode
from ..types import AttentionParams
from .cache_state import CacheState, FullLayer, end_pass

_BYTES = 1 << 26  # of keys in float32 whose moments are taken at once


@dataclass(frozen=True)
class Computed:
    """A prompt that was computed, and is to be cached.

    Args:
        tokens: of each row.
        k, v: ``[layers, batch, H, n, D]``. Entries after the tokens are undefined.
        last: query of the last token, ``[layers, batch, Hq, 1, Dk]``.
        queries: :func:`..predictor.channels.magnitudes` of the queries in the last layers, which are calibrated:
            ``[layers, batch, Hq, Dk]``. None: none are.
        params: of each layer's attention.
    """

    tokens: int
    k: Tensor
    v: Tensor
    last: Tensor
    queries: Tensor | None
    params: list[AttentionParams]


def adopts(policy: Policy) -> bool:
    """The policy needs no more of a prompt than :class:`Computed` has."""
    kind = type(policy)
    observe, plain = kind.observe, kind.store_type is LayerStore
    plain &= policy.foresight is None or not policy.foresight.by_delta
    return plain and observe in (Policy.observe, LabelledPolicy.observe)


@no_autocast
@no_inference_mode
@torch.no_grad()
def adopt(owner: CacheState, computed: Computed) -> None:
    """Cache a prompt, or a piece that has attended to what is cached, in all layers of ``owner`` (:func:`adopts`)."""
    layers, n = owner.sparse_layers, computed.tokens
    keys, values = (of[:, :, :, :n].unbind(0) for of in (computed.k, computed.v))
    lasts, q_heads = computed.last.unbind(0), computed.last.shape[2]
    try:
        with for_layers(len(layers)):
            for layer, k, v, params in zip(layers, keys, values, computed.params):
                layer.policy.params, layer.latent = params, False
                layer.begin(Step(layer, k, v, 0), q_heads)
        if computed.queries is not None:
            _calibrate([layer.policy for layer in layers[-len(computed.queries) :]], computed)
        for layer in layers:
            layer.store.counters.exact += layer.store.length > 0
        _store(layers, computed)
        for layer, last in zip(layers, lasts):
            owner.passed(layer.index)
            layer.next_step.after_prompt(layer.store, layer.policy, last, None)
        end_pass(owner, layers[-1].index)
    except BaseException as error:
        for layer in layers:
            layer.broken = f"{type(error).__name__} while a prompt was stored"
        raise


def _store(layers: Sequence[FullLayer], computed: Computed) -> None:
    """Store the tokens: of layers that follow each other and index alike at once, if their memory lies side by side."""
    k, v = (of[:, :, :, : computed.tokens] for of in (computed.k, computed.v))
    first = 0
    for end in range(1, len(layers) + 1):
        if end < len(layers) and type(layers[end].policy) is type(layers[first].policy):
            continue
        some = layers[first:end]
        stores, policies = [layer.store for layer in some], [layer.policy for layer in some]
        if len(some) == 1 or not extend_together(stores, policies, k[first:end], v[first:end]):
            for nth, layer in enumerate(some, first):
                layer.store.extend(k[nth], v[nth], None, layer.policy)
        first = end


def _calibrate(policies: list[Policy], computed: Computed) -> None:
    """Calibrate the labels of the last layers, some layers at a time."""
    labels = [policy.labels for policy in policies if policy.labels is not None]
    first = labels[0].wanted
    n = computed.tokens if first is None else min(first, computed.tokens)
    k, queries = computed.k[-len(labels) :], computed.queries
    assert queries is not None
    some = max(1, _BYTES // (4 * k[0, :, :, :n].numel()))
    for lo in range(0, len(labels), some):
        stats = ChannelStats()
        stats.take(queries[lo : lo + some].flatten(0, 1), k[lo : lo + some].flatten(0, 1)[:, :, :n])
        calibrate_all(labels[lo : lo + some], stats)
