"""The benchmark of quantised weights, from its arguments to its rows and its table."""

from __future__ import annotations

import pytest
import torch
from captured import ImitatedGraphs, Imitation
from models import build
from read_rows import read_rows
from torch import nn

from benchmarks import readme, shapes
from benchmarks import weights as bench
from benchmarks.weight_formats import FORMATS, Format, convert, kept_bytes
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion import layers as fused_layers
from hf_sparsekv.fusion.fuse import fuse

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 4096}


class Bytes(nn.Module):
    """8 bits each and a scale a row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scale)
        self.register_buffer("qweight", (layer.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales, self.bias)


class HostLooks(Bytes):
    """Looks at what it is given on the host, as layers that look for outliers."""


def refuses(layer: nn.Linear) -> nn.Module:
    raise ImportError("Requires a library\nand more")


@pytest.fixture
def formats(monkeypatch):
    """Formats that need no library."""
    made = {
        "bf16": FORMATS["bf16"],
        "bytes": Format("bytes", "8 bits", Bytes),
        "looks": Format("looks", "8 bits, the host looks", HostLooks),
        "none": Format("none", "needs a library", refuses),
    }
    monkeypatch.setattr(bench, "FORMATS", made)
    monkeypatch.setitem(shapes.SHAPES, "toy", lambda: build("llama", "sdpa", **WIDE).config)
    return made


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Captured steps imitated; a layer of ``HostLooks`` cannot be captured."""

    class Some(ImitatedGraphs):
        def __init__(self, model):
            self.model = model

        def record(self, run, device, saved):
            if any(isinstance(module, HostLooks) for module in self.model.modules()):
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(run, device, saved)

    def prepare(model, variant, fused, capture=True):
        model.set_attn_implementation("sparsekv")
        if capture:
            runner = Imitation(model, Some(model))
            runner.fusion = fuse(model)
            runner.install()

    monkeypatch.setattr(fused_layers, "accelerated", lambda t: True)
    monkeypatch.setattr(bench, "prepare", prepare)


COMMAND = "--model toy --device cpu --dtype float32 --shapes 1x600"


def test_rows(formats, as_on_gpu, tmp_path, capsys):
    """One format after another; what cannot be captured and what cannot run say why, and the others are measured."""
    path = tmp_path / "weights.csv"
    assert bench.main([*COMMAND.split(), "--formats", *formats, "--csv", str(path)]) == 0
    out = capsys.readouterr().out
    assert "none: not run: ImportError: Requires a library\n" in out
    assert out.count("decode steps run eagerly: the model's forward cannot be captured (operation not permitted") == 2
    rows = {(row["variant"], row["metric"]): row for row in read_rows(path)}
    assert {(row["benchmark"], row["case"]) for row in rows.values()} == {("weights", "toy:float32")}
    value = {key: float(row["value"]) for key, row in rows.items()}
    for name in ("bf16", "bytes", "looks"):
        assert value[name, "works"] == 1
        for how in ("", ":eager"):
            assert value[name, f"equal_tokens{how}"] == bench.ANSWER
            assert value[name, f"equal_share{how}"] == 1
            assert value[name, f"logits_diff{how}"] < 1e-3
        for variant, captured in bench.RUNS:
            label = bench.label(formats[name], variant, captured, False)
            assert value[label, "tpot_ms"] > 0
            assert ((label, "captured") in value) == captured
            if captured:
                assert value[label, "captured"] == (name != "looks")
    assert [key for key in value if key[0].startswith("none")] == [("none", "works")]
    assert value["none", "works"] == 0
    assert value["bytes", "weights_gb"] < value["bf16", "weights_gb"]
    assert rows["bf16", "works"]["context"] == str(bench.PROMPT)
    assert rows["bf16:token_only+eager", "tpot_ms"]["context"] == "600"


def test_answers_are_asked_for_behind_the_same_tokens():
    """Said tokens that the model would not have said itself change nothing in what it would say next."""
    model = build("llama", "sdpa", **WIDE)
    own = bench.answer(model)
    again = bench.answer(model, said=own.tokens)
    assert torch.equal(again.tokens, own.tokens) and torch.allclose(again.logits, own.logits)
    other = own.tokens.clone()
    other[3] = (other[3] + 1) % model.config.vocab_size
    turned = bench.answer(model, said=other)
    assert torch.equal(turned.tokens[:4], own.tokens[:4]), "up to the token behind which it is another text"
    ids = torch.cat((bench.prompt(model), other[None]), 1)
    with torch.no_grad():
        expected = model(ids).logits[0, bench.PROMPT - 1 : -1]
    assert torch.allclose(turned.logits, expected, atol=1e-4)


