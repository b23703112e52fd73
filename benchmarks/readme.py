"""Tables of README.md and of pages of docs, from the newest rows in benchmarks/results.

    python -m benchmarks.readme            # print them
    python -m benchmarks.readme --write    # put them between their marks in these pages

A line of the first one without a row of ours is left out; elsewhere a cell that has none says so. Times are an H200's
where nothing else is said.
The commands that measure are beside the tables.
"""

from __future__ import annotations

import argparse
import csv

from . import ROOT, files_of
from .serving.client import MEAN_DELAY, TBT_ITERATIONS

CASE, GPU = "qwen3-8b", "NVIDIA H200"  # of times
K = 1024
NONE = "not run"

# The commits of the first rows of today's defaults, in step.csv and in accuracy.csv: one dense layer. What keeps two
# has been what it is since EARLIER (tokens among all, means for what is not chosen). Rows are appended, so every one
# behind them is newer.
DEFAULTS = ("e78671e", "da590eb")
EARLIER = ("f4e5ad0", "f15868d")

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

# All presets of all methods, for docs/presets.md: (its name there, variant in accuracy.csv, variants of the same
# settings in step.csv). How much progressive selection reads is up to keys and queries: its steps replay recorded ones.
ALL_PRESETS = (
    ("full attention, captured", "full", ("captured_dense+fused",)),
    ("`OffloadedSparseCache`, on the device", "two_level", ("token_only+fused",)),
    ("the same, offloaded", "two_level:offload=true", ("token_only+fused+offload:kv=replayed",)),
    ("`fast`", "two_level:preset=fast", ("two_level:fast+fused",)),
    ("`accurate`", "two_level:preset=accurate", ("two_level:accurate+fused",)),
    ("`previous`", "two_level:preset=previous", ("two_level:previous+fused", "two_level:lag+fused")),
    ("`paper`", "two_level:preset=paper", ("two_level:paper+fused",)),
    ("`ProgressiveCache`", "progressive", ("progressive:0.95+fused:kv=replayed",)),
    (
        "`fast`",
        "progressive:preset=fast",
        ("progressive:fast+fused:kv=replayed", "progressive:0.9+fused:kv=replayed"),
    ),
    (
        "`accurate`",
        "progressive:preset=accurate",
        ("progressive:accurate+fused:kv=replayed", "progressive:0.98+fused:kv=replayed"),
    ),
    ("`AsyncPredictiveCache`", "predictive", ("predictive+fused", "predictive:layer:in+fused")),
    *(
        (f"`{name}`", f"predictive:preset={name}", (f"predictive:{name}+fused",))
        for name in ("fast", "accurate", "previous", "paper")
    ),
)
PRESET_SHAPES = ((1, 32 * K), (1, 128 * K), (8, 32 * K), (8, 64 * K))
# Names whose settings were others before DEFAULTS; every other one says what it is.
NAMES_OF_DEFAULTS = (
    *("token_only", "two_level:fast", "two_level:accurate", "predictive"),
    *("progressive:0.95", "progressive:fast", "progressive:accurate"),
)
UNKNOWN = "not measured"

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
NEEDLE_LENGTHS = tuple(n * K for n in (1, 3, 5, 7))
NEEDLES = (
    ("full attention", "full"),
    ("tokens by labels, among all", "token_only:token_budget=512"),
    ("two levels, 32 blocks, four bounds a block", "two_level:token_budget=512,num_blocks=32,bound_tokens=16"),
    ("two levels, 32 blocks", "two_level:token_budget=512,num_blocks=32"),
    ("whole blocks by bounds (Quest)", "block_only:token_budget=512"),
    ("queries predicted from earlier steps", "predictive:token_budget=512"),
)


# Of traces, in the order of docs/benchmarks-serving.md: (name in rows, what it is called).
SYSTEMS = (
    ("transformers", "transformers, continuous batching"),
    ("vllm", "vLLM 0.26.0"),
    ("dense", "our engine, dense"),
    ("sparse", "+ sparse attention"),
    ("offload", "+ full blocks in host memory"),
    ("working-set", "+ working sets"),
    ("segments", "+ layer segments (offloaded, as it comes)"),
)

WORKING_SETS = "gpu=8gb:budget=2048:kv=replayed"  # of the rows that do and do not fit
LADDER_BUDGET, ITERATION_MS = "1024", 10.0  # `--budget` and `--iteration-ms` of the ladder

