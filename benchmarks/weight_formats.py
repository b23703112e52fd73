"""Forms in which weights are kept: a model's linear layers turned into what transformers makes of them on loading.

The output embedding and the embedding table stay as they are, as libraries leave them. Weights are those of the model
that is given, quantised without calibration: what a step costs does not depend on their values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .shapes import text_config

BLOCK = 128  # channels that share a scale, of transformers' fp8 (DeepSeek-V3's checkpoints)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """One form of the weights.

    Args:
        name: as in the rows.
        about: for tables and ``--help``.
        make: turns one linear layer into what stands in its place; None leaves all as they are. Raises ``ImportError``
            if the library is not installed, and what the library raises where it cannot.
    """

    name: str
    about: str
    make: Callable[[nn.Linear], nn.Module] | None


def bnb_4bit(layer: nn.Linear) -> nn.Module:
    """4 bits each, a scale for 64: ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")``.

    Computes in the dtype that the weights had.
    """
    import bitsandbytes as bnb

    with torch.device("meta"):
        new = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            compute_dtype=layer.weight.dtype,
            compress_statistics=False,
            quant_type="nf4",
        )
    device = layer.weight.device
    new.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **new.weight.__dict__).to(device)
    new.bias = layer.bias
    return new


def bnb_8bit(threshold: float) -> Callable[[nn.Linear], nn.Module]:
    """8 bits each, a scale a row; inputs of ``threshold`` and more are multiplied in 16 bits (0: none)."""

    def make(layer: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        # It says in each call of each layer that bfloat16 becomes float16 on its way.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        with torch.device("meta"):
            new = bnb.nn.Linear8bitLt(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                has_fp16_weights=False,
                threshold=threshold,
            )
        device = layer.weight.device
        # It quantises what comes from the CPU (transformers' Bnb8bitQuantize).
        new.weight = bnb.nn.Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False).to(device)
        new.bias = layer.bias
        return new

    return make


def torchao(config: str, **settings: str | Callable) -> Callable[[nn.Linear], nn.Module]:
    """torch's own layer over weights of torchao: ``quantize_(model, config(**settings))``.

    ``settings`` that are functions are given ``torchao.quantization`` and return the setting.
    """

    def make(layer: nn.Linear) -> nn.Module:
        import torchao.quantization as library

        found = {name: value(library) if callable(value) else value for name, value in settings.items()}
        holder = nn.Sequential(layer)
        library.quantize_(holder, getattr(library, config)(**found))
        return holder[0]

    return make


def compressed_fp8(layer: nn.Linear) -> nn.Module:
    """8 bit floats, a scale a row: fp8 checkpoints of compressed-tensors under ``use_optimized_inference=True``."""
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

    with torch.device("meta"):
        new = CompressedTensorsFP8Linear(layer.in_features, layer.out_features, layer.bias is not None)
    weight = layer.weight.data.float()
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / torch.finfo(FP8).max
    new.weight = nn.Parameter((weight / scale).to(FP8), False)
    new.weight_scale = nn.Parameter(scale.reshape(1, -1), False)
    new.bias = layer.bias
    return new


def finegrained_fp8(layer: nn.Linear) -> nn.Module:
    """8 bit floats, a scale for 128 x 128: transformers' ``FineGrainedFP8Config``, DeepSeek-V3's checkpoints."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        new = FP8Linear(layer.in_features, layer.out_features, (BLOCK, BLOCK), has_bias=layer.bias is not None)
    out, inner = layer.weight.shape
    rows, columns = -(-out // BLOCK), -(-inner // BLOCK)
    weight = nn.functional.pad(layer.weight.data.float(), (0, columns * BLOCK - inner, 0, rows * BLOCK - out))
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(FP8).max
    quantised = (blocks / scale[:, None, :, None]).view_as(weight)[:out, :inner]
    new.weight = nn.Parameter(quantised.to(FP8), False)
    new.weight_scale_inv = nn.Parameter(scale, False)
    new.bias = layer.bias
    return new


def _tiles(library: Any) -> Any:
    from torchao.quantization.quantize_.workflows import Int4PackingFormat

    return Int4PackingFormat.TILE_PACKED_TO_4D


FORMATS = {
    one.name: one
    for one in (
        Format("bf16", "bfloat16", None),
        Format("bnb-nf4", "bitsandbytes, 4 bits (nf4)", bnb_4bit),
        Format("bnb-int8", "bitsandbytes, 8 bits, `llm_int8_threshold=0`", bnb_8bit(0.0)),
        Format("bnb-int8-outliers", "bitsandbytes, 8 bits, `llm_int8_threshold=6` (its default)", bnb_8bit(6.0)),
        Format("torchao-int8", "torchao, `Int8WeightOnlyConfig`", torchao("Int8WeightOnlyConfig")),
        Format("torchao-int4", "torchao, `Int4WeightOnlyConfig` (plain: needs mslk)", torchao("Int4WeightOnlyConfig")),
        Format(
            "torchao-int4-tiles",
            "torchao, `Int4WeightOnlyConfig`, `TILE_PACKED_TO_4D`",
            torchao("Int4WeightOnlyConfig", int4_packing_format=_tiles),
        ),
        Format("torchao-fp8", "torchao, `Float8WeightOnlyConfig`", torchao("Float8WeightOnlyConfig")),
        Format(
            "torchao-fp8-dynamic",
            "torchao, `Float8DynamicActivationFloat8WeightConfig`",
            torchao("Float8DynamicActivationFloat8WeightConfig"),
        ),
        Format(
            "torchao-fp8-dynamic-rows",
            "the same, `granularity=PerRow()`",
            torchao("Float8DynamicActivationFloat8WeightConfig", granularity=lambda library: library.PerRow()),
        ),
        Format("fp8-blocks", "transformers' `FineGrainedFP8Config`: kernels of the hub", finegrained_fp8),
        Format("compressed-fp8", "compressed-tensors' fp8, `use_optimized_inference=True`", compressed_fp8),
    )
}


@torch.no_grad()
def convert(model: nn.Module, form: Format) -> int:
    """Turn the linear layers of ``model`` into ``form``, one by one, in place; how many.

    Raises:
        ImportError: its library, or something that this needs, is not installed.
    """
    if form.make is None:
        return 0
    head, done = model.get_output_embeddings(), 0
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            model.set_submodule(name, form.make(layer).requires_grad_(False).eval())
            done += 1
    return done


def kept_bytes(model: nn.Module) -> int:
    """Bytes of weights that a step of a dense model reads, scales included: all but a table that is only looked up in.

    ``nbytes`` of a parameter says nothing where its class keeps other tensors in it (torchao), beside it (bitsandbytes'
    ``quant_state``) or in its layer (``state``): these are looked for, and memory that several share counts once.
    """
    seen: dict[int, int] = {}
    for module in model.modules():
        for t in _tensors([*module._parameters.values(), *module._buffers.values(), module.__dict__.get("state")]):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    table = model.get_input_embeddings().weight
    return sum(seen.values()) - (0 if text_config(model).tie_word_embeddings else table.nbytes)


def _tensors(found: Any, met: set[int] | None = None) -> Iterator[Tensor]:
    """The plain tensors in tensors, lists and bitsandbytes' objects."""
    met = set() if met is None else met
    if found is None or id(found) in met:
        return
    met.add(id(found))
    if isinstance(found, list | tuple):
        for one in found:
            yield from _tensors(one, met)
    elif isinstance(found, Tensor) and hasattr(found, "__tensor_flatten__"):
        names, _ = found.__tensor_flatten__()
        yield from _tensors([getattr(found, name) for name in names], met)
    elif isinstance(found, Tensor):
        yield found
        yield from _tensors(list(vars(found).values()), met)
    elif type(found).__module__.startswith("bitsandbytes.") and not isinstance(found, nn.Module):
        yield from _tensors(list(vars(found).values()), met)
