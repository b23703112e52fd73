"""What progressive selections cover, for several ways to tell what tokens hold: mean, worst 2 % and retrieval heads.

    python -m benchmarks.studies.progressive_estimates      # small model and GQA probe
    python -m benchmarks.studies.progressive_estimates small --thresholds 0.95 --seed 1

Recorded queries over recorded keys. Prints tables and appends rows to benchmarks/results/accuracy.csv. A walk is one
query, layer and KV head; the first two layers are dense. What a walk covers is the true share of the attention mass
that the tokens it takes hold with sinks and recent ones, the least of its query heads. A retrieval head is a walk in
which sixteen tokens in a row, neither sinks nor recent, hold more than half of the mass of a query head.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import ProgressiveConfig
from hf_sparsekv.ops.block_score.reference import query_parts
from hf_sparsekv.ops.mass_select.reference import near_masses, share_bins, take
from hf_sparsekv.ops.seal import key_metadata, quantise_labels
from hf_sparsekv.ops.token_score.reference import unpack_labels
from hf_sparsekv.policies.block_walk import METADATA, SLOPE, stop
from hf_sparsekv.policies.label_index import default_channels
from hf_sparsekv.predictor.channels import ChannelStats
from hf_sparsekv.results import Row, append_rows
from hf_sparsekv.small_model import SMALL_MODEL_NAME
from hf_sparsekv_eval import ruler_probe
from hf_sparsekv_eval.prefix import prefill

from .. import ROOT
from .small_model import CSV, greedy, load, reference_ids

CONFIG = ProgressiveConfig(dense_layers=2)
THRESHOLDS = (0.90, 0.95, 0.98)
UNIT = 16  # tokens in a row, of which one way takes all or none, and which a retrieval head rests on
WORST = 0.02


@dataclass
class Walks:
    """One query in one layer.

    Args:
        q: ``[H, G, D]``; keys ``[H, n, D]``; scale: of the softmax.
        channels: ``[H, r]``, label channels.
    """

    q: Tensor
    keys: Tensor
    scale: float
    channels: Tensor

    def __post_init__(self) -> None:
        n = self.keys.shape[1]
        size, recent = CONFIG.block_size, CONFIG.window + CONFIG.max_draft
        self.full_blocks = (n - recent) // size
        self.end = self.full_blocks * size
        self.near_keys = torch.cat((self.keys[:, : CONFIG.sinks], self.keys[:, self.end :]), 1)
        logits = torch.einsum("hgd,hnd->hgn", self.q, self.keys) * self.scale
        self.near = torch.cat((logits[..., : CONFIG.sinks], logits[..., self.end :]), -1).logsumexp(-1)
        self.logits = logits[..., : self.end].clone()  # of what can be selected
        self.logits[..., : CONFIG.sinks] = -math.inf
        self.whole = torch.logaddexp(self.near, self.logits.logsumexp(-1))
        row = self.logits.unflatten(-1, (-1, UNIT)).logsumexp(-1) - self.whole[..., None]
        self.retrieves = row.amax((1, 2)) > math.log(0.5)  # [H]
        at = self.channels.long()
        kept = self.keys[:, : self.end].gather(-1, at[:, None].expand(-1, self.end, -1))
        own = self.q.gather(-1, at[:, None].expand(-1, self.q.shape[1], -1))
        labels = unpack_labels(*quantise_labels(kept))
        self.products = torch.einsum("hgr,hnr->hgn", own, labels)
        self.products[..., : CONFIG.sinks] = -math.inf

    def covered(self, taken: Tensor) -> Tensor:
        """True share of the mass that the tokens ``taken [H, n]`` hold with the near ones, ``[H]``."""
        held = self.logits.masked_fill(~taken[:, None], -math.inf).logsumexp(-1)
        return (torch.logaddexp(self.near, held) - self.whole).exp().amin(-1)

    # ------------------------------------------------------------------ ways: which tokens are taken

    def labels(self, threshold: float, corrected: bool = True) -> Tensor:
        rows = torch.tensor([[self.keys.shape[1], self.end]], dtype=torch.int32)  # a ring with room for these alone
        near, mean = near_masses(
            self.q.flatten(0, 1)[None],
            self.channels[None],
            self.near_keys[None],
            rows,
            sinks=CONFIG.sinks,
            scale=self.scale,
        )
        mean = mean if corrected else torch.zeros_like(mean)
        bins = share_bins(self.products.flatten(0, 1)[None], near, mean, scale=self.scale)
        return take(bins, threshold=threshold, min_tokens=CONFIG.min_tokens, max_tokens=None)[0][0]

    def plain_labels(self, threshold: float) -> Tensor:
        return self.labels(threshold, corrected=False)

    def units(self, threshold: float) -> Tensor:
        """By labels, sixteen tokens at a time."""
        held = (self.products * self.scale).unflatten(-1, (-1, UNIT)).logsumexp(-1)
        whole = torch.logaddexp(self.near, held.logsumexp(-1))
        share = (held - whole[..., None]).exp().amax(1)
        order = share.sort(-1, descending=True)
        left = order.values.flip(-1).cumsum(-1).flip(-1)  # with the unit itself
        count = (left > 1 - threshold).sum(-1).clamp_min(CONFIG.min_tokens // UNIT)
        taken = torch.zeros_like(share, dtype=torch.bool)
        taken.scatter_(-1, order.indices, torch.arange(share.shape[-1]) < count[:, None])
        return taken.repeat_interleave(UNIT, -1)

    def boxes(self, threshold: float, estimate: str) -> Tensor:
        """PSA's walks over blocks."""
        size, kind = CONFIG.block_size, METADATA[estimate]
        usable = torch.ones(self.full_blocks, size, dtype=torch.bool)
        usable[0, : CONFIG.sinks] = False
        blocks = self.keys[:, : self.end].unflatten(1, (self.full_blocks, size)).transpose(0, 1)
        kept = key_metadata(blocks, usable, 1, kind).flatten(3)[:, 0]  # [blocks, H, sides * D]
        score = torch.einsum("hgd,bhd->hgb", query_parts(self.q, kind), kept)
        order = score.amax(1).argsort(-1, descending=True)[:, None].expand_as(score)
        tokens = usable.sum(-1)[None].expand(len(order), -1).gather(-1, order[:, 0])
        held = self.logits.unflatten(-1, (-1, size)).logsumexp(-1).gather(-1, order).transpose(1, 2)
        slope = SLOPE if estimate == "scores" else 1.0
        predicted = slope * self.scale * score.gather(-1, order).transpose(1, 2) + tokens.log()[..., None]
        config = ProgressiveConfig(threshold=threshold, estimate=estimate, min_tokens=8 * size)
        given = held, self.near[:, None], predicted, tokens
        used = stop(*(x[None].double() for x in given[:3]), tokens[None], config, size)[0]
        taken = torch.zeros(len(order), self.full_blocks, dtype=torch.bool)
        taken.scatter_(-1, order[:, 0], torch.arange(self.full_blocks) < used[:, None])
        return taken.repeat_interleave(size, -1)


