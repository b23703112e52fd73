"""``hf-sparsekv serve``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from hf_sparsekv_cli import options as opt

from ..attention import flash_4
from ..gguf_file import is_gguf
from ..serving.grammar import MOST_BYTES, PROCESS
from . import loading
from .output import CommandError, messages, note

NEEDED = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
WARM_UP = 64  # tokens
FAILED_S = 2  # how long /ready reports the loss of a rank before the replica ends
GRACE_S = 10  # how long clients have to read the ends of their answers
HURRY_S = 2  # the same, at the second signal
OTHER_FILES = 256 + MOST_BYTES // PROCESS  # beside connections and rows: libraries, weights; compiled grammars
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    *,
    model: str,
    host: str,
    port: int,
    api_key: str | None,
    model_id: str | None,
    max_body: int,
    max_connections: int,
    allow_host: list[str] | None,
    cors_origin: list[str] | None,
    ignore_unknown_fields: bool,
    log_requests: bool,
    max_answer: int,
    device_kv: int | None,
    host_kv: int | None,
    cache: opt.CacheKind,
    dtype: opt.DType,
    device: str,
    tensor_parallel: bool,
    engine: opt.EngineOptions,
    options: opt.DecodingOptions,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, many requests over one sparse cache."""
    _check_installed()
    rank = _rank() if tensor_parallel else 0
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
    if tensor_parallel:
        _begin_ranks(place)
        if rank:
            _follow(model, (config, offload, serving, dtype, device))
    listener = _listen(host, port)  # first: report a taken port before the model is loaded
    try:
        _serve(
            model,
            model_id or served_name(model),
            listener,
            max_connections,
            {
                "api_key": api_key,
                "max_body": max_body,
                "max_answer": max_answer,
                "allowed_hosts": tuple(allow_host or ()),
                "cors_origins": tuple(cors_origin or ()),
                "ignore_unknown_fields": ignore_unknown_fields,
            },
            (config, offload, serving, dtype, device),
            tensor_parallel,
        )
    finally:
        listener.close()


def _serve(model, model_id, listener, max_connections, options, settings, tensor_parallel) -> None:
    from ..serving.engine import Engine
    from ..serving.garbage import set_aside
    from ..serving.http import create_app
    from ..serving.http.gate import is_loopback
    from ..serving.sampling import Sampling
    from ..serving.turns import short_turns

    config, offload, serving, dtype, device = settings
    api_key = options["api_key"]
    place = loading.pick_device(device)
    with messages.status(f"loading {model}"):
        tokenizer, loaded = loading.load(model, loading.torch_dtype(dtype), place, tensor_parallel)
    with Engine(loaded, tokenizer, config, offload, serving) as engine:
        length = max(1, min(WARM_UP, engine.max_length - 2))
        engine.submit([0] * length, Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)).result()
        app = create_app(engine, model_id, **options)
        server = server_of(app, engine, max_connections, serving.max_rows)
        with set_aside(), short_turns(), signals_heard(server):  # signals: before anybody is told that it listens
            if tensor_parallel:
                threading.Thread(target=_end_with_ranks, args=(engine, server), name="ranks", daemon=True).start()
            listener.listen(2048)
            address, port = listener.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            note(f"{model_id}: up to {engine.max_length:,} tokens a request, {serving.max_rows} rows, {config.brief()}")
            keyed = "" if api_key is None else " (with an API key)"
            note(f"listening on http://{shown}:{port}/v1{keyed}; Ctrl-C ends it")
            if api_key is None and not is_loopback(address):
                note("anybody who reaches this machine may ask: no API key is set")
            _run(server, engine, listener, tensor_parallel)
    if tensor_parallel:
        _leave(0 if engine.failed is None else 1)


def _run(server, engine, listener, tensor_parallel: bool) -> None:
    """Serve until the server ends."""
    server.run(sockets=[listener])
    if tensor_parallel and engine.failed is not None:
        _leave(1)  # everybody was told; to close the engine would wait for its step, and that for a rank that is gone
    engine.close()  # a signal may still come


