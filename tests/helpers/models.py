"""Tiny random models, each built with any attention implementation from the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import transformers as tf
from inside import of_config

from hf_sparsekv import QueryTap

VOCAB = 97
PAD = 0

# No end-of-sequence token: generation always runs to max_new_tokens.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (model class, configuration class, what differs from COMMON)
MODELS: dict[str, tuple[type, type, dict]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {}),
    "llama-mha": (tf.LlamaForCausalLM, tf.LlamaConfig, {"num_key_value_heads": 4}),
    "llama-mqa": (tf.LlamaForCausalLM, tf.LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, {}),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {}),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig,
        {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": _HYBRID},
    ),
    "gemma2": (
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config,
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": _HYBRID,
            "attn_logit_softcapping": 2.0,  # low enough to bend these models' logits
            "query_pre_attn_scalar": 16,
        },
    ),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {"sliding_window": None}),
    "mistral-window": (tf.MistralForCausalLM, tf.MistralConfig, {"sliding_window": 12}),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config, {"sliding_window": None}),
    "gpt-oss": (
        tf.GptOssForCausalLM,
        tf.GptOssConfig,
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "qwen3-next": (
        tf.Qwen3NextForCausalLM,
        tf.Qwen3NextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    ),
}

# Multi-head latent attention: one latent and one rotary part are cached for all heads.
MLA_SIZES = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # several of these configurations call the rotary part so
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
MLA: dict[str, tuple[type, type, dict]] = {
    "deepseek-v2": (tf.DeepseekV2ForCausalLM, tf.DeepseekV2Config, {**EXPERTS, "first_k_dense_replace": 1}),
    "deepseek-v3": (
        tf.DeepseekV3ForCausalLM,
        tf.DeepseekV3Config,
        {
            **EXPERTS,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 256},
        },
    ),
    "glm4-moe-lite": (tf.Glm4MoeLiteForCausalLM, tf.Glm4MoeLiteConfig, EXPERTS),
    "axk1": (tf.AXK1ForCausalLM, tf.AXK1Config, {**EXPERTS, "first_k_dense_replace": 1}),
    "kimi-linear": (
        tf.KimiLinearForCausalLM,
        tf.KimiLinearConfig,
        {
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 4,
        },
    ),
    "longcat-flash": (
        tf.LongcatFlashForCausalLM,
        tf.LongcatFlashConfig,
        {
            "num_layers": 1,  # of two attention modules each
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "minicpm3": (tf.MiniCPM3ForCausalLM, tf.MiniCPM3Config, {}),
    "mistral4": (tf.Mistral4ForCausalLM, tf.Mistral4Config, {**EXPERTS, "head_dim": 20}),
    "youtu": (tf.YoutuForCausalLM, tf.YoutuConfig, {}),
}
MODELS |= {name: (model, config, {**MLA_SIZES, **own}) for name, (model, config, own) in MLA.items()}

# With an indexer of their own (DeepSeek Sparse Attention), which chooses 24 tokens a query. No method chooses for them.
_INDEXER = {"index_topk": 24, "index_n_heads": 8, "index_head_dim": 16}
_THREE = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
INDEXED: dict[str, tuple[type, type, dict]] = {
    "deepseek-v32": (
        tf.DeepseekV32ForCausalLM,
        tf.DeepseekV32Config,
        {"rope_parameters": {**_YARN, "original_max_position_embeddings": 256}},
    ),
    "glm-moe-dsa": (tf.GlmMoeDsaForCausalLM, tf.GlmMoeDsaConfig, _THREE),
    "axk2": (tf.AXK2ForCausalLM, tf.AXK2Config, {}),
    "hy-v4": (tf.HYV4ForCausalLM, tf.HYV4Config, _THREE),
}
INDEXED = {
    name: (model, config, {**MLA_SIZES, **EXPERTS, "first_k_dense_replace": 1, **_INDEXER, **own})
    for name, (model, config, own) in INDEXED.items()
}

# For all others "sdpa": gpt-oss and HY 4 have none, and sdpa drops Gemma2's softcap.
REFERENCE = {"gpt-oss": "eager", "gemma2": "eager", "hy-v4": "eager"}
NEEDS_CONFIG = ("qwen3-next", "kimi-linear")  # linear attention touches the cache before any attention does
# One of a kind: `make test` runs tests over all models with these alone where they are marked ``few``.
TELLING_MODELS = (
    *("llama-mqa", "qwen3", "gemma3", "gpt-oss", "qwen3-next", "deepseek-v3", "kimi-linear", "mistral-window"),
)
NOTHING_SPARSE = ("mistral-window",)


def build(name: str, attn: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A new model in eval mode; the same seed gives the same weights whatever ``attn`` is."""
    model_class, config_class, own = (MODELS | INDEXED)[name]
    config = config_class(**{**COMMON, **own, **changes}, attn_implementation=attn)
    torch.manual_seed(seed)
    return wide(model_class(config), seed)


