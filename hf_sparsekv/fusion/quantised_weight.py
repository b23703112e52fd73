"""Read the codes and scales of quantisation libraries as :class:`.ops.layers.quantised_linear.QuantisedWeight`.

Supported are bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``, torchao's ``Int8Tensor`` and ``Float8Tensor`` in
torch's own layer, and transformers' ``FP8Linear`` and ``CompressedTensorsFP8Linear``. They are recognised by names of
classes and attributes; no library is imported. Codes are read in place, and so are float32 scales. Other scales are
copied to float32: the 8-bit ones of bitsandbytes' double quantisation, and those of its 8 bits, which are 127 times as
large.

Some libraries also round the inputs to 8 bits: bitsandbytes' 8 bits, dynamic formats of torchao and transformers' two.
:func:`.ops.layers.quantised_linear` leaves inputs in 16 bits. Its results are closer to those of the dequantised
weights, and differ from the library's in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..ops.layers.quantised_linear import QuantisedWeight
from ..ops.layers.quantised_linear.reference import CODES, FP8, check

_LEVELS = 127  # largest int8 code in bitsandbytes, whose scales are the largest numbers of each row


@dataclass
class _Source:
    """Codes and scales as a library stores them.

    Args:
        codes: codes in the operator's form, a view of the library's memory.
        of: tensors that the scales are computed from.
        make: computes the scales, float32 ``[a, b]``; None if the operator does not support them. May wait for the GPU.
        block: rows and inputs that share a scale, from the library; None if the shape of the scales determines them.
        codebook: codebook of 4-bit codes.
    """

    codes: Tensor
    of: tuple[Tensor, ...]
    make: Callable[[], Tensor | None]
    block: tuple[int, int] | None = None
    codebook: Tensor | None = None


@dataclass
class Kept:
    """Cached scales of one layer, valid as long as the tensors they were computed from are unchanged.

    Codes are looked up each time and not cached, so that a model that is moved frees its memory. A copy of scales is
    updated in place, so that captured steps, which hold its address, use the layer's current scales. Writes through
    ``.data``, or to inference tensors, are not detected.
    """

    _key: tuple = ()
    _of: tuple[Tensor, ...] = field(default=(), repr=False)
    _scales: Tensor | None = field(default=None, repr=False)

    def scales(self, source: _Source) -> Tensor | None:
        """Scales of ``source``, recomputed if a tensor was replaced, moved or written to.

        Raises:
            RuntimeError: they must be recomputed during a capture, which would record the computation.
        """
        key = tuple((t.data_ptr(), 0 if t.is_inference() else t._version, t.device) for t in source.of)
        if key == self._key and len(self._of) == len(source.of) and all(a is b for a, b in zip(self._of, source.of)):
            return self._scales
        on_gpu = source.codes.is_cuda
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the scales of a quantised layer have changed")
        made, held = source.make(), self._scales
        if made is not None and held is not None and _takes(held, made, source):
            made = held.copy_(made)
        if on_gpu:  # dependent launches may read them before earlier kernels have ended
            torch.cuda.current_stream(source.codes.device).synchronize()
        self._scales, self._key, self._of = made, key, source.of
        return made


def _takes(held: Tensor, made: Tensor, source: _Source) -> bool:
    """Whether scales ``made`` can be written over the previous ones, ``held``."""
    if held.shape != made.shape or held.device != made.device or held.is_inference():
        return False
    return _is_copy(held, source) and _is_copy(made, source)


def _is_copy(scales: Tensor, source: _Source) -> bool:
    """Whether the scales have separate memory, not shared with the library's tensors."""
    mine = scales.untyped_storage().data_ptr()
    return all(t.untyped_storage().data_ptr() != mine for t in source.of)


def found(layer: nn.Module, kept: Kept | None = None) -> QuantisedWeight | None:
    """The weight of ``layer``, if it is a linear layer of a supported library in a supported format.

    Args:
        layer: any module.
        kept: cached scales of the same layer, from earlier calls.
    """
    package, reader = _READERS.get(type(layer).__name__, ("", None))
    source = reader(layer) if reader is not None and type(layer).__module__.startswith(package) else None
    if source is None:
        return None
    with torch.no_grad():
        scales = source.make() if kept is None else kept.scales(source)
    if scales is None:
        return None
    weight = QuantisedWeight(source.codes, scales, source.codebook)
    try:
        check(weight)
    except ValueError:
        return None
    tensors = [t for t in weight if t is not None]
    if any(t.device != source.codes.device or t.stride(-1) != 1 for t in tensors):
        return None
    sizes = (weight.out_features, weight.in_features)
    if sizes != (layer.out_features, layer.in_features) or not _is_cut_so(sizes, scales, source.block):
        return None
    return weight


