"""The benchmark of hostile clients as a whole, for a few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import build
from tokenizers_made import byte_level

from benchmarks.serving import hostile


@pytest.mark.slow
def test_a_few_seconds_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    tokenizer = byte_level()
    build(
        "llama", "sdpa", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=3072
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = f"--minutes 0.05 --growth 1 --no-csv --size 1000000 -- {tmp_path} --device cpu --context 3k --max-rows 4"
    status = hostile.main(command.split())
    said = capsys.readouterr().out
    assert status == 0 and "nothing was wrong" in said and "longest_gap_alone" in said, said