# Captured steps, by GPU (name, device in the rows), and variants of one column: (what it is, variants).
GPUS = (("H200", GPU), ("H100", "NVIDIA H100 80GB HBM3"))
GPU_SHAPES = ((1, 8 * K), (1, 32 * K), (1, 128 * K), (4, 32 * K), (8, 32 * K))
GPU_COLUMNS = (
    ("read everything", ("limit",)),
    ("dense", ("captured_dense+fused",)),
    ("the default", ("token_only+fused",)),
    ("`AsyncPredictiveCache`", ("predictive+fused", "predictive:layer:in+fused")),
)

# Of docs/speed.md. Captured steps of the defaults, beside our own dense ones: (what it is, variant).
DEFAULT_STEPS = (
    ("dense", "captured_dense+fused"),
    ("`OffloadedSparseCache(offload=None)`", "token_only+fused"),
    ("`AsyncPredictiveCache()`", "predictive+fused"),
)
# AsyncTLS's two levels. Rows before these are of steps, dense ones too, that took a millisecond more.
TWO_LEVELS_SINCE = "59032a2"
TWO_LEVELS_SHAPES = ((1, 8 * K), (1, 32 * K), (1, 64 * K), (1, 128 * K), (8, 32 * K), (8, 64 * K))
TWO_LEVELS = (
    ("transformers, token (eager, sdpa)", "hf_dynamic", "tpot_ms"),
    ("dense, step (captured, best sdpa, fused as ours)", "sdpa_best+fused", "step_ms"),
    ("`two_level`, step", "two_level+fused", "step_ms"),
    ("`two_level`, token", "two_level+fused", "tpot_ms"),
    ("`two_level:lag`, step", "two_level:lag+fused", "step_ms"),
    ("`two_level:lag`, token", "two_level:lag+fused", "tpot_ms"),
)
# With keys and values in host memory: (what it is, our variant, room for copies on the device, shape).
QUARTER = ":pool=0.25kv"
OFFLOADED = (
    ("the default", "token_only", "", (1, 32 * K)),
    ("the default", "token_only", "", (1, 128 * K)),
    ("the default", "token_only", "", (8, 32 * K)),
    ("the default", "token_only", "", (8, 64 * K)),
    ("the default, pool of a quarter of the KV", "token_only", QUARTER, (8, 64 * K)),
    ("`AsyncPredictiveCache`", "predictive", "", (1, 32 * K)),
    ("`AsyncPredictiveCache`", "predictive", "", (8, 64 * K)),
    ("`two_level:lag`", "two_level:lag", "", (1, 32 * K)),
    ("`two_level:lag`", "two_level:lag", "", (1, 128 * K)),
    ("`two_level:lag`", "two_level:lag", "", (4, 64 * K)),
    ("`two_level:lag`, pool of a quarter", "two_level:lag", QUARTER, (8, 64 * K)),
    ("`two_level:lag`, pool of a quarter", "two_level:lag", QUARTER, (8, 128 * K)),
)

# Of quantised weights (benchmarks/weights.py): tokens of the prompt, shapes of the columns.
WEIGHTS_PROMPT = 600
WEIGHTS_SHAPES = ((1, 32 * K), (8, 32 * K))


def read(name: str, device: str | None = None) -> list[dict]:
    """Rows of a table in benchmarks/results, oldest first; of all machines, or of one ``device``."""
    rows: list[dict] = []
    for path in files_of(name):
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if device in (None, row["device"])]
    return rows


def first_commits(name: str) -> tuple[str, ...]:
    """Those of the first rows in which a variant, or a spec of ``eval``, means what it means today."""
    two_layers = name.startswith("predictive") or name.endswith(("=previous", "=paper"))
    return EARLIER if two_layers else DEFAULTS


def since_defaults(rows: list[dict], name: str) -> list[dict]:
    """From the first row on in which ``name`` means what it means today."""
    commits = first_commits(name)
    return rows[next((i for i, row in enumerate(rows) if row["commit"] in commits), len(rows)) :]


def newest_row(
    rows: list[dict], variants: str | tuple, metric: str, batch: int, context: int, case: str
) -> dict | None:
    """The newest row of one cell, of any of the ``variants``."""
    variants = (variants,) if isinstance(variants, str) else variants
    wanted = (case, metric, str(batch), str(context))
    for row in reversed(rows):
        if (row["case"], row["metric"], row["batch"], row["context"]) == wanted and row["variant"] in variants:
            return row
    return None


