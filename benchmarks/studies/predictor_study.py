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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_sparsekv import TwoLevelConfig
from hf_sparsekv.evaluation.prefix import attention, prefill
from hf_sparsekv.evaluation.ruler_probe import FAMILIES, make_sample
from hf_sparsekv.evaluation.small_model import SMALL_MODEL_NAME
from hf_sparsekv.evaluation.text import needle_prompt, python_reference
from hf_sparsekv.ops.query_predict.reference import MAX_WINDOW, query_predict
from hf_sparsekv.ops.seal.reference import quantise_labels
from hf_sparsekv.ops.token_score.reference import unpack_labels
from hf_sparsekv.predictor.channels import ChannelStats
from hf_sparsekv.results import Row, append_rows

from .. import RESULTS, ROOT
from .small_model import load

CSV = RESULTS / "predictors.csv"
PLOT = ROOT / "docs" / "predictors.svg"
PROBE = ROOT / "assets" / "probe-gqa"
CONFIG = TwoLevelConfig()  # sinks, window, dense layers, calibration
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
STREAMS = ("text", "own", "needle", "filler", "answers")


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
            logits = model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
            part = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            ids = torch.cat((ids, part), dim=1)
    return ids


def documents(args, model, tokenizer) -> Iterator[tuple[str, Tensor, list[int]]]:
    """Streams of the small model: name, ids ``[1, n]``, and the positions of the queries that are predicted."""
    words = tokenizer(python_reference(), add_special_tokens=False, return_tensors="pt")["input_ids"]
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
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
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
def study(args, model, tokenizer, source, found: dict) -> None:
    """Measure all variants on the documents of ``source``; adds lists to ``found[stream, variant, labels, layer]``."""
    for name, ids, steps in source(args, model, tokenizer):
        prefix = prefill(model, ids)
        position = torch.arange(ids.shape[1])[None]
        cos, sin = (x[0].float() for x in model.model.rotary_emb(prefix.queries[0], position))
        for index in track(range(len(prefix.queries)), name):
            q, k = prefix.queries[index][0].float(), prefix.cache.layers[index].keys[0].float()
            layer = Layer(args, q, k, steps, model.model.layers[index].self_attn.scaling, cos, sin)
            for variant in variants():
                for labels in (False, True):
                    if not labels or with_labels(variant):
                        found.setdefault((name, variant, labels, index), []).append(layer.measure(variant, labels))
            prefix.queries[index] = None


# ---------------------------------------------------------------------- what is reported


def averaged(found: dict) -> dict[tuple[str, Variant, bool], list[dict[str, float]]]:
    """By stream, variant and labels, for each layer: the mean over documents."""
    layers: dict = {}
    for (stream, variant, labels, _), entries in found.items():
        mean = {name: sum(e[name] for e in entries) / len(entries) for name in entries[0]}
        layers.setdefault((stream, variant, labels), []).append(mean)
    return layers


def rows(layers: dict, context: int) -> Iterator[Row]:
    """Means over the layers that select (low and high: lowest and highest of them); some variants layer by layer."""
    for (stream, variant, labels), by_layer in layers.items():
        model = SMALL_MODEL_NAME if stream in ("text", "own", "needle") else PROBE.name
        what = f"{variant}{',labels' if labels else ''}"
        common = ("predictors", model)
        for name in by_layer[0]:
            values = [entry[name] for entry in by_layer]
            used = values[CONFIG.dense_layers :]
            mean = sum(used) / len(used)
            yield Row(*common, f"{what}:{stream}", 1, context, name, mean, min(used), max(used), "share")
            if with_labels(variant) and not labels and name in ("overlap", "middle_mass"):
                for index, value in enumerate(values):
                    yield Row(*common, f"{what}:{stream},layer={index:02}", 1, context, name, value, unit="share")


def tables(layers: dict) -> None:
    """Prints overlap and mass of every variant, by whole keys and by labels, and over all tokens of all layers."""
    columns = {"overlap": "overlap", "mass of middle": "middle_mass", "covered mass": "covered_mass"}
    columns["overlap, all tokens"] = "overlap_all"
    for stream in STREAMS:
        table = Table(stream, *columns, *(f"{name}, labels" for name in columns))
        for variant in variants():
            cells = []
            for labels in (False, True):
                by_layer = layers.get((stream, variant, labels), [{}])
                for name in columns.values():
                    used = by_layer if name == "overlap_all" else by_layer[CONFIG.dense_layers :]
                    known = used and name in used[0]
                    cells.append(f"{sum(entry[name] for entry in used) / len(used):.3f}" if known else "")
            table.add_row(str(variant), *cells)
        table.columns[0].no_wrap = True
        if any(key[0] == stream for key in layers):
            Console(width=160).print(table)


def plot(layers: dict, path: Path) -> None:
    """Overlap by layer."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    lines = [Variant(name) for name in ("last", "ridge", "assembled", "assembled_ridge")]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, stream in zip(panels, ("text", "own")):
        for color, variant in enumerate(lines):
            by_layer = layers[stream, variant, False]
            axes.plot([e["overlap"] for e in by_layer], color=f"C{color}", label=variant.name, linewidth=1.2)
        axes.set(xlabel="layer", title={"text": "text", "own": "own output"}[stream])
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
    found: dict = {}
    small = load()
    probe = (
        AutoModelForCausalLM.from_pretrained(PROBE, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(PROBE),
    )
    for source, model in ((questions, probe), (needles, small), (documents, small)):
        if args.sources is None or source.__name__ in args.sources:
            study(args, *model, source, found)
    layers = averaged(found)
    tables(layers)
    append_rows(args.csv, list(rows(layers, args.context)))
    if ("text", Variant("last"), False) in layers:
        plot(layers, args.plot)


if __name__ == "__main__":
    main()
