"""The query that the layer before expects, on the small real model: how close, and does it choose the same?

    python -m benchmarks.studies.foreseen_queries --profile      # about ten minutes on one core

Prompts and streams are those of :mod:`.attention_statistics`, attention is dense throughout. Beside each decode step's
query of a layer there are those that the layer before expects (``hf_sparsekv/attention/points.py``): from its input
(``in``), from that and what it added for the token before (``in_delta``), and from the stream between its attention and
its MLP (``mid``). Noted, by layer: the cosine of both queries, the size of the error and how long it keeps its
direction; the overlap of the tokens that both choose by labels, with that of consecutive steps beside it; how many of
the tokens that a step's own query chooses are on the device already if it has room for 1 to 16 selections, and how many
selections the tokens of 12 steps amount to. Prints a table and appends rows to
benchmarks/results/foreseen_queries.csv. With ``--profile`` it also writes what benchmarks/synthetic/foreseen.py
imitates.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections import deque
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_sparsekv.attention.handle import KVHandle
from hf_sparsekv.attention.interface import sparsekv_attention
from hf_sparsekv.attention.points import Point, Points
from hf_sparsekv.ops.device_tokens import EMPTY
from hf_sparsekv.ops.device_tokens.reference import CLASSES
from hf_sparsekv.results import Row, append_rows, commit
from hf_sparsekv.small_model import SMALL_MODEL_NAME

from .. import RESULTS
from ..synthetic import foreseen as fs
from ..synthetic.keys import PROFILES
from ..synthetic.statistics import WORKING_SET, chosen_blocks, stored_blocks
from .attention_statistics import CONFIG, STREAMS, record
from .small_model import load, reference_ids

CSV = RESULTS / "foreseen_queries.csv"
PROFILE = PROFILES / "smollm2-135m-foreseen.json"
PERCENTILES = (5, 95)
BY_LAYER = (":k=1/4", ":k=1/8", ":cosine", ":cosine_5", ":cosine_95", ":error", ":error_spread", ":error_16")
BY_LAYER += (":k=1/64:hit_8", ":k=1/64:working_set")
UNITS = {"error_spread": "nats", "working_set": "k"}
WARM_UP = 32  # steps before what is held counts: at first it is nothing


class Taps:
    """Hooks on a model that give the queries expected of the step under way.

    Attributes:
        points: by index of the layer whose query is expected.
        expected: of these layers ``[Hq, D]``, by place.
    """

    def __init__(self, model) -> None:
        self.points = Points(model).found
        self.expected: dict[int, dict[str, Tensor]] = {}
        self._given: dict = {}  # what the layer before is called with beside its input
        self._added: dict[int, Tensor] = {}  # by the layer before, for the last token
        self._handles = []
        for point in self.points.values():
            self._handles += [
                point.before.register_forward_pre_hook(partial(self._entered, point), with_kwargs=True),
                point.norm.register_forward_pre_hook(partial(self._half_way, point)),
                point.before.register_forward_hook(partial(self._left, point), with_kwargs=True),
            ]

    def _entered(self, point: Point, module, args: tuple, given: dict) -> None:
        stream = args[0]
        if stream.shape[1] != 1:
            return
        self._given = dict(given)
        added = self._added.get(point.index, torch.zeros_like(stream))
        self.expected[point.index] = {
            "in": point.query(stream, self._given)[0],
            "in_delta": point.query(stream + added, self._given)[0],
        }

    def _half_way(self, point: Point, module, args: tuple) -> None:
        if args[0].shape[1] == 1:
            self.expected[point.index]["mid"] = point.query(args[0], self._given)[0]

    def _left(self, point: Point, module, args: tuple, given: dict, out) -> None:
        out = out[0] if isinstance(out, tuple) else out
        self._added[point.index] = (out - args[0])[:, -1:].clone()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


class HeldTokens:
    """Which tokens are on the device, of one KV head: without their copies, what ``ops.device_tokens`` defines.

    Args:
        tokens: that there can be.
        room: slots.
    """

    _class = np.array([age.bit_length() for age in range(1 << (CLASSES - 1))] + [CLASSES], dtype=np.int8)

    def __init__(self, tokens: int, room: int) -> None:
        self.slots, self.columns = np.full(tokens, -1), np.full(room, -1)
        self.stamps, self.now = np.full(room, EMPTY), 0

    def choose(self, ids: np.ndarray) -> int:
        """Hold the tokens ``ids`` (all different), in the place of the oldest; how many were there before."""
        self.now += 1
        at = self.slots[ids]
        self.stamps[at[at >= 0]] = self.now
        missing = ids[at < 0]
        found = len(ids) - len(missing)
        age = self._class[np.minimum(self.now - self.stamps, len(self._class) - 1)]
        oldest = np.argsort(-age, kind="stable")[: min(len(missing), np.count_nonzero(age))]
        to, missing = np.sort(oldest), missing[: len(oldest)]
        gone = self.columns[to]
        self.slots[gone[gone >= 0]] = -1
        self.columns[to], self.stamps[to], self.slots[missing] = missing, self.now, to
        return found


class Reuse:
    """How much of what one layer's steps choose was chosen shortly before, of each KV head.

    Args:
        k: tokens of a selection.
        tokens: that there can be.
        heads: KV heads; each holds tokens of its own.
    """

    def __init__(self, k: int, tokens: int, heads: int) -> None:
        self.k, self.steps = k, 0
        self.held = {r: [HeldTokens(tokens, min(tokens, r * k)) for _ in range(heads)] for r in fs.ROOMS}
        self.past: deque[np.ndarray] = deque(maxlen=WORKING_SET)

    def step(self, chosen: Tensor) -> dict[str, Tensor]:
        """``chosen [H, tokens]`` (bool): ``hit_<room>`` and ``working_set``, each ``[H]``; none while it warms up."""
        mask = np.zeros((len(chosen), len(self.held[1][0].slots)), dtype=bool)
        mask[:, : chosen.shape[1]] = chosen.numpy()
        ids = [head.nonzero()[0] for head in mask]
        self.past.append(mask)
        self.steps += 1
        found = {f"hit_{room}": [one.choose(x) for one, x in zip(heads, ids)] for room, heads in self.held.items()}
        if self.steps <= WARM_UP:
            return {}
        found["working_set"] = np.any(self.past, axis=0).sum(-1)
        return {name: torch.as_tensor(values) / self.k for name, values in found.items()}


class PairRecorder:
    """An attention function that attends densely and notes how expected queries compare with true ones.

    Args:
        taps: on the model.
        channels: index of each layer, whose label channels the prompt's first part calibrates; shared by the recorders
            of a document.
        length, steps: tokens that are cached before the first step, and steps.
    """

    def __init__(self, taps: Taps, channels: dict[int, Tensor], length: int, steps: int) -> None:
        self.taps, self.channels = taps, channels
        first, last = (stored_blocks(CONFIG, n) * CONFIG.block_size for n in (length, length + steps - 1))
        self.chosen, self.most = chosen_blocks(first, fs.SHARES), last
        self.indexes: dict[int, fs.StoredIndex] = {}
        self.noted: dict[int, dict[str, list[Tensor]]] = {}  # by layer and name, each step's [H] or [Hq]
        self.errors: dict[int, dict[str, list[Tensor]]] = {}  # by layer and place, each step's [Hq, D]
        self.last: dict[int, Tensor] = {}  # scores of the step before
        self.reuse: dict[tuple, Reuse] = {}  # by layer and share

    def __call__(self, module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, **kwargs):
        if isinstance(key, KVHandle):  # a layer is asked what it expects
            return sparsekv_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        layer = module.layer_idx
        if query.shape[2] == key.shape[2]:
            self.channels[layer] = fs.calibrate(CONFIG, query[0], key[0])
        elif query.shape[2] == 1 and layer in self.taps.points:
            self._note(layer, query[0, :, 0], key[0])
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    def _note(self, layer: int, true: Tensor, keys: Tensor) -> None:
        if layer not in self.indexes:
            self.indexes[layer] = fs.StoredIndex(CONFIG, self.channels[layer])
            self.noted[layer], self.errors[layer] = {}, {place: [] for place in fs.PLACES}
        index, noted = self.indexes[layer], self.noted[layer]
        index.store(keys, stored_blocks(CONFIG, keys.shape[1] - 1))
        expected = self.taps.expected[layer]
        scores = index.scores(torch.stack([true, *(expected[place] for place in fs.PLACES)]))

        def note(name: str, value: Tensor) -> None:
            noted.setdefault(name, []).append(value)

        true_scores, last = scores[0], self.last.get(layer)
        if last is not None:
            last = torch.nn.functional.pad(last, (0, true_scores.shape[-1] - last.shape[-1]), value=-torch.inf)
        for share, k in self.chosen.items():
            for at, place in enumerate(fs.PLACES, start=1):
                note(f"{place}:tokens:k={share}", fs.overlap(true_scores, scores[at], k))
            if last is not None:
                note(f"step:tokens:k={share}", fs.overlap(true_scores, last, k))
            if (layer, share) not in self.reuse:
                self.reuse[layer, share] = Reuse(k, self.most, len(true_scores))
            for what, value in self.reuse[layer, share].step(fs.best(true_scores, k)).items():
                note(f"step:tokens:k={share}:{what}", value)
        self.last[layer] = true_scores
        for place in fs.PLACES:
            direction, size = fs.error_of(expected[place], true)
            note(f"{place}:cosine", torch.nn.functional.cosine_similarity(expected[place], true, dim=-1))
            note(f"{place}:log_error", size.log().float())
            errors = self.errors[layer][place]
            for lag in fs.ERROR_LAGS:
                if len(errors) >= lag:
                    note(f"{place}:error_{lag}", (direction * errors[-lag]).sum(-1).float())
            errors.append(direction)

    def values(self) -> dict[str, np.ndarray]:
        """By name ``[layers, heads]``, averaged over steps; the layers are those whose query is expected."""
        found: dict[str, list[np.ndarray]] = {}
        for _, noted in sorted(self.noted.items()):
            for name, steps in noted.items():
                place, _, what = name.partition(":")
                v = torch.stack(steps).double().numpy()  # [steps, heads]
                if what == "log_error":
                    v = np.ma.masked_invalid(v)  # beyond a right angle
                    found.setdefault(f"{place}:error", []).append(np.exp(v.mean(0)).filled(np.inf))
                    found.setdefault(f"{place}:error_spread", []).append(v.std(0).filled(0.0))
                    continue
                found.setdefault(name, []).append(v.mean(0))
                if what == "cosine":
                    for percent in PERCENTILES:
                        found.setdefault(f"{name}_{percent}", []).append(np.percentile(v, percent, axis=0))
        return {name: np.stack(each) for name, each in found.items()}


def record_pairs(model, ids: Tensor, steps: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Statistics of ``steps`` decode steps after a prompt, by stream; ``ids [1, n + steps]``."""
    taps = Taps(model)
    try:
        return record(model, ids, steps, seed, partial(PairRecorder, taps, {}))
    finally:
        taps.remove()