def newest(rows: list[dict], variants: str | tuple, metric: str, batch: int, context: int, case: str) -> float | None:
    """The newest figure of one cell, of any of the ``variants``."""
    row = newest_row(rows, variants, metric, batch, context, case)
    return None if row is None else float(row["value"])


def _cell(value: float | None, bold: bool = False) -> str:
    if value is None:
        return NONE
    text = f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
    return f"**{text}**" if bold else text


def speed() -> str:
    """Milliseconds a token, transformers and ours; vLLM's beside."""
    rows = read("step.csv", GPU)
    lines = [
        "| KV cache in | batch x context | transformers | vLLM 0.26.0 (full attention) | hf-sparsekv |",
        "|---|---|---|---|---|",
    ]
    for place, theirs, ours, shapes in SPEED:
        for batch, context in shapes:
            stock = newest(rows, theirs, "tpot_ms", batch, context, CASE)
            mine = newest(since_defaults(rows, ours), ours, "tpot_ms", batch, context, CASE)
            vllm = _cell(VLLM[batch, context]) if place == "GPU" else "-"
            if mine is not None:
                shape = f"{batch} x {context // K}k"
                lines.append(f"| {place} | {shape} | {_cell(stock)} | {vllm} | {_cell(mine, bold=True)} |")
    return "\n".join(lines)


def _ruler(rows: list[dict], case: str, variant: str, none: str = NONE) -> str:
    """Question prefilled / its last tokens as decode steps, in %, at 32k tokens."""
    name = f"ruler:average:{variant}"
    both = [newest(rows, name, metric, 1, 32 * K, case) for metric in ("score", "score_in_steps")]
    return none if None in both else " / ".join(f"{100 * value:.1f}" for value in both)


def presets() -> str:
    """RULER at 32k tokens on both probe models."""
    rows = read("accuracy.csv")
    lines = ["| | grouped queries | latents (MLA) |", "|---|---|---|"]
    for about, variant in PRESETS:
        lines.append(f"| {about} | {' | '.join(_ruler(rows, case, variant) for case in ('probe-gqa', 'probe-mla'))} |")
    return "\n".join(lines)


def _needles_found(rows: list[dict], variant: str) -> float | None:
    """Facts found in the small model's context, of five at each of :data:`NEEDLE_LENGTHS`."""
    found = [newest(rows, f"needle:average:{variant}", "score", 1, length, "small") for length in NEEDLE_LENGTHS]
    return None if None in found else 5 * sum(found)


def all_presets() -> str:
    """What every method's presets cost and find: a token's time, RULER, needles, divergence on running text."""
    steps, accuracy = read("step.csv", GPU), read("accuracy.csv")
    shapes = [f"{batch} x {context // K}k" for batch, context in PRESET_SHAPES]
    heads = ("", *(f"{shape}, ms" for shape in shapes), "RULER, GQA", "RULER, MLA", "needles of 20", "KL")
    lines = [f"| {' | '.join(heads)} |".replace("|  |", "| |"), "|---" * len(heads) + "|"]
    for about, variant, timed in ALL_PRESETS:
        rows = since_defaults(steps, timed[0]) if timed[0].split("+")[0] in NAMES_OF_DEFAULTS else steps
        times = [newest(rows, timed, "tpot_ms", *shape, CASE) for shape in PRESET_SHAPES]
        cells = [UNKNOWN if value is None else _cell(value) for value in times]
        cells += [_ruler(accuracy, case, variant, UNKNOWN) for case in ("probe-gqa", "probe-mla")]
        # Full attention is what it always was; caches by name are today's since then.
        rows = accuracy if variant == "full" else since_defaults(accuracy, variant)
        found = _needles_found(rows, variant)
        cells.append(UNKNOWN if found is None else f"{found:.0f}")
        kl = newest(rows, f"agreement:{variant}", "kl", 1, TEXT_CONTEXT, "small")
        cells.append(UNKNOWN if kl is None else f"{kl:.5f}")
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    lines = ["| 512 tokens | 1k | 3k | 5k | 7k | of 20 |", "|---|---|---|---|---|---|"]
    for about, variant in NEEDLES:
        found = [
            5 * newest(rows, f"needle:average:{variant}", "score", 1, length, "small") for length in NEEDLE_LENGTHS
        ]
        lines.append(f"| {about} | {' | '.join(f'{n:.0f}' for n in [*found, sum(found)])} |")
    return "\n".join(lines)


