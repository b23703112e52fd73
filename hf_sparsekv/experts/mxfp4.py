"""``keep_mxfp4()``: experts that stay in four bits (gpt-oss, as it is published), without kernels of the hub.

transformers dequantises such a checkpoint where the package ``kernels`` is missing: 3.8 times the memory, and of the
bytes of each step. Here the codes and scales are parameters, under their names in the checkpoint, and our kernels read
them in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..ops.layers.experts import Mxfp4, dequantise, encode, experts
from ..ops.layers.experts.gates import Gate, between
from ..ops.layers.experts.mxfp4 import BIAS, BLOCK, MAX_SCALE
from ..untraced import untraced
from .interface import accelerated
from .recognised import gate_of

METHOD = "sparsekv_mxfp4"
_PRODUCTS = ("gate_up_proj", "down_proj")
Kept = TypeVar("Kept", PreTrainedConfig, PreTrainedModel)


def is_coded(config: object) -> bool:
    """Whether a configuration is of a checkpoint in MXFP4 that transformers would dequantise or give to the hub."""
    found: Any = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return getattr(method, "value", method) == "mxfp4"


def keep_mxfp4(where: Kept) -> Kept:
    """Keep a model's experts in MXFP4.

    With a configuration, before the model is loaded::

        config = hf_sparsekv.keep_mxfp4(AutoConfig.from_pretrained(name))
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype="auto", device_map="cuda")

    With a model whose checkpoint transformers has dequantised: its weights become codes again, layer by layer and
    without loss. This needs the memory of the dequantised model first.

    Args:
        where: the configuration of a checkpoint in MXFP4, or a model. It is changed.

    Returns:
        ``where``.

    Raises:
        ValueError: the checkpoint is not in MXFP4; or no experts of the model have weights that MXFP4 holds exactly.
    """
    if isinstance(where, PreTrainedConfig):
        if not is_coded(where):
            raise ValueError(
                "the configuration's checkpoint is not in MXFP4 (quantization_config): load it without keep_mxfp4()"
            )
        found: Any = where.quantization_config
        skipped = found.get("modules_to_not_convert") if isinstance(found, dict) else found.modules_to_not_convert
        where.quantization_config = {"quant_method": METHOD, "modules_to_not_convert": skipped}
        return where
    held = [(name, module) for name, module in where.named_modules() if hasattr(module, "is_transposed")]
    if not held:
        raise ValueError(f"{type(where).__name__} has no experts that could be in MXFP4")
    for name, module in held:
        where.set_submodule(name, CodedExperts.of(module, name))
    return where


def code_experts(model: nn.Module, skipped: Iterable[str] = ()) -> None:
    """Put codes without values in the place of all experts of ``model``, except names that contain one of ``skipped``.

    Raises:
        ValueError: there are none.
    """
    held = [(name, module) for name, module in model.named_modules() if hasattr(module, "is_transposed")]
    if not held:
        raise ValueError(f"{type(model).__name__} has no experts that could be in MXFP4: load it without keep_mxfp4()")
    for name, module in held:
        if not any(part in name for part in skipped):
            model.set_submodule(name, CodedExperts(module))


class CodedExperts(nn.Module):
    """Experts in MXFP4, in the place of a model's own.

    Attributes:
        gate_up_proj_blocks: uint8 ``[E, n, D / 32, 16]``: codes; ``down_proj_blocks`` likewise.
        gate_up_proj_scales: uint8 ``[E, n, D / 32]``; ``down_proj_scales`` likewise.
    """

    has_gate = True

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        plain = (int, float, str, bool, PreTrainedConfig)
        self.__dict__.update({name: v for name, v in vars(like).items() if isinstance(v, plain) and name != "training"})
        self.act_fn = getattr(like, "act_fn", None)
        self._gate = type(like)._apply_gate  # type: ignore[attr-defined]
        for name in _PRODUCTS:
            bias = like._parameters.get(f"{name}_bias")
            self.register_parameter(f"{name}_bias", bias)
            *_, rows, inputs = self._shape(like, name)
            if inputs % BLOCK:
                raise ValueError(
                    f"{name} has {inputs} inputs, which are no multiple of {BLOCK}: MXFP4 does not hold it"
                )
            device = like._parameters[name].device  # type: ignore[union-attr]
            for part, shape in (("blocks", (rows, inputs // BLOCK, 16)), ("scales", (rows, inputs // BLOCK))):
                held = torch.empty((int(like.num_experts), *shape), dtype=torch.uint8, device=device)  # type: ignore[arg-type]
                self.register_parameter(f"{name}_{part}", nn.Parameter(held, requires_grad=False))
        self.train(like.training)

    @staticmethod
    def _shape(like: nn.Module, name: str) -> tuple[int, ...]:
        """``(E, n, d)`` of a product's weights."""
        count, *two = like._parameters[name].shape  # type: ignore[union-attr]
        return (count, *(reversed(two) if like.is_transposed else two))

    @classmethod
    def of(cls, module: nn.Module, name: str) -> CodedExperts:
        """``module`` in four bits, without loss.

        Raises:
            ValueError: MXFP4 does not hold its weights exactly.
        """
        with torch.device("meta"):
            made = cls(module)
        for product in _PRODUCTS:
            weight = module._parameters[product].data  # type: ignore[union-attr]
            codes = [encode(one) for one in (weight.transpose(1, 2) if module.is_transposed else weight).split(1)]
            if any(one is None for one in codes):
                raise ValueError(
                    f"MXFP4 does not hold {name}.{product} exactly: the checkpoint was not in MXFP4, or its "
                    "weights have changed"
                )
            for part, tensors in zip(("blocks", "scales"), zip(*codes)):  # type: ignore[arg-type]
                shape = made._parameters[f"{product}_{part}"].shape  # type: ignore[union-attr]
                held = nn.Parameter(torch.cat(tensors).view(shape), requires_grad=False)
                made.register_parameter(f"{product}_{part}", held)
        return made

    def _apply_gate(self, values: Tensor) -> Tensor:
        return self._gate(self, values)

    @torch.no_grad()
    def fill(self) -> None:
        """Random codes; scales that leave values as large as they were."""
        for name, parameter in self.named_parameters():
            if name.endswith("_blocks"):
                parameter.random_(0, 256)
            elif name.endswith("_scales"):
                parameter.fill_(BIAS - 7)  # weights of 2 ** -7: root mean square .023
            else:
                parameter.zero_()

    def weight(self, name: str) -> Mxfp4:
        """Codes and scales of ``"gate_up_proj"`` or ``"down_proj"``."""
        held = self._parameters
        return Mxfp4(held[f"{name}_blocks"].data.flatten(2), held[f"{name}_scales"].data)  # type: ignore[union-attr]

    @untraced
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As :func:`.interface.sparsekv_experts`. Where our kernels do not run, one expert after another."""
        weights, gate = [self.weight(name) for name in _PRODUCTS], gate_of(self)
        biases = [self._parameters[f"{name}_bias"] for name in _PRODUCTS]
        if accelerated(hidden_states) and not torch.is_grad_enabled():
            return experts(hidden_states, top_k_index, top_k_weights, *weights, gate, *biases)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            if 0 <= expert < self.num_experts:
                token, at = torch.where(top_k_index == expert)
                values = hidden_states[token]
                for step, (weight, bias) in enumerate(zip(weights, biases)):
                    rows = dequantise(Mxfp4(weight.codes[expert, None], weight.scales[expert, None]), values.dtype)[0]
                    values = nn.functional.linear(values, rows, None if bias is None else bias[expert].to(values.dtype))
                    if step == 0:
                        values = between(values, gate) if isinstance(gate, Gate) else gate(values)
                out.index_add_(0, token, (values * top_k_weights[token, at, None]).float())
        return out.to(hidden_states.dtype)


class Mxfp4KeptConfig(QuantizationConfigMixin):
    """The configuration that :func:`keep_mxfp4` sets. It is written as that of the checkpoint, ``"mxfp4"``."""

    def __init__(self, modules_to_not_convert: list[str] | None = None, **kwargs) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint's ``config.json`` says."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": self.modules_to_not_convert}


class Mxfp4KeptQuantizer(HfQuantizer):
    """Gives experts their codes before transformers loads them, under the names of the checkpoint."""

    def validate_environment(self, *args, **kwargs) -> None:
        """Nothing is needed."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs) -> None:
        with torch.device("meta"):
            code_experts(model, getattr(self.quantization_config, "modules_to_not_convert", None) or ())

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs) -> None:
        for name, module in model.named_modules():
            if isinstance(module, CodedExperts):
                most = max(int(module._parameters[f"{one}_scales"].max()) for one in _PRODUCTS)  # type: ignore[union-attr]
                if most > MAX_SCALE:
                    raise ValueError(f"{name} has a scale of 2 ** {most - 127}: our kernels take up to 2 ** 113")

    def is_serializable(self) -> bool:
        """``save_pretrained()`` writes the checkpoint as it was."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Codes have no gradients."""
        return False


def register() -> None:
    """Make the method known to transformers."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(Mxfp4KeptConfig)
        register_quantizer(METHOD)(Mxfp4KeptQuantizer)


register()