def rows(values: dict[str, dict[str, np.ndarray]], context: int, layers: list[int]) -> list[Row]:
    """Averages over the layers behind the dense ones (low and high: lowest and highest layer), and some of each layer.

    Those are of text and have the lowest and highest head.
    """
    found, sparse = [], [at for at, layer in enumerate(layers) if layer >= CONFIG.dense_layers]

    def add(stream: str, layer: str, name: str, value: float, low: float, high: float) -> None:
        if ":k=" in name:
            place, kind, share, *more = name.split(":")
            variant = ":".join((share, kind, *([] if place == "step" else [place])))
            metric = more[0] if more else "overlap_1" if place == "step" else "foreseen_overlap"
            metric = metric.replace("hit_", "hit_rate:room=")
        else:
            variant, _, metric = name.partition(":")
        variant = ":".join((f"layer={layer}", variant, stream))
        unit = UNITS.get(metric, "share")
        found.append(Row("foreseen_queries", SMALL_MODEL_NAME, variant, 1, context, metric, value, low, high, unit))

    for stream, by_name in values.items():
        for name, v in by_name.items():
            means = v[sparse].mean(1)
            add(stream, "all", name, means.mean(), means.min(), means.max())
    for name, v in values["text"].items():
        for layer, heads in zip(layers, v) if name.endswith(BY_LAYER) else ():
            add("text", f"{layer:02}", name, heads.mean(), heads.min(), heads.max())
    return found


