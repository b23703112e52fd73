"""Multi-head latent attention (MLA): attention on the cached latents themselves.

MLA caches one latent ``c [r]`` and one rotated key part ``k_rot [dr]`` a token, for all heads together. Keys and values
are products of the latent, ``k_h = [W_UK,h c, k_rot]`` and ``v_h = W_UV,h c``. So both matrices can be *absorbed* into
query and output (DeepSeek-V2, section 2.1.2):

    q_h . k_h = [W_UK,h^T q_nope,h, q_rot,h] . [c, k_rot]        out_h = W_UV,h sum_t p_t c_t

To a decode step the cache is then a single KV head of ``r + dr`` channels whose values are the first ``r`` of them, and
nothing is ever expanded. transformers' models expand all latents in each step, in ``expand_kv``. We replace only that
method, on the instance, so that handles of our caches reach the attention function. With any other cache or attention
function the original method runs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model_watch import kind_of
from ..types import AttentionParams
from ..untraced import untraced
from .compact_mask import Rule
from .exact import PIECE_BYTES, exact_attention
from .handle import KVHandle
from .indexer import is_ours, restore_indexer, take_pieces

_NEEDED = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OWN, _HELD = "_sparsekv_own_expand_kv", "_sparsekv_kv_b"
# Modules whose functions lie between an attention module's forward and `caller`.
_BETWEEN = {"transformers.cache_utils", "torch._dynamo.eval_frame", __name__}
_PIECE = 1 << 29  # bytes of keys and values that are expanded at once
_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SAMPLE = (
    2048  # tokens of a prompt that label channels are made from: absorbed queries of all would take 10x the prompt's
)
RECENT = 64  # tokens of the sample that are the prompt's last ones


def is_mla(module: nn.Module) -> bool:
    """An attention module that makes latents and expands them."""
    return all(hasattr(module, name) for name in _NEEDED)


def may_be_mla(config) -> bool:
    """Whether a model of this configuration may have MLA modules. ``None``, an unknown configuration, may.

    False avoids the search of the call stack (:func:`calling_module`).
    """
    if config is None:
        return True
    text, name = config.get_text_config(decoder=True), "kv_lora_rank"
    return hasattr(type(text), name) or name in vars(text)  # to ask for what differs by layers is an error


def passes_on(name: str) -> None:
    """Let :func:`caller` skip functions of the Python module ``name``, which pass ``update()`` on."""
    _BETWEEN.add(name)


def _calling() -> dict[str, Any]:
    """Local variables of the innermost function in the call stack that does not just pass calls on."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def caller() -> nn.Module | None:
    """The attention module whose ``forward()`` is calling ``update()``, or None if something else does.

    ``Cache.update()`` does not get the module, so it is looked up in the call stack.
    """
    module = _calling().get("self")
    return module if isinstance(module, nn.Module) else None


def calling_module(key: Tensor, value: Tensor) -> nn.Module | None:
    """The :func:`caller`, if it is an MLA module whose latents and rotary parts these are.

    Its ``expand_kv`` runs before the attention function does.
    """
    module = caller()
    if module is None or not is_mla(module):
        return None
    latent = (1, module.kv_lora_rank, module.qk_rope_head_dim)
    return module if (key.shape[1], key.shape[3], value.shape[3]) == latent else None


def calling_model() -> nn.Module | None:
    """The innermost module in the call stack: while masks are made, the model whose layers they are for."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            return module
        frame = frame.f_back
    return None


# ---------------------------------------------------------------------- the method that is replaced


@untraced
def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces a module's ``expand_kv``: handles pass through it to our attention function.

    Models with an indexer expand before they call the cache, in transformers 5.17. There latents pass through it to one
    of our caches, which is a local variable of the module's ``forward()``.
    """
    if self.config._attn_implementation == "sparsekv":
        if isinstance(kv_nope, KVHandle):
            if kv_nope.step.absorbed:
                return kv_nope, k_rot
        elif hasattr(self, "indexer") and _keeps_latents(_calling().get("past_key_values"), self.layer_idx):
            return kv_nope, k_rot
    own = self.__dict__.get(_OWN)
    return own(kv_nope, k_rot) if own is not None else type(self).expand_kv(self, kv_nope, k_rot)


