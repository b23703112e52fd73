"""What the selections of the small real model look like: overlap, attention mass, reuse of blocks.

    python -m benchmarks.studies.attention_statistics            # about six minutes on one core

The language reference is prefilled up to ``--context`` tokens, then decoded for ``--steps`` steps twice: fed the
document's own next tokens, and what the model itself samples. Every step is attended to densely; the selections that a
cache would make are noted beside. Prints a table and appends rows to benchmarks/results/attention_statistics.csv. With
``--profile`` it writes what benchmarks/synthetic/keys.py imitates; then run
``python -m benchmarks.synthetic.fit``, which adds the fitted parameters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_sparsekv import TwoLevelConfig
from hf_sparsekv.cache_name import over
from hf_sparsekv.results import Row, append_rows, commit
from hf_sparsekv.small_model import SMALL_MODEL_NAME
from hf_sparsekv_eval.prefix import attention

from .. import RESULTS
from ..synthetic import statistics as st
from ..synthetic.keys import PROFILES
from .small_model import load, reference_ids

CSV = RESULTS / "attention_statistics.csv"
PROFILE = PROFILES / "smollm2-135m.json"
NAME = "sparsekv_statistics"
CONFIG = TwoLevelConfig(dense_layers=2)
WARM_UP = 16  # steps before a pool's hits count: it starts empty
STREAMS = ("text", "own")
BY_LAYER = ("overlap_1", "overlap_16", "covered_mass", "working_set", "blocks_for_95", "rest_mass", "lru_layer_25")


class Recorder:
    """An attention function that attends densely and notes every decode step's selections."""

    def __init__(self, length: int, steps: int) -> None:
        self.first = st.stored_blocks(CONFIG, length)
        self.most = st.stored_blocks(CONFIG, length + steps - 1)
        self.chosen = st.chosen_blocks(self.first)
        self.layers: dict[int, st.LayerStatistics] = {}
        self.bounds: dict[int, Tensor] = {}
        self.pools: dict[tuple, st.PoolStatistics] = {}

    def __call__(self, module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, **kwargs):
        if query.shape[2] == 1:
            self._note(module.layer_idx, module.config.num_hidden_layers, query[0, :, 0], key[0], scaling)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    def _note(self, layer: int, layers: int, q: Tensor, k: Tensor, scale: float) -> None:
        n = st.stored_blocks(CONFIG, k.shape[1] - 1)
        held = self.bounds.get(layer)
        have = 0 if held is None else len(held)
        if n > have:  # only what has been sealed since
            new = st.block_bounds(k, CONFIG, have, n)
            held = self.bounds[layer] = new if held is None else torch.cat((held, new))
        mass, rest = st.block_mass(q[None], k, n, CONFIG, scale)
        scores = {"bound": st.bound_scores(q[None], held), "oracle": mass}
        if layer not in self.layers:
            self.layers[layer] = st.LayerStatistics(self.chosen, self.most)
        for what, ids in self.layers[layer].add(scores, mass, rest).items():
            if what not in self.pools:
                self.pools[what] = st.PoolStatistics(layers, ids.shape[1], self.most, WARM_UP)
            self.pools[what].add(layer, ids[0])

    def values(self) -> dict[str, np.ndarray]:
        """By name ``[layers, H]``; pools' hit rates ``[layers, 1]``, those of the shared pool ``[1, 1]``."""
        by_layer = [self.layers[index].values() for index in sorted(self.layers)]
        found = {name: np.stack([one[name] for one in by_layer]) for name in by_layer[0]}
        for (selector, fraction), pool in self.pools.items():
            for percent in st.POOLS:
                name = f"k={fraction}:{selector}:lru"
                found[f"{name}_layer_{percent}"] = np.array(pool.by_layer(percent))[:, None]
                found[f"{name}_shared_{percent}"] = np.array([[pool.shared(percent)]])
        return found


