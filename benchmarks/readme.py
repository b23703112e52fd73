"""Tables of README.md and of pages of docs, from the newest rows in benchmarks/results.

    python -m benchmarks.readme            # print them
    python -m benchmarks.readme --write    # put them between their marks in these pages

Their lines and columns are in readme.yaml. ``--write`` also draws README's pictures (picture.py). A line of the first
one without a row of ours is left out; elsewhere an empty cell is marked. Times are an H200's where nothing else is
said. The commands that measure are beside the tables.
"""

from __future__ import annotations

import argparse

from . import ROOT, spread_tables
from .peers import report as peers
from .serving.client import MEAN_DELAY, TBT_ITERATIONS
from .tables import (
    DATA,
    GPU,
    GPUS,
    SYSTEMS,
    UNKNOWN,
    K,
    cell_of,
    commits_of,
    fixed,
    newest,
    newest_row,
    read,
    served,
    shape,
    spelled,
    table,
)

PROBES = ("probe-gqa", "probe-mla")
NEEDLES = ("1k", "3k", "5k", "7k")  # tokens of the contexts with facts


def first_commits(name: str) -> list[str]:
    """Commits of the first rows in which a variant, or a spec of ``eval``, means what it means today."""
    two_layers = name.startswith("predictive") or name.endswith("=paper")
    return DATA["since"]["earlier" if two_layers else "defaults"]


def since_defaults(rows: list[dict], name: str) -> list[dict]:
    """From the first row on in which ``name`` means what it means today."""
    commits = first_commits(name)
    return rows[next((i for i, row in enumerate(rows) if row["commit"] in commits), len(rows)) :]


def of_todays_settings(rows: list[dict], name: str) -> list[dict]:
    """All rows, or those since the defaults if ``name`` is one whose settings were others before."""
    return since_defaults(rows, name) if name.split("+")[0] in DATA["names_of_defaults"] else rows


# ---------------------------------------------------------------------- a token's time


def speed() -> str:
    """Milliseconds a token, transformers and ours; vLLM's beside."""
    rows, lines = read("step.csv", GPU), []
    for place, theirs, ours, shapes in DATA["speed"]:
        for text in shapes:
            stock = newest(rows, theirs, "tpot_ms", *shape(text))
            mine = newest(since_defaults(rows, ours), ours, "tpot_ms", *shape(text))
            vllm = cell_of(DATA["vllm"][text]) if place == "GPU" else "-"
            if mine is not None:
                lines.append((place, spelled(text), cell_of(stock), vllm, cell_of(mine, bold=True)))
    heads = ("KV cache in", "batch x context", "transformers", "vLLM 0.26.0 (full attention)", "hf-sparsekv")
    return table(heads, lines)


def gpus() -> str:
    """Milliseconds of a captured step on each GPU."""
    every, lines = read("step.csv"), []
    columns = DATA["gpu_steps"]["columns"]
    for name, device in GPUS.items():
        for text in DATA["gpu_steps"]["shapes"]:
            found = []
            for _, variants in columns:
                rows = [row for row in of_todays_settings(every, variants[0]) if row["device"] == device]
                found.append(newest(rows, variants, "step_ms", *shape(text)))
            lines.append((name, spelled(text), *(fixed(value, 2) for value in found)))
    return table(("GPU", "batch x context", *(about for about, _ in columns)), lines)


def two_levels() -> str:
    """Milliseconds of AsyncTLS's two levels; the fastest step of a line is bold."""
    rows, lines = read("step.csv", GPU), []
    since, columns = DATA["two_levels"]["since"], DATA["two_levels"]["columns"]
    rows = rows[next(i for i, row in enumerate(rows) if row["commit"] == since) :]
    for text in DATA["two_levels"]["shapes"]:
        found = [newest_row(rows, variant, metric, *shape(text)) for _, variant, metric in columns]
        values = [None if row is None else float(row["value"]) for row in found]
        best = min(v for v, (*_, metric) in zip(values, columns) if metric == "step_ms" and v is not None)
        lines.append((spelled(text), *(cell_of(value, bold=value == best) for value in values), commits_of(found)))
    return table(("batch x context", *(about for about, *_ in columns), "commit"), lines)


def offloaded() -> str:
    """A token with KV in host memory: its time, what crosses the link for it, what was on the device already."""
    rows, lines = read("step.csv", GPU), []
    metrics = ("host_gb", "tpot_ms", "step_ms", "host_mb", "hit_rate")
    for about, name, pool, text in DATA["offloaded"]:
        mine, variant = of_todays_settings(rows, name), f"{name}+fused+offload{pool}:kv=replayed"
        found = [newest_row(mine, variant, metric, *shape(text)) for metric in metrics]
        if None in found:
            continue
        size, token, step, link, share = (float(row["value"]) for row in found)
        stock = cell_of(newest(rows, "hf_offloaded", "tpot_ms", *shape(text)))
        times = f"{size:.0f}", stock, cell_of(token, bold=True), f"{step:.1f}"
        lines.append((about, spelled(text), *times, f"{link:.0f}", f"{100 * share:.0f} %", commits_of(found)))
    heads = ("", "batch x context", "KV, GB", "transformers offloaded, token", "token", "step")
    return table((*heads, "over the link, MB", "found on the device", "commit"), lines)


