"""``hf-sparsekv calibrate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from hf_sparsekv_cli.options import DType

from . import loading
from .output import CommandError, messages, note, results


def calibrate(
    *,
    model: str,
    output: Path,
    text_file: list[Path],
    tokens: int,
    pieces: int,
    dtype: DType,
    device: str,
) -> None:
    """Rank a model's key channels on your text, for --channel-file and TokenConfig(channel_file=...)."""
    from ..tuning.channels import calibrate as rank_channels

    texts = [_read(path) for path in text_file]
    if not output.absolute().parent.is_dir():
        raise CommandError(f"cannot write {output}: there is no directory {output.absolute().parent}")
    if output.is_dir():
        raise CommandError(f"cannot write {output}: it is a directory, give the name of a file in it")
    where = loading.pick_device(device)
    with messages.status(f"loading {model}"):
        tokenizer, loaded = loading.load(model, loading.torch_dtype(dtype), where)
    chunks = []
    for text in texts:
        # One long text is meant to be longer than the model's context: no warning about it.
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
        chunks += [piece for piece in ids.split(tokens, dim=1) if piece.shape[1] >= 16]
    chunks = chunks[:pieces]
    if not chunks:
        raise CommandError("the text is too short to calibrate on: at least 16 tokens are needed")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with messages.progress("calibrating", len(chunks), *columns) as advance:
        channels = rank_channels(loaded, _counted(chunks, advance))
    channels.save(output)
    note(f"{sum(c.shape[1] for c in chunks)} tokens read")
    results.print(str(output), markup=False)


def _counted(chunks: list, advance: Callable[[float], None]) -> Iterator:
    for chunk in chunks:
        yield chunk
        advance(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
