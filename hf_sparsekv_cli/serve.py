"""The arguments of ``hf-sparsekv serve``, and what is wrong about them together."""

from __future__ import annotations

import enum
import functools
import re
from typing import Annotated

import typer

from hf_sparsekv_config.sparse import OffloadConfig

from . import checks, values
from .command import command
from .options import CacheKind, DecodingOptions, Device, DType, DTypeOption, EngineOptions, Model, help_of

TOOL_FORMATS = (
    *("harmony", "gemma", "function-gemma", "deepseek-3.2", "deepseek", "kimi", "minimax", "glm", "qwen", "hermes"),
    *("mistral", "llama", "template"),
)
ToolFormat = enum.StrEnum("ToolFormat", {re.sub(r"\W", "_", name): name for name in TOOL_FORMATS})

_of_requests = functools.partial(typer.Option, rich_help_panel="Requests")
_of_server = functools.partial(typer.Option, rich_help_panel="Server")


@command("hf_sparsekv_serve.cli.serve:serve")
def serve(
    model: Model,
    host: Annotated[str, _of_server(help="0.0.0.0 lets other machines in: give an API key then.")] = "127.0.0.1",
    port: Annotated[int, _of_server(min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _of_server(
            metavar="KEY",
            envvar="HF_SPARSEKV_API_KEY",
            show_envvar=False,
            help="Key that clients must send, or several; better in HF_SPARSEKV_API_KEY, with spaces between them, "
            "where other users do not see it.",
            show_default=False,
        ),
    ] = None,
    model_id: Annotated[
        str | None,
        _of_server(
            help="The name that clients ask for; default: MODEL, of a directory or file its name.", show_default=False
        ),
    ] = None,
    max_body: Annotated[
        int, _of_server(parser=values.parse_body, metavar="SIZE", help="Largest body of a request.")
    ] = "16MiB",  # type: ignore[assignment]
    max_connections: Annotated[
        int, _of_server(min=1, help="Most connections at a time; those without a request make room for others.")
    ] = 2048,
    keep_alive: Annotated[
        float, _of_server(min=1, max=3600, help="Seconds until an idle connection is closed; longer than a proxy's.")
    ] = 75.0,
    allow_host: Annotated[
        list[str] | None,
        _of_server(
            metavar="NAME",
            help="A name of this server, beside localhost and IP addresses, that clients may ask it by; of a server "
            "on a loopback address without a key. Several times, or '*' for any.",
            show_default=False,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _of_server(
            metavar="ORIGIN",
            help="Origin of web pages that may ask this server in a browser, as https://chat.example.org. Several "
            "times, or *.",
            show_default=False,
        ),
    ] = None,
    ignore_unknown_fields: Annotated[
        bool,
        _of_server(
            "--ignore-unknown-fields", help="Leave out what requests have and this server does not know, as chat_id."
        ),
    ] = False,
    tool_format: Annotated[
        ToolFormat | None,
        _of_server(
            help="How the model writes calls of tools; default: as its chat template shows. `template`: by the "
            "response_template of its tokenizer.",
            show_default=False,
        ),
    ] = None,
    log_requests: Annotated[
        bool, _of_server("--log-requests", help="A line for each request, with its id; no prompts and no answers.")
    ] = False,
    max_answer: Annotated[
        int | None,
        _of_requests(
            min=1,
            help="Tokens of a chat's answer if the client does not say: memory is reserved for them. Default: as many "
            "as there is memory for in each of the rows.",
            show_default=False,
        ),
    ] = None,
    device_kv: Annotated[
        int | None,
        _of_requests(
            parser=values.parse_memory,
            metavar="SIZE",
            help=help_of(OffloadConfig, "device_pool"),
            show_default=False,
        ),
    ] = None,
    host_kv: Annotated[
        int | None,
        _of_requests(
            parser=values.parse_memory,
            metavar="SIZE",
            help=help_of(OffloadConfig, "max_host_bytes"),
            show_default=False,
        ),
    ] = None,
    cache: Annotated[CacheKind, typer.Option("--cache", help="How steps choose.")] = CacheKind.token,
    dtype: DTypeOption = DType.auto,
    device: Device = "auto",
    tensor_parallel: Annotated[
        bool,
        _of_server("--tensor-parallel", help="Spread the model over the GPUs that torchrun has started processes for."),
    ] = False,
    *,
    engine: EngineOptions,
    options: DecodingOptions,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, many requests over one sparse cache."""
    values.check_device(device)
    checks.served(cache, options, api_key, model_id)
    options.config(cache)
    engine.config()
    checks.coded(options)
    checks.host_kept(options.offload, device_kv, host_kv)
    offload = options.offload or options.kv_dtype or device_kv is not None or host_kv is not None
    checks.exact_mode(engine.exact, True, bool(offload))
    if engine.exact and tensor_parallel:
        raise typer.BadParameter("--exact is not for tensor parallel models: leave --tensor-parallel out")
    checks.origins(cors_origin)
