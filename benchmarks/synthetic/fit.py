"""Fit the parameters of synthetic keys and queries to a recorded profile, layer by layer; stores them in the profile.

    python -m benchmarks.synthetic.fit        # about ten minutes on one core

Damped Gauss-Newton steps on the difference between recorded and achieved statistics of a modest case. Every evaluation
uses the same random numbers, so differences come from the parameters alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv.config import TwoLevelConfig

from .achieved import measure
from .keys import BLENDS, PROFILES, LayerParameters, Profile, Walk, blend, make_keys, set_sinks
from .statistics import FRACTIONS, LAGS

# The modest case: as many stored blocks as were recorded. (The head dimension hardly matters, see the tests.)
HEADS, GROUP, DIM, STEPS = 20, 4, 64, 28
CONFIG = TwoLevelConfig()

WEIGHTS = {f"k=1/8:bound:overlap_{lag}": 1.0 for lag in LAGS}
WEIGHTS |= {f"k={f}:bound:overlap_1": 1.0 for f in FRACTIONS}
WEIGHTS |= {f"k={f}:bound:covered_mass": 1.0 for f in FRACTIONS}
WEIGHTS |= {"blocks_for_95": 1.0, "k=1/8:oracle:covered_mass": 0.5, "k=1/8:oracle:overlap_1": 0.5}
WEIGHTS["k=1/8:bound:overlap_1"] = 2.0
PULL = 0.02  # towards the starting point, for what the statistics leave open


def unpack(x: np.ndarray, rest: float) -> LayerParameters:
    """Parameters from unbounded numbers: logarithms of the strengths, log-odds of the weights against "new"."""
    odds = np.exp(np.clip([*x[3:], 0.0], -12, 12))
    strengths = np.exp(np.clip(x[:3], -6, 4))
    return LayerParameters(*(float(n) for n in (*strengths, *(odds / odds.sum())[:3])), rest=rest)


START = np.array([math.log(0.8), math.log(1.2), math.log(0.4), 1.0, 0.0, -0.5])


def queries(weights: tuple[float, ...], seed: int, steps: int = STEPS) -> Tensor:
    """``[steps, Hq, D]``."""
    generator = torch.Generator().manual_seed(seed)
    walk = Walk(1, HEADS * GROUP, HEADS, DIM, weights, generator)
    return torch.stack([walk.next()[0] for _ in range(steps)])


def keys(p: LayerParameters, q: Tensor, context: int, seed: int) -> tuple[Tensor, LayerParameters]:
    """Keys ``[H, context, D]``, sinks included, and ``p`` with the offset that gives these queries ``p.rest``."""
    k = torch.empty(1, HEADS, context, DIM)
    make_keys(k, p, CONFIG, torch.Generator().manual_seed(seed))
    q = q[:8].view(8, HEADS, -1, DIM).transpose(0, 1).flatten(1, 2)
    stored = (q @ k[0, :, CONFIG.sinks :].transpose(1, 2) * DIM**-0.5).logsumexp(-1)
    low, high = float(stored.min()) - 10, float(stored.max()) + 10
    for _ in range(50):  # the mass rises with the sinks' logit
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle - stored).sigmoid().mean()) < p.rest else (low, middle)
    p = replace(p, offset=low - math.log(p.rest / (1 - p.rest)) - math.log(context))
    set_sinks(k, p, CONFIG)
    return k[0], p


def simulate(p: LayerParameters, context: int, seed: int = 0) -> tuple[dict[str, float], LayerParameters]:
    """Statistics that ``p`` gives, and ``p`` with its offset."""
    q = queries(p.weights, seed + 1)
    k, p = keys(p, q, context, seed)
    return {name: float(v.mean()) for name, v in measure(k, q, CONFIG).items()}, p


def fit(
    targets: dict[str, float], context: int, rounds: int = 5, seed: int = 0
) -> tuple[dict[str, float], LayerParameters]:
    """What comes close to the targets, and the parameters that achieve it."""
    weight = np.array(list(WEIGHTS.values()))
    wanted = np.array([targets[name] for name in WEIGHTS])

    def residual(x: np.ndarray) -> tuple[np.ndarray, tuple[dict[str, float], LayerParameters]]:
        found, p = simulate(unpack(x, targets["rest_mass"]), context, seed)
        off = weight * (np.array([found[name] for name in WEIGHTS]) - wanted)
        return np.concatenate((off, PULL * (x - START))), (found, p)

    x, damping = START.copy(), 0.01
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
    return found


def overlap_curves(p: LayerParameters, context: int, seed: int = 0) -> dict[str, list[float]]:
    """Overlap of consecutive selections at each of ``BLENDS``, by fraction."""
    k, _ = keys(p, queries(p.weights, seed + 1, 8), context, seed)
    found = [measure(k, queries(blend(p.weights, by), seed + 1, 12), CONFIG) for by in BLENDS]
    return {str(f): [round(float(one[f"k={f}:bound:overlap_1"].mean()), 3) for one in found] for f in FRACTIONS}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", default="smollm2-135m")
    args = parser.parse_args()
    path, profile = PROFILES / f"{args.profile}.json", Profile(args.profile)
    context, began = profile.source["context"], time.perf_counter()
    fitted: dict[str, list[float]] = {}
    curves: dict[str, list[list[float]]] = {}
    for layer in range(profile.layers):
        targets = profile.targets(layer, profile.layers)
        seed = 2 * layer  # what one draw happens to be must not go into all layers
        found, p = fit(targets, context, seed=seed)
        for name, value in vars(p).items():
            fitted.setdefault(name, []).append(round(float(value), 4))
        for name, curve in overlap_curves(p, context, seed).items():
            curves.setdefault(name, []).append(curve)
        off = {name: found[name] - targets[name] for name in WEIGHTS}
        worst = max(off, key=lambda name: abs(off[name]))
        print(f"layer {layer:2}: worst {worst} {off[worst]:+.3f} of {targets[worst]:.3f}; {p}", flush=True)
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
