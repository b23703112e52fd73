"""``hf-sparsekv serve``: its options, and what is served by them."""

from __future__ import annotations

import functools
import importlib.util
import logging
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import torch
import typer

from hf_sparsekv.attention import flash_4
from hf_sparsekv.cli import loading
from hf_sparsekv.cli import options as opt
from hf_sparsekv.cli.output import CommandError, messages, note
from hf_sparsekv.config import OffloadConfig, SparseConfig
from hf_sparsekv.gguf_file import is_gguf
from hf_sparsekv.serving.config import MOST_ROWS, ServingConfig
from hf_sparsekv_cli import checks, values

from ..process import end_after, ignore_signals, leave, set_aside, short_turns, warm_up
from . import torchrun

if TYPE_CHECKING:
    from hf_sparsekv.serving.engine import Engine

    from .server import Server

NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}

# Options of serve, by what they are about.
_of_requests = functools.partial(typer.Option, rich_help_panel="Requests")
_of_server = functools.partial(typer.Option, rich_help_panel="Server")


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server. Each field is an option."""

    host: Annotated[str, _of_server(help="0.0.0.0 lets other machines in: give an API key then.")] = "127.0.0.1"
    port: Annotated[int, _of_server(min=0, max=65535, help="0: any free one.")] = 8000
    api_key: Annotated[
        str | None,
        _of_server(
            envvar="HF_SPARSEKV_API_KEY",
            show_envvar=False,
            help="That clients must send; better in HF_SPARSEKV_API_KEY, where other users do not see it.",
            show_default=False,
        ),
    ] = None
    model_id: Annotated[
        str | None,
        _of_server(
            help="The name that clients ask for; default: MODEL, of a directory or file its name.", show_default=False
        ),
    ] = None
    max_body: Annotated[str, _of_server(metavar="SIZE", help="Of a request's body.")] = "16MiB"
    max_connections: Annotated[
        int, _of_server(min=1, help="At a time; those without a request make room for others.")
    ] = 2048
    allow_host: Annotated[
        list[str] | None,
        _of_server(
            metavar="NAME",
            help="A name of this server, beside localhost and IP addresses, that clients may ask it by; of a server "
            "on a loopback address without a key. Several times, or '*' for any.",
            show_default=False,
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _of_server(
            metavar="ORIGIN",
            help="Of web pages that a browser lets ask this server, as https://chat.example.org. Several times, or *.",
            show_default=False,
        ),
    ] = None
    ignore_unknown_fields: Annotated[
        bool,
        _of_server(
            "--ignore-unknown-fields", help="Leave out what requests have and this server does not know, as chat_id."
        ),
    ] = False
    log_requests: Annotated[
        bool, _of_server("--log-requests", help="A line for each request, with its id; no prompts and no answers.")
    ] = False
    tensor_parallel: Annotated[
        bool,
        _of_server("--tensor-parallel", help="Spread the model over the GPUs that torchrun has started processes for."),
    ] = False


@dataclass(frozen=True)
class RequestOptions:
    """Options of requests and their memory. Each field is an option."""

    max_rows: Annotated[int, _of_requests(min=1, max=MOST_ROWS, help="That decode together.")] = 32
    context: Annotated[
        int | None,
        _of_requests(
            parser=values.parse_tokens,
            metavar="TOKENS",
            help="Of a prompt and its answer together: 4096, 32k; default: the model's.",
            show_default=False,
        ),
    ] = None
    batch_tokens: Annotated[
        int | None,
        _of_requests(
            parser=values.parse_tokens,
            metavar="TOKENS",
            help="Of all running requests together, with the longest answers they asked for; default: what fits.",
            show_default=False,
        ),
    ] = None
    max_answer: Annotated[
        int,
        _of_requests(min=1, help="Tokens of a chat's answer if the client does not say: memory is reserved for them."),
    ] = 4096
    max_waiting: Annotated[
        int,
        _of_requests(min=0, help="Requests that may wait; more are refused (429). 0: whatever cannot start at once."),
    ] = 256
    max_wait_s: Annotated[
        float | None,
        _of_requests(
            min=0, help="Seconds that a request may be expected to wait (429); default: any.", show_default=False
        ),
    ] = None
    prefill_ms: Annotated[
        float,
        _of_requests(min=0.1, help="Of the GPU's time for prompts between two steps."),
    ] = 20.0
    prefix_cache: Annotated[
        bool,
        _of_requests(
            "--prefix-cache/--no-prefix-cache", help="Keep blocks for prompts that begin alike, while there is room."
        ),
    ] = True
    device_kv: Annotated[
        str | None,
        _of_requests(
            metavar="SIZE",
            help="GPU memory for copies of chosen tokens; default: what the cache takes by itself.",
            show_default=False,
        ),
    ] = None
    host_kv: Annotated[
        str | None,
        _of_requests(
            metavar="SIZE",
            help="Host memory for keys and values; default: 80 % of the machine's or container's.",
            show_default=False,
        ),
    ] = None
    exact: Annotated[
        bool, _of_requests("--exact", help='Give full attention\'s answers, unless one asks "exact": false.')
    ] = False
    flash_attention_4: Annotated[
        bool,
        _of_requests("--flash-attention-4", help="Read prompts by FlashAttention 4 (the extra `flash`), on an H100."),
    ] = False

    def config(self) -> ServingConfig:
        """Limits and scheduling of the engine."""
        return ServingConfig(
            max_rows=self.max_rows,
            max_length=self.context,
            max_tokens=self.batch_tokens,
            max_waiting=self.max_waiting,
            max_wait_s=self.max_wait_s,
            prefill_ms=self.prefill_ms,
            prefix_cache=self.prefix_cache,
            exact=self.exact,
            flash_attention_4=self.flash_attention_4,
        )


@dataclass(frozen=True)
class ServedModel:
    """A model and how an engine serves it, the same on every rank.

    Attributes:
        model, dtype, place, tensor_parallel: as :func:`.loading.load` takes them.
        config, offload, serving: as :class:`.Engine` takes them.
    """

    model: str
    dtype: torch.dtype | None
    place: torch.device
    tensor_parallel: bool
    config: SparseConfig
    offload: OffloadConfig | None
    serving: ServingConfig

    def engine(self) -> Engine:
        """Load the model on rank 0, and open its engine."""
        from hf_sparsekv.serving.engine import Engine

        from ..ranks import TensorParallelEngine

        with messages.status(f"loading {self.model}"):
            tokenizer, model = self._load()
        kind = TensorParallelEngine if self.tensor_parallel else Engine
        return kind(model, tokenizer, self.config, self.offload, self.serving)

    def follow(self) -> NoReturn:
        """Load the model on another rank, and do as rank 0 says until it ends."""
        from ..ranks import follow

        ignore_signals()
        model = self._load()[1]
        end_after(functools.partial(follow, model, self.config, self.offload, self.serving))

    def _load(self):
        return loading.load(self.model, self.dtype, self.place, self.tensor_parallel)


@opt.takes(opt.DecodingOptions)
@opt.takes(RequestOptions, "requests")
@opt.takes(ServerOptions, "server")
def serve(
    model: opt.Model,
    cache: Annotated[opt.CacheKind, typer.Option("--cache", help="How steps choose.")] = opt.CacheKind.token,
    dtype: opt.DTypeOption = opt.DType.auto,
    device: opt.Device = "auto",
    *,
    server: ServerOptions,
    requests: RequestOptions,
    options: opt.DecodingOptions,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, many requests over one sparse cache."""
    _check_installed()
    device_kv, host_kv = requests.device_kv, requests.host_kv
    asked = {"offload": options.offload, "device_kv": device_kv, "host_kv": host_kv, "kv_dtype": options.kv_dtype}
    checks.exact_requests({**asked, "exact": requests.exact, "tensor_parallel": server.tensor_parallel})
    rank = torchrun.rank() if server.tensor_parallel else 0
    checks.served(cache.value, options.max_length, server.api_key, server.model_id)
    config = options.config(cache)
    if options.offload is None and (device_kv is not None or host_kv is not None):
        options = replace(options, offload=True)  # these options need it
    place = loading.pick_device(device)
    options = opt.placed(cache, config, options)
    serving = requests.config()
    if serving.flash_attention_4:
        try:
            flash_4.check()  # first: a model takes minutes to load
        except (ImportError, RuntimeError) as error:
            raise CommandError(f"--flash-attention-4: {error}") from error
    checks.origins(server.cors_origin)
    if server.log_requests:
        _log_requests()
    checks.host_kept(options.offload, device_kv, host_kv)
    device_bytes, host_bytes, body = checks.sizes(device_kv, host_kv, server.max_body)
    offload = opt.offload_config(options, device_pool=device_bytes, max_host_bytes=host_bytes)
    served = ServedModel(model, opt.torch_dtype(dtype), place, server.tensor_parallel, config, offload, serving)
    if server.tensor_parallel:
        torchrun.begin(place)
        if rank:
            served.follow()
    application = {
        "model_id": server.model_id or served_name(model),
        "api_key": server.api_key,
        "max_body": body,
        "max_answer": requests.max_answer,
        "allowed_hosts": tuple(server.allow_host or ()),
        "cors_origins": tuple(server.cors_origin or ()),
        "ignore_unknown_fields": server.ignore_unknown_fields,
    }
    listener = _listen(server.host, server.port)  # first: report a taken port before the model is loaded
    try:
        _serve(served, listener, server.max_connections, application)
    finally:
        listener.close()