def ladder() -> str:
    """Whole systems over rates: the newest rows of one kind of trace, that of the last row; means over seeds."""
    kinds: dict[tuple, dict[tuple[int, float, int], dict[str, tuple[str, dict[str, float]]]]] = {}
    order = {name: i for i, (name, _) in enumerate(SYSTEMS)}
    kind: tuple = ()
    for row in read("serving.csv"):
        system, *parts = row["variant"].split(":")
        given = dict(part.split("=", 1) for part in parts if "=" in part)
        if row["case"] != CASE or "rate" not in given or "chunk" in given or given.get("gpu") != "24gb":
            continue
        if given.get("budget", LADDER_BUDGET) != LADDER_BUDGET:
            continue
        kind = row["device"], int(given["out"]), int(given.get("most", 0))
        key = int(row["context"]), float(given["rate"]), order[system]
        seeds = kinds.setdefault(kind, {}).setdefault(key, {})
        if seeds.get(given["seed"], ("",))[0] != row["commit"]:  # measured anew
            seeds[given["seed"]] = row["commit"], {}
        seeds[given["seed"]][1][row["metric"]] = float(row["value"])
    lines = [
        "| prompts up to | requests a second | system | seeds | tokens/s | first token, s: mean, p99 | "
        "between tokens, ms: p50, p99 | waited, s: mean | within the limits | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(kinds.get(kind, {})):
        commits = ", ".join(dict.fromkeys(commit for commit, _ in kinds[kind][key].values()))
        seeds = [one for _, one in kinds[kind][key].values()]
        lost = sum(one["failed"] for one in seeds), sum(one["requests"] for one in seeds)
        clip, rate, system = key
        cells = [f"{clip // K}k", f"{rate:g}", SYSTEMS[system][1], str(len(seeds)), *_over_seeds(seeds)]
        if lost[0]:
            cells[4] += f" ({lost[0]:.0f} of {lost[1]:.0f} not finished)"
        if 2 * lost[0] > lost[1]:  # what has been finished says little
            cells[5:8] = "", "", ""
        kept = sum(_within(one) for one in seeds)
        cells.append({0: "no", len(seeds): "yes"}.get(kept, f"{kept} of {len(seeds)}"))
        lines.append(f"| {' | '.join(cells)} | {commits} |")
    return "\n".join(lines)


def _within(one: dict[str, float]) -> bool:
    """Goodput's limits hold (benchmarks/serving/client.py), with iterations of ITERATION_MS."""
    slow = one["between_ms:p99"] > TBT_ITERATIONS * ITERATION_MS or one["queued_s:mean"] > MEAN_DELAY
    return not (slow or one["failed"])


def _over_seeds(seeds: list[dict[str, float]]) -> list[str]:
    """Tokens a second, times to the first token and between tokens, waits: means, and of several seeds the extremes."""

    def said(metric: str, digits: int, extremes: bool = False) -> str:
        found = [one[metric] for one in seeds]
        text = f"{sum(found) / len(found):,.{digits}f}"
        if extremes and len(found) > 1:
            text += f" ({min(found):,.{digits}f} to {max(found):,.{digits}f})"
        return text

    first = f"{said('ttft_s:mean', 2, True)}, {said('ttft_s:p99', 1)}"
    between_ms = f"{said('between_ms:p50', 1)}, {said('between_ms:p99', 0)}"
    return [said("tokens_per_s", 0, True), first, between_ms, said("queued_s:mean", 2)]


def full() -> str:
    """Systems that are always full: the newest row of each, of each kind of trace and number of rows."""
    found: dict[tuple, dict[str, float]] = {}
    about: dict[tuple, tuple[str, str]] = {}
    order = {name: i for i, (name, _) in enumerate(SYSTEMS)}
    names = {device: name for name, device in GPUS}
    for row in read("serving.csv"):
        system, *parts = row["variant"].split(":")
        if row["case"] != CASE or "saturated" not in parts or "gpu=24gb" not in parts:
            continue
        if int(row["context"]) != 32 * K or ("budget=" in row["variant"] and "kv=replayed" not in parts):
            continue
        given = dict(part.split("=") for part in parts if "=" in part)
        lengths = int(given["prompt"]), int(given["out"]), int(given.get("most", 0))
        said = (("budget", "{} tokens a step"), ("chunk", "prompts in pieces of {}"))
        more = [text.format(given[name]) for name, text in said if name in given]
        key = lengths, row["device"], order[system], int(row["batch"]), tuple(more), given["seed"]
        if about.get(key) != (given["s"], row["commit"]):
            about[key], found[key] = (given["s"], row["commit"]), {}
        found[key][row["metric"]] = float(row["value"])
    lines = [
        "| prompts, answers | GPU | system | rows at most | counted, s | tokens/s | requests/s | answering | between "
        "tokens, ms: p50, p99 | commit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(found, key=lambda key: (*key[:3], key[4], key[3])):
        ((prompt, answer, most), device, system, rows, more, _), cells = key, found[key]
        seconds, commit = about[key]
        answers = f"{answer:,}" + f", {most:,} at most" * bool(most)
        lines.append(
            f"| {prompt // K}k, {answers} | {names[device]} | {', '.join((SYSTEMS[system][1], *more))} | {rows} | "
            f"{seconds.replace('-', ' to ')} | {cells['tokens_per_s']:,.0f} | {cells['requests_per_s']:.2f} | "
            f"{cells['rows']:.1f} | {cells['between_ms:p50']:.1f}, {cells['between_ms:p99']:.0f} | {commit} |"
        )
    return "\n".join(lines)


def working_sets() -> str:
    """A fixed number of rows, by whether rows are held back whose working sets do not fit: the newest of each."""
    found: dict[tuple[int, str], dict[str, tuple[float, str]]] = {}
    for row in read("serving.csv"):
        system, _, rest = row["variant"].partition(":")
        if (row["case"], row["context"], rest) == (CASE, str(8 * K), WORKING_SETS) and system in dict(SYSTEMS):
            found.setdefault((int(row["batch"]), system), {})[row["metric"]] = float(row["value"]), row["commit"]
    lines = [
        "| rows | taken as they come: tokens/s | ms a step | over the link, MB a step "
        "| held to working sets: tokens/s | ms a step | over the link, MB a step | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in sorted({rows for rows, _ in found}):
        cells, commits = [], []
        for system in ("offload", "working-set"):
            of = found.get((rows, system), {})
            for metric, digits in (("tokens_per_s", 0), ("between_ms", 1), ("host_mb", 0)):
                value, commit = of.get(metric, (None, None))
                cells.append("not run" if value is None else f"{value:,.{digits}f}")
                commits += [] if commit is None else [commit]
        lines.append(f"| {rows} | {' | '.join(cells)} | {', '.join(dict.fromkeys(commits))} |")
    return "\n".join(lines)


def gpus() -> str:
    """Milliseconds of a captured step on each GPU."""
    lines = [
        f"| GPU | batch x context | {' | '.join(about for about, _ in GPU_COLUMNS)} |",
        "|---" * (2 + len(GPU_COLUMNS)) + "|",
    ]
    every = read("step.csv")
    for name, device in GPUS:
        for batch, context in GPU_SHAPES:
            found = []
            for _, variants in GPU_COLUMNS:
                of_defaults = variants[0].split("+")[0] in NAMES_OF_DEFAULTS
                rows = since_defaults(every, variants[0]) if of_defaults else every
                rows = [row for row in rows if row["device"] == device]
                found.append(newest(rows, variants, "step_ms", batch, context, CASE))
            cells = [UNKNOWN if value is None else f"{value:.2f}" for value in found]
            lines.append(f"| {name} | {batch} x {context // K}k | {' | '.join(cells)} |")
    return "\n".join(lines)


def _commits(rows: list[dict | None]) -> str:
    """Those that rows are of, each once, in the order of the columns."""
    return ", ".join(dict.fromkeys(row["commit"] for row in rows if row is not None))


def default_steps() -> str:
    """Milliseconds of a captured step with the defaults."""
    rows = read("step.csv", GPU)
    lines = [
        f"| 1024 tokens, ms a captured step | {' | '.join(about for about, _ in DEFAULT_STEPS)} | commit |",
        "|---" * (2 + len(DEFAULT_STEPS)) + "|",
    ]
    for batch, context in PRESET_SHAPES:
        todays = ((since_defaults(rows, name), name) for _, name in DEFAULT_STEPS)
        found = [newest_row(since, name, "step_ms", batch, context, CASE) for since, name in todays]
        cells = [UNKNOWN if row is None else f"{float(row['value']):.2f}" for row in found]
        lines.append(f"| {batch} x {context // K}k | {' | '.join(cells)} | {_commits(found)} |")
    return "\n".join(lines)


def two_levels() -> str:
    """Milliseconds of AsyncTLS's two levels; the quickest step of a line is bold."""
    rows = read("step.csv", GPU)
    rows = rows[next(i for i, row in enumerate(rows) if row["commit"] == TWO_LEVELS_SINCE) :]
    lines = [
        f"| batch x context | {' | '.join(about for about, *_ in TWO_LEVELS)} | commit |",
        "|---" * (2 + len(TWO_LEVELS)) + "|",
    ]
    for batch, context in TWO_LEVELS_SHAPES:
        found = [newest_row(rows, variant, metric, batch, context, CASE) for _, variant, metric in TWO_LEVELS]
        values = [None if row is None else float(row["value"]) for row in found]
        best = min(v for v, (*_, metric) in zip(values, TWO_LEVELS) if metric == "step_ms" and v is not None)
        cells = [_cell(value, bold=value == best) for value in values]
        lines.append(f"| {batch} x {context // K}k | {' | '.join(cells)} | {_commits(found)} |")
    return "\n".join(lines)


def offloaded() -> str:
    """A token with KV in host memory: its time, what crosses the link for it, what was on the device already."""
    rows = read("step.csv", GPU)
    lines = [
        "| | batch x context | KV, GB | transformers offloaded, token | token | step | over the link, MB | "
        "found on the device | commit |",
        "|" + "---|" * 9,
    ]
    for about, name, pool, (batch, context) in OFFLOADED:
        mine = since_defaults(rows, name) if name in NAMES_OF_DEFAULTS else rows
        variant = f"{name}+fused+offload{pool}:kv=replayed"
        metrics = ("host_gb", "tpot_ms", "step_ms", "host_mb", "hit_rate")
        found = [newest_row(mine, variant, metric, batch, context, CASE) for metric in metrics]
        if None in found:
            continue
        size, token, step, link, share = (float(row["value"]) for row in found)
        stock = _cell(newest(rows, "hf_offloaded", "tpot_ms", batch, context, CASE))
        lines.append(
            f"| {about} | {batch} x {context // K}k | {size:.0f} | {stock} | {_cell(token, bold=True)} | {step:.1f} | "
            f"{link:.0f} | {100 * share:.0f} % | {_commits(found)} |"
        )
    return "\n".join(lines)


def weights() -> str:
    """Formats of the weights: bytes, equal tokens, and milliseconds a token, eager and captured."""
    from .weight_formats import FORMATS  # needs torch and transformers

    rows = read("weights.csv", GPU)
    heads = [f"{batch} x {context // K}k, {how}" for batch, context in WEIGHTS_SHAPES for how in ("eager", "captured")]
    heads.append(f"the same, dense ({WEIGHTS_SHAPES[0][0]} x {WEIGHTS_SHAPES[0][1] // K}k)")
    lines = [f"| weights | GB | equal tokens of 16 | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]

    def shown(value: float | None, digits: int) -> str:
        return UNKNOWN if value is None else f"{value:.{digits}f}"

    def times(name: str, variant: str, shape: tuple[int, int]) -> str:
        if newest(rows, f"{name}:{variant}", "captured", *shape, CASE) == 0:
            return "not captured"
        return shown(newest(rows, f"{name}:{variant}", "tpot_ms", *shape, CASE), 1)

    for form in FORMATS.values():
        if newest(rows, form.name, "works", 1, WEIGHTS_PROMPT, CASE) == 0:
            cells = ["does not run", *[""] * (1 + len(heads))]
        else:
            gigabytes, equal = (
                newest(rows, form.name, metric, 1, WEIGHTS_PROMPT, CASE) for metric in ("weights_gb", "equal_tokens")
            )
            ways = ("token_only+eager", "token_only+fused")
            cells = [shown(gigabytes, 1), shown(equal, 0)]
            cells += [times(form.name, way, shape) for shape in WEIGHTS_SHAPES for way in ways]
            cells.append(times(form.name, "captured_dense+fused", WEIGHTS_SHAPES[0]))
        lines.append(f"| {form.about} | {' | '.join(cells)} |")
    return "\n".join(lines)


PAGES = {
    "README.md": {"speed": speed, "presets": presets},
    "docs/speed.md": {"default-steps": default_steps, "two-levels": two_levels, "offloaded": offloaded},
    "docs/presets.md": {"all-presets": all_presets},
    "docs/serving.md": {"ladder": ladder},
    "docs/benchmarks-serving.md": {"full": full, "working-sets": working_sets},
    "docs/hardware.md": {"gpus": gpus, "weights": weights},
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