def table(values: dict[str, dict[str, np.ndarray]], sparse: list[int]) -> str:
    """Averages over the layers behind the dense ones, all heads."""
    means = {}
    for stream, by_name in values.items():
        for name, v in by_name.items():
            place, _, what = name.partition(":")
            means[what, f"{stream} {place}"] = v[sparse].mean()
    return pd.Series(means).unstack(sort=False).to_string(float_format="{:.3f}".format, na_rep="")


def write_profile(values: dict[str, dict[str, np.ndarray]], args: argparse.Namespace) -> None:
    """Per layer, averaged over heads and both streams. Layer 0, which has none before it, stands as layer 1."""
    recorded = {}
    for name in values["text"]:
        each = np.mean([values[stream][name].mean(1) for stream in STREAMS], axis=0).round(4).tolist()
        recorded[name] = [each[0], *each]
    source = {
        "model": SMALL_MODEL_NAME,
        "text": "language reference of Python (pydoc_data.topics)",
        "context": args.context,
        "steps": args.steps,
        "passages": args.passages,
        "streams": "the text's own next tokens; tokens sampled by the model",
        "block_size": CONFIG.block_size,
        "stored_blocks": stored_blocks(CONFIG, args.context - 1),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    lines = ",\n  ".join(f'"{name}": {json.dumps(v, separators=(",", ":"))}' for name, v in recorded.items())
    PROFILE.write_text(f'{{"source": {json.dumps(source)},\n"recorded": {{\n  {lines}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=128, help="decode steps of each stream")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--profile", action="store_true", help="write the profile, too")
    args = parser.parse_args()
    model, tokenizer = load()
    words = reference_ids(tokenizer)
    need = args.context + args.steps
    found = []
    for passage in range(args.passages):
        began = time.perf_counter()
        start = round((passage + 0.5) * (words.shape[1] - need) / args.passages)
        found.append(record_pairs(model, words[:, start : start + need], args.steps, seed=passage))
        print(f"passage {passage}: {time.perf_counter() - began:.0f} s", flush=True)
    values = {s: {name: np.mean([one[s][name] for one in found], axis=0) for name in found[0][s]} for s in STREAMS}
    layers = sorted(Points(model).found)
    print(table(values, [at for at, layer in enumerate(layers) if layer >= CONFIG.dense_layers]))
    append_rows(args.csv, rows(values, args.context, layers))
    if args.profile:
        write_profile(values, args)


if __name__ == "__main__":
    main()
