"""A batch that does not fit memory is done in parts, and answers are those of any batch."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from command_line import run
from inside import short_pieces
from models import model, prompt
from test_evaluation_passes import LABELS, Letters

from hf_sparsekv_eval import forced, generation, prefix
from hf_sparsekv_eval.batches import Once, each_batch
from hf_sparsekv_eval.cache_specs import parse_caches
from hf_sparsekv_eval.records import Results
from hf_sparsekv_eval.samples import Sample, found_share

ROWS, LENGTH = 5, 120


def ruler(net, results, batch: int, advance) -> None:
    samples = [
        Sample("a", LENGTH, i, tuple(prompt(1, LENGTH - i, seed=i)["input_ids"][0].tolist()), ("7",), 6, found_share)
        for i in range(ROWS)
    ]
    specs = parse_caches(["full", LABELS])
    generation.evaluate(net, Letters(), samples, specs, results, batch, 4, advance, against=True)


def agreement(net, results, batch: int, advance) -> None:
    words = prompt(1, 900)["input_ids"][0]
    starts = forced.passages(words, LENGTH, 6, ROWS)
    specs = parse_caches(["full", LABELS])
    forced.evaluate(net, words, starts, LENGTH, 6, specs, results, "agreement", batch, advance=advance)


@cache
def by_row(task) -> Results:
    """Each row by itself, with memory for it."""
    results = Results(None, {})
    task(model("llama"), results, 1, lambda n: None)
    return results


@pytest.mark.few
@pytest.mark.parametrize("task", [ruler, agreement], ids=lambda task: task.__name__)
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("when", ["prompt", "steps"])
def test_a_batch_that_does_not_fit_is_halved(task, error, when: str, monkeypatch) -> None:
    """In its prompt, or after a cache has been measured: that is not measured again, and progress counts it once."""
    net, told, rows = model("llama"), [], []
    alone = by_row(task)
    real = net.forward

    def forward(ids, **kwargs):
        full_is_measured = len(halved.records) >= ROWS
        if ids.shape[0] > 2 and (when == "prompt" or full_is_measured):
            raise error("no room")
        rows.append(ids.shape[0])
        return real(ids, **kwargs)

    halved = Results(None, {})
    monkeypatch.setattr(net, "forward", forward)
    with pytest.warns(UserWarning, match="5 rows do not fit into memory: they are read 3 at"):
        task(net, halved, ROWS, told.append)
    assert sum(told) == 2 * ROWS and max(rows) == (2 if when == "prompt" else ROWS)
    assert halved.records.keys() == alone.records.keys()
    for key, record in halved.records.items():
        assert record.output == alone.records[key].output
        values, others = ({k: v for k, v in r.values.items() if k != "attended"} for r in (record, alone.records[key]))
        assert values == pytest.approx(others, rel=1e-3, abs=1e-3)


def test_a_row_that_does_not_fit_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(prefix, "host_memory_limit", lambda: 1000)
    with pytest.warns(UserWarning), pytest.raises(MemoryError, match="queries of 1 prompts"):
        agreement(model("llama"), Results(None, {}), ROWS, lambda n: None)


def test_parts_keep_their_order_and_later_batches_are_no_larger() -> None:
    done, tried = [], []

    def work(part: list[int]) -> None:
        tried.append(len(part))
        if sum(part) > 20 and len(part) > 2:
            raise MemoryError
        done.append(part)

    with pytest.warns(UserWarning, match="8 rows do not fit"):
        each_batch([[1] * 8, list(range(2, 10)), list(range(8))], work)
    assert done == [[1] * 8, [2, 3, 4, 5], [6, 7], [8, 9], [0, 1], [2, 3], [4, 5], [6, 7]]
    assert tried == [8, 8, 4, 4, 2, 2, 2, 2, 2, 2]
    told: list[int] = []
    once = Once(told.append)
    once("ab")
    once("bc")
    assert told == [2, 1]


def test_a_batch_on_the_command_line_reads_in_bounded_passes(tiny, tmp_path, monkeypatch) -> None:
    """The largest forward pass has no more tokens than allowed, for all rows together, and figures are equal."""
    from hf_sparsekv.cli import loading

    real, largest, found = loading.load, {}, {}
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    short_pieces(monkeypatch, 16)
    monkeypatch.setattr(prefix, "PASS", 512)
    for batch in (1, 4):

        def load(*args, batch=batch):
            tokenizer, net = real(*args)
            forward = net.forward

            def counted(ids, **kwargs):
                largest[batch] = max(largest.get(batch, 0), ids.numel())
                return forward(ids, **kwargs)

            net.forward = counted
            return tokenizer, net

        monkeypatch.setattr(loading, "load", load)
        args = ("--lengths", 600, "--tokens", 4, "--batch", batch, "--cache", LABELS, "--text-file", text)
        run("eval", "agreement", tiny, *args, "--out", tmp_path / str(batch))
        lines = [json.loads(line) for line in (tmp_path / str(batch) / "samples.jsonl").read_text().splitlines()]
        found[batch] = {line["index"]: (line["values"]["same"], line["values"]["nll"]) for line in lines}
    assert len(found[1]) == len(found[4]) == 4
    for index, values in found[1].items():
        assert found[4][index] == pytest.approx(values, rel=1e-3)
    assert 256 < largest[1] <= 512 and 256 < largest[4] <= 512
