"""The benchmark of replicas: what needs no Ray."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from http_server import serving
from read_rows import read_rows

from benchmarks import replicas


def test_delays_are_those_of_every_token_but_the_first_tenth():
    with serving(replicas.clock_app(0.002)) as url:
        began = time.monotonic()
        found = asyncio.run(replicas.delays(url, 3, 40))
        seconds = time.monotonic() - began
    assert len(found) == 3 * 36
    assert all(0 <= delay < 1e3 * seconds for delay in found)
    assert seconds > 2 * 40 * 0.002  # one stream first, then three together


def test_a_stream_that_is_cut_is_no_figure():
    async def cut(scope, receive, send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'data: {"error": {"message": "lost"}}\n\n'})

    with serving(cut) as url, pytest.raises(RuntimeError, match="0 of 40 tokens have come"):
        asyncio.run(replicas.delays(url, 1, 40))


@pytest.mark.slow
def test_rows_of_one_way(tmp_path):
    """uvicorn alone, in a process of its own; the other ways need Ray."""
    file = tmp_path / "rows.csv"
    options = ["--streams", "1", "2", "--tokens", "20", "--step-ms", "1", "--ways", "direct", "--csv", str(file)]
    assert replicas.main(["overhead", *options]) == 0
    rows = read_rows(file)
    assert {row["variant"] for row in rows} == {"direct:step=1ms"} and {row["batch"] for row in rows} == {"1", "2"}
    assert {row["metric"] for row in rows} == {"delay_ms", "delay_p99_ms", "cpu_ms"}
    assert all(float(row["value"]) > 0 for row in rows)
