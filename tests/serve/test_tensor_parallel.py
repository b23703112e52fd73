"""The engine over two ranks of one model: the tokens of one process, and an end if a rank ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import forked
import httpx
import numpy as np
import pytest
import torch
from models import build
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv import Engine
from hf_sparsekv.serving import work
from hf_sparsekv_cli.app import app
from hf_sparsekv_serve import ranks as ranks_module
from hf_sparsekv_serve.ranks import FollowedWork, RanksApart, SharedWork, TensorParallelEngine

ROOT = Path(__file__).parents[2]

# Rank 0 asks the same of an engine over both ranks and of one in its own process.
ANSWERS = """
import os, sys, warnings
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from caches import FULL, SMALL
from captured import Imitation
from models import prompt
from hf_sparsekv import Engine, OffloadConfig, Sampling, ServingConfig, TokenConfig, optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.ranks import ranks_of
from hf_sparsekv_serve.ranks import TensorParallelEngine, follow

path, gpus, spread = sys.argv[1], sys.argv[2:] == ["gpus"], DistributedConfig(tp_plan="auto")
here = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here)
else:
    dist.init_process_group("gloo")
shard = AutoModelForCausalLM.from_pretrained(path, distributed_config=spread, attn_implementation="sparsekv")
serving = ServingConfig(max_rows=3, max_length=300, chunk=64, prefill_ms=0.5)
budget = TokenConfig(**{**SMALL, "dense_below": 0, "token_budget": 32})
kinds = ((TokenConfig(**SMALL, **FULL), None, False), (budget, OffloadConfig(), True))

def begin(captured):
    if gpus:
        optimize(shard)
    elif captured:
        ranks_of(shard).captures = True  # as if a graph could hold the ranks' sums
        Imitation(shard).install()

if dist.get_rank():
    for config, offload, captured in kinds:
        begin(captured)
        follow(shard, config, offload, serving)
    assert runner_of(shard).captures > 3 and runner_of(shard).replays > 20
    print("rank 1 is done", flush=True)
    os._exit(0)

whole = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sparsekv").to(here)
if gpus:
    optimize(whole, fused=False)  # no share of a model is fused, which rounds otherwise
ids = lambda n, seed: prompt(1, n, seed=seed)["input_ids"][0].tolist()
sizes = ((150, 12), (20, 9), (201, 20), (65, 1), (150, 8), (7, 60))
asked = [(ids(n, n), Sampling(max_tokens=new, temperature=0)) for n, new in sizes]
asked += [(ids(40, 3), Sampling(max_tokens=15, seed=seed)) for seed in (5, 6)]
asked += [(ids(90, 4), Sampling(max_tokens=10, temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=7))]

def answers(kind, net, config, offload):
    with kind(net, None, config, offload, serving) as engine:
        left = engine.submit(ids(30, 1), Sampling(max_tokens=200, temperature=0))
        handles = [engine.submit(*one) for one in asked]
        for piece, _ in zip(left, range(3)):
            pass
        left.cancel()
        unread = engine.submit(ids(250, 2), Sampling(max_tokens=5))
        unread.cancel()
        try:
            engine.submit(ids(290, 1), Sampling(max_tokens=200))
            raise AssertionError("it would not fit")
        except ValueError as error:
            assert "the 300 that max_length allows" in str(error)
        found = [list(handle.result(60).token_ids) for handle in handles]
        assert {left.result(60).finish_reason, unread.result(60).finish_reason} == {"cancelled"}
        again = engine.submit(*asked[2]).result(60)
        assert again.cached_tokens > 0
        heads = engine._cache.sparse_layers[0].store.heads
    return found, list(again.token_ids), heads

for config, offload, captured in kinds:
    one, again, heads = answers(Engine, whole, config, offload)
    begin(captured)
    both, both_again, fewer = answers(TensorParallelEngine, shard, config, offload)
    assert both == one and both_again == again, (one, both, again, both_again)
    assert (heads, fewer) == (2, 1)
    if config is kinds[0][0]:
        for (given, sampling), tokens in list(zip(asked, one))[:6]:
            given, new = torch.tensor([given], device=here), sampling.max_tokens
            row = whole.generate(given, max_new_tokens=new, do_sample=False)
            assert row[0, given.shape[1] :].tolist() == tokens
for wrong, says in ((follow, "make an engine here"), (Engine, "this is rank 0 of a tensor parallel model")):
    try:
        wrong(shard)
        raise AssertionError("rank 0 has an engine of its own")
    except ValueError as error:
        assert says in str(error)
print("rank 0 is done", flush=True)
os._exit(0)
"""


# Sparse prompts of the same engines: rank 0 reports the query heads of both.
HEADS = """
import os, sys
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from caches import SMALL
from engines import greedy, ids_of, inside
from hf_sparsekv import Engine, ServingConfig, TokenConfig
from hf_sparsekv_serve.ranks import TensorParallelEngine, follow

