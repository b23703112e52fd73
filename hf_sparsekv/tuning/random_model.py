"""Models of a known shape with random weights, for measurements: ``random:qwen3-8b``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..attention.interface import NAME
from ..experts.mxfp4 import CodedExperts, code_experts, is_coded
from ..ranks import distribute
from .shapes import SHAPES, known_shape

RANDOM = "random:"  # before a known shape's name


def load_random(name: str, dtype: torch.dtype | None, device: torch.device, tensor_parallel: bool = False):
    """Tokenizer and model of ``random:SHAPE``.

    Args:
        dtype: None: bfloat16.
        tensor_parallel: see :func:`random_model`.

    Raises:
        ValueError: no shape of that name is known.
    """
    if (shape := known_shape(name.removeprefix(RANDOM))) is None:
        raise ValueError(f"{name}: no shape of that name is known; known ones are {', '.join(SHAPES)}")
    config = SHAPES[shape]()
    model = random_model(config, dtype or torch.bfloat16, device, tensor_parallel)
    return numbers(config.get_text_config(decoder=True).vocab_size), model


def numbers(vocabulary: int):
    """A tokenizer whose tokens are their own numbers: text of a random model tells its ids, a word each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@torch.no_grad()
def random_model(config, dtype: torch.dtype, device: torch.device, tensor_parallel: bool = False):
    """A model with random weights, created where they will be, one module at a time; the same in every process.

    Args:
        tensor_parallel: keep of each weight only this rank's share, so the whole model need not fit a GPU.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if tensor_parallel and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
        if is_coded(config):
            code_experts(model)
    if tensor_parallel:
        distribute(model)
    for module in model.modules():
        shares: dict[str, Any] = dict(module._parameters)
        for held in (module._parameters, module._buffers):
            held.update({name: _empty(t, device) for name, t in held.items() if t is not None})
        model._init_weights(module)
        if isinstance(module, CodedExperts):
            module.fill()
        for name, share in shares.items():
            if (mesh := getattr(share, "device_mesh", None)) is not None:
                module._parameters[name] = _share(module._parameters[name], mesh, share.placements)
    model.tie_weights()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no token ends an answer
    return model.eval()


def _empty(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory on ``device`` for the whole of a parameter or buffer."""
    made = torch.empty(t.shape, dtype=t.dtype, device=device)
    return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made


def _share(whole: torch.Tensor, mesh, placements) -> nn.Parameter:
    """This rank's share of a parameter, in memory of its own."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    local = distribute_tensor(whole.data, mesh, placements, src_data_rank=None).to_local()
    made = DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(made, requires_grad=whole.requires_grad)
