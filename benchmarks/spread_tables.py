"""Tables of docs/measured/serving.md, from the newest rows of ``parallel``: several GPUs.

:mod:`.readme` writes them into the page. Their columns are numbers of GPUs.
"""

from __future__ import annotations

from .tables import K, commits_of, fixed, read, table

NOTHING = "Not measured yet."
OURS = "mass:0.9"
SUMS = ("sums_ms", "selection_ms", "attention_ms", "linear_ms", "other_ms", "agree_ms")
MODELS = {"qwen3-8b": "Qwen3-8B", "qwen3-32b": "Qwen3-32B", "llama-3.3-70b": "Llama-3.3-70B"}


class Found:
    """The newest figures of ``parallel``, by what was measured; of one ``commit``, if it is given."""

    def __init__(self, commit: str | None = None) -> None:
        self.rows: dict[tuple[str, int, int, str, str], dict] = {}
        for row in read("parallel.csv"):
            if commit not in (None, row["commit"]):
                continue
            key = row["case"], int(row["batch"]), int(row["context"]), row["variant"], row["metric"]
            self.rows[key] = row

    def shapes(self, metric: str) -> list[tuple[str, int, int]]:
        """Models, rows and tokens with this figure."""
        found = {key[:3] for key in self.rows if key[4] == metric and key[0] in MODELS}
        return sorted(found, key=lambda one: (list(MODELS).index(one[0]), one[1], one[2]))

    def row(self, case: str, batch: int, context: int, name: str, ranks: int, metric: str) -> dict | None:
        """The row of our cache, fused or not; or another row by its name."""
        name, plus, more = name.partition("+")
        ends = f"{plus}{more}:kv=replayed:ranks={ranks}"
        for variant in (f"{name}+fused{ends}", f"{name}{ends}", f"{name}:ranks={ranks}"):
            if (row := self.rows.get((case, batch, context, variant, metric))) is not None:
                return row
        return None

    def value(self, *of) -> float | None:
        """As :meth:`row`."""
        row = self.row(*of)
        return None if row is None else float(row["value"])


def _many(tokens: int) -> str:
    return f"{tokens // K}k"


def ranks() -> str:
    """Captured steps by the number of ranks, beside what their bytes take."""
    found, lines = Found(), []
    for case, batch, context in found.shapes("steps_ms"):
        of = case, batch, context
        for ours in (OURS, f"{OURS}+offload"):
            for size in (1, 2, 4):
                mine = found.row(*of, ours, size, "tpot_ms")
                if mine is None:
                    continue
                step, limit = (found.value(*of, name, size, "step_ms") for name in (ours, "limit"))
                dense = found.value(*of, "captured_dense", size, "step_ms")
                one = Found(mine["commit"]).value(*of, ours, 1, "step_ms")  # others have other kernels
                peaks = [found.value(*of, ours, size, f"peak_gb:rank{rank}") for rank in range(size)]
                share = "" if None in (one, step) or size == 1 else f"{step / one:.2f}"
                cells = [fixed(value, 2) for value in (limit, dense, step)]
                token = fixed(found.value(*of, ours, size, "tpot_ms"), 2)
                parts = [fixed(found.value(*of, ours, size, name), 2, "") for name in SUMS]
                most = fixed(max((peak for peak in peaks if peak is not None), default=None), 0)
                name = MODELS[case] + ", offloaded" * (ours != OURS)
                row = name, f"{batch} x {_many(context)}", str(size), *cells, share, token, *parts, most
                lines.append((*row, mine["commit"]))
    heads = (
        "model",
        "batch x context",
        "GPUs",
        "a dense step's bytes",
        "dense",
        "the default",
        "of one GPU's",
        "token",
    )
    parts = ("sums", "selection", "attention", "products", "others", "an agreement", "GB a GPU", "commit")
    return table((*heads, *parts), lines) if lines else NOTHING


def prompts(found: Found) -> list[tuple[tuple[str, int], dict[int, dict]]]:
    """Models and tokens, and the row of each number of ranks."""
    of: dict[tuple[str, int], dict[int, dict]] = {}
    for (case, _, context, variant, metric), row in found.rows.items():
        if metric == "ttft_s" and ":prompt" in variant and case in MODELS:
            size = int(variant.partition(":ranks=")[2].partition(":")[0])
            of.setdefault((case, context), {})[size] = row
    return sorted(of.items(), key=lambda one: (list(MODELS).index(one[0][0]), one[0][1]))


def rank_prompts() -> str:
    """Seconds of a prompt by the number of ranks."""
    lines = []
    for (case, context), rows in prompts(Found()):
        cells = [fixed(float(rows[size]["value"]) if size in rows else None, 2, "not run") for size in (1, 2, 4)]
        lines.append((MODELS[case], _many(context), *cells, commits_of(rows.values())))
    return table(("model", "prompt", "1 GPU", "2", "4", "commit"), lines) if lines else NOTHING


TABLES = {"ranks": ranks, "rank-prompts": rank_prompts}
