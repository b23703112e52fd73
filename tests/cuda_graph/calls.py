"""Counts the calls of the package's own Python functions in a step: the work of the host, equal on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import hf_sparsekv
from hf_sparsekv.cuda_graph.recorder import Recorder

HOME = f"{Path(hf_sparsekv.__file__).parent}/"


class Call(NamedTuple):
    """A function of the package.

    Args:
        file: its place in the package, as ``"kv/store.py"``.
        name: its own name.
    """

    file: str
    name: str

    @property
    def has_name(self) -> bool:
        """It is no comprehension, generator expression or lambda. Python 3.12 calls fewer of those than 3.11."""
        return not self.name.startswith("<")

    @property
    def is_operator(self) -> bool:
        """It belongs to an operator, whose calls differ between a CPU and a GPU."""
        return self.file.startswith("ops/")


def calls(run: Callable[[], object]) -> Counter[Call]:
    """How often ``run()`` enters each function of the package; a generator is entered once more for each item."""
    found: Counter[Call] = Counter()

    def count(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOME):
            found[Call(code.co_filename.removeprefix(HOME), code.co_name)] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


class EmptyGraphs(Recorder):
    """Graphs without a GPU whose replays do nothing, so only the host's part of a captured step remains."""

    @staticmethod
    def readable(t):
        return True

    def record(self, run, device, saved):
        return self, run(None)

    def replay(self):
        """As of a graph."""


@torch.no_grad()
def calls_of_steps(net, cache, steps: int, context: int = 500) -> list[Counter[Call]]:
    """The calls of each of ``steps`` decode steps after a prompt of ``context`` tokens, one row."""
    ids = torch.arange(context, device=net.device)[None] * 7 % 30
    net(ids, past_key_values=cache)
    found = []
    for past in range(context, context + steps):
        given = {"input_ids": ids[:, :1], "position_ids": torch.full((1, 1), past, device=net.device)}
        found.append(calls(lambda given=given: net(**given, past_key_values=cache, use_cache=True)))
    return found
