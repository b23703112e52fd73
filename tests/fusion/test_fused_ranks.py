"""Fused layers of a tensor parallel model, by gloo: the same model as before on each rank, and everything undone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import forked
import pytest
from models import build

ROOT = Path(__file__).parents[2]
CODE = """
import os, sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from caches import FULL, two_level
from models import prompt
from hf_sparsekv.fusion import fuse as fused
from hf_sparsekv.fusion import layers
from hf_sparsekv.ranks import spread

dist.init_process_group("gloo")
layers.accelerated = lambda t: True
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sparsekv", **spread())
for norm in (p for name, p in model.named_parameters() if "norm" in name):
    norm.data += torch.linspace(0, 0.5, norm.numel())
given = prompt(1, 60)


def answer():
    how = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**given, past_key_values=two_level(False, **FULL), **how)
    return out.sequences, torch.stack(out.logits)


def held():
    return {name: (id(p), p.full_tensor() if hasattr(p, "full_tensor") else p.clone()) for name, p in
        model.named_parameters()}


want, before, calls = answer(), held(), []
for name in ("small_linear", "qk_rope", "add_norm"):
    op = getattr(layers, name)
    setattr(layers, name, lambda *a, _op=op, _name=name, **k: (calls.append(_name), _op(*a, **k))[1])
attention = model.model.layers[0].self_attn
forward = attention.o_proj.forward
fusion = fused.fuse(model)
n = model.config.num_hidden_layers
assert fusion.counts["qkv"] == fusion.counts["gate_up"] == n and fusion.counts["linear"] >= 2 * n, fusion
assert not fusion.quantised and not fusion.skipped, fusion
shares = [getattr(attention, f"{one}_proj").weight.to_local() for one in "qkv"]
assert {one.untyped_storage().nbytes() for one in shares} == {sum(one.nbytes for one in shares)}
found = answer()
assert torch.equal(found[0], want[0])
torch.testing.assert_close(found[1], want[1], atol=1e-4, rtol=1e-4)
# Of each layer two products that are summed, and the gated one; the joined projections have their own.
steps = calls.count("small_linear") / n
assert steps >= 3 * 7 and calls.count("qk_rope") == 8 * n, (steps, calls.count("qk_rope"))
after = held()
assert all(after[name][0] == one and torch.equal(after[name][1], value) for name, (one, value) in before.items())
ids = torch.tensor([[5, 6, 7]])
model(ids, labels=ids).loss.backward()  # transformers' own forward passes, with gradients
grads = attention.o_proj.weight.grad.full_tensor(), attention.k_proj.weight.grad.full_tensor()
fusion.undo()
assert attention.o_proj.forward is forward
model.zero_grad()
model(ids, labels=ids).loss.backward()
for mine, own in zip(grads, (attention.o_proj.weight.grad.full_tensor(), attention.k_proj.weight.grad.full_tensor())):
    torch.testing.assert_close(mine, own)
found, after = answer(), held()
torch.testing.assert_close(found[1], want[1], atol=1e-4, rtol=1e-4)  # addresses differ, and with them roundings
assert all(after[name][0] == one and torch.equal(after[name][1], value) for name, (one, value) in before.items())
model.tp_plan["model.layers.*.self_attn.k_proj"] = "colwise_gather_output"
assert "by a plan of its own" in fused.why_not(model)
print("rank", dist.get_rank(), "is done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {}),
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, marks=pytest.mark.slow),
    ],
    ids=["qwen3", "biases"],
)
def test_fused_shares(tmp_path, name, changes):
    build(name, "sparsekv", vocab_size=98, **changes).save_pretrained(tmp_path / "model")
    (tmp_path / "ranks.py").write_text(CODE)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    paths = os.pathsep.join([str(ROOT / "tests/helpers"), str(ROOT)])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    world |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [str(tmp_path / "ranks.py"), str(tmp_path / "model")]
    both = [forked.merged(command, {**os.environ, **world, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(2)]
    try:
        said = [process.communicate(240)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said[0][-3000:]
