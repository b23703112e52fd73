"""Models spread over several processes (tensor parallel) or several GPUs (``device_map``)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from caches import FULL, TIGHT, two_level
from inside import attention_of
from models import build, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import optimize
from hf_sparsekv.cuda_graph.optimize import runner_of

ROOT = Path(__file__).parents[1]

# Each rank generates with its half of the heads, and alone with all of them.
RANKS = """
import os, sys, warnings
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from caches import FULL, TIGHT, two_level
from models import build, prompt
from captured import Imitation
from hf_sparsekv import optimize, unoptimize
from hf_sparsekv.ranks import ranks_of

warnings.simplefilter("ignore", FutureWarning)
dist.init_process_group("gloo")
path, inputs, spread = sys.argv[1], prompt(2, 150, (0, 20)), DistributedConfig(tp_plan="auto")
shard = AutoModelForCausalLM.from_pretrained(path, distributed_config=spread, attn_implementation="sparsekv")
whole = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sparsekv")
for settings, offload in ((FULL, True), (TIGHT, True), (TIGHT, False)):
    caches = two_level(offload, **settings), two_level(offload, **settings)
    texts = [
        net.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
        for net, cache in zip((shard, whole), caches)
    ]
    assert torch.equal(*texts)
    assert [cache.layers[0].store.heads for cache in caches] == [1, 2]
    assert (caches[0].stats().sparse_calls > 0) == (settings is TIGHT)
optimize(shard)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    text = shard.generate(**inputs, past_key_values=two_level(False, **TIGHT), max_new_tokens=20, do_sample=False)
assert torch.equal(text, texts[0])
assert any("tensor parallel" in str(w.message) for w in caught), [str(w.message) for w in caught]
unoptimize(shard)

# As if a graph could hold the ranks' sums. What they decide by themselves differs a few times.
class Alike(Imitation):
    calls = 0

    def __init__(self, model):
        ranks_of(model).captures = True
        super().__init__(model)
        self.alone, self.eligibility.why_not = self.eligibility.why_not, self.why_not

    def why_not(self, given, cache):
        self.calls += 1
        return "not here" if self.calls == 4 and dist.get_rank() == 1 else self.alone(given, cache)

    def _step(self, given, cache, plans):
        if self.calls in (3, 6) and dist.get_rank() == 1:
            self.graphs.pop(cache, None)  # so this rank has to capture what the other one has
        out = super()._step(given, cache, plans)
        if self.calls < 8:
            self.steady.pop(cache, None)  # the next one is agreed on
        return out

runner = Alike(shard)
runner.install()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    text = shard.generate(**inputs, past_key_values=two_level(False, **TIGHT), max_new_tokens=20, do_sample=False)
assert torch.equal(text, texts[0])
assert any(("not here", "another rank")[dist.get_rank() == 0] in str(w.message) for w in caught)
counts = [None, None]
dist.all_gather_object(counts, (runner.captures, runner.replays))
assert counts[0] == counts[1] and runner.captures >= 3 and runner.replays == 18, counts
runner.remove()
dist.barrier()
print("rank", dist.get_rank(), "is done", flush=True)
# The model's mesh keeps the group, so Gloo's threads outlive destroy_process_group(). One that lets go of a tensor
# while the interpreter ends takes the process down with SIGABRT (pytorch/pytorch#179291): leave without ending it.
os._exit(0)
"""


def test_tensor_parallel(tmp_path):
    """Every rank caches and selects for its own KV heads: the same text as in one process."""
    command, environment = ranks(tmp_path, RANKS)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    both = [forked.merged(command, {**environment, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(2)]
    try:
        said = [process.communicate(240)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    assert ["is done" in each for each in said] == [True, True]


def ranks(tmp_path: Path, code: str) -> tuple[list[str], dict[str, str]]:
    """A program that runs ``code`` on a saved model, and its environment."""
    build("llama", "sparsekv", vocab_size=98).save_pretrained(tmp_path / "model")
    (tmp_path / "ranks.py").write_text(code)
    paths = [str(ROOT / "tests/helpers"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return [str(tmp_path / "ranks.py"), str(tmp_path / "model")], environment


def run_on_gpus(tmp_path: Path, code: str) -> None:
    """Two processes run ``code``, started by torchrun."""
    command, environment = ranks(tmp_path, code)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *command,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("is done") == 2


# Each rank decodes by captured steps, NCCL's sums in them, what one GPU decodes eagerly.
CAPTURED_RANKS = """
import os, sys, warnings
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from caches import FULL, TIGHT, two_level
from models import prompt
from hf_sparsekv import optimize
from hf_sparsekv.cuda_graph.optimize import runner_of

