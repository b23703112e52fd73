"""``hf-sparsekv serve``: a whole one in a process of its own, and what it says when something is wrong."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import forked
import httpx
import pytest
import torch
from fake_engine import FakeEngine
from models import build
from tokenizers_made import byte_level
from typer.testing import CliRunner
from waiting import wait_until

from hf_sparsekv import OffloadConfig, Sampling
from hf_sparsekv.cli import loading
from hf_sparsekv.serving.grammar import MOST_BYTES, PROCESS
from hf_sparsekv_cli.app import app
from hf_sparsekv_serve.cli import serve as module
from hf_sparsekv_serve.cli import server as server_module
from hf_sparsekv_serve.cli import torchrun
from hf_sparsekv_serve.cli.server import SIGNALS, Server, signals_heard
from hf_sparsekv_serve.http import create_app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny random Llama with a tokenizer of bytes."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "tiny-llama", byte_level()
    build("llama", "sdpa", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def by_itself(argv: list[str], env: dict[str, str]) -> subprocess.Popen:
    """A new interpreter, which imports all again."""
    told = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *argv], env=env, **told)


@pytest.mark.parametrize(
    "start", [forked.Popen, pytest.param(by_itself, marks=pytest.mark.slow)], ids=["forked", "new"]
)
def test_a_server_from_its_first_line_to_its_last(start, tiny):
    """Greedy answers are generate()'s; SIGTERM lets a stream have its end, and takes no more requests."""
    command = ["-m", "hf_sparsekv_cli", "serve", str(tiny), "--port", "0", "--device", "cpu"]
    command += ["--max-rows", "4", "--context", "1k", "--no-offload", "--max-answer", "12"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_SPARSEKV_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    server = start(command, env)
    lines = []
    try:
        while not lines or not lines[-1].startswith("listening on "):
            lines.append(server.stderr.readline())
            assert lines[-1], "".join(lines)
        url = re.search(r"http://127\.0\.0\.1:\d+", lines[-1])[0]
        assert "tiny-llama: up to 1,024 tokens a request, 4 rows" in lines[-2] and "sesame" not in "".join(lines)
        with httpx.Client(base_url=url, headers={"authorization": "Bearer sesame"}, timeout=60) as client:
            assert httpx.get(f"{url}/v1/models").status_code == 401
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny-llama"
            body = {"prompt": "the cat of the cat", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 20
            assert answer["choices"][0]["text"] == generated(tiny, body["prompt"], 20)
            chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "the"}]})
            assert 1 <= chat.json()["usage"]["completion_tokens"] <= 12
            body |= {"max_tokens": 100, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                events = stream.iter_lines()
                next(events)
                server.send_signal(signal.SIGTERM)
                wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
                refused = httpx.post(f"{url}/v1/completions", json=body, headers=client.headers)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "closed"
                told = [line for line in events if line.startswith("data: ")]
            assert told[-1] == "data: [DONE]" and json.loads(told[-2][6:])["choices"][0]["finish_reason"] == "length"
        out, rest = server.communicate(timeout=60)
        assert server.returncode == 0 and "draining: 1 requests are left" in rest and "Traceback" not in rest, rest
        assert out == ""
    finally:
        server.kill()
        server.communicate()


@torch.no_grad()
def generated(path: Path, prompt: str, tokens: int) -> str:
    """By transformers alone."""
    tokenizer, model = loading.load(str(path), None, torch.device("cpu"))
    model.set_attn_implementation("sdpa")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=ids * 0 + 1, do_sample=False, max_new_tokens=tokens, eos_token_id=None)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("signals", [1, 2])
