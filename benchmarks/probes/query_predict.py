"""What predicting the next query takes: one layer's launch, for each predictor and window.

    python -m benchmarks.probes.query_predict

bf16; 128 dimensions (Qwen3-8B: 32 query heads), and 576 (absorbed queries of a latent cache, 20 heads). 40 launches in
one CUDA graph, each on the ring of another layer. Prints medians and quartiles in microseconds.
"""

from __future__ import annotations

import torch
import triton

from hf_sparsekv.config import PREDICTORS
from hf_sparsekv.predictor.query import make_predictor
from hf_sparsekv.tuning.timing import captured

LAYERS, SLOTS = 40, 33


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for batch, heads, dim in ((1, 32, 128), (8, 32, 128), (16, 32, 128), (8, 20, 576)):
        rings = torch.randn(LAYERS, batch, heads, SLOTS, dim, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(LAYERS, batch, heads, dim, device="cuda", dtype=torch.bfloat16)
        position = torch.full((batch,), 7, dtype=torch.int32, device="cuda")
        count = torch.full((batch,), SLOTS, dtype=torch.int32, device="cuda")
        for name in PREDICTORS:
            for window in (8, 16, 32) if name != "last" else (16,):
                predictor = make_predictor(name, window)

                def run(i: int, predictor=predictor, rings=rings, out=out, position=position, count=count) -> None:
                    predictor.predict(rings[i], position, count, out[i])

                time = captured(run, LAYERS, repetitions=LAYERS)
                print(
                    f"{batch:2} x {heads} x {dim}: {name:13} {window:2}: {time.median:5.2f} us "
                    f"({time.low:.2f} - {time.high:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