dist.init_process_group("gloo")
config = TokenConfig(**SMALL, prefill=0.4, prefill_below=0)
serving = ServingConfig(max_rows=2, max_length=1000, chunk=1000)
spread = DistributedConfig(tp_plan="auto")
shard = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=spread, attn_implementation="sparsekv")
if dist.get_rank():
    follow(shard, config, None, serving)
    os._exit(0)
whole = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sparsekv")
found = []
for kind, net in ((Engine, whole), (TensorParallelEngine, shard)):
    with kind(net, None, config, None, serving) as engine:
        tokens = [engine.submit(ids_of(900, seed), greedy(3)).result(60).token_ids for seed in (1,)]
        while not engine.stats().prompts:
            engine.submit(ids_of(20, 1), greedy(2)).result(60)
        found.append((tokens, engine.stats().prompts, inside(engine).cache.sparse_layers[0].q_heads))
(one, alone, heads), (both, together, fewer) = found
assert one == both and (heads, fewer) == (4, 2)
assert len(alone) == len(together) == 2
for a, b in zip(alone, together):
    assert (a.layer, a.visible, a.choices) == (b.layer, b.visible, b.choices)
    assert len(b.heads) == 4 and abs(a.covered - b.covered) < 1e-2 and 0 < b.density < 1
    assert all(abs(x - y) < 2e-2 for x, y in zip(a.densities, b.densities)), (a, b)
os._exit(0)
"""


RANDOM = """
import os
import torch
import torch.distributed as dist
from models import build
from hf_sparsekv.cli import loading

dist.init_process_group("gloo")
shape = build("llama", "sdpa", vocab_size=96).config
loading.SHAPES["tiny"] = lambda: shape
shard, whole = (loading.load("random:tiny", torch.float32, torch.device("cpu"), both)[1] for both in (True, False))
share = shard.model.layers[0].self_attn.q_proj.weight.to_local()
assert 2 * share.numel() == whole.model.layers[0].self_attn.q_proj.weight.numel()
ids = torch.arange(20)[None]
with torch.no_grad():
    torch.testing.assert_close(shard(ids).logits, whole(ids).logits)
print(f"rank {dist.get_rank()} is done", flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of bytes, whose words two ranks can share."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "tiny-llama", byte_level()
    words = len(tokenizer) + len(tokenizer) % 2
    build("llama", "sdpa", vocab_size=words).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def alone(argv: list[str], env: dict[str, str]) -> subprocess.Popen:
    """A process that shares nothing with others, as one that uses a GPU has to be."""
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *argv], env=env, **told)


