"""Models in GGUF files: configuration, tokenizer and dequantised weights.

Such a file has no config.json, gives a chat the wrong end tokens, and leaves its model marked as quantised.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_ANSWER = "forty-two"  # an answer whose end a chat template shows
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # a special token as chat templates write them


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a GGUF file, by its ending."""
    return os.fspath(name).lower().endswith(SUFFIX)


def check(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be read.

    Raises:
        ValueError: it is no GGUF file.
        OSError: it is not there, or may not be read.
    """
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")


@contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of a file that ends too soon, which its readers do not expect, say so."""
    try:
        yield
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, ValueError) and "cannot reshape array" not in str(error):  # numpy's, of half a tensor
            raise
        text = f"{path} cannot be read as a GGUF file, perhaps as it is not whole: fetch it again ({error})"
        raise ValueError(text) from error


@contextmanager
def read_once() -> Iterator[None]:
    """Have ``gguf`` read each file once in here.

    transformers reads a file for the configuration, twice for the tokenizer, and for the weights. Each time it reads
    the whole vocabulary. For 0.5B parameters this took 45 s of a core; reading once takes 14 s.
    """
    gguf: Any = importlib.import_module("gguf")
    kind: Any = gguf.GGUFReader
    if not isinstance(kind, type):  # within another one
        yield
        return

    class Reader(kind):
        def __setattr__(self, name: str, value: Any) -> None:
            # As a plain array: slices of a memmap take four times as long, and each entry is several.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    gguf.GGUFReader = functools.cache(Reader)
    try:
        yield
    finally:
        gguf.GGUFReader = kind


def load_config(path: str | os.PathLike[str]) -> Any:
    """The configuration of a file's model, with ``dtype`` bfloat16: blocks of a file have none.

    Raises:
        ValueError: see :func:`check`; or transformers does not know the architecture.
    """
    from transformers import AutoConfig

    check(path)
    path = Path(path)
    with _whole(path), read_once():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.dtype = torch.bfloat16
    return config


def load(path: str | os.PathLike[str], dtype: torch.dtype | None, device: torch.device, **kwargs: Any):
    """Tokenizer and model of a file, the weights dequantised.

    Args:
        dtype: of the weights; ``None``: bfloat16, on a CPU float32.
        kwargs: those of ``from_pretrained``.

    Returns:
        ``(tokenizer, model)``: a plain model in eval mode on ``device``, which ``save_pretrained`` takes. Both end an
        answer where the chat template does.

    Raises:
        ValueError: as :func:`load_config`.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    check(path)
    with _whole(path), read_once():
        config = load_config(path)
        tokenizer, ends = _tokenizer(Path(path), config)
        config.dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        config.pad_token_id = tokenizer.pad_token_id
        model = AutoModelForCausalLM.from_pretrained(
            Path(path).parent,
            gguf_file=Path(path).name,
            config=config,
            dtype=config.dtype,
            quantization_config=GgufConfig(dequantize=True),
            device_map={"": device},
            **kwargs,
        )
    _unmark(model)
    return tokenizer, model.eval()


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a file, as :func:`load` gives it."""
    check(path)
    with _whole(path), read_once():
        return _tokenizer(Path(path), load_config(path))[0]


def _tokenizer(path: Path, config: Any) -> tuple[Any, list[int]]:
    """The tokenizer, and the ids that end an answer, that of a chat's turn first."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    own = config.eos_token_id if isinstance(config.eos_token_id, (list, tuple)) else [config.eos_token_id]
    ends = end_tokens(tokenizer, own)
    if ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if config.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    elif tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False  # text as the model wrote it
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer, ends


def end_tokens(tokenizer: Any, named: Iterable[int | None]) -> list[int]:
    """Ids that end an answer, the end of a chat's turn first.

    The end of a turn is the special token that the chat template writes after an answer. Other candidates are the
    file's own end token and that of transformers' tokenizer, which for some architectures is the file's *first*
    token. So those that the template writes before an answer are left out.

    Args:
        named: ids that the file names as its end.
    """
    ends = [token for token in named if token is not None]
    before, after = _around_answer(tokenizer)
    if not before:
        return list(dict.fromkeys(ends))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    begun = set(tokenizer(before, add_special_tokens=False)["input_ids"])
    turn = [token for token in tokenizer(after.strip(), add_special_tokens=False)["input_ids"][:1] if token in special]
    others = [token for token in (*ends, tokenizer.eos_token_id) if token is not None and token not in begun]
    return list(dict.fromkeys((*turn, *others))) or list(dict.fromkeys(ends))


def _around_answer(tokenizer: Any) -> tuple[str, str]:
    """The chat template's text before and after an answer; special tokens in it become single tokens.

    Two empty texts where there is no template, or one that refuses a question and an answer.
    """
    if tokenizer.chat_template is None:
        return "", ""
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # whatever a template raises
        return "", ""
    before, found, after = text.rpartition(_ANSWER)
    if not found:
        return "", ""
    vocabulary, known = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    known |= {token.content for token in tokenizer.added_tokens_decoder.values()}
    missed = [marker for marker in dict.fromkeys(_MARKER.findall(text)) if marker in vocabulary and marker not in known]
    if missed:
        tokenizer.add_tokens(missed, special_tokens=True)
    return before, after


def _unmark(model: Any) -> None:
    """A model marked as quantised refuses to be saved, and changed, although its weights are plain."""
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