WAYS = {
    "labels": Walks.labels,
    "labels, masses as they say": Walks.plain_labels,
    "labels, 16 tokens at once": Walks.units,
    "boxes, scores": lambda w, threshold: w.boxes(threshold, "scores"),
    "boxes, as_min (PSA)": lambda w, threshold: w.boxes(threshold, "as_min"),
}


def compare(case: str, context: int, records: Iterator[Walks], thresholds: list[float], seed: int) -> list[Row]:
    """Print the table of one model; its rows."""
    found = {(way, threshold): ([], []) for way in WAYS for threshold in thresholds}
    retrieves = []
    for record in records:
        retrieves.append(record.retrieves)
        for (way, threshold), (covered, read) in found.items():
            taken = WAYS[way](record, threshold)
            covered.append(record.covered(taken))
            read.append(taken[:, CONFIG.sinks :].float().mean(-1))
    retrieval = torch.cat(retrieves)
    title = f"{case}, {len(retrieval)} walks, {int(retrieval.sum())} of retrieval heads"
    table = Table(title, "threshold", "read", "covered", f"worst {WORST:.0%}", "retrieval heads")
    rows = []
    for (way, threshold), (covered, read) in found.items():
        share, mass = float(torch.cat(read).mean()), torch.cat(covered)
        worst = float(mass.sort().values[: max(1, round(WORST * len(mass)))].mean())
        found_there = float(mass[retrieval].mean()) if retrieval.any() else math.nan
        cells = (f"{x:.3f}" for x in (share, float(mass.mean()), worst, found_there))
        table.add_row(way, f"{threshold}", *cells)
        common = ("accuracy", case, f"covered:{way}:{threshold}:seed={seed}", 1, context)
        rows.append(Row(*common, "covered_mass", float(mass.mean()), worst, None, "share"))
        rows.append(Row(*common, "read", share, unit="share"))
        if retrieval.any():
            rows.append(Row(*common, "covered_mass:retrieval", found_there, unit="share"))
    Console(width=160).print(table)
    return rows