@torch.no_grad()
def record(
    model, ids: Tensor, steps: int, seed: int, make: Callable[[int, int], Recorder] = Recorder
) -> dict[str, dict[str, np.ndarray]]:
    """Statistics of ``steps`` decode steps after a prompt, by stream; ``ids [1, n + steps]``.

    ``make(length, steps)`` gives the attention function that takes notes: one for the prompt, one for each stream.
    """
    length = ids.shape[1] - steps
    cache, current = DynamicCache(), [make(length, steps)]
    AttentionInterface.register(NAME, lambda *args, **kwargs: current[0](*args, **kwargs))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    with attention(model, NAME):
        for part in ids[:, : length - 1].split(1024, dim=1):
            model(part, **over(model, cache), logits_to_keep=1)
        for stream in STREAMS:
            current[0] = recorder = make(length - 1, steps)
            token = ids[:, length - 1 : length]  # the prompt's last
            for step in range(steps):
                logits = model(token, **over(model, cache)).logits[0, -1]
                token = ids[:, length + step : length + step + 1]
                if stream == "own":
                    token = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[None]
            found[stream] = recorder.values()
            cache.crop(-steps)
    return found


def rows(values: dict[str, dict[str, np.ndarray]], context: int, by_layer: bool) -> list[Row]:
    """Averages over layers of both streams (low and high: lowest and highest layer), and each layer's for text."""
    found = []

    def add(stream: str, layer: str, name: str, value: float, low: float, high: float) -> None:
        variant, _, metric = name.rpartition(":")
        variant = ":".join(part for part in (f"layer={layer}", variant, stream) if part)
        unit = "k" if metric == "working_set" else "share"
        found.append(Row("attention_statistics", SMALL_MODEL_NAME, variant, 1, context, metric, value, low, high, unit))

    for stream, by_name in values.items():
        for name, v in by_name.items():
            layers = v.mean(1)
            add(stream, "all", name, layers.mean(), layers.min(), layers.max())
    for name, v in values["text"].items():  # low and high: lowest and highest KV head
        if by_layer and name.endswith(BY_LAYER) and ":oracle:lru" not in name:
            for layer, heads in enumerate(v):
                add("text", f"{layer:02}", name, heads.mean(), heads.min(), heads.max())
    return found


def table(values: dict[str, dict[str, np.ndarray]]) -> str:
    """Averages over all layers and heads; what does not depend on a fraction stands under ``all``."""
    means = {}
    for stream, by_name in values.items():
        for name, v in by_name.items():
            fraction, _, metric = name.partition(":") if name.startswith("k=") else ("all", "", name)
            means[metric, f"{stream} {fraction}"] = v.mean()
    return pd.Series(means).unstack(sort=False).to_string(float_format="{:.3f}".format, na_rep="")


def write_profile(values: dict[str, dict[str, np.ndarray]], args: argparse.Namespace) -> None:
    """Per layer, averaged over KV heads and both streams, with where it comes from."""
    names = [name for name, v in values["text"].items() if len(v) > 1 and ":lru_" not in name]
    recorded = {name: np.mean([values[s][name].mean(1) for s in STREAMS], axis=0).round(3).tolist() for name in names}
    source = {
        "model": SMALL_MODEL_NAME,
        "text": "language reference of Python (pydoc_data.topics)",
        "context": args.context,
        "steps": args.steps,
        "passages": args.passages,
        "streams": "the text's own next tokens; tokens sampled by the model",
        "block_size": CONFIG.block_size,
        "stored_blocks": st.stored_blocks(CONFIG, args.context - 1),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    PROFILE.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'"{name}": {json.dumps(v)}' for name, v in recorded.items()]
    text = ",\n  ".join(lines)
    PROFILE.write_text(f'{{"source": {json.dumps(source, indent=1)},\n"recorded": {{\n  {text}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=7168, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=224, help="decode steps of each stream")
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--by-layer", action=argparse.BooleanOptionalAction, default=True, help="rows of each layer")
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
        found.append(record(model, words[:, start : start + need], args.steps, seed=passage))
        print(f"passage {passage}: {time.perf_counter() - began:.0f} s", flush=True)
    values = {s: {name: np.mean([one[s][name] for one in found], axis=0) for name in found[0][s]} for s in STREAMS}
    print(table(values))
    append_rows(args.csv, rows(values, args.context, args.by_layer))
    if args.profile:
        write_profile(values, args)


if __name__ == "__main__":
    main()
