"""Forward passes of evaluation are bounded, whatever rows and lengths are asked for, and results are the same."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from command_line import SPARSE, run
from inside import SHORTEST, short_pieces
from models import build, model, prompt

from hf_sparsekv.cli import running
from hf_sparsekv.tuning import channels
from hf_sparsekv_eval import drift, forced, generation, prefix
from hf_sparsekv_eval.cache_specs import parse_caches
from hf_sparsekv_eval.records import Results
from hf_sparsekv_eval.samples import Sample, found_share

PASS, ROWS, LENGTH = 256, 3, 331  # at most 85 columns a pass, four passes
SMALL = "block_size=16,window=16,max_draft=4,dense_layers=0,token_budget=32"
LABELS = f"two_level:{SMALL},calibration_tokens=32,num_blocks=4"
BLOCKS = f"two_level:{SMALL},level=block,num_blocks=4"  # nothing that is calibrated on the first pass


class Letters:
    """A tokenizer in one direction, which is all that an answer needs."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, ids, **kwargs) -> str:
        return " ".join(map(str, ids))


@contextmanager
def passes(net):
    """``(rows, columns, positions with logits)`` of every forward pass meanwhile."""
    seen: list[tuple[int, int, int]] = []
    real = net.forward

    def forward(*args, **kwargs):
        out = real(*args, **kwargs)
        seen.append((*(args[0] if args else kwargs["input_ids"]).shape, out.logits.shape[1]))
        return out

    net.forward = forward
    try:
        yield seen
    finally:
        del net.forward


def ruler(net, specs, results) -> None:
    """Rows of several lengths, so that the batch is padded; the question prefilled and in steps."""
    samples = [
        Sample(
            "a", LENGTH, i, tuple(prompt(1, LENGTH - 70 * i, seed=i)["input_ids"][0].tolist()), ("7",), 6, found_share
        )
        for i in range(ROWS)
    ]
    generation.evaluate(net, Letters(), samples, specs, results, batch=ROWS, steps=4, against=True)


def perplexity(net, specs, results) -> None:
    words = prompt(1, 1200)["input_ids"][0]
    forced.evaluate(net, words, forced.passages(words, LENGTH, 6, ROWS), LENGTH, 6, specs, results, "agreement", ROWS)


def output(net, specs, results) -> None:
    drift.evaluate(net, prompt(2, LENGTH)["input_ids"].tolist(), LENGTH, 8, 4, specs, results, set())


@pytest.mark.few
@pytest.mark.parametrize("task", [ruler, perplexity, output], ids=lambda task: task.__name__)
@pytest.mark.parametrize(
    ("name", "cache"),
    [("llama", LABELS), ("deepseek-v3", LABELS), ("gemma3", BLOCKS), ("qwen3-next", BLOCKS), ("gpt-oss", BLOCKS)],
)
def test_no_pass_is_larger_and_results_are_the_same(name: str, cache: str, task, monkeypatch) -> None:
    """From one prefill, or from one a cache (sliding or linear layers); eager attention for full attention."""
    net = model(name)
    short_pieces(monkeypatch, 16)
    found, largest = [], []
    for most in (1 << 20, PASS):
        monkeypatch.setattr(prefix, "PASS", most)
        monkeypatch.setattr(prefix, "_ON_CPU", most)
        results = Results(None, {})
        with passes(net) as seen:
            task(net, parse_caches(["full", cache]), results)
        found.append({(r.task, r.index, r.cache): (r.output, r.values) for r in results.records.values()})
        largest.append(max(rows * columns for rows, columns, _ in seen))
        assert {kept for *_, kept in seen} == {1}, "logits of the last position alone"
    whole = LENGTH * (1 if task is output else ROWS)
    # Linear attention looks at the padding of the first pass alone, which holds all of it.
    padding = ROWS * (70 * (ROWS - 1) + 1) if (name, task) == ("qwen3-next", ruler) else 0
    assert largest[0] == whole and largest[1] <= max(PASS, padding + ROWS) < whole
    for key, (text, values) in found[0].items():
        again, others = found[1][key]
        assert again == text
        assert others == pytest.approx(values, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("name", "rows", "n"), [("llama", 8, 30_000), ("gpt-oss", 1, 30_000), ("llama", 1, 131_072)])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "sparsekv"])
