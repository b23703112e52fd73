"""The probe models, and a forward to train them: weights of transformers' classes, a batch's tokens in one row.

All but attention runs on ``[tokens, hidden]``, so one compilation serves every length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_sparsekv_eval import probe_language as lang

MAX_LENGTH = 65536
THETA = 1e7
UNBOUNDED = ("q_b_proj", "kv_a_proj", "kv_b_proj")  # make attention logits without a norm behind them
SINKS, WINDOW = 4, 64  # attended on top of the budget, as the caches do


@dataclass(frozen=True)
class Size:
    """Dimensions; the defaults are the published models', tests take smaller ones."""

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int | None = None  # 768, with latent attention 704
    q_rank: int = 192
    kv_rank: int = 128
    nope: int = 32
    rope: int = 64
    theta: float = THETA
    logit_init: float = 0.5  # standard deviation of the first queries' and keys' numbers


def build(kind: str, size: Size, seed: int):
    """A new model, float32, with weights for Muon: every matrix has a spectral norm of about one."""
    common = {
        "vocab_size": lang.VOCAB_SIZE,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.theta},
        "tie_word_embeddings": True,
        "pad_token_id": lang.PAD,
        "bos_token_id": lang.BOS,
        "eos_token_id": lang.END,
    }
    if kind == "gqa":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        own = {"num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "intermediate_size": size.ffn or 768}
        model = Qwen3ForCausalLM(Qwen3Config(**common, **own))
        for layer in model.model.layers:  # the largest logit is 8 times the product of the two
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.data.fill_(1.4)
    elif kind == "mla":
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        own = {
            "num_key_value_heads": size.heads,
            "intermediate_size": size.ffn or 704,
            "first_k_dense_replace": size.layers,  # no experts
            "q_lora_rank": size.q_rank,
            "kv_lora_rank": size.kv_rank,
            "qk_nope_head_dim": size.nope,
            "qk_rope_head_dim": size.rope,
            "v_head_dim": size.head_dim,
            "rope_interleave": False,
            "num_mtp_layers": 0,
        }
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**common, **own))
    else:
        raise ValueError(f"kind must be 'gqa' or 'mla', got {kind!r}")
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            scale = 0.25 if "o_proj" in name or "down_proj" in name else 0.5
            scale = size.logit_init if any(part in name for part in UNBOUNDED) else scale
            weight.data = torch.randn(weight.shape, generator=random) * scale / math.sqrt(weight.shape[1])
    return model


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [tokens, heads, D]``, ``cos`` and ``sin`` ``[tokens, D]``."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def project_gqa(h, cos, sin, norm, wq, wk, wv, q_norm, k_norm):
    """Queries ``[tokens, Hq, D]``, keys and values ``[tokens, Hkv, D]``."""
    x, dim = rms_norm(h, norm), q_norm.shape[0]
    q = rms_norm((x @ wq.t()).unflatten(-1, (-1, dim)), q_norm)
    k = rms_norm((x @ wk.t()).unflatten(-1, (-1, dim)), k_norm)
    return rotate(q, cos, sin), rotate(k, cos, sin), (x @ wv.t()).unflatten(-1, (-1, dim))


def project_mla(h, cos, sin, norm, wqa, q_norm, wqb, wkva, kv_norm, wkvb, *, heads: int):
    """The same with a latent for all heads, expanded (a key and a value per query head)."""
    x, rank, rope = rms_norm(h, norm), kv_norm.shape[0], cos.shape[1]
    q = (rms_norm(x @ wqa.t(), q_norm) @ wqb.t()).unflatten(-1, (heads, -1))
    nope = q.shape[-1] - rope
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
    both = x @ wkva.t()
    kv = (rms_norm(both[..., :rank], kv_norm) @ wkvb.t()).unflatten(-1, (heads, -1))
    turned = rotate(both[:, None, rank:], cos, sin).expand(-1, heads, -1)
    return q, torch.cat((kv[..., :nope], turned), -1), kv[..., nope:].contiguous()


