"""Fit the parameters of synthetic keys and queries to a recorded profile, layer by layer; stores them in the profile.

    python -m hf_sparsekv.benchmark.synthetic_fit        # about ten minutes on one core

Damped Gauss-Newton steps on the difference between recorded and achieved statistics of a modest case. Every evaluation
uses the same random numbers, so differences come from the parameters alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np
import torch
from torch import Tensor

from ..config import TwoLevelConfig
from .achieved import measure
from .statistics import FRACTIONS, LAGS
from .synthetic import BLENDS, PROFILES, LayerParameters, Profile, Walk, blend, make_keys

# The modest case: as many stored blocks as were recorded. (The head dimension hardly matters, see the tests.)
HEADS, GROUP, DIM, STEPS = 6, 4, 64, 40
CONFIG = TwoLevelConfig(sinks=0, window=1, max_draft=0, dense_layers=0)

WEIGHTS = {f"k=1/8:bound:overlap_{lag}": 1.0 for lag in LAGS}
WEIGHTS |= {f"k={f}:bound:overlap_1": 1.0 for f in FRACTIONS}
WEIGHTS |= {f"k={f}:bound:covered_mass": 1.0 for f in FRACTIONS}
WEIGHTS |= {"blocks_for_95": 1.0, "k=1/8:oracle:covered_mass": 0.5, "k=1/8:oracle:overlap_1": 0.5}
WEIGHTS["k=1/8:bound:overlap_1"] = 2.0
PULL = 0.02  # towards the starting point, for what the statistics leave open


def unpack(x: np.ndarray) -> LayerParameters:
    """Parameters from unbounded numbers: logarithms of the strengths, log-odds of the weights against "new"."""
    odds = np.exp(np.clip([*x[3:], 0.0], -12, 12))
    strengths = np.exp(np.clip(x[:3], -6, 4))
    return LayerParameters(*(float(n) for n in (*strengths, *(odds / odds.sum())[:3])))


START = np.array([math.log(0.8), math.log(1.2), math.log(0.4), 1.0, 0.0, -0.5])


def queries(weights: tuple[float, ...], seed: int, steps: int = STEPS) -> Tensor:
    """``[steps, Hq, D]``."""
    generator = torch.Generator().manual_seed(seed)
    walk = Walk(1, HEADS * GROUP, HEADS, DIM, weights, generator)
    return torch.stack([walk.next()[0] for _ in range(steps)])


def keys(p: LayerParameters, blocks: int, seed: int) -> Tensor:
    """``[H, blocks * block_size + 1, D]``."""
    k = torch.empty(1, HEADS, blocks * CONFIG.block_size + 1, DIM)
    make_keys(k, p, CONFIG, torch.Generator().manual_seed(seed))
    return k[0]


def simulate(p: LayerParameters, blocks: int, seed: int = 0) -> dict[str, float]:
    """Statistics that ``p`` gives."""
    found = measure(keys(p, blocks, seed), queries(p.weights, seed + 1), CONFIG)
    return {name: float(v.mean()) for name, v in found.items()}


def fit(targets: dict[str, float], blocks: int, start: np.ndarray = START, rounds: int = 4, seed: int = 0):
    """Parameters that come close to the targets; returns them, the numbers behind them and what they achieve."""
    weight = np.array(list(WEIGHTS.values()))
    wanted = np.array([targets[name] for name in WEIGHTS])

    def residual(x: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        found = simulate(unpack(x), blocks, seed)
        off = weight * (np.array([found[name] for name in WEIGHTS]) - wanted)
        return np.concatenate((off, PULL * (x - START))), found

    x, damping = start.copy(), 0.01
    r, found = residual(x)
    for _ in range(rounds):
        jacobian = np.empty((len(r), len(x)))
        for i in range(len(x)):
            step = np.zeros_like(x)
            step[i] = 0.15
            jacobian[:, i] = (residual(x + step)[0] - r) / 0.15
        gained = False
        for _ in range(3):
            move = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ r)
            move *= min(1.0, 1.5 / np.abs(move).max())
            r_new, found_new = residual(x + move)
            if r_new @ r_new < r @ r:
                gained = r @ r - r_new @ r_new > 2e-4
                x, r, found, damping = x + move, r_new, found_new, damping / 3
                break
            damping *= 6
        if not gained:
            break
    return unpack(x), x, found


def offset(p: LayerParameters, blocks: int, seed: int = 0) -> float:
    """Logarithm of the mean of ``exp(logit)`` over stored tokens, averaged over heads and steps."""
    k, q = keys(p, blocks, seed), queries(p.weights, seed + 1, 8)
    logits = q.view(8, HEADS, GROUP, DIM).permute(1, 0, 2, 3).flatten(1, 2) @ k.transpose(1, 2) * DIM**-0.5
    return float(logits.logsumexp(-1).mean()) - math.log(k.shape[1])


def overlap_curves(p: LayerParameters, blocks: int, seed: int = 0) -> dict[str, list[float]]:
    """Overlap of consecutive selections at each of ``BLENDS``, by fraction."""
    k = keys(p, blocks, seed)
    found = [measure(k, queries(blend(p.weights, by), seed + 1, 24), CONFIG) for by in BLENDS]
    return {str(f): [round(float(one[f"k={f}:bound:overlap_1"].mean()), 3) for one in found] for f in FRACTIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", default="smollm2-135m")
    args = parser.parse_args()
    path, profile = PROFILES / f"{args.profile}.json", Profile(args.profile)
    blocks, began = profile.source["stored_blocks"], time.perf_counter()
    fitted: dict[str, list[float]] = {}
    curves: dict[str, list[list[float]]] = {}
    x = START
    for layer in range(profile.layers):
        targets = profile.targets(layer, profile.layers)
        p, x, found = fit(targets, blocks, x)  # neighbours are alike: start from the last one
        values = vars(p) | {"offset": offset(p, blocks), "rest": targets["rest_mass"]}
        for name, value in values.items():
            fitted.setdefault(name, []).append(round(float(value), 4))
        for name, curve in overlap_curves(p, blocks).items():
            curves.setdefault(name, []).append(curve)
        off = {name: found[name] - targets[name] for name in WEIGHTS}
        worst = max(off, key=lambda name: abs(off[name]))
        print(f"layer {layer:2}: worst {worst} {off[worst]:+.3f} of {targets[worst]:.3f}; {values}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    write(path, profile, fitted, curves)


def write(path, profile: Profile, fitted: dict, curves: dict) -> None:
    """The profile, one line a statistic."""
    parts = [f'"source": {json.dumps(profile.source)}']
    for name, table in (("recorded", profile.recorded), ("fitted", fitted), ("overlap_by_blend", curves)):
        lines = ",\n  ".join(f'"{key}": {json.dumps(values, separators=(",", ":"))}' for key, values in table.items())
        parts.append(f'"{name}": {{\n  {lines}\n}}')
    path.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
