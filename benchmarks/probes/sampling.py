"""What a step's tokens cost: the sampler of the serving engine by what rows ask for, on this GPU.

    python -m benchmarks.probes.sampling

Milliseconds of the device, and of the host until a call returns, over bfloat16 logits of 151,936 tokens.
"""

from __future__ import annotations

import statistics
import time

import torch

from hf_sparsekv.results import versions
from hf_sparsekv.serving.sampler import Sampler
from hf_sparsekv.serving.sampling import Sampling

from ..decoding import timed

VOCABULARY, ROWS, CALLS = 151936, (1, 8, 32), 40
ASKED = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.7),
    "seed": Sampling(temperature=0.7, seed=1),
    "top-k 50": Sampling(top_k=50),
    "top-k 50, top-p 0.9": Sampling(top_k=50, top_p=0.9),
    "top-p 0.9": Sampling(top_p=0.9),
    "min-p 0.05": Sampling(min_p=0.05),
    "greedy, penalty 1.1": Sampling(temperature=0.0, repetition_penalty=1.1),
    "greedy, frequency 0.5": Sampling(temperature=0.0, frequency_penalty=0.5),
    "greedy, 5 logprobs": Sampling(temperature=0.0, logprobs=5),
}


def main() -> None:
    print(torch.cuda.get_device_name(), versions())
    generator = torch.Generator("cuda").manual_seed(0)
    for rows in ROWS:
        logits = (3 * torch.randn(rows, VOCABULARY, device="cuda", generator=generator)).bfloat16()
        for name, asked in ASKED.items():
            sampler, all_rows = Sampler(rows, VOCABULARY, "cuda"), range(rows)
            for row in all_rows:
                sampler.set(row, asked, [1, 2, 3])
            device = timed(lambda sampler=sampler, logits=logits, all_rows=all_rows: sampler(logits, all_rows), CALLS)
            host = []
            for _ in range(CALLS):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                sampler(logits, all_rows)
                host.append(1e3 * (time.perf_counter() - begin))
            print(f"{rows:3} rows  {name:20} {statistics.median(device):7.3f}  host {statistics.median(host[5:]):7.3f}")


if __name__ == "__main__":
    main()
