"""Predicted queries on the small real model and on the probe model: do they choose the tokens that the true ones do?

    python -m benchmarks.studies.predictor_study           # half an hour on one core

Prints tables, appends rows to benchmarks/results/predictors.csv and draws docs/predictors.svg. The model's own output
is kept under ``--out``.

A *choice* is one step, layer and KV head: the best ``--share`` of the tokens between sinks and recent window, scored
for the query that was predicted one step before, and compared with those scored for the query that came, both by whole
keys and the maximum over the query heads of a group. Streams:

* ``text``: the language reference of Python, 4k tokens before each step;
* ``own``: the first three quarters of that, the rest sampled by the model itself;
* ``needle``: the digits of a number that was planted in the reference (five depths) and asked for;
* ``filler`` and ``answers``: the probe model's, the latter the tokens of its answers to questions about 4k tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_sparsekv import TwoLevelConfig
from hf_sparsekv.cache_name import over
from hf_sparsekv.config import MAX_WINDOW
from hf_sparsekv.ops.query_predict.reference import query_predict
from hf_sparsekv.ops.seal.reference import quantise_labels
from hf_sparsekv.ops.token_score.reference import unpack_labels
from hf_sparsekv.predictor.channels import ChannelStats
from hf_sparsekv.results import Row, append_rows
from hf_sparsekv.small_model import SMALL_MODEL_NAME
from hf_sparsekv_eval.prefix import attention, prefill
from hf_sparsekv_eval.ruler_probe import FAMILIES, make_sample
from hf_sparsekv_eval.text import needle_prompt

from .. import RESULTS, ROOT
from .small_model import DEPTHS, load, reference_ids

CSV = RESULTS / "predictors.csv"
PLOT = ROOT / "docs" / "predictors.svg"
PROBE = ROOT / "assets" / "probe-gqa"
CONFIG = TwoLevelConfig(dense_layers=2)  # sinks, window, dense layers, calibration
FORMS = {
    "ridge": (False, False),
    "ridge_softmax": (False, True),
    "assembled": (True, True),
    "assembled_ridge": (True, False),  # windows averaged, weights as they are
}
WINDOWS = (4, 8, 16, 32)
EPSILONS = (1e-3, 1e-2, 1e-1, 0.3, 1.0)
WINDOW, EPSILON = 16, 1e-1  # what the other one is varied at
TEMPERATURE = 1.0  # at 0.8 it soon repeats itself, and a long window finds the last time
METRICS = ["overlap", "middle_mass", "covered_mass", "overlap_all"]


@dataclass(frozen=True)
class Variant:
    """A predictor with its settings; ``turned``: of queries before the rotary embedding, which the prediction gets."""

    name: str
    window: int = WINDOW
    epsilon: float = EPSILON
    turned: bool = False

    def __str__(self) -> str:
        turned = ",turned" if self.turned else ""
        if self.name not in FORMS:
            return self.name + (":" + turned[1:] if turned else "")
        return f"{self.name}:window={self.window},epsilon={self.epsilon:g}{turned}"

    def predict(self, ring: Tensor) -> Tensor:
        """``ring [T, Hq, slots, D]`` in order of time; the query after each, ``[T, Hq, D]``."""
        if self.name == "last":
            return ring[:, :, -1]
        position = torch.zeros(1, dtype=torch.int32)
        count = torch.full((ring.shape[0],), ring.shape[2], dtype=torch.int32)
        return query_predict(ring, position, count, self.window, self.epsilon, *FORMS[self.name])


def variants() -> list[Variant]:
    """All that is compared: windows at one epsilon, epsilons at one window, and some before the rotary embedding."""
    found = [Variant("true"), Variant("last"), Variant("last", turned=True)]
    found += [Variant(name, window) for name in FORMS for window in WINDOWS]
    others = [e for e in EPSILONS if e != EPSILON]
    found += [Variant(name, epsilon=e) for name in ("ridge", "assembled", "assembled_ridge") for e in others]
    found += [Variant(name, turned=True) for name in FORMS]
    return found


def with_labels(variant: Variant) -> bool:
    """Whether a variant is tried with label channels, too."""
    return variant.epsilon == EPSILON and (variant.name not in FORMS or variant.window == WINDOW)


# ---------------------------------------------------------------------- recording


@torch.no_grad()
def continued(model, ids: Tensor, steps: int, seed: int) -> Tensor:
    """``ids [batch, n]`` and ``steps`` tokens that the model samples."""
    generator = torch.Generator().manual_seed(seed)
    cache, part = DynamicCache(), ids
    with attention(model, "sdpa"):
        for _ in track(range(steps), "own output"):
            logits = model(part, **over(model, cache), logits_to_keep=1).logits[:, -1].float()
            part = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, part), dim=1)
    return ids


def documents(args, model, tokenizer) -> Iterator[tuple[str, Tensor, list[int]]]:
    """Streams of the small model: name, ids ``[1, n]``, and the positions of the queries that are predicted."""
    words = reference_ids(tokenizer)
    need = args.context + args.steps * args.stride
    starts = [round((i + 0.5) * (words.shape[1] - need) / args.passages) for i in range(args.passages)]
    steps = [args.context + i * args.stride for i in range(args.steps)]
    for start in starts:
        yield "text", words[:, start : start + need], steps
    prompts = torch.cat([words[:, start : start + args.context * 3 // 4] for start in starts])
    path = args.out / f"own-{args.context}-{args.passages}.pt"
    if not path.exists():
        torch.save(continued(model, prompts, need - prompts.shape[1], seed=0), path)
    for row in torch.load(path):
        yield "own", row[None, :need], steps


def needles(args, model, tokenizer) -> Iterator[tuple[str, Tensor, list[int]]]:
    """Facts that the small model looks up."""
    for depth in DEPTHS:
        prompt = needle_prompt(tokenizer, args.context, depth)
        answer = tokenizer(f" {prompt.answer}", add_special_tokens=False, return_tensors="pt")["input_ids"]
        n = prompt.ids.shape[1]
        yield "needle", torch.cat((prompt.ids, answer), dim=1), list(range(n - 1, n - 1 + answer.shape[1]))


def questions(args, model, tokenizer) -> Iterator[tuple[str, Tensor, list[int]]]:
    """Streams of the probe model."""
    for family in FAMILIES:
        sample = make_sample(tokenizer, family, args.context, 0)
        answer = tokenizer(sample.references[0], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*sample.ids, *answer]])
        n = len(sample.ids)
        yield "answers", ids, list(range(n - 1, n - 1 + len(answer)))  # these queries' steps give the answer's tokens
        yield "filler", ids, list(range(n - 512, n - 256, 256 // args.steps))


# ---------------------------------------------------------------------- study


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [..., n, D]`` by ``[n, D]``; by ``-sin`` it is taken back."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def share(chosen: Tensor, best: Tensor) -> float:
    """The share of the best tokens that were chosen."""
    return float((chosen & best).sum() / best.sum())


class Layer:
    """One layer's queries and keys of one document, and the steps at which its queries are predicted."""

    def __init__(self, args, q: Tensor, k: Tensor, steps: list[int], scale: float, cos: Tensor, sin: Tensor) -> None:
        """``q [Hq, n, D]``, ``k [H, n, D]``, rotary ``cos`` and ``sin [n, D]``."""
        at = torch.tensor(steps)
        before = at[:, None] - MAX_WINDOW - 1 + torch.arange(MAX_WINDOW + 1)
        self.rings = {False: q[:, before].transpose(0, 1), True: turn(q, cos, -sin)[:, before].transpose(0, 1)}
        self.turn = cos[at][:, None], sin[at][:, None]
        self.true = q[:, at].transpose(0, 1)  # [T, Hq, D]
        self.keys, self.heads = k, k.shape[0]
        token, last = torch.arange(k.shape[1]), at[:, None]
        # When the choice is made the newest key is that of the step before: it is attended to in any case.
        self.middle = (token >= CONFIG.sinks) & (token < last + 1 - CONFIG.window)  # [T, n]
        self.past = token < last
        self.near = (token <= last) & ~self.middle
        logits = self._grouped(self.true, k) * scale
        weights = logits.masked_fill((token > last)[:, None, None], float("-inf")).softmax(-1)
        self.weights = weights.mean(2)  # [T, H, n]
        self.budget = round(args.share * args.context)
        stats = ChannelStats("max")
        stats.update(q[None, :, : args.context // 2], k[None, :, : args.context // 2], None)
        channels = stats.ranking()[0, :, : k.shape[-1] // 4].long()  # [H, r]
        self.channels = channels[:, None]
        self.labels = unpack_labels(*quantise_labels(k.gather(-1, self.channels.expand(-1, k.shape[1], -1))))
        self.best = {region: self._choose(self.true, False, region) for region in ("middle", "past")}

    def _grouped(self, q: Tensor, keys: Tensor) -> Tensor:
        """Scores ``[T, H, G, n]`` of queries ``[T, Hq, D]``."""
        q = q.unflatten(1, (self.heads, -1))
        return torch.einsum("thgd,hnd->thgn", q, keys)

    def _choose(self, q: Tensor, labels: bool, region: str) -> Tensor:
        """Bool ``[T, H, n]``: the best tokens of a region, as the caches score them."""
        keys = self.keys
        if labels:
            keys = self.labels
            at = self.channels.expand(-1, q.shape[1] // self.heads, -1).flatten(0, 1)  # [Hq, r]
            q = q.gather(-1, at.expand(q.shape[0], -1, -1))
        score = self._grouped(q, keys).amax(2)
        score = score.masked_fill(~getattr(self, region)[:, None], float("-inf"))
        top = score.topk(self.budget, dim=-1).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, top, True)

    def measure(self, variant: Variant, labels: bool) -> dict[str, float]:
        """Shares: overlap with the true choice in the middle region and over all past tokens; mass covered."""
        q = self.true
        if variant.name != "true":
            q = variant.predict(self.rings[variant.turned])
            q = turn(q, *self.turn) if variant.turned else q
        chosen, mass = self._choose(q, labels, "middle"), self.weights
        held = (mass * chosen).sum(-1)
        found = {
            "overlap": share(chosen, self.best["middle"]),
            "covered_mass": float((held + (mass * self.near[:, None]).sum(-1)).mean()),
            "middle_mass": float(held.mean() / (mass * self.middle[:, None]).sum(-1).mean()),
        }
        if with_labels(variant):
            found["overlap_all"] = share(self._choose(q, labels, "past"), self.best["past"])
        return found


@torch.no_grad()
def study(args, model, tokenizer, source) -> Iterator[dict]:
    """Figures of all variants, in each layer of the documents of ``source``."""
    for stream, ids, steps in source(args, model, tokenizer):
        prefix = prefill(model, ids)
        position = torch.arange(ids.shape[1])[None]
        cos, sin = (x[0].float() for x in model.model.rotary_emb(prefix.queries[0], position))
        for index in track(range(len(prefix.queries)), stream):
            q, k = prefix.queries[index][0].float(), prefix.cache.layers[index].keys[0].float()
            layer = Layer(args, q, k, steps, model.model.layers[index].self_attn.scaling, cos, sin)
            for variant in variants():
                for labels in (False, True) if with_labels(variant) else (False,):
                    name = f"{variant}{',labels' * labels}"
                    figures = layer.measure(variant, labels)
                    yield {"stream": stream, "variant": name, "layer": index, "apart": with_labels(variant), **figures}
            prefix.queries[index] = None


# ---------------------------------------------------------------------- what is reported


def rows(layers: pd.DataFrame, context: int) -> Iterator[Row]:
    """Means over the layers that select (low and high: lowest and highest of them); some variants layer by layer."""
    for (stream, variant), by_layer in layers.groupby(["stream", "variant"], sort=False):
        common = ("predictors", SMALL_MODEL_NAME if stream in ("text", "own", "needle") else PROBE.name)
        for name in METRICS:
            values = by_layer[name].tolist()
            used = values[CONFIG.dense_layers :]
            if math.isnan(used[0]):
                continue
            mean = sum(used) / len(used)
            yield Row(*common, f"{variant}:{stream}", 1, context, name, mean, min(used), max(used), "share")
            if by_layer.apart.all() and "labels" not in variant and name in ("overlap", "middle_mass"):
                for index, value in enumerate(values):
                    yield Row(*common, f"{variant}:{stream},layer={index:02}", 1, context, name, value, unit="share")


def tables(layers: pd.DataFrame) -> None:
    """Overlap and mass of every variant; ``overlap_all``: over all tokens of all layers."""
    for stream, mine in layers.groupby("stream", sort=False):
        means = mine[mine.layer >= CONFIG.dense_layers].groupby("variant", sort=False)[METRICS].mean()
        means["overlap_all"] = mine.groupby("variant", sort=False).overlap_all.mean()
        print(f"\n{stream}\n{means.to_string(float_format='{:.3f}'.format, na_rep='')}")


def plot(layers: pd.DataFrame, path: Path) -> None:
    """Overlap by layer."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, (stream, title) in zip(panels, (("text", "text"), ("own", "own output"))):
        for name in ("last", "ridge", "assembled", "assembled_ridge"):
            mine = layers[(layers.stream == stream) & (layers.variant == str(Variant(name)))]
            axes.plot(mine.layer, mine.overlap, label=name, linewidth=1.2)
        axes.set(xlabel="layer", title=title)
    panels[0].set_ylabel("share of the best 5 % that is chosen")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=48, help="of a document")
    parser.add_argument("--stride", type=int, default=4, help="tokens between them")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.05, help="of the context that is chosen")
    parser.add_argument("--sources", nargs="+", choices=("documents", "needles", "questions"), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("eval-results/predictors"), help="the model's own output")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--plot", type=Path, default=PLOT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    probe = (
        AutoModelForCausalLM.from_pretrained(PROBE, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(PROBE),
    )
    small, found = load(), []
    models = {questions: probe, needles: small, documents: small}
    for source, model in models.items():
        if args.sources is None or source.__name__ in args.sources:
            found += study(args, *model, source)
    layers = pd.DataFrame(found).groupby(["stream", "variant", "layer"], sort=False).mean().reset_index()
    tables(layers)
    append_rows(args.csv, list(rows(layers, args.context)))
    if {"text", "own"} <= set(layers.stream):
        plot(layers, args.plot)


if __name__ == "__main__":
    main()