def test_what_cannot_run_leaves_its_runner(formats, as_on_gpu, monkeypatch):
    """An error in one shape does not lose the others."""
    model, tries = build("llama", "sparsekv", **WIDE), []
    monkeypatch.setattr(bench, "checked", lambda form, args, report: model)

    def fails(*args, **kwargs):
        tries.append(runner_of(model))
        raise RuntimeError("no")

    monkeypatch.setattr(bench, "generate", fails)
    assert bench.main([*COMMAND.split(), "--formats", "bf16", "--no-csv"]) == 1
    assert len(tries) == len(bench.RUNS) and runner_of(model) is None


# ---------------------------------------------------------------------- formats


def reference(layer: nn.Linear, bits: int) -> float:
    """How far a layer of so many bits may be from ``layer``, as a share of its output."""
    return {8: 0.08, 4: 0.25}[bits]


LIBRARIES = {
    "bnb-nf4": ("bitsandbytes", 4),
    "bnb-int8": ("bitsandbytes", 8),
    "bnb-int8-outliers": ("bitsandbytes", 8),
    "torchao-int8": ("torchao", 8),
    "torchao-fp8": ("torchao", 8),
    "compressed-fp8": ("transformers", 8),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_layers_multiply_nearly_as_before(name):
    library, bits = LIBRARIES[name]
    pytest.importorskip(library, reason=f"{library} is not installed")
    torch.manual_seed(0)
    model = build("llama", "sdpa", **WIDE)
    before, head = kept_bytes(model), model.lm_head.weight
    layer, x = model.model.layers[0].mlp.down_proj, torch.randn(3, 20, WIDE["intermediate_size"])
    with torch.no_grad():
        expected = layer(x)
        assert convert(model, FORMATS[name]) == 14
        found = model.model.layers[0].mlp.down_proj(x)
    assert (found - expected).norm() < reference(layer, bits) * expected.norm()
    assert model.lm_head.weight is head
    # Of 32 bits each; scales are the larger part of such small layers' rest.
    assert kept_bytes(model) - head.nbytes < (before - head.nbytes) * (bits + 4) / 32
    assert all(not p.requires_grad for p in model.model.layers[0].mlp.parameters())


def test_bytes_are_counted_once():
    """Those that a step reads: without a table that is only looked up in, with one that is the output layer, too."""
    model = build("llama", "sdpa")
    own = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert kept_bytes(model) == own - model.model.embed_tokens.weight.nbytes
    tied = build("llama", "sdpa", tie_word_embeddings=True)
    assert kept_bytes(tied) == kept_bytes(model)


# ---------------------------------------------------------------------- the table


def test_the_table(monkeypatch):
    """Newest rows of this GPU; what does not run says so, what has no row, too."""
    k32, prompt = str(32 << 10), str(readme.DATA["weights"]["prompt"])
    row = {"case": "qwen3-8b", "device": readme.GPU, "batch": "1", "context": prompt}
    rows = [
        row | {"variant": "bf16", "metric": "works", "value": "1"},
        row | {"variant": "bf16", "metric": "weights_gb", "value": "15.13"},
        row | {"variant": "bf16", "metric": "equal_tokens", "value": "15"},
        row | {"context": k32, "variant": "bf16:token_only+eager", "metric": "tpot_ms", "value": "61.04"},
        row | {"context": k32, "variant": "bf16:token_only+fused", "metric": "tpot_ms", "value": "5.04"},
        row | {"context": k32, "variant": "bf16:token_only+fused", "metric": "captured", "value": "1"},
        row | {"context": k32, "variant": "bnb-int8:token_only+fused", "metric": "tpot_ms", "value": "88"},
        row | {"context": k32, "variant": "bnb-int8:token_only+fused", "metric": "captured", "value": "0"},
        row | {"variant": "bnb-nf4", "metric": "works", "value": "0"},
        row | {"device": "x", "variant": "torchao-int8", "metric": "works", "value": "0"},
    ]
    monkeypatch.setattr(readme, "read", lambda name, device=None: [r for r in rows if device in (None, r["device"])])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.weights().splitlines()]
    assert {len(line) for line in lines} == {8} and len(lines) == 2 + len(FORMATS)
    found = {name: line[1:] for name, line in zip(FORMATS, lines[2:])}
    unknown = readme.UNKNOWN
    assert found["bf16"] == ["15.1", "15", "61.0", "5.0", unknown, unknown, unknown]
    assert found["bnb-int8"][3] == "not captured"
    assert found["bnb-nf4"] == ["does not run", *[""] * 6]
    assert found["torchao-int8"] == [unknown] * 7
