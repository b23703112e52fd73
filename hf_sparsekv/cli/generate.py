"""``hf-sparsekv generate``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import typer
from rich.table import Table

from hf_sparsekv_cli.options import CacheKind, DecodingOptions, DType
from hf_sparsekv_config.audit import AuditConfig

from ..cache import SparseCache
from ..checking.audit import check_of
from ..checking.exact import Exact, of_drafts
from ..telemetry.audit_stats import AuditedToken
from ..telemetry.timing import Timing
from . import demo_text, loading
from .output import ALL, CommandError, messages, note
from .running import OtherWork, Run, encode, run_dense, run_sparse

_BEFORE = 12  # tokens that are shown before one
_AROUND = 128  # tokens of the fact, the question and a chat template


def generate(
    *,
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    demo: bool,
    chat: bool | None,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
    cache: CacheKind,
    compare: CacheKind | None,
    exact: bool,
    audit: bool,
    max_loss: float | Literal["top"] | None,
    dtype: DType,
    device: str,
    capture: bool,
    options: DecodingOptions,
) -> None:
    """Generate text with a sparse cache, and show what it read and how long each token took."""
    if demo and compare is None and cache is not CacheKind.dense:
        compare = CacheKind.dense
    kinds = [cache] if compare is None else [cache, compare]
    sparse_kinds = [kind for kind in kinds if kind is not CacheKind.dense]
    config = options.config(sparse_kinds[0]) if sparse_kinds else None
    # It is to show what is chosen, where reading everything is as fast, too, unless asked otherwise.
    if demo and config is not None and config.dense_below == "auto":
        config = replace(config, dense_below=None)
    text = None if demo else _prompt_text(prompt, prompt_file)
    on = loading.pick_device(device)
    # Made before the model is loaded: a bad channel file is told at once.
    sparse, mode = None, dict[str, Any]()  # arguments of sparse()
    if sparse_kinds:
        if exact:
            options, config = replace(options, offload=False), of_drafts(config)  # as sparse(exact=True) does
        options = loading.placed(config, options)
        sparse = SparseCache(config, options.offload_config())
        mode |= {"exact": True} if exact else {}
        if audit or max_loss is not None:
            mode |= {"audit": AuditConfig(max_loss=max_loss)}
        _check_mode(sparse, **mode)
    with messages.status(f"loading {model}"):
        tokenizer, loaded = loading.load(model, loading.torch_dtype(dtype), on)
    if text is None:
        text = _demo_text(tokenizer, loaded, max_new_tokens)
    inputs = encode(tokenizer, text, chat, loaded.device)
    _check_length(loaded, inputs["input_ids"].shape[1], max_new_tokens)

    sampling = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
    sampling |= {"temperature": temperature} if temperature > 0 else {"temperature": None, "top_p": None, "top_k": None}
    runs, on_gpu = [], loaded.device.type == "cuda"
    with OtherWork() as others:
        for kind in kinds:
            if len(kinds) > 1:
                note(f"--- {kind.value}")
            if temperature > 0 and seed is not None:
                torch.manual_seed(seed)
            if kind is not CacheKind.dense:
                captured = capture and on_gpu
                runs.append(run_sparse(tokenizer, loaded, inputs, sparse, captured, kind.value, mode, **sampling))
            else:
                runs.append(run_dense(tokenizer, loaded, inputs, **sampling))
    _report(runs, sparse, exact=exact, on_gpu=on_gpu, same_tokens_expected=temperature == 0 or exact)
    if sparse is not None and (found := sparse.stats().audit) is not None and found.largest is not None:
        note(_farthest(found.largest, next(run for run in runs if run.name != "dense"), tokenizer))
    if demo:
        note(_found(runs, tokenizer))
    processors = psutil.cpu_count() or 1
    if not on_gpu and others.disturbs(torch.get_num_threads(), processors):
        note(
            f"the processors were busy: others took {others.processors:.1f} of {processors} meanwhile, so these times "
            "say little. Try again on an idle machine"
        )


def _farthest(token: AuditedToken, run: Run, tokenizer) -> str:
    """The audited token that is farthest from full attention, with the text before it."""
    at = token.column - run.prompt_tokens
    text, last = tokenizer.decode(run.tokens[max(0, at - _BEFORE) : at]), tokenizer.decode(run.tokens[at])
    return (
        f"farthest from full attention, which gives it {token.probability:.0%}: {last!r} after {text!r} (total "
        f"variation {token.variation:.2f})"
    )


def _check_mode(cache: SparseCache, exact: bool = False, audit: AuditConfig | None = None) -> None:
    try:
        if exact:
            Exact().check(cache)
        elif audit is not None:
            check_of(audit).check(cache)
    except ValueError as error:
        told = str(error).replace("exact=True", "--exact").replace("audit=True", "--audit")
        raise typer.BadParameter(told.replace("max_loss", "--max-loss")) from error


def _prompt_text(prompt: str | None, path: Path | None) -> str:
    shown = "--prompt" if path is None else "standard input" if str(path) == "-" else path
    try:
        if prompt is None:
            if str(path) == "-":
                if sys.stdin is None:
                    raise CommandError("standard input is closed")
                prompt = sys.stdin.buffer.read().decode()  # whatever the locale says
            else:
                prompt = path.read_text(encoding="utf-8")
        prompt.encode()  # Python takes other bytes of the command line as half surrogate pairs
    except UnicodeError:
        raise CommandError(f"{shown} is not UTF-8 text") from None
    except OSError as error:
        raise CommandError(f"cannot read {shown}: {error.strerror}") from error
    if not prompt.strip():
        raise CommandError("the prompt is empty")
    return prompt


def _demo_text(tokenizer, model, new: int) -> str:
    """The text of ``--demo``, as long as the model reads."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or demo_text.TOKENS
    tokens = min(demo_text.TOKENS, most - new - _AROUND)
    if tokens < _AROUND:
        raise CommandError(f"the model reads {most:,} tokens, too few for --demo and {new:,} new tokens: give --prompt")
    try:
        return demo_text.build(tokenizer, tokens)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(f"this model's tokenizer cannot make a text for --demo ({error}): give --prompt") from error


