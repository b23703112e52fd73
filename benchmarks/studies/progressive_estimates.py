"""What a progressive walk estimates to have covered against what it has, for several ways to estimate what is left.

    python -m benchmarks.studies.progressive_estimates      # small model and GQA probe; docs/progressive.svg
    python -m benchmarks.studies.progressive_estimates small --metadata cuboid_mean:16 min_max:64 mean:64

Walks of recorded queries over recorded keys, to their ends: so each estimate stops the same walks, and they are
compared at equal thresholds and at equal numbers of blocks. Prints tables and appends rows to
benchmarks/results/accuracy.csv. A walk is one query, layer and KV head; blocks have 64 tokens; the first two layers are
dense.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import ProgressiveConfig
from hf_sparsekv.evaluation import ruler_probe
from hf_sparsekv.evaluation.prefix import prefill
from hf_sparsekv.evaluation.small_model import SMALL_MODEL_NAME
from hf_sparsekv.ops.block_score.reference import query_parts
from hf_sparsekv.ops.seal import key_metadata
from hf_sparsekv.policies.progressive import SLOPES
from hf_sparsekv.results import Row, append_rows

from .. import ROOT
from .small_model import CSV, greedy, load, reference_ids

CONFIG = ProgressiveConfig()
THRESHOLDS = (0.90, 0.95, 0.98, 0.99)
EQUAL = 24  # blocks a walk at which estimates are compared
INF = math.inf


@dataclass
class Walks:
    """The walks of one query in one layer. Masses are natural logarithms; blocks are in order of their rank.

    Args:
        near: ``[H, G]``, sinks and recent tokens together.
        held: ``[H, G, n]``, what each block holds.
        logits: ``[H, G, n]``, the blocks' scores for each query head, times the softmax scale.
        tokens: ``[H, G, n]``, selectable tokens of each block.
        kind: of the metadata.
    """

    near: Tensor
    held: Tensor
    logits: Tensor
    tokens: Tensor
    kind: str

    @property
    def seen(self) -> Tensor:
        """Mass after each block, ``[H, G, n]``."""
        return torch.logaddexp(self.near[..., None], self.held.logcumsumexp(-1))

    @property
    def true(self) -> Tensor:
        """Share of the mass after each block, the least of the query heads, ``[H, n]``."""
        return (self.seen - self.seen[..., -1:]).exp().amin(1)


def walks(q: Tensor, keys: Tensor, scale: float, kind: str, share: int) -> Walks:
    """Those of a query ``[Hq, D]`` over ``keys [H, n, D]``; ``share`` tokens a piece of metadata."""
    heads, n, dim = keys.shape
    size, recent = CONFIG.block_size, CONFIG.window + CONFIG.max_draft
    full_blocks = (n - recent) // size
    q = q.view(heads, -1, dim)
    logits = torch.einsum("hgd,hnd->hgn", q, keys) * scale
    usable = torch.ones(full_blocks, size, dtype=torch.bool)
    usable[0, : CONFIG.sinks] = False
    stored = logits[..., : full_blocks * size].unflatten(-1, (full_blocks, size))
    near = torch.cat((logits[..., full_blocks * size :], logits[..., : CONFIG.sinks]), -1).logsumexp(-1)
    held = stored.masked_fill(~usable, -INF).logsumexp(-1)
    blocks = keys[:, : full_blocks * size].unflatten(1, (full_blocks, size)).transpose(0, 1)
    kept = key_metadata(blocks, usable, size // share, kind).flatten(3)  # [blocks, parts, H, sides * D]
    score = torch.einsum("hgd,bphd->hgbp", query_parts(q, kind), kept).amax(3) * scale
    order = score.amax(1).argsort(-1, descending=True)[:, None].expand_as(score)
    tokens = usable.sum(-1).expand_as(score).gather(-1, order).float()
    return Walks(near, held.gather(-1, order), score.gather(-1, order), tokens, kind)


# ---------------------------------------------------------------------- estimates of the mass left, logarithms


def _left(w: Walks) -> Tensor:
    return (w.tokens.sum(-1, keepdim=True) - w.tokens.cumsum(-1)).clamp_min(0).log()


def _behind(x: Tensor) -> Tensor:
    """Sums over the blocks behind each."""
    after = x.flip(-1).logcumsumexp(-1).flip(-1)
    return torch.nn.functional.pad(after[..., 1:], (0, 1), value=-INF)


def _last(w: Walks, m: int) -> Tensor:
    """Every token left holds the mean of those in the last ``m`` blocks."""
    each = torch.nn.functional.pad(w.held - w.tokens.log(), (m - 1, 0), value=-INF).unfold(-1, m, 1)
    return each.logsumexp(-1) - torch.arange(1, w.held.shape[-1] + 1).clamp_max(m).log() + _left(w)


def _from_scores(w: Walks, slope: float, group: bool = False) -> Tensor:
    logits = w.logits.amax(1, keepdim=True) if group else w.logits
    expected = slope * logits + w.tokens.log()
    count = torch.arange(1, expected.shape[-1] + 1)
    return (w.held - expected).logcumsumexp(-1) - count.log() + _behind(expected)


def _regression(w: Walks) -> Tensor:
    """Least squares of log mass on score over the blocks read, anew after each; residuals taken to be log-normal."""
    x, y, n = w.logits.double(), (w.held - w.tokens.log()).double(), w.held.shape[-1]
    count = torch.arange(1, n + 1)
    mx, my = x.cumsum(-1) / count, y.cumsum(-1) / count
    xx, xy, yy = (a.cumsum(-1) / count - b for a, b in ((x * x, mx * mx), (x * y, mx * my), (y * y, my * my)))
    slope = torch.where(count < 4, 1.0, (xy / xx.clamp_min(1e-6)).clamp(0, 1.5))
    spread = (yy - 2 * slope * xy + slope * slope * xx).clamp_min(0) / 2
    line = (my - slope * mx + spread)[..., :, None] + slope[..., :, None] * x[..., None, :]
    line = line + w.tokens.log()[..., None, :]
    return line.masked_fill(~torch.ones(n, n).triu(1).bool(), -INF).logsumexp(-1).float()


def _near_apart(w: Walks) -> Tensor:
    """PSA's, of the stored mass alone: scaled so that seen / (seen + left) is that share."""
    stored = w.held.logcumsumexp(-1)
    return _as_min(w) - stored + w.seen