def _is_cut_so(sizes: tuple[int, int], scales: Tensor, block: tuple[int, int] | None) -> bool:
    """Whether :attr:`QuantisedWeight.block` gives the library's ``block``, whose last one may be cut off.

    (4,100 inputs in 33 blocks may be blocks of 125, or 32 blocks of 128 and one of 4.)
    """
    if block is None:
        return True
    return all(
        blocks == -(-size // each) and (blocks == 1 or -(-size // blocks) == each)
        for size, blocks, each in zip(sizes, scales.shape, block)
    )


def _float(scales: Tensor, *shape: int) -> Tensor:
    """The scales as float32 in a shape; a view if they are float32 already."""
    return scales.detach().float().reshape(shape)


# ---------------------------------------------------------------------- bitsandbytes


def _bnb_4bit(layer: nn.Module) -> _Source | None:
    packed = layer.weight
    state = getattr(packed, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return None
    if state.shape is None or len(state.shape) != 2 or not packed.is_contiguous():
        return None
    rows, inputs = state.shape
    nested, size = state.state2, state.blocksize
    if (
        inputs % 2
        or inputs % size
        or packed.nbytes != rows * inputs // 2
        or state.absmax.numel() * size != rows * inputs
    ):
        return None  # a block, or a byte, would span two rows
    if state.code.shape != (CODES,) or state.code.dtype != torch.float32:
        return None
    of = (state.absmax,) if nested is None else (state.absmax, state.offset, nested.absmax, nested.code)

    def make() -> Tensor:
        if nested is None:
            return _float(state.absmax, rows, -1)
        each = nested.absmax.repeat_interleave(nested.blocksize)[: state.absmax.numel()]
        return _float(nested.code[state.absmax.flatten().int()] * each + state.offset, rows, -1)

    return _Source(packed.data.view(torch.uint8).view(rows, inputs // 2), of, make, codebook=state.code)


def _bnb_8bit(layer: nn.Module) -> _Source | None:
    if layer.state.has_fp16_weights:
        return None
    # The first forward pass moves them from the weight to the state.
    codes, scales = layer.weight.CB, layer.weight.SCB
    if codes is None or scales is None:
        codes, scales = layer.state.CB, layer.state.SCB
    if codes is None or scales is None or codes.dim() != 2 or scales.numel() != codes.shape[0]:
        return None
    return _Source(codes, (scales,), lambda: _float(scales, -1, 1) / _LEVELS)


# ---------------------------------------------------------------------- torchao, in torch's own layer


def _torchao(layer: nn.Module) -> _Source | None:
    weight = getattr(layer, "weight", None)
    kind = type(weight)
    if not kind.__module__.startswith("torchao.") or kind.__name__ not in ("Int8Tensor", "Float8Tensor"):
        return None
    codes, scales, zero = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    if getattr(weight, "act_pre_scale", None) is not None or codes.dim() != 2 or scales.numel() == 0:
        return None
    shape = scales.shape if scales.dim() == 2 else (1, 1) if scales.numel() == 1 else (-1, 1)
    block = tuple(weight.block_size) if weight.block_size and scales.dim() == 2 else None

    def make() -> Tensor | None:
        # Symmetric formats keep zeros.
        return None if zero is not None and bool(zero.any()) else _float(scales, *shape)

    return _Source(codes, (scales,) if zero is None else (scales, zero), make, block)


# ---------------------------------------------------------------------- transformers


def _fp8(layer: nn.Module) -> _Source | None:
    if layer.weight.dtype != FP8:
        return None
    scales = layer.weight_scale_inv
    if layer.block_size is None:
        return None if scales.numel() != 1 else _Source(layer.weight.data, (scales,), lambda: _float(scales, 1, 1))
    if scales.dim() != 2:
        return None
    return _Source(layer.weight.data, (scales,), lambda: _float(scales, *scales.shape), tuple(layer.block_size))


def _compressed_fp8(layer: nn.Module) -> _Source | None:
    if layer.weight.dtype != FP8:
        return None
    scales = layer.weight_scale
    if scales.numel() not in (1, layer.weight.shape[0]):
        return None
    return _Source(layer.weight.data, (scales,), lambda: _float(scales, -1, 1))


# class of the layer -> its package, and the function that reads it
_READERS: dict[str, tuple[str, Callable[[nn.Module], _Source | None]]] = {
    "Linear4bit": ("bitsandbytes.", _bnb_4bit),
    "LinearNF4": ("bitsandbytes.", _bnb_4bit),
    "LinearFP4": ("bitsandbytes.", _bnb_4bit),
    "Linear8bitLt": ("bitsandbytes.", _bnb_8bit),
    "Linear": ("torch.", _torchao),
    "FP8Linear": ("transformers.", _fp8),
    "CompressedTensorsFP8Linear": ("transformers.", _compressed_fp8),
}