def _serve(served: ServedModel, listener: socket.socket, max_connections: int, application: dict[str, Any]) -> None:
    """Load the model and serve it until a signal ends that; ``application``: arguments of :func:`.create_app`."""
    from ..http import create_app
    from .server import Server, signals_heard

    with served.engine() as engine:
        warm_up(engine)
        server = Server(create_app(engine, **application), engine, max_connections, served.serving.max_rows)
        with set_aside(), short_turns(), signals_heard(server):  # signals: before anybody is told that it listens
            if served.tensor_parallel:
                torchrun.watch(engine, server)
            listener.listen(2048)
            brief = f"{served.serving.max_rows} rows, {served.config.brief()}"
            note(f"{application['model_id']}: up to {engine.max_length:,} tokens a request, {brief}")
            _tell_address(listener, application["api_key"])
            _run(server, engine, listener, served.tensor_parallel)
    if served.tensor_parallel:
        leave(0 if engine.failed is None else 1)


def _run(server: Server, engine: Engine, listener: socket.socket, tensor_parallel: bool) -> None:
    """Serve until the server ends."""
    server.run(sockets=[listener])
    if tensor_parallel and engine.failed is not None:
        leave(1)  # all clients were told; to close the engine would wait for its step, and that for a lost rank
    engine.close()  # a signal may still come


def _tell_address(listener: socket.socket, api_key: str | None) -> None:
    from ..http.gate import is_loopback

    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    keyed = "" if api_key is None else " (with an API key)"
    note(f"listening on http://{shown}:{port}/v1{keyed}; Ctrl-C ends it")
    if api_key is None and not is_loopback(address):
        note("anybody who reaches this machine may ask: no API key is set")


def _log_requests() -> None:
    """Lines of the HTTP server about requests, on standard error."""
    logger = logging.getLogger("hf_sparsekv_serve.http")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _check_installed() -> None:
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(
            f"serve needs {', '.join(missing)}: install the extra, `pip install '.[serve]'` in a checkout, or "
            f"`pip install {' '.join(missing)}`"
        )


def _listen(host: str, port: int) -> socket.socket:
    """Bound, and not yet listening: clients are refused while the model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)  # asyncio looks at proto: without it, tokens wait for each other
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def served_name(model: str) -> str:
    path = Path(model).expanduser()
    if is_gguf(path):
        return path.stem
    return path.resolve().name if path.is_dir() else model
