"""Muon on the matrices of the blocks, Adam on embeddings and norms; float32 masters of weights in any precision.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon (momentum orthogonalised by a quintic
Newton-Schulz iteration, coefficients from there). Weight decay bounds a matrix's spectral norm by 1 / decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAINS = ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")


def orthogonalise(gradients: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, of ``[n, rows, columns]``."""
    x = gradients.bfloat16() if gradients.is_cuda else gradients
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        y = x @ x.mT
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * (y @ y)) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Both methods over one model; each call of :meth:`step` takes the rates times ``factor``.

    Args:
        model: its parameters' gradients are used and cleared.
        muon, adam: learning rates. Gains of query and key norms take twice Adam's.
        decay: of matrices.
        unbounded: parts of names of matrices that make attention logits without a norm behind them; ``logit_decay``: of
            those, or zero: their rows keep the norm they began with, and the gains of the norms before them learn the
            scale.
    """

    def __init__(
        self, model, muon: float, adam: float, decay: float = 0.02, unbounded: tuple = (), logit_decay: float = 0.7
    ) -> None:
        self.muon, self.count = muon, 0
        self.groups: dict[tuple, list] = {}
        self.rest, self.rates = [], []
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                key = (*weight.shape, logit_decay if any(part in name for part in unbounded) else decay)
                self.groups.setdefault(key, []).append(weight)
            else:
                self.rest.append(weight)
                self.rates.append(2 * adam if any(part in name for part in GAINS) else adam)
        self.state = {
            "matrices": {key: torch.stack([w.detach().float() for w in ws]) for key, ws in self.groups.items()},
            "momentum": {},
            "rest": [w.detach().float().clone() for w in self.rest],
            "first": [torch.zeros_like(w, dtype=torch.float32) for w in self.rest],
            "second": [torch.zeros_like(w, dtype=torch.float32) for w in self.rest],
        }
        self.state["momentum"] = {key: torch.zeros_like(w) for key, w in self.state["matrices"].items()}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        self.count += 1
        s = self.state
        for key, weights in self.groups.items():
            rows, columns, decay = key
            gradient = torch.stack([w.grad for w in weights]).float()
            momentum, master = s["momentum"][key], s["matrices"][key]
            momentum.lerp_(gradient, 0.05)
            update = orthogonalise(gradient.lerp(momentum, 0.95))
            rate = self.muon * factor
            norms = None if decay else master.norm(dim=2, keepdim=True)
            master.mul_(1 - rate * decay).add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
            if norms is not None:
                master.mul_(norms / master.norm(dim=2, keepdim=True))
        gradients = [w.grad.float() for w in self.rest]
        torch._foreach_lerp_(s["first"], gradients, 0.1)
        torch._foreach_mul_(s["second"], 0.98)
        torch._foreach_addcmul_(s["second"], gradients, gradients, 0.02)
        size = torch._foreach_sqrt(torch._foreach_div(s["second"], 1 - 0.98**self.count))
        torch._foreach_add_(size, 1e-10)
        update = torch._foreach_div(torch._foreach_div(s["first"], 1 - 0.9**self.count), size)
        torch._foreach_mul_(update, [-rate * factor for rate in self.rates])
        torch._foreach_add_(s["rest"], update)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Masters into the model's weights."""
        for key, weights in self.groups.items():
            torch._foreach_copy_([w.data for w in weights], list(self.state["matrices"][key].unbind(0)))
        torch._foreach_copy_([w.data for w in self.rest], self.state["rest"])
        for weight in (*self.rest, *(w for ws in self.groups.values() for w in ws)):
            weight.grad = None

    def state_dict(self) -> dict:
        return {**self.state, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        self.state = {key: state[key] for key in self.state}
        self.write()
