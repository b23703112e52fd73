"""Tables of README.md, docs/accuracy.md and docs/presets.md, from the newest rows in benchmarks/results.

    python -m benchmarks.readme            # print them
    python -m benchmarks.readme --write    # put them between their marks in these pages

A line without a row of ours is left out; a cell of others that has none says so. The commands that measure are beside
the tables.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from .arguments import RESULTS

ROOT = Path(__file__).parents[1]
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

# All presets of all methods, for docs/presets.md: (its name there, variant).
ALL_PRESETS = (
    ("full attention", "full"),
    ("`OffloadedSparseCache`, on the device", "two_level"),
    ("the same, offloaded", "two_level:offload=true"),
    *((f"`{name}`", f"two_level:preset={name}") for name in ("fast", "accurate", "previous", "paper")),
    ("`ProgressiveCache`", "progressive"),
    *((f"`{name}`", f"progressive:preset={name}") for name in ("fast", "accurate")),
    ("`AsyncPredictiveCache`", "predictive"),
    *((f"`{name}`", f"predictive:preset={name}") for name in ("fast", "accurate", "previous", "paper")),
)

# RULER's six families, 64 prompts each, measured in one run for each family (docs/studies/ruler.md).
METHODS_COMMIT = "1ab6208"
FAMILIES = ("single", "multikey-25", "multikey-all", "multivalue", "multiquery", "vt")
METHODS = (
    ("full attention", "full"),
    ("oracle: the 1,024 tokens of the largest mass", "oracle:token_budget=1024"),
    ("tokens by labels, among all, 1,024 (the default's choice)", "token_only:token_budget=1024"),
    ("two levels, 512 tokens of 512 blocks of 16", "two_level:token_budget=512,block_size=16,num_blocks=512"),
    ("two levels, 512 tokens of 128 blocks of 64 (AsyncTLS)", "two_level:token_budget=512"),
    ("the same, blocks chosen a step late (`lag`)", "two_level:token_budget=512,lag=true"),
    ("whole blocks by bounds, 1,024 tokens (Quest)", "block_only:token_budget=1024"),
    ("walk over blocks to 98 %, the least mass seen (PSA)", "progressive:threshold=0.98,estimate=as_min"),
    ("queries predicted from earlier steps, 1,024 tokens", "predictive:token_budget=1024"),
    ("chance, 512 tokens", "random:token_budget=512"),
)

# Running text on the small model, after 4,096 tokens: (what it is, variant).
TEXT_CONTEXT = 4 * K
TEXT = (
    ("full attention", "full"),
    ("oracle, 512 tokens, without means", "oracle:token_budget=512"),
    ('`"fast"`: 512 tokens', "two_level:preset=fast"),
    ("the same without means for what is not chosen (`tail=none`)", "two_level:token_budget=512,tail=none"),
    ("the default: 1,024 tokens", "two_level"),
    ('`"accurate"`: 2,048 tokens', "two_level:preset=accurate"),
    ("`ProgressiveConfig()`: 95 % of the attention mass", "progressive"),
    ("`PredictiveConfig()`: chosen by the layer before", "predictive"),
    ('`"previous"`: blocks a step ahead (`lag`), 1,024 tokens', "two_level:preset=previous"),
    ("whole blocks by bounds, 512 tokens (Quest)", "block_only:token_budget=512,tail=none"),
    ("chance, 512 tokens", "random:token_budget=512"),
)

# Facts in the small model's context: five depths at each of four lengths.
NEEDLES_COMMIT = "68b1676"
NEEDLES = (
    ("full attention", "full"),
    ("tokens by labels, among all", "token_only:token_budget=512"),
    ("two levels, 32 blocks, four bounds a block", "two_level:token_budget=512,num_blocks=32,bound_tokens=16"),
    ("two levels, 32 blocks", "two_level:token_budget=512,num_blocks=32"),
    ("whole blocks by bounds (Quest)", "block_only:token_budget=512"),
    ("queries predicted from earlier steps", "predictive:token_budget=512"),
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


def _presets(which: tuple[tuple[str, str], ...], heads: str) -> str:
    rows = read("accuracy.csv")
    lines = [heads, "|---|---|---|"]
    for about, variant in which:
        cells = []
        for case in ("probe-gqa", "probe-mla"):
            name = f"ruler:average:{variant}"
            both = [newest(rows, name, metric, 1, 32 * K, case) for metric in ("score", "score_in_steps")]
            cells.append(NONE if None in both else " / ".join(f"{100 * value:.1f}" for value in both))
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(lines)


def presets() -> str:
    """RULER at 32k tokens on both probe models."""
    return _presets(PRESETS, "| | grouped queries | latents (MLA) |")


def all_presets() -> str:
    """The same of every method's presets."""
    return _presets(ALL_PRESETS, "| | GQA probe | MLA probe |")