def _as_min(w: Walks) -> Tensor:
    return (w.held - w.tokens.log()).cummin(-1).values + _left(w)


ESTIMATES: dict[str, Callable[[Walks], Tensor]] = {
    "as_min": _as_min,
    "as_min, near tokens not counted": _near_apart,
    "as_min, times 3": lambda w: _as_min(w) + math.log(3),
    "last block": lambda w: _last(w, 1),
    "mean of the last 8": lambda w: _last(w, 8),
    "regression on scores": _regression,
    "scores, slope 1": lambda w: _from_scores(w, 1.0),
    "scores of the group": lambda w: _from_scores(w, SLOPES[w.kind], group=True),
    "scores": lambda w: _from_scores(w, SLOPES[w.kind]),
}
PERFECT = "perfect"  # stops where the true share passes the threshold


# ---------------------------------------------------------------------- where walks stop


def _stop(shares: list[Tensor], threshold: float) -> list[Tensor]:
    """Blocks that each walk uses, ``[H]`` a record."""
    out = []
    for share in shares:
        n = share.shape[-1]
        enough = (share > threshold) & (torch.arange(n) + 1 >= CONFIG.min_blocks)
        out.append(torch.where(enough.any(-1), enough.int().argmax(-1), n - 1) + 1)
    return out


def _reached(stops: list[Tensor], true: list[Tensor]) -> Tensor:
    return torch.cat([t.gather(-1, s[:, None] - 1)[:, 0] for s, t in zip(stops, true)])


def _at_equal(shares: list[Tensor], blocks: float) -> list[Tensor]:
    """Stops with the threshold at which walks use so many blocks on average."""
    low, high = -20.0, 15.0  # logit of the threshold
    for _ in range(24):
        middle = (low + high) / 2
        stops = _stop(shares, torch.tensor(middle, dtype=torch.float64).sigmoid().item())
        low, high = (middle, high) if torch.cat(stops).float().mean() < blocks else (low, middle)
    return stops


def compare(case: str, context: int, records: list[Walks], title: str) -> tuple[list[Row], dict[str, list[Tensor]]]:
    """Print the table of one model; its rows, and the share that each estimate gives after each block."""
    true = [w.true for w in records]
    shares = {name: [torch.sigmoid(w.seen - f(w)).amin(1) for w in records] for name, f in ESTIMATES.items()}
    shares[PERFECT] = true
    n = true[0].shape[-1]
    columns = [f"{c}, {t}" for t in THRESHOLDS for c in ("blocks", "true (10 %)")]
    table = Table(f"{title}, {n} blocks", *columns, f"at {EQUAL} blocks")
    rows = []
    for name, share in shares.items():
        cells = []
        for threshold in THRESHOLDS:
            stops = _stop(share, threshold)
            used, found = torch.cat(stops).float().mean(), _reached(stops, true)
            tenth = float(found.quantile(0.1))
            cells += [f"{used:.1f}", f"{found.mean():.3f} ({tenth:.3f})"]
            common = ("accuracy", case, f"estimate:{name}:{threshold}:{title}", 1, context)
            rows.append(Row(*common, "covered_mass", float(found.mean()), tenth, None, "share"))
            rows.append(Row(*common, "blocks", float(used), unit="count"))
        found = _reached(_at_equal(share, EQUAL), true)
        tenth = float(found.quantile(0.1))
        variant = f"estimate:{name}:blocks={EQUAL}:{title}"
        rows.append(
            Row("accuracy", case, variant, 1, context, "covered_mass", float(found.mean()), tenth, None, "share")
        )
        table.add_row(name, *cells, f"{found.mean():.3f} ({tenth:.3f})")
    Console(width=200).print(table)
    return rows, shares