def test_masks_are_bounded_too(name: str, rows: int, n: int, attention: str) -> None:
    columns = prefix.pass_columns(model(name), prefix.Prefix(torch.zeros(rows, n), [], None, None), attention)
    heads = model(name).config.num_attention_heads
    assert columns >= SHORTEST and rows * columns <= prefix.PASS
    assert rows * columns * n * {"sdpa": 3, "eager": 8 * heads, "sparsekv": 0}[attention] <= 4 << 30


def test_queries_that_no_memory_holds_are_told(monkeypatch) -> None:
    monkeypatch.setattr(prefix, "host_memory_limit", lambda: 1000)
    with pytest.raises(MemoryError, match=r"queries of 2 prompts take .* take a smaller --batch"):
        prefix.prefill(model("llama"), prompt(2, 100)["input_ids"])


@pytest.mark.gpu
def test_queries_leave_the_gpu_where_they_are_much_of_it(monkeypatch) -> None:
    """Caches are filled alike from either place."""
    net = build("llama", "sparsekv").to("cuda")
    given = {key: value.cuda() for key, value in prompt(2, 300, (0, 70)).items()}
    spec, answers = parse_caches([LABELS])[0], []
    for free in (1 << 40, 1 << 10):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1 << 40))
        read = prefix.prefill(net, given["input_ids"], mask=given["attention_mask"])
        assert {q.device.type for q in read.queries} == {"cuda" if free > 1 << 20 else "cpu"}
        cache, logits = read.start(net, spec.make(net.config))
        answers.append(prefix.greedy_rows(net, read, cache, logits, 8, set()))
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_rows_of_a_padded_batch_take_little_more_than_they_keep() -> None:
    """Eight rows of 16k: the mask of one whole pass, 4 GiB and as many bytes twice in bfloat16, would be over it."""
    net = build("llama", "sparsekv", max_position_embeddings=1 << 15).to("cuda", torch.bfloat16)
    given = {key: value.cuda() for key, value in prompt(8, 1 << 14, tuple(range(0, 800, 100))).items()}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    read = prefix.prefill(net, given["input_ids"], mask=given["attention_mask"])
    kept = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before - kept < 2 << 30
    assert read.logits.isfinite().all()


def test_channels_are_ranked_in_passes(monkeypatch) -> None:
    net, ids = model("llama"), [prompt(1, 300)["input_ids"]]
    whole = channels.calibrate(net, ids)
    monkeypatch.setattr(channels, "CHUNK", 64)
    with passes(net) as seen:
        pieces = channels.calibrate(net, ids)
    assert [columns for _, columns, _ in seen] == [60] * 5
    assert torch.equal(whole.ranking, pieces.ranking) and whole.tokens == pieces.tokens == 300


def test_generate_reads_long_prompts_in_chunks(tiny, monkeypatch) -> None:
    """The last chunk is no single token, which would be a decode step."""
    said, text = [], "the quick brown fox jumps over the lazy dog " * 11  # 484 tokens and one
    for chunk in (1 << 20, 161):
        monkeypatch.setattr(running, "CHUNK", chunk)
        said.append(run("generate", tiny, "--prompt", text, "--max-new-tokens", 8, *SPARSE, "--level", "block").stdout)
    assert said[0] == said[1] != ""


@torch.no_grad()
def test_sparse_prompts_are_read_by_the_cache_itself():
    net, made = build("llama", "sparsekv"), prompt(1, 1000)
    full = prefix.prefill(net, made["input_ids"])
    all_of_it, some = parse_caches([f"token:{SMALL},prefill=1.0", f"token:{SMALL},prefill=0.5"])
    for spec, exact in ((all_of_it, True), (some, False)):
        cache, logits = full.start(net, spec.make())
        assert len(cache.stats().prompts) == 2
        assert exact == (cache.stats().prompt_density == 1)
        if exact:
            torch.testing.assert_close(logits, full.logits, atol=5e-4, rtol=1e-4)