# ---------------------------------------------------------------------- what answers are worth


def _ruler(rows: list[dict], case: str, variant: str) -> str:
    """Question prefilled / its last tokens as decode steps, in %, at 32k tokens."""
    name = f"ruler:average:{variant}"
    both = [newest(rows, name, metric, 1, 32 * K, case) for metric in ("score", "score_in_steps")]
    return UNKNOWN if None in both else " / ".join(f"{100 * value:.1f}" for value in both)


def ruler_by_default(case: str, context: int) -> tuple[tuple, tuple, float | None]:
    """RULER's mean in %, question prefilled and in steps: full attention's, today's defaults', and their share read."""
    rows = read("accuracy.csv")
    todays = since_defaults(rows, "token")
    both = []
    for variant, of in (("full", rows), ("token", todays)):
        name = f"ruler:average:{variant}"
        found = (newest(of, name, metric, 1, context, case) for metric in ("score", "score_in_steps"))
        both.append(tuple(None if value is None else 100 * value for value in found))
    return both[0], both[1], newest(todays, "ruler:average:token", "attended", 1, context, case)


def models() -> str:
    """RULER by today's defaults beside full attention, and what share of the context they read."""
    lines = []
    for about, case, context in DATA["models"]:
        full, ours, share = ruler_by_default(case, context)
        cells = (UNKNOWN if None in both else " / ".join(f"{value:.1f}" for value in both) for both in (full, ours))
        lines.append((about, f"{context // 1000}k", *cells, UNKNOWN if share is None else f"{100 * share:.0f} %"))
    return table(("RULER, %", "tokens", "full attention", "default settings", "read of the context"), lines)


def _needles_found(rows: list[dict], variant: str) -> list[float] | None:
    """Facts found in the small model's context, of five at each length."""
    name, shapes = f"needle:average:{variant}", [shape(f"1x{length}") for length in NEEDLES]
    found = [newest(rows, name, "score", *one, "small") for one in shapes]
    return None if None in found else [5 * share for share in found]


def all_presets() -> str:
    """Cost and accuracy of every method's presets: a token's time, RULER, needles, divergence on running text."""
    steps, accuracy, lines = read("step.csv", GPU), read("accuracy.csv"), []
    shapes, context = DATA["preset_shapes"], shape(f"1x{DATA['text']['context']}")
    for about, variant, timed in DATA["all_presets"]:
        rows = of_todays_settings(steps, timed[0])
        cells = [cell_of(newest(rows, timed, "tpot_ms", *shape(text)), none=UNKNOWN) for text in shapes]
        cells += [_ruler(accuracy, case, variant) for case in PROBES]
        # Full attention is what it always was; caches by name are today's since then.
        rows = accuracy if variant == "full" else since_defaults(accuracy, variant)
        found = _needles_found(rows, variant)
        cells.append(UNKNOWN if found is None else f"{sum(found):.0f}")
        cells.append(fixed(newest(rows, f"agreement:{variant}", "kl", *context, "small"), 5))
        lines.append((about, *cells))
    heads = ("", *(f"{spelled(text)}, ms" for text in shapes), "RULER, GQA", "RULER, MLA", "needles of 20", "KL")
    return table(heads, lines)


def text() -> str:
    """Agreement with full attention on running text."""
    rows, lines = read("accuracy.csv"), []
    _, context = shape(f"1x{DATA['text']['context']}")
    for about, variant in DATA["text"]["lines"]:
        wanted = (f"agreement:{variant}", str(context))
        found = {row["metric"]: row for row in rows if (row["variant"], row["context"]) == wanted}  # the newest
        same, kl, read_of = (float(found[name]["value"]) for name in ("top1_agreement", "kl", "attended"))
        spread = f"{float(found['kl']['low']):.5f} to {float(found['kl']['high']):.5f}" if found["kl"]["low"] else ""
        lines.append((about, f"{100 * same:.1f} %", f"{kl:.5f}", spread, f"{100 * read_of:.1f} %"))
    return table(("", "same most likely token", "KL, nats a token", "95 %", "attended"), lines)


# ---------------------------------------------------------------------- whole systems


