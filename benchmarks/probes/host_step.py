"""What the host does for a captured step, before and behind the launch of its graph.

    python -m benchmarks.probes.host_step

A model of 36 small layers and 8 rows, any machine: replays do nothing here, so what is left is Python. Prints medians
and the 95th percentile in milliseconds, of steps over blocks on the device and in host memory, as ``generate()`` makes
them and of rows that come and go (6 of 8 get a token).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig
from hf_sparsekv.cache_name import over
from hf_sparsekv.cuda_graph.recorder import Recorder
from hf_sparsekv.cuda_graph.runner import StepRunner

LAYERS, ROWS, CONTEXT, STEPS = 36, 8, 700, 400
WARM_UP = 50


class Timed(Recorder):
    """Steps are run once, and from then on said to have been replayed."""

    launched = 0.0

    @staticmethod
    def readable(t: torch.Tensor) -> bool:
        return True

    def record(self, run, device, saved):
        return self, run(None)

    def replay(self) -> None:
        """As of a graph."""
        self.launched = time.perf_counter()


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({statistics.quantiles(values, n=20)[-1]:.3f})"


@torch.no_grad()
def main() -> None:
    size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, vocab_size=50, **size)).eval()
    model.set_attn_implementation("sparsekv")
    recorder = Timed()
    StepRunner(model, recorder).install()
    print(f"{'blocks':12} {'steps of':12} {'before, ms (95 %)':>20} {'behind, ms (95 %)':>20}")
    for name, offload in (("device", None), ("host memory", OffloadConfig())):
        for who, steps in (("generate()", of_generate), ("rows", of_rows)):
            cache = OffloadedSparseCache(TokenConfig(dense_below=0, token_budget=64), offload)
            ids = torch.randint(0, 50, (ROWS, CONTEXT))
            before, behind = [], []
            step = steps(model, cache, ids)
            for _ in range(STEPS):
                start = time.perf_counter()
                step()
                end = time.perf_counter()
                before.append(1e3 * (recorder.launched - start))
                behind.append(1e3 * (end - recorder.launched))
            print(f"{name:12} {who:12} {middle(before[WARM_UP:]):>20} {middle(behind[WARM_UP:]):>20}")


def of_generate(model, cache: OffloadedSparseCache, ids: torch.Tensor) -> Callable[[], None]:
    """One step, called as transformers' loop does."""
    model(ids, **over(model, cache), logits_to_keep=1)

    def step() -> None:
        past = cache.get_seq_length()
        given = {
            "input_ids": ids[:, :1],
            "attention_mask": torch.ones(ROWS, past + 1, dtype=torch.long),
            "position_ids": torch.full((ROWS, 1), past),
        }
        model(**given, **over(model, cache), use_cache=True, logits_to_keep=1, return_dict=True)

    return step


def of_rows(model, cache: OffloadedSparseCache, ids: torch.Tensor) -> Callable[[], None]:
    """One step of rows that come and go, two of them held."""
    rows = cache.rows(ROWS, CONTEXT + STEPS)
    for i, one in enumerate(ids):
        rows.join(rows.prefill(model, one[None, : CONTEXT - 50 * i]))
    rows.hold(1)
    rows.hold(4)
    tokens = ids[:, 0].clone()
    return lambda: rows.step(model, tokens)


if __name__ == "__main__":
    main()
