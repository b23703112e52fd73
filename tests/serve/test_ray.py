"""Replicas under a local Ray, on the CPU, asked by OpenAI's client: where requests go, what is lost with a replica.

The last test has a replica of two ranks, each of which is killed once.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import string
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from models import build
from ray_processes import free_port, replica_processes
from starlette.testclient import TestClient
from tokenizers_made import byte_level
from waiting import wait_until

pytest.importorskip("ray.serve", reason="Ray is not installed: `make test-ray` installs it")

import ray
from ray import serve

from hf_sparsekv_serve.ray import deployment as module

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[2]
CONFIG = {
    "token_budget": 32,
    "block_size": 16,
    "window": 16,
    "num_blocks": 2,
    "dense_layers": 0,
    "calibration_tokens": 32,
}
ROUTE_BYTES = 200
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves this machine
    "RAY_AUTH_MODE": "disabled",  # a token would be written to the user's home
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "hf_sparsekv_serve.ray.proxy:middlewares",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "HF_SPARSEKV_ROUTE_BYTES": str(ROUTE_BYTES),
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture(scope="module")
def url():
    """Ray and Serve without an application; nothing is left of them."""
    port, before = free_port(), dict(os.environ)
    with tempfile.TemporaryDirectory() as directory:  # short: sockets are in it
        os.environ.update(ENVIRONMENT)
        try:
            ray.init(
                num_cpus=2,
                num_gpus=0,
                object_store_memory=100 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=directory,
            )
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny random Llama with a tokenizer of bytes."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "tiny", byte_level()
    words = len(tokenizer) + len(tokenizer) % 2  # two ranks can share them
    build("llama", "sdpa", vocab_size=words, eos_token_id=tokenizer.eos_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@contextmanager
def deployed(tiny: Path, **changes):
    """The application, until it is deleted."""
    args = {"model": str(tiny), "num_gpus": 0, "num_cpus": 1, "offload": False, "config": CONFIG}
    args |= {"serving": {"max_rows": 4, "max_length": 1000}, "health_s": 1.0}
    serve.run(module.build({**args, **changes}), name="llm")
    try:
        yield
    finally:
        serve.delete("llm")


@pytest.fixture(scope="module")
def client(url, tiny):
    asking = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    with deployed(tiny, replicas=2, drain_s=30), asking as client:
        yield client


def text(characters: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters, k=characters))


def running() -> int:
    deployment = serve.status().applications["llm"].deployments["Replica"]
    return deployment.replica_states.get("RUNNING", 0)


def metric(url: str, name: str) -> float:
    """One of the replicas."""
    return float(re.search(rf"^hf_sparsekv_{name} (\S+)$", httpx.get(f"{url}/metrics").text, re.M)[1])


# ---------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "model"),
        ({"model": ""}, "at least 1 character"),
        ({"model": "m", "modle_id": "x"}, "modle_id"),
        ({"model": "m", "replicas": 0}, "replicas"),
        ({"model": "m", "num_gpus": 2}, "num_gpus"),
        ({"model": "m", "tensor_parallel": 0}, "tensor_parallel"),
        ({"model": "m", "tensor_parallel": 1.5}, "tensor_parallel"),
        ({"model": "m", "num_gpus": 0.5}, "num_gpus"),
        ({"model": "m", "dtype": "float17"}, "torch has no 'float17'"),
        ({"model": "m", "config": "accurat"}, "accurat"),
        ({"model": "m", "config": {"token_budge": 3}}, "token_budge"),
        ({"model": "m", "offload": {"max_host_bytes": -1}}, "max_host_bytes"),
        ({"model": "m", "serving": {"max_rows": 0}}, r"max_rows must be an integer in"),
        ({"model": "m", "autoscaling": {"max_replica": 2}}, "AutoscalingConfig has no max_replica"),
        ({"model": "m", "autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "replicas"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(args, says):
    with pytest.raises(ValueError, match=says):
        module.build(args)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("args", "gpus"), [({}, 1), ({"tensor_parallel": 4}, 4), ({"tensor_parallel": 4, "num_gpus": 0}, 0)]
)
def test_a_replica_asks_for_the_gpus_of_all_its_ranks(args, gpus):
    deployment = module.build({"model": "m", "num_cpus": 3, **args})._bound_deployment
    assert deployment.ray_actor_options == {"num_gpus": gpus, "num_cpus": 3}


def test_an_engine_that_takes_nothing_is_unhealthy(tiny, monkeypatch):
    monkeypatch.setenv(module.KEY, "sesame")
    args = {"model": str(tiny), "num_gpus": 0, "offload": False, "config": CONFIG, "serving": {"max_rows": 2}}
    replica = module.Replica(module.Deployed(**args).model_dump())
    asyncio.run(replica.check_health())
    assert asyncio.run(replica.record_autoscaling_stats()) == {"asked": 0, "fits": 2}
    with TestClient(replica.__serve_build_asgi_app__()) as http:
        assert http.get("/v1/models").status_code == 401
        named = http.get("/v1/models", headers={"authorization": "Bearer sesame"}).json()["data"][0]["id"]
        assert named == "tiny"
    replica.__del__()
    with pytest.raises(RuntimeError, match="takes no requests any more"):
        asyncio.run(replica.check_health())


def test_a_lost_rank_is_why_a_replica_is_unhealthy(tiny, monkeypatch):
    """In the words of who has seen it, at the next look; and the replica ends."""
    ended, closed = [], []

    class OneRank:
        """Methods of RankProcesses that a replica calls, without processes."""

        lost = None

        def __init__(self, size, served, gpus) -> None:
            assert (size, served.config.token_budget, served.offload, gpus) == (2, 32, False, False)
            self.served = served

        def engine(self):
            one = self.served
            return module.Engine(module.load(one.model, one.dtype, "cpu")[1], None, one.config, False, one.serving)

        def when_lost(self, call) -> None:
            self.call = call

        def lose(self, rank: int) -> None:
            self.lost = module.RanksApart(f"rank {rank} has ended")
            self.call(self.lost)

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(module, "RankProcesses", OneRank)
    monkeypatch.setattr(module, "LOST_S", 0)
    monkeypatch.setattr(module.os, "_exit", ended.append)
    args = {"model": str(tiny), "num_gpus": 0, "offload": False, "config": CONFIG, "tensor_parallel": 2}
    replica = module.Replica(module.Deployed(**args).model_dump())
    asyncio.run(replica.check_health())
    assert not ended
    replica._ranks.lose(1)
    assert ended == [1]
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        asyncio.run(replica.check_health())
    replica.__del__()
    assert closed == [True]


# ---------------------------------------------------------------------- two replicas


def test_streams_come_piece_by_piece(client):
    options = {"model": "tiny", "prompt": "the cat", "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**options, extra_body={"ignore_eos": True})
    came, pieces = [], []
    for chunk in client.completions.create(**options, stream=True, extra_body={"ignore_eos": True}):
        came.append(time.monotonic())
        pieces.append(chunk.choices[0].text)
    assert "".join(pieces) == whole.choices[0].text and whole.usage.completion_tokens == 60
    assert len(pieces) > 10 and came[-1] - came[0] > 0.05, "the answer has come at once"


def test_what_the_server_refuses_is_told_through_the_proxy(client):
    with pytest.raises(openai.BadRequestError, match="more than the 1000 that max_length allows"):
        client.completions.create(model="tiny", prompt="a", max_tokens=2000)
    with pytest.raises(openai.NotFoundError, match="another"):
        client.completions.create(model="another", prompt="a")


def test_a_client_that_leaves_cancels_its_request(client, url):
    stream = client.completions.create(
        model="tiny", prompt="the", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: metric(url, "requests_cancelled_total") == 1)


def hits(client, documents: list[str], headers=lambda: None) -> list[int]:
    """Tokens found in a prefix cache, of five questions to each document, in turn."""
    found = []
    for question in range(5):
        for document in documents:
            answer = client.completions.create(
                model="tiny", prompt=f"{document} {question}?", max_tokens=1, extra_headers=headers()
            )
            found.append(answer.usage.prompt_tokens_details.cached_tokens)
    return found


def test_questions_to_a_document_go_where_it_is_kept(client):
    """All but the first: 20 of 25. Without a hint a document is read once on each replica."""
    with_hints = hits(client, [text(400, seed) for seed in range(5)])
    assert sum(cached > 300 for cached in with_hints) == 20, with_hints
    draw = random.Random(3)
    without = hits(
        client, [text(400, seed) for seed in range(5, 10)], lambda: {"x-session-id": str(draw.getrandbits(64))}
    )
    assert sum(cached > 300 for cached in without) <= 18, without


def test_a_session_of_the_clients_own_is_kept(client):
    """Prompts too short for a hint, which begin alike."""
    prompt = text(ROUTE_BYTES // 2, 77)
    ask = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "extra_headers": {"X-Session-Id": "contract-7"}}
    found = [client.completions.create(**ask).usage.prompt_tokens_details.cached_tokens for _ in range(6)]
    assert found[0] == 0 and min(found[1:]) > 0, found


def test_metrics_are_told_to_ray(client):
    """Each replica's, by its own name."""
    node = ray.nodes()[0]
    page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    label = re.compile(r'^ray_hf_sparsekv_generated_tokens\w*\{[^}]*replica="([^"]+)"[^}]*\} [1-9]', re.M)
    wait_until(lambda: len(set(label.findall(httpx.get(page).text))) >= 2, 60)