warnings.simplefilter("ignore", FutureWarning)
here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(here)
dist.init_process_group("nccl", device_id=here)
path, spread = sys.argv[1], DistributedConfig(tp_plan="auto")
inputs = {name: value.to(here) for name, value in prompt(2, 150, (0, 20)).items()}
shard = optimize(AutoModelForCausalLM.from_pretrained(path, distributed_config=spread, attn_implementation="sparsekv"))
whole = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sparsekv").to(here)
warnings.filterwarnings("error", message="decode steps run eagerly")
for settings, offload in ((FULL, True), (TIGHT, True), (TIGHT, False)):
    before = runner_of(shard).replays
    caches = two_level(offload, **settings), two_level(offload, **settings)
    texts = [
        net.generate(**inputs, past_key_values=cache, max_new_tokens=60, do_sample=False)
        for net, cache in zip((shard, whole), caches)
    ]
    assert torch.equal(*texts)
    assert [cache.layers[0].store.heads for cache in caches] == [1, 2]
    assert runner_of(shard).replays - before > 50
counts = [None, None]
dist.all_gather_object(counts, (runner_of(shard).captures, runner_of(shard).replays))
assert counts[0] == counts[1], counts
dist.barrier()
print("rank", dist.get_rank(), "is done", flush=True)
os._exit(0)
"""


@pytest.mark.gpu
def test_tensor_parallel_captured(tmp_path):
    """Two GPUs: steps with NCCL's sums are replayed, and give the text of one GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_on_gpus(tmp_path, CAPTURED_RANKS)


# ---------------------------------------------------------------------- several GPUs


@pytest.fixture
def spread():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from accelerate import dispatch_model

    def make(name: str):
        net = build(name, "sparsekv", num_hidden_layers=3)
        places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
        return dispatch_model(net, {**places, **{f"model.layers.{i}": int(i > 0) for i in range(3)}})

    return make


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "offload"), [("llama", True), ("gemma3", False)])
def test_layers_on_two_gpus(spread, name, offload):
    """Pools, copy streams and clocks of each device; prompts in pieces, padding, second turns."""
    net = spread(name)
    dense = build(name, attention_of(reference(name)), num_hidden_layers=3).cuda()
    inputs = {key: value.cuda() for key, value in prompt(2, 400, (0, 60)).items()}
    how = {"max_new_tokens": 30, "do_sample": False}
    for chunk in ({}, {"prefill_chunk_size": 128}):
        cache = two_level(offload, **FULL)
        found = net.generate(**inputs, past_key_values=cache, **how, **chunk)
        assert torch.equal(found, dense.generate(**inputs, **how))
    where = {layer.store.device.index for layer in cache.sparse_layers}
    assert where == ({0, 1} if name == "llama" else where)
    text, lone = [], build(name, "sparsekv", num_hidden_layers=3).cuda()
    for each in (net, lone):
        cache = two_level(offload, **TIGHT)
        with torch.no_grad():
            first = each.generate(**inputs, past_key_values=cache, **how)
            more = torch.cat((first, prompt(2, 20, seed=5)["input_ids"].cuda()), 1)
            mask = torch.cat((inputs["attention_mask"], torch.ones_like(more[:, inputs["input_ids"].shape[1] :])), 1)
            text.append(each.generate(more, attention_mask=mask, past_key_values=cache, **how))
        assert cache.stats().sparse_calls > 0
    assert torch.equal(*text)


@pytest.mark.gpu
def test_two_gpus_are_not_captured(spread):
    net = optimize(spread("llama"), fused=False)
    inputs = {key: value.cuda() for key, value in prompt(1, 200).items()}
    with pytest.warns(UserWarning, match="several devices"):
        net.generate(**inputs, past_key_values=two_level(**TIGHT), max_new_tokens=5, do_sample=False)
    assert runner_of(net).captures == 0


@pytest.mark.gpu
def test_a_second_gpu_alone():
    """A model on a GPU that is not the current one: captured, offloaded, and equal to the first GPU's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    texts = []
    for device in ("cuda:0", "cuda:1"):
        net = optimize(build("llama", "sparsekv").to(device))
        inputs = {key: value.to(device) for key, value in prompt(2, 300, (0, 40)).items()}
        cache = two_level(**TIGHT)
        how = {"max_new_tokens": 60, "do_sample": False, "prefill_chunk_size": 128}
        texts.append(net.generate(**inputs, past_key_values=cache, **how).cpu())
        assert runner_of(net).replays > 40
        assert cache.stats().sparse_calls > 0
    assert torch.equal(*texts)


@pytest.mark.gpu
def test_a_cache_per_gpu():
    """Two models on two GPUs decode in turns, each with a cache of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ids = prompt(1, 200)["input_ids"]
    nets = [optimize(build("llama", "sparsekv").to(f"cuda:{i}")) for i in range(2)]
    caches, stock, net = [two_level(**FULL), two_level(**FULL)], DynamicCache(), reference("llama")
    with torch.no_grad():
        net(ids[:, :150], past_key_values=stock)
        for i in range(2):
            nets[i](ids[:, :150].to(f"cuda:{i}"), past_key_values=caches[i])
        for token in ids[:, 150:].split(1, dim=1):
            want = net(token, past_key_values=stock).logits
            for i in range(2):
                found = nets[i](token.to(f"cuda:{i}"), past_key_values=caches[i]).logits
                torch.testing.assert_close(found.cpu(), want, atol=1e-3, rtol=1e-3)
