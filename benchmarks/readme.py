"""The tables of README.md, from the newest rows in benchmarks/results.

    python -m benchmarks.readme            # print them
    python -m benchmarks.readme --write    # put them between their marks in README.md

A line without a row of ours is left out; a cell of others that has none says so. The commands that measure are beside
the tables.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from .arguments import RESULTS

README = Path(__file__).parents[1] / "README.md"
CASE = "qwen3-8b"
K = 1024
NONE = "not run"

# The first rows of today's defaults (tokens among all, means for what is not chosen). Rows are appended, so every one
# behind it is newer.
DEFAULTS = "f4e5ad0"

# (KV cache in, transformers' variant, our variant with its defaults, shapes)
SPEED = (
    ("GPU", "hf_dynamic", "token_only+fused", ((1, 32 * K), (1, 128 * K), (8, 32 * K), (8, 64 * K))),
    (
        "host memory",
        "hf_offloaded",
        "token_only+fused+offload:kv=replayed",
        ((1, 32 * K), (1, 128 * K), (8, 64 * K), (8, 128 * K)),
    ),
)
# vLLM 0.26.0 (torch 2.11, FlashAttention 3, torch.compile, CUDA graphs) on one H200, 2026-11-22: median of 96 steps of
# its engine. It is not run by this package's benchmarks, so it has no rows.
VLLM = {(1, 32 * K): 6.29, (1, 128 * K): 9.64, (8, 32 * K): 13.99, (8, 64 * K): 22.5}

# (what it is, the preset's variant in accuracy.csv)
PRESETS = (
    ("full attention", "full"),
    ('`"fast"`: 512 tokens', "two_level:preset=fast"),
    ("the default: 1,024 tokens", "two_level"),
    ("the default, `offload=True`", "two_level:offload=true"),
    ('`"accurate"`: 2,048 tokens', "two_level:preset=accurate"),
    ('`"previous"`: AsyncTLS\'s blocks a step ahead (`lag`)', "two_level:preset=previous"),
    ("`ProgressiveConfig()`: 95 % of the attention mass", "progressive"),
    ("`PredictiveConfig()`: chosen by the layer before", "predictive"),
)


def read(name: str) -> list[dict]:
    """Rows of a table in benchmarks/results, oldest first."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def newest(rows: list[dict], variant: str, metric: str, batch: int, context: int, case: str) -> float | None:
    """The newest figure of one cell."""
    wanted = (case, variant, metric, str(batch), str(context))
    for row in reversed(rows):
        if (row["case"], row["variant"], row["metric"], row["batch"], row["context"]) == wanted:
            return float(row["value"])
    return None


def _cell(value: float | None, bold: bool = False) -> str:
    if value is None:
        return NONE
    text = f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
    return f"**{text}**" if bold else text


def speed() -> str:
    """Milliseconds a token, transformers and ours; vLLM's beside."""
    rows = read("step.csv")
    first = next(i for i, row in enumerate(rows) if row["commit"] == DEFAULTS)
    lines = [
        "| KV cache in | batch x context | transformers | vLLM 0.26.0 (full attention) | hf-sparsekv |",
        "|---|---|---|---|---|",
    ]
    for place, theirs, ours, shapes in SPEED:
        for batch, context in shapes:
            stock = newest(rows, theirs, "tpot_ms", batch, context, CASE)
            mine = newest(rows[first:], ours, "tpot_ms", batch, context, CASE)
            vllm = _cell(VLLM[batch, context]) if place == "GPU" else "-"
            if mine is not None:
                shape = f"{batch} x {context // K}k"
                lines.append(f"| {place} | {shape} | {_cell(stock)} | {vllm} | {_cell(mine, bold=True)} |")
    return "\n".join(lines)


def presets() -> str:
    """RULER at 32k tokens on both probe models."""
    rows = read("accuracy.csv")
    lines = ["| | grouped queries | latents (MLA) |", "|---|---|---|"]
    for about, variant in PRESETS:
        cells = []
        for case in ("probe-gqa", "probe-mla"):
            name = f"ruler:average:{variant}"
            both = [newest(rows, name, metric, 1, 32 * K, case) for metric in ("score", "score_in_steps")]
            cells.append(NONE if None in both else " / ".join(f"{100 * value:.1f}" for value in both))
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"speed": speed, "presets": presets}


def between(text: str, name: str) -> tuple[int, int]:
    """Where a table stands: behind its mark, before the closing one.

    Raises:
        ValueError: a mark is missing.
    """
    begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"README.md lacks the marks <!-- {name} --> and <!-- /{name} -->")
    return text.index(begin) + len(begin), text.index(end)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    args = parser.parse_args(argv)
    text = README.read_text()
    for name, table in TABLES.items():
        print(table(), end="\n\n")
        start, stop = between(text, name) if args.write else (0, 0)
        text = text[:start] + table() + text[stop:] if args.write else text
    if args.write:
        README.write_text(text)


if __name__ == "__main__":
    main()
