"""A made-up profiler trace: what is read from it, its figures, its picture."""

from __future__ import annotations

import gzip
import json

import pandas as pd
import pytest

from benchmarks.offload import run as offload
from benchmarks.offload import timeline


def kernel(operator: str, part: str = "") -> str:
    """The name of one of an operator's kernels."""
    return min(name for name in timeline.kernel_names(operator) if name.endswith("kernel") and part in name)


def event(name: str, start: float, end: float, stream: int = 7, launch: int = 1) -> dict:
    args = {"stream": stream, "correlation": launch}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start, "args": args}


def trace(two_streams: bool) -> list[dict]:
    """Two steps of 100 us, and what the host does between them."""
    rows = [{"ph": "M", "name": "process_name"}, {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 1}]
    rows.append(event("elementwise_kernel", 105, 107, launch=3))
    aside = 20 if two_streams else 7
    for launch, at in ((1, 0), (2, 200)):
        rows += [
            event(kernel("small_linear", "one_row"), at, at + 40, launch=launch),
            event(kernel("sparse_decode", "split"), at + 40, at + 60, launch=launch),
            event("nvjet_tst_64x8", at + 70, at + 90, launch=launch),
            event(kernel("block_score"), at + 60, at + 70, aside, launch),
            event(kernel("residency"), at + 62, at + 65, aside, launch),
            event(kernel("block_copy"), at + 65, at + 80, aside, launch),
            event(kernel("block_copy"), at + 85, at + 100, aside, launch),
        ]
    return rows


def test_kinds_follow_the_kernels():
    """Names come from the operators' own functions; none belongs to two kinds."""
    pytest.importorskip("triton")
    from hf_sparsekv.ops.attention.sparse_decode.split import sparse_decode_split_kernel

    by_kind = [set().union(*map(timeline.kernel_names, operators)) for _, operators in timeline.KINDS.values()]
    names = [name for names in by_kind for name in names if name.endswith("kernel")]  # others are called by these
    assert len(names) == len(set(names))
    kinds = timeline.kinds()
    assert kinds[sparse_decode_split_kernel.fn.__name__] == timeline.ATTEND
    for kind, (_, operators) in timeline.KINDS.items():
        for operator in operators:
            assert kinds[kernel(operator)] == kind, "each of these operators has a kernel"
    assert not kinds.keys() & timeline.kernel_names("small_linear")


@pytest.mark.parametrize("two_streams", [True, False])
def test_timeline(tmp_path, two_streams, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("triton")
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": trace(two_streams)}).encode()))
    events = timeline.read_trace(path)
    assert len(events) == 15
    steps = timeline.steps_of(events)
    assert [len(step) for step in steps] == [7, 7]
    assert timeline.overlap_of(steps[0]) == timeline.Overlap(step=100, fetch=30, hidden=15, backlog=10)
    assert list(steps[0].kind)[:2] == [timeline.OTHER, timeline.ATTEND], "one row of a linear layer selects none"
    titles = [title for title, _ in timeline.lanes_of(events)]
    assert titles == (["stream 7", "stream 20"] if two_streams else list(dict.fromkeys(titles)))
    assert two_streams or "fetch blocks" in titles
    for ending, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        out = tmp_path / f"line.{ending}"
        assert offload.main(["timeline", "--trace", str(path), "--out", str(out)]) == 0
        assert out.read_bytes().startswith(start)
        assert out.stat().st_size < 200_000


def test_what_is_no_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    for text in ("nothing", "[]", '{"traceEvents": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"is no trace|ran on a device"):
            timeline.read_trace(path)
    assert offload.main(["timeline", "--trace", str(path), "--out", str(tmp_path / "a.png")]) == 1
    assert "nothing in" in capsys.readouterr().out


def test_times_that_overlap():
    spans = pd.DataFrame({"start": [5, 0, 1], "end": [6, 2, 3]})
    assert timeline.union(spans).values.tolist() == [[0, 3], [5, 6]]
    assert timeline.length(spans) == 4
    assert timeline.length(spans[:0]) == 0