def finish(h, attended, wo, norm, gate, up, down):
    """Output projection and MLP; ``attended [tokens, Hq * D]``."""
    h = h + attended @ wo.t()
    x = rms_norm(h, norm)
    return h + (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def token_losses(h, norm, embedding, target):
    """Cross entropy and whether the best token is the target, ``[tokens]`` each."""
    logits = (rms_norm(h, norm) @ embedding.t()).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target


def select(scores: Tensor, groups: int, budget: int, start: int) -> Tensor:
    """The oracle: which tokens the heads of a group attend to together.

    A token ranks by the largest share of attention that a head of the group gives it.

    Args:
        scores: masked logits ``[batch, heads, n, length]`` of the queries at columns ``start ...``.
        groups: KV heads (one with latent attention).
        budget: tokens beside the sinks and the recent window.

    Returns:
        bool ``[batch, heads, n, length]``.
    """
    batch, heads, n, length = scores.shape
    share = scores.softmax(-1).view(batch, groups, heads // groups, n, length).amax(2)
    column = torch.arange(length, device=scores.device)
    now = torch.arange(start, start + n, device=scores.device)[:, None]
    always = (column < SINKS) | ((column > now - WINDOW) & (column <= now))
    share = share.masked_fill(always, -1.0)
    least = share.topk(min(budget, length), -1, sorted=False).values.amin(-1, keepdim=True)
    keep = (share >= least.clamp(min=0)) | always
    return keep[:, :, None].expand(-1, -1, heads // groups, -1, -1).reshape(scores.shape)


class Network:
    """Forward passes over a model's weights.

    Args:
        model: made by :func:`build`.
        compiled: let torch.compile have the token-wise parts.
    """

    def __init__(self, model, compiled: bool = False) -> None:
        self.model, self.kind = model, "mla" if model.config.model_type == "deepseek_v3" else "gqa"
        config = model.config
        self.groups = 1 if self.kind == "mla" else config.num_key_value_heads
        rope = config.qk_rope_head_dim if self.kind == "mla" else config.head_dim
        self.scale = (config.qk_head_dim if self.kind == "mla" else config.head_dim) ** -0.5
        theta = config.rope_parameters["rope_theta"]
        self.inverse = 1.0 / (theta ** (torch.arange(0, rope, 2, dtype=torch.float32) / rope))
        self.project = project_gqa
        if self.kind == "mla":
            self.project = partial(project_mla, heads=config.num_attention_heads)
        self.finish, self.losses = finish, token_losses
        if compiled:
            self.project, self.finish, self.losses = (
                torch.compile(f, dynamic=False) for f in (self.project, self.finish, self.losses)
            )
        self.backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def weights(self, layer) -> tuple[tuple, tuple]:
        a, mlp = layer.self_attn, layer.mlp
        if self.kind == "mla":
            mine = (a.q_a_proj, a.q_a_layernorm, a.q_b_proj, a.kv_a_proj_with_mqa, a.kv_a_layernorm, a.kv_b_proj)
        else:
            mine = (a.q_proj, a.k_proj, a.v_proj, a.q_norm, a.k_norm)
        after = (a.o_proj, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return tuple(m.weight for m in (layer.input_layernorm, *mine)), tuple(m.weight for m in after)

    def angles(self, batch: int, length: int, spare: int, like: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(length, device=like.device, dtype=torch.float32).repeat(batch)
        turn = F.pad(position, (0, spare))[:, None] * self.inverse.to(like.device)
        turn = torch.cat((turn, turn), -1)
        return turn.cos().to(like.dtype), turn.sin().to(like.dtype)

    def full(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention ``[batch, heads, n, D]``."""
        with sdpa_kernel(self.backends, set_priority=True):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=k.shape[1] != q.shape[1]
            )

    def tail(self, q: Tensor, k: Tensor, v: Tensor, budget: int | None, penalty: int | None) -> tuple[Tensor, Tensor]:
        """Attention of the last queries, from explicit scores.

        Args:
            q: ``[batch, heads, n, D]`` of the last n of the columns of ``k`` and ``v``.
            budget: attend to the oracle's choice of so many tokens; ``None``: to all.
            penalty: measure the mass outside the oracle's choice of so many tokens; ``None``: do not.

        Returns:
            ``[batch, heads, n, D]``, and per head minus the logarithm of the mass inside the choice, ``[heads]``.
        """
        batch, heads, n, _ = q.shape
        length = k.shape[2]
        start = length - n
        scores = (q.reshape(batch, k.shape[1], -1, q.shape[-1]) @ k.mT).view(batch, heads, n, length)
        scores = scores.float() * self.scale
        future = torch.arange(length, device=q.device) > torch.arange(start, length, device=q.device)[:, None]
        scores = scores.masked_fill(future, float("-inf"))
        lost = scores.new_zeros(heads)
        if penalty is not None:
            with torch.no_grad():
                inside = select(scores, self.groups, penalty, start)
            kept = scores.masked_fill(~inside, float("-inf"))
            lost = (scores.logsumexp(-1) - kept.logsumexp(-1)).mean((0, 2))
        if budget is not None:
            if penalty != budget:
                with torch.no_grad():
                    inside = select(scores, self.groups, budget, start)
                kept = scores.masked_fill(~inside, float("-inf"))
            scores = kept
        share = scores.softmax(-1).to(v.dtype).view(batch, v.shape[1], -1, length)
        return (share @ v).view(batch, heads, n, -1), lost

    def hidden(
        self,
        ids: Tensor,
        n_tail: int = 0,
        budget: int | None = None,
        penalty: int | None = None,
        dense_layers: int = 2,
        pad_to: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Last hidden states ``[tokens, hidden]`` (``tokens`` is ``pad_to`` or ``ids.numel()``) and the lost mass.

        Args:
            ids: ``[batch, length]``.
            n_tail: columns at the end whose attention in layers ``>= dense_layers`` is :meth:`tail`'s.
        """
        batch, length = ids.shape
        count = batch * length
        spare = max(0, pad_to - count)
        embedding = self.model.model.embed_tokens.weight
        h = F.embedding(F.pad(ids.reshape(-1), (0, spare)), embedding)
        cos, sin = self.angles(batch, length, spare, h)
        losses = []
        for index, layer in enumerate(self.model.model.layers):
            before, after = self.weights(layer)
            q, k, v = (
                t[:count].unflatten(0, (batch, length)).transpose(1, 2) for t in self.project(h, cos, sin, *before)
            )
            if n_tail and index >= dense_layers:
                body = length - n_tail
                end, lost = self.tail(q[:, :, body:], k, v, budget, penalty)
                losses.append(lost)
                o = torch.cat((self.full(q[:, :, :body], k[:, :, :body], v[:, :, :body]), end), 2)
            else:
                o = self.full(q, k, v)
            h = self.finish(h, F.pad(o.transpose(1, 2).reshape(count, -1), (0, 0, 0, spare)), *after)
        return h, torch.stack(losses) if losses else h.new_zeros(1, dtype=torch.float32)


def check_backends(config, network: Network, log) -> list[SDPBackend]:
    """The attention kernels to use: cuDNN's, the quickest, if their gradients are right here; else flash's."""
    heads = config.num_attention_heads
    kv_heads = heads if network.kind == "mla" else config.num_key_value_heads
    width = config.qk_head_dim if network.kind == "mla" else config.head_dim
    random = torch.Generator("cuda").manual_seed(0)

    def gradients(backend: SDPBackend, batch: int, length: int) -> list[Tensor]:
        random.manual_seed(0)
        q, k, v, g = (
            torch.randn(batch, length, h, width, device="cuda", dtype=torch.bfloat16, generator=random)
            for h in (heads, kv_heads, kv_heads, heads)
        )
        leaves = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
        network.backends = [backend]
        out = network.full(*leaves)
        out.backward(g.transpose(1, 2))
        return [out.detach().float(), *(t.grad.float() for t in leaves)]

    best, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    try:
        for batch, length in ((16, 1024), (5, 13104), (3, 21840)):
            for a, b in zip(gradients(best, batch, length), gradients(flash, batch, length)):
                error = float((a - b).norm() / b.norm())
                if not error < 0.02:
                    raise RuntimeError(f"differs from flash by {error:.3f} at {batch} x {length}")
    except RuntimeError as error:
        log(f"cuDNN attention is not used: {' '.join(str(error).split())[:200]}")
        return [flash]
    return [best, flash]
