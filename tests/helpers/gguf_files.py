"""Tiny GGUF files, written from models of :mod:`models` as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import torch
from models import build

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def vocabulary() -> list[str]:
    """Bytes as GPT-2 spells them, a marker that no file calls special, and special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), "ab", "cd", "<stop>", *SPECIAL]


def write(path: Path, kind: str, end: str, template: str | None = TEMPLATE, blocks: bool = False, **changes):
    """Write a random model's file.

    Args:
        kind: ``qwen2`` or ``llama``.
        end: the token that the file names as its end.
        blocks: weights in blocks of 8 bits, else float32.

    Returns:
        The model, whose matrices are those that the file's are read as.
    """
    import gguf
    from gguf.quants import dequantize, quantize

    tokens = vocabulary()
    net = build(kind, "sdpa", vocab_size=len(tokens), **changes)
    config = net.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim if kind == "llama" else 16)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["a b", "c d"])  # a single one is read as a text
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index(end))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    if template is not None:
        writer.add_chat_template(template)
    arch = {"qwen2": gguf.MODEL_ARCH.QWEN2, "llama": gguf.MODEL_ARCH.LLAMA}[kind]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in net.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        codes = None
        data = tensor.detach().float()
        if blocks and data.ndim == 2 and data.shape[1] % 32 == 0:
            codes = quantize(data.numpy(), q8)
            tensor.copy_(torch.from_numpy(dequantize(codes, q8)))
        if kind == "llama" and heads:  # the pairs of RoPE side by side
            rows = torch.arange(data.shape[0]).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)
            data, codes = data[rows], None if codes is None else codes[rows.numpy()]
        kept = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if codes is None:
            writer.add_tensor(kept, data.numpy())
        else:
            writer.add_tensor(kept, codes, raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return net
