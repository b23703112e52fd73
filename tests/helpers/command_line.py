"""The command line in this process, what it says of an error, and a tiny model for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import build
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_sparsekv_cli.app import app

TEXT = "the quick brown fox jumps over the lazy dog " * 30  # a token is a character: longer than window and blocks
SPARSE = ("--token-budget", "32", "--num-blocks", "2", "--block-size", "16", "--window", "16", "--dense-layers", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny random Llama with a tokenizer of characters, no chat template."""
    path = tmp_path_factory.mktemp("tiny")
    build("llama", "sdpa", max_position_embeddings=2048, eos_token_id=2).save_pretrained(path)
    letters = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!"]
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


def run(*args, status: int = 0, **kwargs):
    result = CliRunner().invoke(app, [str(a) for a in args], **kwargs)
    assert result.exit_code == status, (result.stdout, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result


def error(*args, status: int = 1) -> str:
    """The one line that a failing command prints."""
    result = run(*args, status=status)
    if status == 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert len(lines) == 1, result.stderr
        return lines[0]
    return flat(result.stderr)


def flat(text: str) -> str:
    """Without the frame and the line breaks of usage errors."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
