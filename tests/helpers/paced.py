"""Texts whose steps, rounds and verifications take what was measured on GPUs: what a pace makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest.mock import patch

import torch

from hf_sparsekv.checking.pace import Expected
from hf_sparsekv.checking.paces import Paces
from hf_sparsekv.checking.text import Added
from hf_sparsekv.ops._device import H200, Gpu
from hf_sparsekv.policies import crossover

H100 = Gpu(processors=132, l2_bytes=50 << 20, shared_bytes=H200.shared_bytes, bandwidth=3.35e12, cuda_kernels=True)
NAMES = {"H200": "NVIDIA H200", "H100": "NVIDIA H100 80GB HBM3"}


@dataclass(frozen=True)
class Shape:
    """Milliseconds of captured steps; of verifications by their tokens, more of them take as much for each.

    ``width``: bytes of a token's keys and values in one of ``layers``.
    """

    gpu: str
    rows: int
    context: int
    dense: float
    sparse: float
    verify: dict[int, float]
    layers: int = 36
    width: int = 4096
    method: str = "token_only"

    def __str__(self) -> str:
        return f"{self.gpu} {self.rows}x{self.context >> 10}k{' latents' if ':' in self.method else ''}"

    def verification(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens of each row."""
        wide = next((n for n in (4, 8) if tokens <= n), 8)
        return 1e-3 * (self.verify[wide] + (self.verify[8] - self.verify[4]) / 4 * max(0, tokens - 8))

    def expected(self) -> Expected:
        """Expectations for this GPU, as if nothing had been measured on it."""
        with (
            patch.object(torch.cuda, "get_device_name", lambda _=None: NAMES[self.gpu]),
            patch.object(crossover, "gpu", lambda _: H200 if self.gpu == "H200" else H100),
        ):
            device = torch.device("cuda", 0)
            less = crossover.faster(device, self.method, self.rows, self.context, self.width, group=1)
            more = crossover.slower(device, self.rows * self.context * self.width)
        assert less is not None
        return Expected(self.layers * less, {n: self.layers * seconds for n, seconds in more.items()})


def slower(dense: float, four: float, eight: float) -> dict[int, float]:
    return {4: dense + four, 8: dense + eight}


# docs/speed.md, and rows of the step benchmark. Verifications of those were not measured: here they take
# longer beside a dense step as at the shapes that read as much.
MEASURED = [
    Shape("H200", 1, 32 << 10, 5.22, 4.49, {4: 5.95, 8: 6.24}),
    Shape("H200", 1, 128 << 10, 8.47, 5.01, {4: 9.21, 8: 9.70}),
    Shape("H200", 8, 32 << 10, 13.27, 6.40, {4: 14.21, 8: 15.42}),
    Shape("H200", 8, 64 << 10, 21.82, 7.50, {4: 22.80, 8: 25.17}),
    Shape("H200", 1, 8 << 10, 4.38, 4.39, slower(4.38, 0.72, 0.95)),
    Shape("H200", 4, 32 << 10, 8.96, 5.90, slower(8.96, 0.80, 1.50)),
    Shape("H100", 1, 32 << 10, 7.09, 5.91, slower(7.09, 0.80, 1.10)),
    Shape("H100", 1, 128 << 10, 11.78, 6.45, slower(11.78, 0.90, 1.50)),
    Shape("H100", 4, 32 << 10, 12.40, 7.50, slower(12.40, 0.95, 1.80)),
    Shape("H100", 8, 32 << 10, 18.75, 8.00, slower(18.75, 1.20, 2.80)),
    Shape("H200", 1, 32 << 10, 4.83, 4.72, slower(4.83, 1.0, 1.5), 47, 1152, "token_only:mla"),
    Shape("H200", 1, 128 << 10, 6.95, 5.06, slower(6.95, 1.2, 2.0), 47, 1152, "token_only:mla"),
    Shape("H200", 6, 16 << 10, 10.66, 9.59, slower(10.66, 1.5, 3.0), 47, 1152, "token_only:mla"),
    Shape("H200", 6, 96 << 10, 21.28, 10.80, slower(21.28, 2.0, 5.0), 47, 1152, "token_only:mla"),
]


class Simulated:
    """Texts of one process, one after the other.

    Args:
        accepts: probability that a draft is accepted, given those before it.
        noise: standard deviation of a measurement, as a share of it.
    """

    def __init__(self, shape: Shape, accepts: float, seed: int, noise: float = 0.05) -> None:
        self.shape, self.accepts, self.noise = shape, accepts, noise
        self.chance, self.paces, self.expected = random.Random(seed), Paces(16), shape.expected()
        self.slowed = 1.0

    def measured(self, seconds: float) -> float:
        """What a clock says of what takes so long."""
        return self.slowed * seconds * max(0.5, self.chance.gauss(1.0, self.noise))

    def text(self, tokens: int, slowed: float = 1.0, until: float = 0.0) -> float:
        """Seconds of an answer of so many tokens, as a share of a dense one's. Captures are not among them.

        ``slowed``: by which factor something else lengthens what the clock says, ``until`` so many tokens are there.
        """
        shape, made, seconds = self.shape, 1.0, 0.0
        dense, sparse, rows = 1e-3 * shape.dense, 1e-3 * shape.sparse, shape.rows
        self.paces.new_text()
        while made < tokens:
            self.slowed = slowed if made < until else 1.0
            pace = self.paces.of(rows, shape.context * rows, lambda: self.expected)
            drafts, steps = pace.next(True)
            drafts = min(drafts, int(tokens - made) - 1)
            if drafts < 1:
                steps = min(max(1, steps), max(1, int(tokens - made)))
                pace.stepped(self.measured(dense), steps)
                seconds, made = seconds + steps * dense, made + steps
                continue
            accepted = [self._accepted(drafts) for _ in range(rows)]
            verify = shape.verification(drafts + 1)
            added = Added(rows, sum(accepted), sum(n < drafts for n in accepted), min(accepted) + 1)
            pace.drafted(drafts, added, self.measured(drafts * sparse), self.measured(verify))
            seconds, made = seconds + drafts * sparse + verify, made + sum(accepted) / rows + 1
        return seconds / ((made - 1) * dense)

    def _accepted(self, drafts: int) -> int:
        return next((n for n in range(drafts) if self.chance.random() >= self.accepts), drafts)


def ratios(shape: Shape, accepts: float, tokens: int, seeds: range, texts: int = 4) -> tuple[list[float], list[float]]:
    """Times by dense ones, of first texts and of later ones on average."""
    first, later = [], []
    for seed in seeds:
        process = Simulated(shape, accepts, seed)
        every = [process.text(tokens) for _ in range(texts)]
        first.append(every[0])
        later.append(sum(every[1:]) / (texts - 1))
    return first, later


def best(shape: Shape, accepts: float) -> float:
    """The least time of a token by a dense step's, with a fixed number of drafts, or none."""
    rounds = (
        (n * 1e-3 * shape.sparse + shape.verification(n + 1)) / sum(accepts**i for i in range(n + 1))
        for n in range(1, 17)
    )
    return min(1.0, min(rounds) / (1e-3 * shape.dense))