def wide(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """``model`` in eval mode, with random weights of which its text depends."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Wide weights: with the usual 0.02 greedy text is one token over and over.
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=generator)
            elif key.endswith("sinks"):  # as large as the logits, or nobody would miss them
                parameter.normal_(mean=6.0, generator=generator)
    return model


def dots3_note(attn: str) -> torch.nn.Module:
    """Dots 3 Note's text model (transformers 5.24): between layers with an indexer sliding ones of other latents."""
    sliding = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 32}
    sliding |= {"head_dim": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 12, "v_head_dim": 10}
    own = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "indexed_attention"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "dense"],
        "shared_experts_intermediate_size": 32,
        "sliding_window": 17,
        **{f"swa_{name}": value for name, value in sliding.items()},
    }
    config = tf.Dots3NoteTextConfig(**{**COMMON, **MLA_SIZES, **EXPERTS, **_INDEXER, **own}, attn_implementation=attn)
    torch.manual_seed(0)
    return wide(tf.Dots3NoteForCausalLM(config))


# Layers 2 to 4 attend to what layers 0 and 1 have stored, two of them by an indexer of their own.
SHARING = {
    "no_rope_layers": [1, 0, 1, 0, 1, 1],
    "kv_source_layers": [0, 1, 0, 1, 0, 5],
    "indexer_types": ["full", "full", "shared", "full", "full", "shared"],
}


def mistral_large4(attn: str, **changes) -> torch.nn.Module:
    """Mistral Large 4 (transformers 5.24), which also takes images; its fourth layer has no rotary part."""
    text = {**COMMON, **MLA_SIZES, **EXPERTS, **_INDEXER, "num_hidden_layers": 6, "first_k_dense_replace": 1}
    text["rope_parameters"] = {**_YARN, "original_max_position_embeddings": 256, "attention_factor": 1.0}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "image_size": 32, "patch_size": 8}
    vision = {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, **sizes}
    config = tf.MistralLarge4Config(text_config={**text, **changes}, vision_config=vision)
    torch.manual_seed(0)
    return wide(of_config(tf.MistralLarge4ForConditionalGeneration, config, attn))


def minimax_m3(attn: str) -> torch.nn.Module:
    """MiniMax M3's text model: each KV head chooses 4 blocks of 8 tokens in every second layer."""
    config = tf.MiniMaxM3VLTextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        layer_types=["full_attention", "minimax_m3_sparse"] * 2,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=8,
        index_topk_blocks=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        rotary_dim=8,
    )
    torch.manual_seed(0)
    return wide(of_config(tf.MiniMaxM3VLForCausalLM, config, attn))


_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}


def qwen4_exp(attn: str, kinds: Sequence[str]) -> torch.nn.Module:
    """Qwen4-Exp with layers of ``kinds``, new and in eval mode. A query chooses 4 blocks of 4 tokens."""
    config = tf.Qwen4ExpTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=len(kinds),
        layer_types=list(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=_ROPE,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hc_lowrank"), 8),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        num_experts=4,
        num_experts_per_tok=2,
        hc_count=2,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
        max_position_embeddings=2560,
    )
    torch.manual_seed(0)
    net = of_config(tf.Qwen4ExpForCausalLM, config, attn).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    return net


@cache
def model(name: str, attn: str = "sparsekv") -> torch.nn.Module:
    """The shared model of a name, not to be changed by tests. Ours predict ahead, as captured ones do."""
    found = build(name, attn)
    if attn == "sparsekv":
        QueryTap(found).install()
    return found


def reference(name: str) -> torch.nn.Module:
    """The same weights with an attention implementation of transformers' own."""
    return model(name, REFERENCE.get(name, "sdpa"))


_texts: dict[tuple, torch.Tensor] = {}


def plain_text(name: str, inputs: dict[str, torch.Tensor], **generate) -> torch.Tensor:
    """The reference's text with transformers' own cache: worked out once for each input and way to ask."""
    given = [(key, tuple(value.shape), value.numpy().tobytes()) for key, value in inputs.items()]
    key = (name, *given, repr(sorted(generate.items())))
    if key not in _texts:
        plain = reference(name)  # making a model draws numbers, too
        torch.manual_seed(11)
        _texts[key] = plain.generate(**inputs, **{"do_sample": False, **generate})
    return _texts[key]


def prompt(batch: int, length: int, pads: tuple[int, ...] | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ``input_ids`` and ``attention_mask``; row ``i`` has ``pads[i]`` columns of left padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads or ()):
        ids[row, :pad] = PAD
        mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sharp_on_gpu(config, attn: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of this configuration, whose attention is far from uniform."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        net = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if parameter.ndim > 1 and "embed" not in key:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    return net.to(dtype)