class Ranks:
    """Two processes as torchrun starts them, without its looking after them; what they say."""

    def __init__(self, command: list[str], port: int, gpus: bool = False) -> None:
        paths = (str(ROOT), str(ROOT / "tests/helpers"))
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        base = {**os.environ, **world, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        if not gpus:
            base["CUDA_VISIBLE_DEVICES"] = ""
        self.said = ["", ""]
        begin = alone if gpus else forked.merged
        self.processes = [begin(command, {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
        for rank in range(2):
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()

    def _listen(self, rank: int) -> None:
        for line in self.processes[rank].stdout:
            self.said[rank] += line

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def ends(self, rank: int, seconds: float) -> int:
        """Its exit code."""
        try:
            return self.processes[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} has not ended: {self.said}")


@pytest.fixture
def port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_two_ranks_answer_as_one_process(model, tmp_path, port):
    """Greedy and seeded, joins and leaves, prefixes that are kept, cancelled in the middle, refused; replayed."""
    (tmp_path / "answers.py").write_text(ANSWERS)
    with Ranks([str(tmp_path / "answers.py"), str(model)], port) as ranks:
        codes = ranks.ends(0, 120), ranks.ends(1, 20)
        assert codes == (0, 0), ranks.said


def test_two_ranks_tell_of_all_heads(model, tmp_path, port):
    (tmp_path / "answers.py").write_text(HEADS)
    with Ranks([str(tmp_path / "answers.py"), str(model)], port) as ranks:
        codes = ranks.ends(0, 120), ranks.ends(1, 20)
        assert codes == (0, 0), ranks.said


@pytest.mark.gpu
def test_two_gpus_answer_as_one(model, tmp_path, port):
    """The same over NCCL: steps of all kinds are captured, with its sums in them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (tmp_path / "answers.py").write_text(ANSWERS)
    with Ranks([str(tmp_path / "answers.py"), str(model), "gpus"], port, gpus=True) as ranks:
        codes = ranks.ends(0, 300), ranks.ends(1, 20)
        assert codes == (0, 0), ranks.said


@pytest.mark.parametrize("name", ["join", "overtook"])
def test_a_row_that_another_rank_has_not_given_ends_the_replica(name, monkeypatch):
    took = iter([([(name, (), 2)], 5, "forget", (0,)), ([(name, (), 3)], 5, "close", ())])
    follower = FollowedWork.__new__(FollowedWork)
    follower.wire = SimpleNamespace(take=lambda: next(took))
    follower.rows = SimpleNamespace(cache=SimpleNamespace(row_table=SimpleNamespace(ids=SimpleNamespace(used=5))))
    follower._held, follower._row = {0: None}, 2
    monkeypatch.setattr(FollowedWork, "join", lambda self: 2)
    with pytest.raises(RanksApart, match=f"{name} gave 2 here and 3 on rank 0"):
        follower.follow()
    assert follower._held == {}, "until then they agree"


def test_the_row_of_a_prompt_that_overtakes_is_noted(monkeypatch):
    sent, logits = [], torch.zeros(1, 3)
    leader = SharedWork.__new__(SharedWork)
    leader._notes, leader._forgotten = [], deque()
    leader.wire = SimpleNamespace(send=sent.append)
    leader.rows = SimpleNamespace(cache=SimpleNamespace(row_table=SimpleNamespace(ids=SimpleNamespace(used=5))))
    monkeypatch.setattr(work.Work, "overtake", lambda self, ids, blocks, channels: (3, logits))
    assert leader.overtake([1, 2], np.zeros(0, dtype=np.int32), None) == (3, logits)
    assert [name for _, _, name, _ in sent] == ["overtake"] and leader._notes == [("overtook", (), 3)]


@pytest.mark.parametrize("lost", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_a_rank_that_ends_ends_the_replica(model, port, lost):
    """The other one says why, and ends within seconds; clients are told."""
    command = ["-m", "hf_sparsekv", "serve", str(model), "--tensor-parallel", "--port", "0"]
    command += ["--device", "cpu", "--max-rows", "2", "--context", "1k", "--no-offload"]
    with Ranks(command, port) as ranks:
        wait_until(lambda: "listening on" in ranks.said[0] or ranks.processes[0].poll() is not None, 60)
        found = re.search(r"http://127\.0\.0\.1:\d+", ranks.said[0])
        assert found, ranks.said
        body = {"prompt": "the cat", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
        pieces: list[str] = []

        def ask() -> None:
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream("POST", f"{found[0]}/v1/completions", json=body, timeout=60) as answer,
            ):
                pieces.extend(answer.iter_lines())

        client = threading.Thread(target=ask, daemon=True)
        client.start()
        wait_until(lambda: len(pieces) > 3)
        begun = time.monotonic()
        ranks.processes[lost].send_signal(signal.SIGKILL)
        if lost == 1:
            wait_until(lambda: "the engine has failed" in ranks.said[0], 10)
            assert httpx.get(f"{found[0]}/ready").status_code == 503
            client.join(10)
            assert any("error" in piece for piece in pieces) and "data: [DONE]" not in pieces
        assert ranks.ends(1 - lost, 20) == 1
        assert time.monotonic() - begun < 15
        # Whichever is first: a sum that fails, or the connection to the rank.
        assert re.search(f"all ranks of the model|rank {lost} of the model has ended", ranks.said[1 - lost]), ranks.said


def test_the_command_needs_torchrun(model, monkeypatch):
    from typer.testing import CliRunner

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["serve", str(model), "--tensor-parallel"])
    assert done.exit_code == 1 and "torchrun --nproc-per-node 2" in done.output


@pytest.mark.parametrize(
    ("kind", "rank", "says"),
    [
        (Engine, 0, r"this is rank 0 .*TensorParallelEngine\(\)"),
        (Engine, 1, r"this is rank 1 .*follow\(\)"),
        (TensorParallelEngine, 1, r"this is rank 1 .*follow\(\)"),
        (TensorParallelEngine, None, r"in one process: call hf_sparsekv.Engine\(\)"),
    ],
)
def test_each_rank_is_told_what_to_call(kind, rank, says, monkeypatch):
    ranks = None if rank is None else SimpleNamespace(rank=rank, size=2)
    for module in (work, ranks_module):
        monkeypatch.setattr(module, "ranks_of", lambda model: ranks)
    with pytest.raises(ValueError, match=says):
        kind(build("llama", "sparsekv"))


def test_random_weights_of_a_shape_are_shared_by_the_ranks(port):
    """Every rank has its share of the same weights, and both together compute what one process does."""
    with Ranks(["-c", RANDOM], port) as ranks:
        for rank in range(2):
            assert ranks.ends(rank, 120) == 0, ranks.said
            assert f"rank {rank} is done" in ranks.said[rank]