def ladder() -> str:
    """Whole systems over rates: the newest rows of one GPU and kind of trace, with exact prompts; means over seeds."""
    wanted = DATA["ladder"]
    of_kind: dict[tuple[int, float, int], dict[str, tuple[str, dict[str, float]]]] = {}
    order, lines = list(SYSTEMS), []
    for row, system, _, given in served():
        if "rate" not in given or "chunk" in given or "prompts" in given or given.get("gpu") != "24gb":
            continue
        if given.get("budget", wanted["budget"]) != wanted["budget"]:
            continue
        if [row["device"], int(given["out"]), int(given.get("most", 0))] != wanted["kind"]:
            continue
        key = int(row["context"]), float(given["rate"]), order.index(system)
        seeds = of_kind.setdefault(key, {})
        if seeds.get(given["seed"], ("",))[0] != row["commit"]:  # measured again
            seeds[given["seed"]] = row["commit"], {}
        seeds[given["seed"]][1][row["metric"]] = float(row["value"])
    for key, found in sorted(of_kind.items()):
        commits = ", ".join(dict.fromkeys(commit for commit, _ in found.values()))
        seeds = [one for _, one in found.values()]
        lost = sum(one["failed"] for one in seeds), sum(one["requests"] for one in seeds)
        clip, rate, system = key
        cells = [f"{clip // K}k", f"{rate:g}", SYSTEMS[order[system]], str(len(seeds)), *_over_seeds(seeds)]
        if lost[0]:
            cells[4] += f" ({lost[0]:.0f} of {lost[1]:.0f} not finished)"
        if 2 * lost[0] > lost[1]:  # what has been finished says little
            cells[5:8] = "", "", ""
        kept = sum(_within(one) for one in seeds)
        cells.append({0: "no", len(seeds): "yes"}.get(kept, f"{kept} of {len(seeds)}"))
        lines.append((*cells, commits))
    heads = ("prompts up to", "requests a second", "system", "seeds", "tokens/s", "first token, s: mean, p99")
    more = ("between tokens, ms: p50, p99", "waited, s: mean", "within the limits", "commit")
    return table((*heads, *more), lines)


def _within(one: dict[str, float]) -> bool:
    """Goodput's limits hold (benchmarks/serving/client.py), with iterations of the ladder's length."""
    most = TBT_ITERATIONS * DATA["ladder"]["iteration_ms"]
    return not (one["between_ms:p99"] > most or one["queued_s:mean"] > MEAN_DELAY or one["failed"])


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
    order, lines, names = list(SYSTEMS), [], {device: name for name, device in GPUS.items()}
    said = (("budget", "{} tokens a step"), ("chunk", "prompts in pieces of {}"))
    for row, system, parts, given in served():
        if not {"saturated", "gpu=24gb"} <= parts or int(row["context"]) != 32 * K:
            continue
        if "budget" in given and "kv=replayed" not in parts:
            continue
        lengths = int(given["prompt"]), int(given["out"]), int(given.get("most", 0))
        more = tuple(text.format(given[name]) for name, text in said if name in given)
        key = lengths, row["device"], order.index(system), int(row["batch"]), more, given["seed"]
        if about.get(key) != (given["s"], row["commit"]):
            about[key], found[key] = (given["s"], row["commit"]), {}
        found[key][row["metric"]] = float(row["value"])
    for key in sorted(found, key=lambda key: (*key[:3], key[4], key[3])):
        ((prompt, answer, most), device, system, rows, more, _), cells = key, found[key]
        seconds, commit = about[key]
        what = f"{prompt // K}k, {answer:,}" + f", {most:,} at most" * bool(most)
        rates = f"{cells['tokens_per_s']:,.0f}", f"{cells['requests_per_s']:.2f}", f"{cells['rows']:.1f}"
        between_ms = f"{cells['between_ms:p50']:.1f}, {cells['between_ms:p99']:.0f}"
        name, counted = ", ".join((SYSTEMS[order[system]], *more)), seconds.replace("-", " to ")
        lines.append((what, names[device], name, str(rows), counted, *rates, between_ms, commit))
    heads = ("prompts, answers", "GPU", "system", "rows at most", "counted, s", "tokens/s", "requests/s", "answering")
    return table((*heads, "between tokens, ms: p50, p99", "commit"), lines)


def picture() -> str:
    """README's, which shows files that :func:`main` writes."""
    from .picture import embedded

    return embedded()


PAGES = {
    "README.md": {"picture": picture, "models": models},
    "docs/speed.md": {
        "speed": speed,
        "gpus": gpus,
        "two-levels": two_levels,
        "offloaded": offloaded,
    },
    "docs/compared.md": {"peers": peers.tables},
    "docs/measured/serving.md": {
        "ladder": ladder,
        "full": full,
        **spread_tables.TABLES,
    },
    "docs/accuracy.md": {"all-presets": all_presets, "text": text},
}


def between(text: str, name: str, page: str = "README.md") -> tuple[int, int]:
    """Where a table is: after its mark, before the closing one.

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
        for name, make in tables.items():
            made = make()
            print(f"{page}, {name}\n\n{made}", end="\n\n")
            if args.write:
                start, stop = between(written, name, page)
                written = written[:start] + made + written[stop:]
        if args.write:
            (ROOT / page).write_text(written)
    if args.write:
        from .picture import files

        for path, drawn in files().items():
            (ROOT / path).write_text(drawn)


if __name__ == "__main__":
    main()