def test_the_first_signal_drains_and_the_second_stops(signals, capfd):
    with FakeEngine(byte_level(), step_s=0.005) as engine, socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(create_app(engine, "m"), engine)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        wait_until(lambda: server.started)
        url, texts = f"http://127.0.0.1:{listener.getsockname()[1]}", []
        body = {"prompt": "ab", "max_tokens": 100 if signals == 1 else 900}

        def ask() -> None:
            try:
                texts.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30).json())
            except (httpx.HTTPError, ValueError):  # cut short
                texts.append(None)

        client = threading.Thread(target=ask)
        client.start()
        wait_until(lambda: engine.busy == 1)
        server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: engine.draining)
        if signals == 2:
            server.handle_exit(signal.SIGINT, None)
        client.join(20)
        thread.join(20)
        assert not client.is_alive() and not thread.is_alive()
        if signals == 1:
            assert texts[0]["usage"]["completion_tokens"] == 100
        else:
            wait_until(lambda: engine.counts["cancelled"] == 1)
    assert "in lifespan" not in capfd.readouterr().err  # nobody has asked for it


def run(*args: str, **env: str):
    return CliRunner().invoke(app, ["serve", *args], env=env)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--cache", "dense"], "sparse caches only"),
        (["--max-length", "100"], "--context says"),
        (["--no-offload", "--device-kv", "1GiB"], "--device-kv is for keys and values in host memory"),
        (["--no-offload", "--host-kv", "1GiB"], "--host-kv is for keys and values in host memory"),
        (["--host-kv", "many"], "is not a size"),
        (["--max-body", "x"], "is not a size"),
        (["--max-body", "16"], "16 bytes? Write the unit, too: 16MiB"),
        (["--max-body", "0MiB"], "no request would be taken"),
        (["--device-kv", "24"], "24 bytes? Write the unit, too: 24GiB"),
        (["--device-kv", "8.5"], "8.5 bytes? Write the unit, too: 8.5GiB"),
        (["--host-kv", "24"], "24 bytes? Write the unit, too: 24GiB"),
        (["--model-id", ""], "--model-id is empty"),
        (["--context", "x"], "is no length"),
        (["--api-key", " "], "is empty"),
        (["--token-budget", "0"], "--token-budget"),
        (["--max-rows", "0"], "an integer in [1, 4096], got 0"),
        (["--port", "70000"], "65535"),
    ],
)
def test_wrong_usage(args, says, tiny):
    done = run(str(tiny), *args)
    assert done.exit_code == 2 and says in " ".join(re.sub(r"[│\n]", " ", done.output).split()), done.output