def test_a_replica_that_is_killed_takes_its_requests_only(client):
    """Of 50 requests all are answered or end with an error that says what to do; all later ones are answered."""
    before = {process.pid for process in replica_processes()}
    assert len(before) == 2
    done, killed = threading.Semaphore(0), threading.Event()

    def ask(number: int) -> str:
        options = {"model": "tiny", "prompt": text(30, number), "max_tokens": 60, "extra_body": {"ignore_eos": True}}
        try:
            if number % 2:
                answer = client.completions.create(**options)
                assert answer.usage.completion_tokens == 60
            else:
                chunks = list(client.completions.create(**options, stream=True))
                assert chunks[-1].choices[0].finish_reason == "length"
        except openai.APIError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            done.release()
        return "answered"

    def kill() -> None:
        for _ in range(15):
            done.acquire()
        os.kill(min(before), signal.SIGKILL)
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(ask, range(50)))
    assert killed.is_set()
    errors = [end for end in ends if end != "answered"]
    print(f"\n{len(ends) - len(errors)} of {len(ends)} answered; errors: {sorted(set(errors))}")
    assert all("send the request again" in error for error in errors), errors
    assert 1 <= len(errors) <= 8, errors  # no more than ran: nobody else is hurt
    assert [ask(number) for number in range(50, 60)] == ["answered"] * 10
    wait_until(lambda: running() == 2 and len(replica_processes()) == 2, 90)
    assert {process.pid for process in replica_processes()} != before
    assert [ask(number) for number in range(60, 70)] == ["answered"] * 10


