"""Where libraries of quantised weights keep codes and scales, as :class:`.ops.quantised_linear.QuantisedWeight`.

Known are bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``, torchao's ``Int8Tensor`` and ``Float8Tensor`` in torch's
own layer, transformers' ``FP8Linear`` and ``CompressedTensorsFP8Linear``, by names of classes and attributes; none
is imported. Codes are read where the library keeps them. Scales are, too, if they are float32; of others (8-bit ones of
bitsandbytes' double quantisation), and of its 8 bits, whose scales stand for 127, there is a copy in float32.

What a library rounds beside the weight is left out: bitsandbytes' 8 bits, dynamic formats of torchao and transformers'
two round the inputs to 8 bits, too. :func:`.ops.quantised_linear` leaves inputs in 16 bits, so results are closer to
those of the weights that are meant, and not the library's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..ops.quantised_linear import QuantisedWeight
from ..ops.quantised_linear.reference import CODES, FP8, check

_LEVELS = 127  # of int8 in bitsandbytes, whose scales are the largest numbers of each row


@dataclass
class _Source:
    """What a layer keeps.

    Args:
        codes: as the operator takes them, a view of the library's memory.
        of: what scales are made from.
        make: makes them, float32 ``[a, b]``; None if they are not what the operator knows. May wait for the GPU.
        block: rows and inputs that share one, as the library says; None if the shape of the scales says all.
        codebook: of codes of 4 bits.
    """

    codes: Tensor
    of: tuple[Tensor, ...]
    make: Callable[[], Tensor | None]
    block: tuple[int, int] | None = None
    codebook: Tensor | None = None


@dataclass
class Kept:
    """Scales of one layer, for as long as what they were made from stays as it is.

    Codes are looked up each time and not kept: a model that is moved gives its memory back. A copy of scales is written
    again where it is, so that captured steps, which know its place, go on with what the layer has now. Writes through
    ``.data``, or to inference tensors, are not seen.
    """

    _key: tuple = ()
    _of: tuple[Tensor, ...] = field(default=(), repr=False)
    _scales: Tensor | None = field(default=None, repr=False)

    def scales(self, source: _Source) -> Tensor | None:
        """Those of ``source``, made anew if a tensor was replaced, moved or written to.

        Raises:
            RuntimeError: they would be, in a step under capture, which would hold what computes them.
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
        if on_gpu:  # kernels may read them before those ahead of them have ended
            torch.cuda.current_stream(source.codes.device).synchronize()
        self._scales, self._key, self._of = made, key, source.of
        return made


def _takes(held: Tensor, made: Tensor, source: _Source) -> bool:
    """Whether scales ``made`` can be written where those before them are ``held``."""
    if held.shape != made.shape or held.device != made.device or held.is_inference():
        return False
    return _is_copy(held, source) and _is_copy(made, source)


def _is_copy(scales: Tensor, source: _Source) -> bool:
    """Whether they are memory of their own."""
    mine = scales.untyped_storage().data_ptr()
    return all(t.untyped_storage().data_ptr() != mine for t in source.of)


def found(layer: nn.Module, kept: Kept | None = None) -> QuantisedWeight | None:
    """The weight of ``layer``, if it is a linear layer of a known library in a form that the operator knows.

    Args:
        layer: any module.
        kept: of the same layer, from earlier calls.
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
    """Whether blocks of ``block``, of which the last one may be cut off, are what :attr:`QuantisedWeight.block` says.

    (33 blocks of 125 make 4,100 inputs, and so do 32 of 128 and one of 4.)
    """
    if block is None:
        return True
    return all(
        blocks == -(-size // each) and (blocks == 1 or -(-size // blocks) == each)
        for size, blocks, each in zip(sizes, scales.shape, block)
    )


def _float(scales: Tensor, *shape: int) -> Tensor:
    """As float32 of a shape; a view if they are float32."""
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
        return None  # a block, or a byte, would be of two rows
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


# class of the layer -> where it is from, and what reads it
_READERS: dict[str, tuple[str, Callable[[nn.Module], _Source | None]]] = {
    "Linear4bit": ("bitsandbytes.", _bnb_4bit),
    "LinearNF4": ("bitsandbytes.", _bnb_4bit),
    "LinearFP4": ("bitsandbytes.", _bnb_4bit),
    "Linear8bitLt": ("bitsandbytes.", _bnb_8bit),
    "Linear": ("torch.", _torchao),
    "FP8Linear": ("transformers.", _fp8),
    "CompressedTensorsFP8Linear": ("transformers.", _compressed_fp8),
}