def test_a_port_that_is_taken_or_a_host_that_is_not_here(tiny, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *args: pytest.fail("the model was loaded first"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(str(tiny), "--port", port)
        assert done.exit_code == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.output
    done = run(str(tiny), "--host", "203.0.113.7")
    assert done.exit_code == 1 and "cannot listen on 203.0.113.7:8000" in done.output


def test_without_the_extra(tiny, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "uvicorn" else find(name, *a))
    done = run(str(tiny))
    assert done.exit_code == 1 and "serve needs uvicorn: install the extra" in " ".join(done.output.split())


def test_without_flash_attention_4(tiny, monkeypatch):
    monkeypatch.setattr(module.flash_4, "installed", lambda module: False)
    done = run(str(tiny), "--flash-attention-4")
    assert done.exit_code == 1 and "FlashAttention 4 is not installed: pip install" in " ".join(done.output.split())


def test_an_unknown_model_is_told():
    done = run("./nothing", "--port", "0")
    assert done.exit_code == 1 and "there is no directory './nothing'" in done.output


def test_what_the_engine_is_given(tiny, monkeypatch):
    """Options by their names; the key from the environment."""
    given = {}

    def serve(*args, **bounds) -> None:
        given.update(zip(("served", "listener", "application"), args), bounds=bounds)

    monkeypatch.setattr(module, "_serve", serve)
    args = ["--port", "0", "--max-rows", "3", "--context", "2k", "--batch-tokens", "8k", "--max-waiting", "5"]
    args += ["--max-wait-s", "1.5", "--prefill-ms", "7", "--device-kv", "1GiB", "--host-kv", "2GB", "--max-body", "1kB"]
    done = run(
        str(tiny), *args, "--no-prefix-cache", "--token-budget", "64", "--num-blocks", "4", HF_SPARSEKV_API_KEY="k l"
    )
    assert done.exit_code == 0, done.output
    assert given["bounds"] == {"max_connections": 2048, "keep_alive_s": 75}
    assert given["application"] == {
        "model_id": "tiny-llama",
        "api_key": ["k", "l"],
        "max_body": 1000,
        "max_answer": None,
        "allowed_hosts": (),
        "cors_origins": (),
        "ignore_unknown_fields": False,
        "tool_format": None,
    }
    config, offload, serving = given["served"].config, given["served"].offload, given["served"].serving
    assert (config.token_budget, config.num_blocks) == (64, 4)
    assert offload == OffloadConfig(device_pool=1 << 30, max_host_bytes=2_000_000_000)
    assert (serving.max_rows, serving.max_length, serving.max_tokens) == (3, 2048, 8192)
    assert (serving.max_waiting, serving.max_wait_s, serving.prefill_ms) == (5, 1.5, 7.0)
    assert not serving.prefix_cache and not serving.flash_attention_4
    monkeypatch.setattr(module.flash_4, "check", lambda: None)
    run(str(tiny), "--port", "0", "--flash-attention-4")
    assert given["served"].serving.flash_attention_4
    names = ("--allow-host", "a.example", "--allow-host", "b.example")
    names += ("--max-connections", "7", "--keep-alive", "9")
    run("small", "--port", "0", "--no-offload", "--model-id", "mine", *names)
    application = given["application"]
    assert (application["model_id"], application["api_key"], given["served"].offload) == ("mine", None, None)
    assert given["bounds"] == {"max_connections": 7, "keep_alive_s": 9}
    assert application["allowed_hosts"] == ("a.example", "b.example")
    assert module.served_name("small") == "small" and module.served_name("org/model") == "org/model"


def test_there_are_files_for_as_many_connections_as_may_be(monkeypatch, capsys):
    import resource

    limits = [(100, 5000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    other = server_module.OTHER_FILES + 32
    assert other >= MOST_BYTES // PROCESS + 32  # processes of grammars, and one a row
    assert server_module.affordable_connections(2048, 32) == 2048 and limits[-1] == (2048 + other, 5000)
    limits.append((100, 1024))
    assert server_module.affordable_connections(2048, 32) == 1024 - other and limits[-1] == (1024, 1024)
    assert "this process may have 1024 (ulimit -n)" in " ".join(capsys.readouterr().err.split())


def test_what_is_there_when_it_listens_is_left_out_of_collections(tiny, monkeypatch):
    found = []

    class Standing:
        signals = 0

        def handle_exit(self, sig, frame) -> None: ...

        def run(self, sockets) -> None:
            found.append(gc.get_freeze_count())

    monkeypatch.setattr(server_module, "Server", lambda *_, **__: Standing())
    done = run(str(tiny), "--port", "0", "--device", "cpu", "--max-rows", "2", "--context", "1k", "--no-offload")
    assert done.exit_code == 0, done.output
    assert found[0] > 100_000 and gc.get_freeze_count() == 0


# ---------------------------------------------------------------------- signals


@contextmanager
def served(tiny: Path, *args: str):
    """A server in a process of its own and the lines that it has written until it listens."""
    command = ["-m", "hf_sparsekv_cli", "serve", str(tiny), "--port", "0", "--device", "cpu"]
    command += ["--max-rows", "4", "--context", "1k", "--no-offload", *args]
    server = forked.Popen(command, {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    lines: list[str] = []
    try:
        while not lines or not lines[-1].startswith("listening on "):
            lines.append(server.stderr.readline())
            assert lines[-1], "".join(lines)
        yield server, re.search(r"http://127\.0\.0\.1:\d+", lines[-1])[0]
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_behind_the_line_that_says_it_listens(which, tiny):
    """Before the web server has begun: it drains all the same."""
    with served(tiny) as (server, _):
        server.send_signal(which)
        out, rest = server.communicate(timeout=60)
        assert (server.returncode, out) == (0, "") and "draining: 0 requests" in rest and "Traceback" not in rest, rest


def test_a_second_signal_tells_those_who_wait_and_ends_soon(tiny):
    """One reads a stream, one waits for its answer, one takes nothing: the first two hear why, nobody is waited for."""
    body = {"prompt": "the cat", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    with served(tiny) as (server, url), httpx.Client(base_url=url, timeout=60) as client:
        answers, port = [], int(url.rpartition(":")[2])
        whole = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body)))
        whole.start()
        asked = json.dumps({**body, "stream": True}).encode()
        deaf = socket.create_connection(("127.0.0.1", port))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        head = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")
        deaf.sendall("\r\n".join((*head, f"content-length: {len(asked)}", "", "")).encode() + asked)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            events = stream.iter_lines()
            while not next(events).startswith("data: "):
                pass
            wait_until(lambda: "requests_running 3.0" in httpx.get(f"{url}/metrics").text)
            server.send_signal(signal.SIGINT)
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
            server.send_signal(signal.SIGINT)
            told = [line for line in events if line.startswith("data: ")]
        assert json.loads(told[-1][6:])["error"]["code"] == "closed"
        whole.join(20)
        assert answers[0].status_code == 503 and "it is stopping" in answers[0].json()["error"]["message"]
        out, rest = server.communicate(timeout=20)
        deaf.close()
        assert (server.returncode, out) == (0, "") and "Traceback" not in rest, rest


def test_a_third_signal_ends_what_hangs(monkeypatch):
    """What the second one has asked for does not come to its end: the process ends at once."""
    left, closing, go = [], threading.Event(), threading.Event()
    monkeypatch.setattr(server_module, "leave", left.append)
    with FakeEngine(byte_level(), step_s=0.005) as engine:
        monkeypatch.setattr(engine, "close", lambda: closing.set() or go.wait(10))
        server = Server(create_app(engine, "m"), engine)
        engine.submit([1, 2, 3], Sampling(max_tokens=900, ignore_eos=True))
        for _ in range(2):
            server.handle_exit(signal.SIGTERM, None)
        assert closing.wait(10) and left == []
        server.handle_exit(signal.SIGTERM, None)
        assert left == [128 + signal.SIGTERM]
        go.set()
        monkeypatch.undo()


def test_handlers_are_as_before_when_no_signal_has_come():
    with FakeEngine(byte_level()) as engine:
        server, before = (
            Server(create_app(engine, "m"), engine),
            [signal.getsignal(one) for one in SIGNALS],
        )
        with signals_heard(server):
            assert [signal.getsignal(one) for one in SIGNALS] == [server.handle_exit] * 2
        assert [signal.getsignal(one) for one in SIGNALS] == before


def test_a_lost_rank_is_not_waited_for(monkeypatch):
    """The engine's thread may wait for it in a sum, for ever."""

    class Ended:
        failed = RuntimeError("rank 1 of the model has ended")

        def run(self, sockets) -> None:
            pass

        def close(self) -> None:
            pytest.fail("waits for a step that never ends")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(module, "leave", leave)
    with pytest.raises(SystemExit, match="1"):
        module._run(Ended(), Ended(), None, True)


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {}, "lo"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, {}, None),  # of several machines
        ({"WORLD_SIZE": "2"}, {}, None),  # started by something else than torchrun
    ],
)
def test_ranks_of_one_machine_listen_on_loopback(world, given, expected, monkeypatch):
    """They exchange pickles: nobody else may connect. By itself, gloo takes the address of the machine's name."""
    found = []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**world, **given}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = lambda backend: found.append((backend, os.environ.get("GLOO_SOCKET_IFNAME")))  # noqa: E731
    monkeypatch.setattr(torch.distributed, "init_process_group", asked)
    torchrun.begin(torch.device("cpu"))
    assert found == [("gloo", expected)]
    assert os.environ.pop("NCCL_SOCKET_IFNAME", None) == ("lo" if expected else None)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
