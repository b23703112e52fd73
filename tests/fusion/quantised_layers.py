"""Linear layers as libraries of quantised weights make them: by the libraries where they are installed, and imitated.

Imitations bear the names of what they stand for, by which such layers are known, and keep codes and scales where it
keeps them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sparsekv.ops.layers.quantised_linear import QuantisedWeight, dequantise

FP8 = torch.float8_e4m3fn
NF4 = torch.tensor([-1.0, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """``model`` with other linear layers in its decoder; the output embedding stays, as libraries leave it."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, make(child))
    return model


# ---------------------------------------------------------------------- by the libraries


def bnb4(layer: nn.Linear, **settings) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    settings = {"compress_statistics": False, "quant_type": "nf4"} | settings
    new = bnb.nn.Linear4bit(layer.in_features, layer.out_features, False, compute_dtype=torch.float32, **settings)
    new.weight = bnb.nn.Params4bit(layer.weight.detach().clone(), requires_grad=False, **settings)
    return new.to("cpu")


def bnb4_nested(layer: nn.Linear) -> nn.Module:
    return bnb4(layer, compress_statistics=True, quant_type="fp4", quant_storage=torch.bfloat16)


def bnb8(layer: nn.Linear, threshold: float = 0.0) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    how = {"has_fp16_weights": False, "threshold": threshold}
    new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, **how)
    new.weight = bnb.nn.Int8Params(layer.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    return new.to("cpu")


def bnb8_outliers(layer: nn.Linear) -> nn.Module:
    return bnb8(layer, 6.0)


def torchao(config: str, group: int | None = None) -> Callable[[nn.Linear], nn.Module]:
    def make(layer: nn.Linear) -> nn.Module:
        library = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        holder = nn.Sequential(copy.deepcopy(layer))
        how = {} if group is None else {"granularity": library.PerGroup(group)}
        library.quantize_(holder, getattr(library, config)(**how))
        return holder[0]

    return make


# ---------------------------------------------------------------------- imitated


class _Imitation(nn.Linear):
    """Multiplies with the weights that are meant."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.bias = layer.bias

    def meant(self) -> QuantisedWeight:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantise(self.meant()).to(x.dtype), self.bias)


def named(name: str, module: str) -> Callable[[type], type]:
    """Gives a class the name and module of another one."""

    def rename(kind: type) -> type:
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = module
        return kind

    return rename


@named("Linear4bit", "bitsandbytes.nn.modules")
class Bnb4(_Imitation):
    SIZE = 32

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        blocks = layer.weight.detach().reshape(-1, self.SIZE)
        largest = blocks.abs().amax(1)
        code = NF4.to(blocks.device)
        codes = (blocks / largest[:, None]).flatten()[:, None].sub(code).abs().argmin(1)
        self.weight = nn.Parameter((codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(-1, 1), False)
        self.weight.quant_state = SimpleNamespace(
            absmax=largest, shape=layer.weight.shape, code=code, blocksize=self.SIZE, offset=None, state2=None
        )

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.quant_state
        largest = state.absmax
        if state.state2 is not None:
            each = state.state2.absmax.repeat_interleave(state.state2.blocksize)[: len(largest)]
            largest = state.state2.code[largest.long()] * each + state.offset
        numbers = state.code[torch.cat((self.weight >> 4, self.weight & 15), 1).long()]
        return F.linear(x, (numbers.view(-1, self.SIZE) * largest[:, None]).view(state.shape).to(x.dtype), self.bias)


@named("LinearNF4", "bitsandbytes.nn.modules")
class Bnb4Nested(Bnb4):
    """Scales have 8 bits, indices of a codebook of their own, by blocks."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        state, code = self.weight.quant_state, torch.linspace(-1, 1, 256, device=self.weight.device)
        offset = state.absmax.mean()
        each = torch.cat([part.abs().max()[None] for part in (state.absmax - offset).split(20)])
        wide = each.repeat_interleave(20)[: len(state.absmax)]
        state.absmax = ((state.absmax - offset) / wide)[:, None].sub(code).abs().argmin(1).to(torch.uint8)
        state.offset, state.state2 = offset, SimpleNamespace(absmax=each, code=code, blocksize=20)


@named("Linear8bitLt", "bitsandbytes.nn.modules")
class Bnb8(_Imitation):
    """Codes and scales of the weight are moved to ``state`` by the first call."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        largest = layer.weight.detach().abs().amax(1)
        self.weight = nn.Parameter((layer.weight.detach() * (127 / largest[:, None])).round().to(torch.int8), False)
        self.weight.CB, self.weight.SCB = self.weight.data, largest
        self.state = SimpleNamespace(CB=None, SCB=None, has_fp16_weights=False)

    def meant(self) -> QuantisedWeight:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        return QuantisedWeight(self.state.CB, self.state.SCB[:, None] / 127)


def scaled(weight: Tensor, rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    """8-bit floats, and a scale for each block, the last of which are cut off."""
    padded = F.pad(weight, (0, -weight.shape[1] % inputs, 0, -weight.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, inputs)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    return codes.contiguous().to(FP8), scales


@named("FP8Linear", "transformers.integrations.finegrained_fp8")
class Fp8(_Imitation):
    block_size = (32, 32)

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        size = self.block_size or tuple(layer.weight.shape)
        codes, scales = scaled(layer.weight.detach(), *size)
        self.weight = nn.Parameter(codes, False)
        self.weight_scale_inv = nn.Parameter(scales if self.block_size else scales[0, 0], False)

    def meant(self) -> QuantisedWeight:
        scales = self.weight_scale_inv.data
        return QuantisedWeight(self.weight.data, scales if scales.dim() else scales.view(1, 1))


@named("FP8Linear", "transformers.integrations.finegrained_fp8")
class Fp8Tensor(Fp8):
    block_size = None


@named("CompressedTensorsFP8Linear", "transformers.integrations.compressed_tensors")
class CompressedFp8(_Imitation):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        codes, scales = scaled(layer.weight.detach(), 1, layer.in_features)
        self.weight, self.weight_scale = nn.Parameter(codes, False), nn.Parameter(scales.view(1, -1), False)

    def meant(self) -> QuantisedWeight:
        return QuantisedWeight(self.weight.data, self.weight_scale.data.view(-1, 1))


IMITATIONS = {
    "bnb4-like": Bnb4,
    "bnb4-nested-like": Bnb4Nested,
    "bnb8-like": Bnb8,
    "fp8-like": Fp8,
    "fp8-tensor-like": Fp8Tensor,
    "compressed-fp8-like": CompressedFp8,
}
LIBRARIES = {
    "bnb4": bnb4,
    "bnb4-nested": bnb4_nested,
    "bnb8": bnb8,
    "bnb8-outliers": bnb8_outliers,
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-int8-groups": torchao("Int8WeightOnlyConfig", 32),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
}
KNOWN = IMITATIONS | LIBRARIES
