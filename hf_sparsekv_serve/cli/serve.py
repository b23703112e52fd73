"""``hf-sparsekv serve``: a model, its engine and its HTTP server."""

from __future__ import annotations

import functools
import importlib.util
import logging
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hf_sparsekv.attention import flash_4
from hf_sparsekv.cli import loading
from hf_sparsekv.cli.output import CommandError, messages, note
from hf_sparsekv.gguf_file import is_gguf
from hf_sparsekv_cli import options as opt
from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..process import end_after, ignore_signals, leave, set_aside, short_turns, warm_up
from . import torchrun

if TYPE_CHECKING:
    from hf_sparsekv.serving.engine import Engine

    from .server import Server

NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


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


def serve(
    *,
    model: str,
    host: str,
    port: int,
    model_id: str | None,
    allow_host: list[str] | None,
    cors_origin: list[str] | None,
    max_connections: int,
    keep_alive: float,
    log_requests: bool,
    device_kv: int | None,
    host_kv: int | None,
    cache: opt.CacheKind,
    dtype: opt.DType,
    device: str,
    tensor_parallel: bool,
    engine: Any,
    options: opt.CacheOptions,
    **application: Any,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, many requests over one sparse cache.

    Args:
        engine: options that are fields of :class:`.ServingConfig`.
        application: further arguments of :func:`.create_app`.
    """
    _check_installed()
    rank = torchrun.rank() if tensor_parallel else 0
    config, serving = options.config(cache), engine.config()
    if options.offload is None and (device_kv is not None or host_kv is not None):
        options = replace(options, offload=True)  # these options need it
    place = loading.pick_device(device)
    options = loading.placed(config, options)
    if serving.flash_attention_4:
        try:
            flash_4.check()  # first: a model takes minutes to load
        except (ImportError, RuntimeError) as error:
            raise CommandError(f"--flash-attention-4: {error}") from error
    if log_requests:
        _log_requests()
    offload = options.offload_config(device_pool=device_kv, max_host_bytes=host_kv)
    served = ServedModel(model, loading.torch_dtype(dtype), place, tensor_parallel, config, offload, serving)
    if tensor_parallel:
        torchrun.begin(place)
        if rank:
            served.follow()
    application["api_key"] = application["api_key"] or None
    application["model_id"] = model_id or served_name(model)
    application["allowed_hosts"], application["cors_origins"] = tuple(allow_host or ()), tuple(cors_origin or ())
    listener = _listen(host, port)  # first: report a taken port before the model is loaded
    try:
        _serve(served, listener, application, max_connections=max_connections, keep_alive_s=keep_alive)
    finally:
        listener.close()


def _serve(served: ServedModel, listener: socket.socket, application: dict[str, Any], **bounds: Any) -> None:
    """Load the model and serve it until a signal ends that.

    Args:
        application: arguments of :func:`.create_app`.
        bounds: further arguments of :class:`.Server`.
    """
    from ..http import create_app
    from .server import Server, signals_heard

    with served.engine() as engine:
        warm_up(engine)
        app = create_app(engine, **application)
        server = Server(app, engine, max_rows=served.serving.max_rows, **bounds)
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


def _tell_address(listener: socket.socket, api_key: list[str] | None) -> None:
    from ..http.gate import is_loopback

    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    keyed = " (with an API key)" if api_key else ""
    note(f"listening on http://{shown}:{port}/v1{keyed}; Ctrl-C ends it")
    if not api_key and not is_loopback(address):
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
