"""Models in GGUF files: the weights they were written from, the end of a chat's turn, and the commands over them."""

from __future__ import annotations

import pytest
import torch
from command_line import SPARSE, error, run
from gguf_files import SPECIAL, vocabulary, write
from inside import attention_of
from models import prompt

from hf_sparsekv import gguf_file
from hf_sparsekv.cli import loading
from hf_sparsekv_serve.loading import load as load_replica

pytest.importorskip("gguf")
CPU = torch.device("cpu")
END_OF_TEXT, START, END = (vocabulary().index(token) for token in SPECIAL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A file and the model that it was written from. The file names the end of a text as its end."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write(path, "qwen2", "<|endoftext|>", max_position_embeddings=2048)


def logits(net, ids):
    with torch.no_grad():
        return net(ids).logits


@pytest.mark.parametrize("blocks", [False, True], ids=["float32", "8 bits"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_logits_are_those_of_the_model_that_was_written(kind, blocks, tmp_path):
    """And of the copy that ``save_pretrained`` makes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = write(tmp_path / "m.gguf", kind, "<|im_end|>", blocks=blocks)
    tokenizer, found = gguf_file.load(tmp_path / "m.gguf", None, CPU)
    ids = prompt(2, 40)["input_ids"]
    assert found.dtype == torch.float32 and not found.training
    torch.testing.assert_close(logits(found, ids), logits(net, ids), rtol=1e-5, atol=1e-5)
    found.save_pretrained(tmp_path / "copy")
    tokenizer.save_pretrained(tmp_path / "copy")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    torch.testing.assert_close(logits(again, ids), logits(found, ids))
    assert again.generation_config.eos_token_id == found.generation_config.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").eos_token_id == END


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize(
    ("end", "others"), [("<|im_end|>", []), ("<|endoftext|>", [END_OF_TEXT]), ("<|im_start|>", [])]
)
def test_an_answer_ends_where_the_template_ends_a_turn(kind, end, others, tmp_path):
    """Whatever the file or transformers' tokenizer names: for Llama that is the file's first token."""
    write(tmp_path / "m.gguf", kind, end)
    tokenizer, net = gguf_file.load(tmp_path / "m.gguf", None, CPU)
    own = [END_OF_TEXT] if kind == "qwen2" else []  # Qwen2's tokenizer has it by itself
    found = net.generation_config.eos_token_id
    found = found if isinstance(found, list) else [found]
    assert found[0] == tokenizer.eos_token_id == END and START not in found
    assert set(found[1:]) == set(others) | set(own)
    assert tokenizer.pad_token_id == net.config.pad_token_id == END_OF_TEXT
    assert tokenizer("ab<|im_end|>")["input_ids"][-1] == END


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"], ids=["none", "refuses"])
def test_without_a_turn_the_files_end_counts(template, tmp_path):
    write(tmp_path / "m.gguf", "llama", "<|endoftext|>", template)
    tokenizer, net = gguf_file.load(tmp_path / "m.gguf", None, CPU)
    assert tokenizer.eos_token_id == net.generation_config.eos_token_id == END_OF_TEXT


def test_markers_that_were_no_tokens_become_tokens(tiny):
    """Converters of some architectures know a fixed list of special tokens."""
    tokenizer = gguf_file.load_tokenizer(tiny[0])
    stop = vocabulary().index("<stop>")
    assert stop not in tokenizer("<stop>")["input_ids"]
    tokenizer.chat_template = "{% for m in messages %}<none>{{ m.content }}<stop>{% endfor %}"
    assert gguf_file.end_tokens(tokenizer, [END_OF_TEXT])[:2] == [stop, END_OF_TEXT]
    assert tokenizer("<stop>")["input_ids"] == [stop] and len(tokenizer("<none>")["input_ids"]) > 1
    assert tokenizer.decode([stop], skip_special_tokens=True) == ""


def test_precision_is_as_asked(tiny):
    assert gguf_file.load(tiny[0], torch.bfloat16, CPU)[1].dtype == torch.bfloat16
    assert load_replica(str(tiny[0]), "float16", "cpu")[1].dtype == torch.float16
    assert gguf_file.load_config(tiny[0]).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="tensor parallel"):
        load_replica(str(tiny[0]), "auto", "cpu", tensor_parallel=True)


def test_commands_take_a_file(tiny, tmp_path):
    path = tiny[0]
    out = run("generate", path, "--prompt", "abc " * 60, "--max-new-tokens", 4, "--compare", "dense", *SPARSE)
    assert "per token" in out.stderr
    plan = run("plan", path, "--context", "1k", "--gpu-memory", "1GiB").stdout
    assert "qwen2, bfloat16, layers: 2 full" in plan
    spec = "token:block_size=16,window=16,token_budget=32,num_blocks=2,dense_layers=0"
    text = tmp_path / "text.txt"
    text.write_text("abc and so on " * 60)
    held = ("--lengths", 256, "--tokens", 4, "--samples", 1, "--text-file", text, "--out", tmp_path / "out")
    assert "agreement, tiny" in run("eval", "agreement", path, "--cache", "full", "--cache", spec, *held).stdout
    assert attention_of(loading.load(str(path), None, CPU)[1]) == "sparsekv"


def test_a_file_is_read_once(tiny, monkeypatch):
    """transformers reads all entries of it four times; a later call reads it again, as it may have changed."""
    import gguf

    kind, read = gguf.GGUFReader, []
    begin = kind.__init__
    monkeypatch.setattr(kind, "__init__", lambda self, path, *mode: (read.append(path), begin(self, path, *mode))[1])
    gguf_file.load(tiny[0], None, CPU)
    assert len(read) == 1
    gguf_file.load_tokenizer(tiny[0])
    assert len(read) == 2
    with pytest.raises(RuntimeError, match="expected"), gguf_file.read_once():
        raise RuntimeError("expected")
    assert gguf.GGUFReader is kind


def test_errors_name_what_to_do(tiny, tmp_path, monkeypatch):
    path = tiny[0]
    assert "there is no file" in error("plan", tmp_path / "none.gguf", "--context", 10)
    assert f"Name the file: {path}" in error("plan", path.parent, "--context", 10)
    (tmp_path / "bad.gguf").write_bytes(b"PK\3\4")
    assert "is no GGUF file" in error("plan", tmp_path / "bad.gguf", "--context", 10)
    for length in (5, 100, path.stat().st_size // 2):
        (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:length])
        assert "cut.gguf cannot be read as a GGUF file" in error("generate", tmp_path / "cut.gguf", "--prompt", "a")
    (tmp_path / "model.bin").write_bytes(b"")
    assert "or a .gguf file" in error("plan", tmp_path / "model.bin", "--context", 10)
    with pytest.raises(loading.CommandError, match="takes no GGUF file"):
        loading.load(str(path), None, CPU, tensor_parallel=True)


def test_the_engine_ends_a_turn(tiny):
    """Answers of an engine are those of ``generate()``, and end where the file's chat template ends a turn."""
    from hf_sparsekv.serving.engine import Engine
    from hf_sparsekv.serving.sampling import Sampling

    tokenizer, net = gguf_file.load(tiny[0], None, CPU, attn_implementation="sparsekv")
    ids = tokenizer("abc and cd")["input_ids"]
    with torch.no_grad():
        net.lm_head.weight[END] += 40 * net.lm_head.weight[net(torch.tensor([ids])).logits[0, -1].argmax()]
    out = net.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :].tolist()
    assert out == [END]
    with Engine(net, tokenizer) as engine:
        found = engine.submit(ids, Sampling(max_tokens=8, temperature=0.0)).result()
    assert found.finish_reason == "stop" and found.text == ""
