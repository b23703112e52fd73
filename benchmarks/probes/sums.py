"""What a sum over the ranks of a tensor parallel model takes in a captured step: NCCL's, and reads of peers' memory.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.probes.sums

Of one and eight rows of the models' widths, in bfloat16. "One shot": each rank reads what all others have written to
symmetric memory (torch.distributed._symmetric_memory, without multicast). Printed by rank 0.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZES = [(rows, width) for rows in (1, 8) for width in (4096, 5120, 8192)]
SUMS, REPLAYS = 64, 20  # of a graph, and of graphs that count


def one_shot(group: dist.ProcessGroup, most: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sums by reading peers' memory, of up to ``most`` elements."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(most, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    symmetric.rendezvous(buffer, group)
    op, name = torch.ops.symm_mem.one_shot_all_reduce_copy, group.group_name

    def add(x: torch.Tensor) -> torch.Tensor:
        return op(buffer[: x.numel()].view(x.shape), x, "sum", name)

    return add


def nccl(x: torch.Tensor) -> torch.Tensor:
    """As transformers does."""
    dist.all_reduce(x)
    return x


def sum_us(add: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of a sum in a captured chain; and how far one is from NCCL's, relative."""
    want = nccl(x.clone()).float()
    error = ((add(x.clone()).float() - want).norm() / want.norm()).item()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            x = add(x) * 0.25  # as steps have other kernels between two
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / SUMS)
    return statistics.median(times[5:]), error


def main() -> None:
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here)
    ways = {"NCCL": nccl}
    try:
        ways["one shot"] = one_shot(dist.group.WORLD, max(rows * width for rows, width in SIZES))
    except (RuntimeError, AttributeError) as error:
        print(f"rank {dist.get_rank()}: no symmetric memory: {str(error).splitlines()[0]}", flush=True)
    for rows, width in SIZES:
        for name, add in ways.items():
            us, error = sum_us(add, torch.randn(rows, width, dtype=torch.bfloat16, device=here))
            if dist.get_rank() == 0:
                print(
                    f"{dist.get_world_size()} ranks, {rows} x {width}, {name}: {us:.1f} us, {error:.1e} off", flush=True
                )
    os._exit(0)


if __name__ == "__main__":
    main()