def _keeps_latents(cache: Any, layer_idx: int) -> bool:
    """Whether a module that is about to give ``cache`` what it has expanded should give it latents."""
    if not is_ours(cache):
        return False
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    return layer is None or not layer.get_seq_length() or layer.latent


def absorbs(module: nn.Module) -> bool:
    """Whether this module's ``expand_kv`` is replaced."""
    return getattr(module.__dict__.get("expand_kv"), "__func__", None) is expand_kv


def absorb(module: nn.Module) -> bool:
    """Replace the ``expand_kv`` of one module; False if that was done already.

    Raises:
        ValueError: its ``kv_b_proj`` has a bias, which latent attention has no place for.
    """
    if absorbs(module):
        return False
    if getattr(module.kv_b_proj, "bias", None) is not None:
        raise ValueError(
            f"{type(module).__name__}.kv_b_proj has a bias, which cannot be absorbed: use a DynamicCache for this model"
        )
    module.__dict__[_OWN] = module.__dict__.get("expand_kv")
    module.expand_kv = types.MethodType(expand_kv, module)
    if getattr(module, "indexer", None) is not None:
        take_pieces(module.indexer)
    return True


def restore(module: nn.Module) -> None:
    """Undo :func:`absorb`."""
    if absorbs(module):
        own = module.__dict__.get(_OWN)
        if own is None:
            del module.expand_kv
        else:
            module.expand_kv = own
        if getattr(module, "indexer", None) is not None:
            restore_indexer(module.indexer)
    for name in (_OWN, _HELD):
        module.__dict__.pop(name, None)


def absorb_mla(model: nn.Module) -> list[nn.Module]:
    """Let our caches attend to the latents of an MLA model's layers. Caches call it at their first use.

    Returns:
        The attention modules that were changed; empty for a model without MLA, or if it was done before.
    """
    return [module for module in model.modules() if is_mla(module) and absorb(module)]


def restore_mla(model: nn.Module) -> None:
    """Restore every ``expand_kv`` that :func:`absorb_mla`, ``optimize()`` or a cache has replaced; so for indexers."""
    for module in model.modules():
        restore(module)
        restore_indexer(module)


# ---------------------------------------------------------------------- attention