def _rank() -> int:
    """This process's number among those that torchrun has started."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]
    except (KeyError, ValueError):
        rank, size = 0, 1
    if size < 2:
        raise CommandError(
            "--tensor-parallel needs a process for each GPU: torchrun --nproc-per-node 2 -m hf_sparsekv serve MODEL "
            "--tensor-parallel"
        )
    return rank


def _begin_ranks(place: torch.device) -> None:
    """Let the processes find each other."""
    import torch.distributed as dist

    from ..serving.rank_processes import INTERFACES, LOOPBACK

    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]  # no other machine needs to reach them
    if alone and sys.platform == "linux":  # elsewhere the interface has another name
        for name in INTERFACES:
            os.environ.setdefault(name, LOOPBACK)
    if place.type == "cpu":
        if torch.cuda.is_available():  # where transformers would put its shares of the model
            raise CommandError("--tensor-parallel takes the GPUs that are there: leave --device out")
        dist.init_process_group("gloo")
        return
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if place.index is not None or here.index >= torch.cuda.device_count():
        raise CommandError(
            "--tensor-parallel takes a GPU for each process of a machine: leave --device out, and start as many "
            f"processes as GPUs (torch sees {torch.cuda.device_count()})"
        )
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here)


def _follow(model, settings) -> NoReturn:
    """All ranks but 0: do as rank 0 says, which alone is told to end."""
    from ..serving.ranks import follow

    config, offload, serving, dtype, device = settings
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    loaded = loading.load(model, loading.torch_dtype(dtype), loading.pick_device(device), tensor_parallel=True)[1]
    try:
        follow(loaded, config, offload, serving)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _end_with_ranks(engine, server) -> None:
    """A replica that has lost a rank ends, so that another one can be started."""
    while engine.failed is None:
        time.sleep(0.2)
    note(f"the engine has failed, and this process ends: {engine.failed}")
    time.sleep(FAILED_S)
    server.should_exit = True
    time.sleep(GRACE_S)
    _leave(1)  # the engine may wait for a rank that is gone, for ever


def _leave(code: int) -> NoReturn:
    """End the process at once: groups of torch.distributed have threads that may outlive the interpreter, and abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def server_of(app, engine, max_connections=2048, max_rows=32):
    """uvicorn's server, but the first signal lets running requests finish, and the second one cancels them.

    Its own signal handlers are left out. They are set only while it runs, and a signal may come earlier or later.
    """
    import uvicorn

    from ..serving.http.connections import protocol

    class Server(uvicorn.Server):
        signals = 0  # received so far

        def handle_exit(self, sig, frame) -> None:
            self.signals += 1
            if self.signals > 2:  # the second one did not end the server
                _leave(128 + sig)
            what = self.drain if self.signals == 1 else self.stop
            threading.Thread(target=what, name=what.__name__, daemon=True).start()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        def drain(self) -> None:
            stats = engine.stats()
            left = stats.running + stats.waiting + stats.held + stats.prefilling
            note(f"draining: {left} requests are left, no more are taken; once more to stop at once")
            engine.drain()
            self.should_exit = True

        def stop(self) -> None:
            """Whoever waits is told that it ends; who does not take that in time is left."""
            self.config.timeout_graceful_shutdown = HURRY_S
            engine.close()
            self.should_exit = True
            time.sleep(HURRY_S)
            self.force_exit = True  # it may have begun to wait before

    # Hides errors of clients that were cut off: their tasks are cancelled, and uvicorn would show where.
    logging.getLogger("uvicorn.error").addFilter(_no_cancellation)
    options = {"log_level": "warning", "access_log": False, "ws": "none", "lifespan": "off", "server_header": False}
    connections = affordable_connections(max_connections, max_rows)
    options |= {"http": protocol(connections), "proxy_headers": False}
    return Server(uvicorn.Config(app, **options, timeout_graceful_shutdown=GRACE_S))


def affordable_connections(asked: int, rows: int) -> int:
    """As many as this process may have files for, which are raised as far as it may.

    Args:
        rows: most answers at a time; each may have a file, for its grammar's process.
    """
    try:
        import resource
    except ImportError:  # Windows
        return asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other = OTHER_FILES + rows
    needed = asked + other
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            note(f"{asked} connections need {needed} open files, and this process may have {soft} (ulimit -n)")
            return max(1, soft - other)
    return asked


def _no_cancellation(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, asyncio.CancelledError)


@contextlib.contextmanager
def signals_heard(server) -> Iterator[None]:
    """Signals go to the server. If one has come, no more are heard afterwards: the process is about to end."""
    before = {one: signal.signal(one, server.handle_exit) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_IGN if server.signals else handler)


def _log_requests() -> None:
    """Lines of the HTTP server about requests, on standard error."""
    logger = logging.getLogger("hf_sparsekv.serving.http")
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