def methods() -> str:
    """RULER at 32k tokens by what is chosen: means over the families of one commit's rows."""
    rows = [row for row in read("accuracy.csv") if row["commit"] == METHODS_COMMIT]
    lines = ["| | grouped queries | latents (MLA) | attended |", "|---|---|---|---|"]

    def mean(case: str, variant: str, metric: str) -> float:
        found = [newest(rows, f"ruler:{family}:{variant}", metric, 1, 32 * K, case) for family in FAMILIES]
        return 100 * sum(found) / len(found)

    for about, variant in METHODS:
        scores = [f"{mean(case, variant, 'score'):.1f}" for case in ("probe-gqa", "probe-mla")]
        lines.append(f"| {about} | {' | '.join(scores)} | {mean('probe-gqa', variant, 'attended'):.0f} % |")
    return "\n".join(lines)


def text() -> str:
    """Agreement with full attention on running text."""
    rows = read("accuracy.csv")
    lines = ["| | same most likely token | KL, nats a token | 95 % | attended |", "|---|---|---|---|---|"]
    for about, variant in TEXT:
        wanted = (f"agreement:{variant}", str(TEXT_CONTEXT))
        found = {row["metric"]: row for row in rows if (row["variant"], row["context"]) == wanted}  # the newest
        same, kl, read_of = (float(found[name]["value"]) for name in ("top1_agreement", "kl", "attended"))
        spread = f"{float(found['kl']['low']):.5f} to {float(found['kl']['high']):.5f}" if found["kl"]["low"] else ""
        lines.append(f"| {about} | {100 * same:.1f} % | {kl:.5f} | {spread} | {100 * read_of:.1f} % |")
    return "\n".join(lines)


def needles() -> str:
    """Facts found on the small model, of five at each length."""
    rows = [row for row in read("accuracy.csv") if row["commit"] == NEEDLES_COMMIT]
    lengths = [n * K for n in (1, 3, 5, 7)]
    lines = ["| 512 tokens | 1k | 3k | 5k | 7k | of 20 |", "|---|---|---|---|---|---|"]
    for about, variant in NEEDLES:
        found = [5 * newest(rows, f"needle:average:{variant}", "score", 1, length, "small") for length in lengths]
        lines.append(f"| {about} | {' | '.join(f'{n:.0f}' for n in [*found, sum(found)])} |")
    return "\n".join(lines)


PAGES = {
    "README.md": {"speed": speed, "presets": presets},
    "docs/presets.md": {"all-presets": all_presets},
    "docs/accuracy.md": {"presets": presets, "methods": methods, "text": text, "needles": needles},
}


def between(text: str, name: str, page: str = "README.md") -> tuple[int, int]:
    """Where a table stands: behind its mark, before the closing one.

    Raises:
        ValueError: a mark is missing.
    """
    begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks the marks <!-- {name} --> and <!-- /{name} -->")
    return text.index(begin) + len(begin), text.index(end)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into their pages")
    args = parser.parse_args(argv)
    for page, tables in PAGES.items():
        written = (ROOT / page).read_text()
        for name, table in tables.items():
            made = table()
            print(f"{page}, {name}\n\n{made}", end="\n\n")
            if args.write:
                start, stop = between(written, name, page)
                written = written[:start] + made + written[stop:]
        if args.write:
            (ROOT / page).write_text(written)


if __name__ == "__main__":
    main()