# ---------------------------------------------------------------------- recorded attention


def _of_prompt(model, prefix, at: Iterator[int], kind: str, share: int) -> Iterator[Walks]:
    at = list(at)
    for layer in range(CONFIG.dense_layers, len(prefix.queries)):
        keys, scale = prefix.cache.layers[layer].keys[0].float(), model.model.layers[layer].self_attn.scaling
        for i in at:
            yield walks(prefix.queries[layer][0, :, i].float(), keys[:, : i + 1], scale, kind, share)


def of_small(args, kind: str, share: int) -> Iterator[Walks]:
    """Every eighth of the last tokens of passages of Python's language reference."""
    model, tokenizer = load()
    words = reference_ids(tokenizer)
    n = args.context
    for i in range(args.passages):
        start = round(i * (words.shape[1] - n) / max(1, args.passages - 1))
        prefix = prefill(model, words[:, start : start + n])
        yield from _of_prompt(model, prefix, range(n - 1, n - 1 - 8 * args.steps, -8), kind, share)


def of_probe(args, kind: str, share: int) -> Iterator[Walks]:
    """The last tokens of the question and the answer, two prompts of each of RULER's families."""
    path = ROOT / "assets" / "probe-gqa"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    for family in ruler_probe.FAMILIES:
        for i in range(2):
            sample = ruler_probe.make_sample(tokenizer, family, args.context, i, seed=7)
            prefix = prefill(model, torch.tensor([sample.ids]))
            answer = greedy(model, prefix, prefix.full(), sample.max_new_tokens, set(sample.stop))
            ids = torch.tensor([[*sample.ids, *answer]])
            yield from _of_prompt(model, prefill(model, ids), range(len(sample.ids) - 3, ids.shape[1]), kind, share)


SOURCES = {"small": (SMALL_MODEL_NAME, of_small), "probe-gqa": ("probe-gqa", of_probe)}


def plot(found: dict[str, tuple[list[Tensor], dict[str, list[Tensor]]]], path: Path) -> None:
    """The mass that walks miss when they estimate to miss so much: median and the middle 80 %, a panel a model."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    edges = 1 - torch.logspace(math.log10(0.3), math.log10(0.003), 22)
    figure, panels = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.8), squeeze=False, sharey=True)
    for axes, (case, (true, shares)) in zip(panels.flat, found.items()):
        truth = torch.cat([t.flatten() for t in true])
        for colour, name in (("C3", "as_min"), ("C0", "scores")):
            at = torch.bucketize(torch.cat([s.flatten() for s in shares[name]]), edges)
            points, lines = [], []
            for i in range(1, len(edges)):
                if int((at == i).sum()) > 50:
                    points.append(float(1 - (edges[i - 1] + edges[i]) / 2))
                    lines.append((1 - truth[at == i].quantile(torch.tensor([0.1, 0.5, 0.9]))).clamp_min(1e-4).tolist())
            low, middle, high = zip(*lines)
            axes.fill_between(points, low, high, alpha=0.2, color=colour, linewidth=0)
            axes.plot(points, middle, color=colour, label=f'estimate="{name}"')
        axes.plot(points, points, color="black", linewidth=0.8, linestyle="--", label="estimate = truth")
        axes.set(xscale="log", yscale="log", ylim=(1.0, 1e-3), xlabel="mass estimated to be missing")
        axes.invert_xaxis()
        axes.set_title(case, fontsize=9)
    panels[0, 0].set_ylabel("mass that is missing: median, 10 - 90 %")
    panels[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SOURCES), help=", ".join(SOURCES))
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--passages", type=int, default=3, help="of the small model")
    parser.add_argument("--steps", type=int, default=8, help="queries of a passage")
    parser.add_argument("--metadata", nargs="+", default=["cuboid_mean:64"], help="kind:tokens that share one piece")
    parser.add_argument(
        "--plot", type=Path, help="default: docs/progressive.svg, if both models and nothing else are run"
    )
    args = parser.parse_args()
    found = {}
    for one in args.metadata:
        kind, share = one.split(":")
        for name in args.models:
            case, source = SOURCES[name]
            records = list(source(args, kind, int(share)))
            rows, shares = compare(case, args.context, records, one)
            append_rows(CSV, rows)
            found[case] = ([w.true for w in records], shares)
    usual = args.models == list(SOURCES) and args.metadata == ["cuboid_mean:64"]
    if args.plot or usual:
        plot(found, args.plot or ROOT / "docs" / "progressive.svg")


if __name__ == "__main__":
    main()
