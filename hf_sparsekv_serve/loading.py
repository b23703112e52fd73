"""Models as replicas load them (:mod:`.ray.deployment`, :mod:`.rank_processes`)."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_sparsekv import gguf_file
from hf_sparsekv.ranks import spread
from hf_sparsekv.small_model import is_fetched, small_model_path
from hf_sparsekv.tuning.random_model import RANDOM, load_random


def load(name: str, dtype: str, device: str, tensor_parallel: bool = False):
    """Tokenizer and model in eval mode.

    Args:
        name: a directory, a GGUF file, a name on the hub, ``small``, or ``random:SHAPE`` (random weights of a known
            shape, for measurements).
        dtype: of the weights, as torch names it; ``auto``: as they are stored (:func:`hf_sparsekv.gguf_file.load`: in a
            GGUF file).
        device: ``cpu`` or ``cuda``.
        tensor_parallel: load only this rank's share of the model. The ranks are those of torch.distributed, and
            transformers chooses the device.

    Raises:
        OSError: there is no such model; the message says where it was searched.
        ValueError: a GGUF file that cannot be read, or with ``tensor_parallel``; no such shape.
    """
    if name.startswith(RANDOM):
        return load_random(
            name, None if dtype == "auto" else getattr(torch, dtype), torch.device(device), tensor_parallel
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = small_model_path() if name == "small" else Path(name).expanduser()
    if name == "small" and not is_fetched(path):
        raise OSError("the small model is not here yet: run `hf-sparsekv fetch` on every machine of the cluster")
    if gguf_file.is_gguf(path):
        if tensor_parallel:
            raise ValueError(f"{name}: tensor parallel ranks take no GGUF file, but a directory of safetensors")
        return gguf_file.load(path, None if dtype == "auto" else getattr(torch, dtype), torch.device(device))
    source = str(path) if path.is_dir() else name
    tokenizer = AutoTokenizer.from_pretrained(source)
    kwargs = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    if tensor_parallel:
        model = AutoModelForCausalLM.from_pretrained(source, **spread(), **kwargs)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, **kwargs).to(device)
    return tokenizer, model.eval()