def test_replicas_come_as_requests_wait_and_finish_before_they_go(client, url, tiny):
    """Last of all, instead of the two replicas: one that asks for another."""
    serve.delete("llm")  # or the number of replicas would be kept
    client = client.with_options(timeout=100)
    options = {
        "model": "new",
        "prompt": "the cat",
        "max_tokens": 500,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    ends = []

    def read(begun: threading.Semaphore) -> None:
        stream = iter(client.completions.create(**options))
        next(stream)
        begun.release()
        ends.append((list(stream)[-1].choices[0].finish_reason, time.monotonic()))

    def readers(count: int) -> list[threading.Thread]:
        begun = threading.Semaphore(0)
        threads = [threading.Thread(target=read, args=(begun,), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=60)
        return threads

    delays = {"upscale_delay_s": 0.5, "downscale_delay_s": 600, "look_back_period_s": 2, "metrics_interval_s": 1}
    with deployed(tiny, model_id="new", autoscaling={"min_replicas": 1, "max_replicas": 2, **delays}, drain_s=60):
        assert running() == 1
        waiting = readers(9)
        wait_until(lambda: running() == 2, 90)
        for thread in waiting:
            thread.join(100)
        assert [reason for reason, _ in ends] == ["length"] * 9
        ends.clear()
        left = readers(1)
        serve.delete("llm", _blocking=False)
        deleted = time.monotonic()
        wait_until(lambda: httpx.get(f"{url}/ready").status_code != 200)  # no new ones are taken
        refused = time.monotonic()
        left[0].join(60)
        assert ends[0][0] == "length" and ends[0][1] > refused > deleted
        wait_until(lambda: not replica_processes(), 60)


# ---------------------------------------------------------------------- a replica of two ranks


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that compute still."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


def both_ranks() -> list[psutil.Process]:
    """Processes of the only replica, rank 0 first; none, or one, before it has begun."""
    found = replica_processes()
    for process in list(found):
        with suppress(psutil.Error):
            found += [child for child in process.children() if "rank_processes" in " ".join(child.cmdline())]
    return found


def logged(words: str) -> bool:
    """A replica's log has them."""
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path()) / "serve"
    return any(words in log.read_text() for log in logs.glob("replica_*.log"))


@pytest.mark.timeout(600)
def test_a_replica_of_two_ranks_goes_and_comes_as_one(url, tiny):
    """Killed is rank 1, or rank 0: the other one ends too, and a new replica gives the same answer."""
    serve.delete("llm")
    options = {"model": "tiny", "prompt": "the cat", "max_tokens": 40, "temperature": 0}

    def answer(client) -> str | None:
        """None: there is no replica."""
        with suppress(openai.APIError):
            return client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        with deployed(tiny):
            expected = answer(client)
            assert len(both_ranks()) == 1
        wait_until(lambda: not replica_processes(), 60)
        with deployed(tiny, tensor_parallel=2):
            assert answer(client) == expected
            for killed in (1, 0):
                before = both_ranks()
                assert len(before) == 2
                begun = time.monotonic()
                os.kill(before[killed].pid, signal.SIGKILL)
                wait_until(lambda before=before: not alive(before), 60)
                gone = time.monotonic() - begun
                wait_until(lambda: answer(client) == expected, 120)
                print(f"\nrank {killed} killed: gone {gone:.1f} s, answered {time.monotonic() - begun:.1f} s later")
                assert not {process.pid for process in both_ranks()} & {process.pid for process in before}
            assert logged("rank 1 of the model has been killed by SIGKILL")
            last = both_ranks()
        wait_until(lambda: not alive(last), 60)