class Absorbed:
    """The two projections of one MLA module, and attention with them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.nope, self.rope, self.value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        self.rank = module.kv_lora_rank

    @property
    def plain(self) -> bool:
        """Whether the projection's matrix can be used in place."""
        linear = self.module.kv_b_proj
        weight = getattr(linear, "weight", None)
        return (
            kind_of(linear) is nn.Linear
            and type(weight) is nn.Parameter
            and weight.dtype in _PLAIN
            and not weight.is_meta
            and "forward" not in linear.__dict__  # a replaced forward may use another matrix
        )

    def matrix(self, like: Tensor) -> Tensor:
        """``[H, dn + dv, r]``. :meth:`refresh` makes that of a quantised (or adapted, or sharded) projection."""
        if self.plain:
            weight = self.module.kv_b_proj.weight.to(like.dtype)  # another one under torch.autocast only
        else:
            weight = self.module.__dict__.get(_HELD)
            if weight is None or weight.device != like.device or weight.dtype != like.dtype:
                self.refresh(like)
                weight = self.module.__dict__[_HELD]
        return weight.view(-1, self.nope + self.value, self.rank)

    @torch.no_grad()
    def refresh(self, like: Tensor) -> None:
        """Compute the matrix of any kind of projection, by projecting the identity.

        Dynamic quantisation of the rows of an identity is exact. Each prompt does this again, because adapters change.
        It writes in place, because captured steps hold the address.

        Raises:
            ValueError: the projection adds something to its input.
        """
        if self.plain:
            return
        linear = self.module.kv_b_proj
        with torch.inference_mode(False):
            one = torch.eye(self.rank, dtype=like.dtype, device=like.device)
        if bool(linear(torch.zeros_like(one)).any()):
            raise ValueError(
                f"kv_b_proj is a {type(linear).__name__} that adds something to its input, which cannot be absorbed: "
                "use a DynamicCache for this model"
            )
        with torch.inference_mode(False):
            made = linear(one).to(like.dtype).T.contiguous()  # [H * (dn + dv), r]
        held = self.module.__dict__.get(_HELD)
        if held is not None and (held.shape, held.dtype, held.device) == (made.shape, made.dtype, made.device):
            held.copy_(made)
        else:
            self.module.__dict__[_HELD] = made

    def queries(self, query: Tensor) -> Tensor:
        """``[batch, H, q, dn + dr]`` to the latents' space, ``[batch, H, q, r + dr]``."""
        key = self.matrix(query)[:, : self.nope]  # [H, dn, r]
        nope, rope = query.split((self.nope, self.rope), dim=-1)
        return torch.cat((_by_head(nope, key), rope), dim=-1)

    def outputs(self, out: Tensor) -> Tensor:
        """Attention to latents, ``[batch, H, q, r]``, to each head's values, ``[batch, H, q, dv]``."""
        return _by_head(out, self.matrix(out)[:, self.nope :].transpose(1, 2))

    def observed(
        self, query: Tensor, latent: Tensor, rotary: Tensor, valid: Tensor | None, most: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys of at most ``most`` of the tokens, as a selection sees them: evenly spaced, and the last.

        Args:
            query: ``[batch, H, q, dn + dr]``.
            latent, rotary: ``[batch, 1, q, r]`` and ``[batch, 1, q, dr]``.
            valid: bool ``[batch, q]``, or None.
        """
        q = query.shape[2]
        if q > most:
            spaced = torch.arange(most - RECENT, device=query.device) * (q - RECENT) // (most - RECENT)
            at = torch.cat((spaced, torch.arange(q - RECENT, q, device=query.device)))
            query, latent, rotary = (x.index_select(2, at) for x in (query, latent, rotary))
            valid = None if valid is None else valid.index_select(1, at)
        return self.queries(query), torch.cat((latent, rotary), dim=-1), valid

    def attention(
        self,
        query: Tensor,
        latent: Tensor,
        rotary: Tensor,
        params: AttentionParams,
        *,
        columns: Tensor | None = None,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        attend: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Exact attention of the last ``q`` columns over all ``n``, see :func:`.exact.exact_attention`.

        Expanding costs ``r (dn + dv)`` products a cached token and head, whatever ``q`` is; on latents each query costs
        ``2r + dr`` instead of ``dn + dr + dv``. Few queries over a long past therefore attend to the latents.

        Args:
            query: ``[batch, H, q, dn + dr]``.
            latent, rotary: ``[batch, 1, n, r]`` and ``[batch, 1, n, dr]``.
            attend: takes the place of :func:`.exact.exact_attention` over expanded keys; with ``first``, the first row
                and head that it gets. None: none does.

        Returns:
            ``[batch, H, q, dv]``.
        """
        q, n = query.shape[2], latent.shape[2]
        each = self.nope + self.rope + self.value
        # Twice: scores on latents go through memory, for want of a fused kernel of that width.
        if q < n and not dropout and 2 * q * (2 * self.rank + self.rope) < q * each + self.rank * (each - self.rope):
            return self.outputs(_on_latents(self.queries(query), latent, rotary, params, columns, mask))
        batch, heads = query.shape[:2]
        size = n * each * query.dtype.itemsize  # bytes of one row and head
        n_heads = min(heads, max(1, _PIECE // (batch * size)))
        n_rows = batch if n_heads > 1 else min(batch, max(1, _PIECE // size))
        if n_heads == heads and n_rows == batch:
            kv = self.expand(latent, rotary)
            return (attend or exact_attention)(query, *kv, params, columns=columns, mask=mask, dropout=dropout)
        out = query.new_empty(batch, heads, q, self.value)
        for row in range(0, batch, n_rows):
            rows = slice(row, row + n_rows)
            for lo in range(0, heads, n_heads):
                some = slice(lo, lo + n_heads)
                sinks = None if params.sink_logits is None else params.sink_logits[some]
                part = AttentionParams(params.scale, params.softcap, sinks, params.sliding_window)
                seen = None if columns is None else columns[rows]
                here = mask
                if mask is not None:
                    here = mask[rows] if mask.shape[0] > 1 else mask
                    here = here[:, some] if mask.shape[1] > 1 else here
                kv = self.expand(latent[rows], rotary[rows], some)
                here_too = exact_attention if attend is None else partial(attend, first=(row, lo))
                out[rows, some] = here_too(query[rows, some], *kv, part, columns=seen, mask=here, dropout=dropout)
        return out

    def expand(self, latent: Tensor, rotary: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys ``[batch, h, n, dn + dr]`` and values ``[batch, h, n, dv]`` of some heads, as the model's own method."""
        weight = self.matrix(latent)[heads]
        kv = nn.functional.linear(latent[:, 0], weight.flatten(0, 1))  # [batch, n, h * (dn + dv)]
        kv = kv.unflatten(-1, (len(weight), -1)).transpose(1, 2)
        nope, value = kv.split((self.nope, self.value), dim=-1)
        return torch.cat((nope, rotary.expand(-1, len(weight), -1, -1)), dim=-1), value


def _by_head(x: Tensor, matrix: Tensor) -> Tensor:
    """``x [batch, H, q, a]`` times ``matrix [H, a, b]``: all rows of a head at once, so that it is read once."""
    batch, heads, q, _ = x.shape
    return torch.bmm(x.transpose(0, 1).flatten(1, 2), matrix).view(heads, batch, q, -1).transpose(0, 1)


def _on_latents(
    query: Tensor, latent: Tensor, rotary: Tensor, params: AttentionParams, columns: Tensor | None, mask: Tensor | None
) -> Tensor:
    """Attention of absorbed queries ``[batch, H, q, r + dr]``, ``[batch, H, q, r]``: some queries at a time."""
    batch, heads, q, _ = query.shape
    n, rank = latent.shape[2], latent.shape[3]
    out = query.new_empty(batch, heads, q, rank)
    parts = (latent[:, 0].transpose(1, 2), rotary[:, 0].transpose(1, 2))  # [batch, r or dr, n]
    step = max(1, PIECE_BYTES // (4 * batch * heads * n))
    rule = None if mask is not None else Rule(columns).within(params.sliding_window, n)
    for lo in range(0, q, step):
        hi = min(lo + step, q)
        some = query[:, :, lo:hi].flatten(1, 2)  # [batch, H * q, r + dr]
        end = n if rule is None else n - q + hi
        seen = mask[:, :, lo:hi] if rule is None else rule.mask(n - q + lo, end, 0, query.device)
        logits = product(some[..., :rank], parts[0][..., :end]).add_(product(some[..., rank:], parts[1][..., :end]))
        logits = logits.mul_(params.scale).unflatten(1, (heads, -1))  # [batch, H, q, n]
        if params.softcap is not None:
            logits = logits.div_(params.softcap).tanh_().mul_(params.softcap)
        logits = logits.masked_fill_(~seen, float("-inf")) if seen.dtype == torch.bool else logits.add_(seen)
        if params.sink_logits is not None:
            sink = params.sink_logits.float().view(1, -1, 1, 1).expand(batch, -1, hi - lo, 1)
            logits = torch.cat((logits, sink), dim=-1)
        weights = logits.softmax(-1).nan_to_num_(0.0)[..., :end].to(latent.dtype).flatten(1, 2)
        out[:, :, lo:hi] = torch.bmm(weights, latent[:, 0, :end]).unflatten(1, (heads, -1))
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product in float32 (of bfloat16 on tensor cores: rounded scores would cost a digit of the weights)."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