def _found(runs: list[Run], tokenizer) -> str:
    """Which runs of ``--demo`` found the fact."""
    told = (
        f"{run.name} {'found' if demo_text.ANSWER in tokenizer.decode(run.tokens) else 'missed'} it" for run in runs
    )
    return f"the text hides the number {demo_text.ANSWER}: {', '.join(told)}"


def _check_length(model, tokens: int, new: int) -> None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most and tokens > most:
        raise CommandError(f"the prompt has {tokens:,} tokens, the model reads at most {most:,}: shorten it")
    if most and tokens + new > most:
        note(f"prompt ({tokens:,}) and answer ({new:,}) may exceed the {most:,} tokens that the model was made for")


def _report(runs: list[Run], sparse, *, exact: bool, on_gpu: bool, same_tokens_expected: bool) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("cache")
    for title in ("prompt", "new", "first token", "per token (median)", "10 - 90 %"):
        table.add_column(title, justify="right")
    for run in runs:
        table.add_row(run.name, f"{run.prompt_tokens:,}", *_times(run.timing))
    messages.print(table)
    if sparse is not None:
        stats = sparse.stats()
        note(str(stats))
        if sparse.config.prefill is not None and not stats.prompts:
            note(f"the prompt was read exactly: sparse ones have at least {sparse.config.prefill_below:,} tokens")
        if exact and not stats.drafted:
            note("no drafts: so short a text is as quick to read whole, or the model cannot take drafts back")
        elif stats.attended_share >= ALL and stats.decode_steps:
            why = "as fast to read whole" if stats.crossover_calls else "within its budget"
            note(
                f"the sparse cache attended to everything, as full attention does: so short a text is {why}. A longer "
                "prompt shows what it chooses"
            )
    if len(runs) < 2:
        return
    if same_tokens_expected:
        note(_agreement(runs[0].tokens, runs[1].tokens))
    by_name = {run.name: run.timing.tpot_s for run in runs}
    mine, dense = next((t for name, t in by_name.items() if name != "dense"), None), by_name.get("dense")
    if mine and dense and mine > dense:
        why = (
            "at this length the dense cache is read quickly; sparse reading pays with longer contexts, larger batches, "
            "or KV that does not fit the GPU"
            if on_gpu
            else "without a GPU operators are made of plain torch operations; sparse reading pays with longer contexts"
        )
        note(f"sparse was slower here ({1e3 * mine:.1f} against {1e3 * dense:.1f} ms a token): {why}")


def _times(t: Timing) -> tuple[str, ...]:
    if t.ttft_s is None:
        return ("0", "-", "-", "-")
    if t.tpot_s is None:
        return (str(t.tokens), f"{t.ttft_s:.2f} s", "-", "-")
    spread = f"{1e3 * t.low_s:.1f} - {1e3 * t.high_s:.1f} ms"
    return (str(t.tokens), f"{t.ttft_s:.2f} s", f"{1e3 * t.tpot_s:.1f} ms", spread)


def _agreement(a: list[int], b: list[int]) -> str:
    if a == b:
        return f"both gave the same {len(a)} tokens"
    same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return f"the answers agree in their first {same} tokens"