# ---------------------------------------------------------------------- recorded attention


def _of_prompt(model, prefix, at: list[int]) -> Iterator[Walks]:
    for layer in range(CONFIG.dense_layers, len(prefix.queries)):
        keys, queries = prefix.cache.layers[layer].keys.float(), prefix.queries[layer].float()
        stats = ChannelStats(CONFIG.channel_importance)
        stats.update(queries, keys, None)
        channels = stats.ranking()[0, :, : default_channels(keys.shape[-1], CONFIG.label_share)]
        scale = model.model.layers[layer].self_attn.scaling
        for i in at:
            q = queries[0, :, i].unflatten(0, (keys.shape[1], -1))
            yield Walks(q, keys[0, :, : i + 1], scale, channels)


def of_small(args) -> Iterator[Walks]:
    """Every eighth of the last tokens of passages of Python's language reference; other passages for another seed."""
    model, tokenizer = load()
    words = reference_ids(tokenizer)
    n = args.context
    for i in range(args.passages):
        start = round((i + args.seed / 2) * (words.shape[1] - n) / args.passages)
        prefix = prefill(model, words[:, start : start + n])
        yield from _of_prompt(model, prefix, list(range(n - 1, n - 1 - 8 * args.steps, -8)))


def of_probe(args) -> Iterator[Walks]:
    """The last tokens of the question and the answer, a prompt of each of RULER's families."""
    path = ROOT / "assets" / "probe-gqa"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    for family in ruler_probe.FAMILIES:
        sample = ruler_probe.make_sample(tokenizer, family, args.context, 0, seed=args.seed)
        prefix = prefill(model, torch.tensor([sample.ids]))
        answer = greedy(model, prefix, prefix.full(), sample.max_new_tokens, set(sample.stop))
        ids = torch.tensor([[*sample.ids, *answer]])
        yield from _of_prompt(model, prefill(model, ids), list(range(len(sample.ids) - 3, ids.shape[1])))


SOURCES = {"small": (SMALL_MODEL_NAME, of_small), "probe-gqa": ("probe-gqa", of_probe)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SOURCES), help=", ".join(SOURCES))
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--passages", type=int, default=2, help="of the small model")
    parser.add_argument("--steps", type=int, default=8, help="queries of a passage")
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    parser.add_argument("--seed", type=int, default=0, help="other passages and prompts: tune on one, report another")
    args = parser.parse_args()
    for name in args.models:
        case, source = SOURCES[name]
        append_rows(CSV, compare(case, args.context, source(args), list(args.thresholds), args.seed))


if __name__ == "__main__":
    main()
