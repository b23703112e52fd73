"""How fast blocks cross the link, each way.

To the GPU: scattered blocks of 32 KB and rows of 4 KB by ``ops.block_copy`` (``uva``: a kernel that reads pinned memory
in place), by one ``cudaMemcpy`` each, and one large copy as the limit. From the GPU: keys and
values of a prompt as one large copy (the limit), permuted into blocks and then copied, written into their blocks by a
kernel, and one ``cudaMemcpy`` a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparsekv.ops.block_copy.triton import TILE, block_copy
from hf_sparsekv.tuning.block_copies import BLOCK, DIM, HEADS
from hf_sparsekv.tuning.timing import gbps
from hf_sparsekv.tuning.transfer import DEFAULT

from ..report import Report

POOL = 1 << 30  # bytes of pinned memory
GRID = [(16, 4), (16, 8), (32, 4), (32, 8), (64, 2), (64, 4), (64, 8), (132, 1), (132, 4), (264, 4)]
# tokens and width of a block, and how many: blocks of 32 KB, few and many, and rows of 4 KB
GATHERS = ((BLOCK, 2 * DIM, 512), (BLOCK, 2 * DIM, 8192), (8, 256, 8192))
SAVES = ((1, 8192), (4, 8192))  # rows and tokens


def pinned(device: torch.device) -> Tensor:
    """Random bf16 in :data:`POOL` bytes of pinned memory, flat."""
    host = torch.empty(POOL // 2, dtype=torch.bfloat16, pin_memory=True)
    return host.copy_(torch.randn(host.shape, dtype=host.dtype, device=device))


class Captured:
    """``run`` as one graph, made by the first call: the host's share of many copies is gone, the engine's is left."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run, self.graph = run, None

    def __call__(self) -> None:
        if self.graph is None:
            stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.run()
        self.graph.replay()


class Sweep:
    """A kernel over :data:`GRID`: a row for the best, and if asked for all."""

    def __init__(self, report: Report, metric: str, size: int, where: tuple[int, int], everything: bool) -> None:
        self.report, self.metric, self.size, self.where, self.everything = report, metric, size, where, everything

    def __call__(self, name: str, launch: Callable[[int, int], object]) -> None:
        """``launch(programs, warps)``."""
        best = 0.0, (DEFAULT.programs, DEFAULT.warps)
        for shape in GRID:
            label = f"{name}:programs={shape[0]},warps={shape[1]}"
            with self.report.measuring(*self.where, label):
                found = gbps(self.size, lambda shape=shape: launch(*shape), 3)
                best = max(best, (sorted(found)[1], shape), key=lambda one: one[0])
                if self.everything:
                    self.report.add(self.metric, found, "GB/s")
        programs, warps = best[1]
        with self.report.measuring(*self.where, f"{name}:best:programs={programs},warps={warps}"):
            self.report.add(self.metric, gbps(self.size, lambda: launch(programs, warps)), "GB/s")


def gather(
    report: Report, host: Tensor, device: torch.device, tokens: int, width: int, count: int, everything: bool
) -> None:
    """``count`` blocks of ``[tokens, width]`` from anywhere in ``host`` into frames anywhere."""
    kv = host.view(-1, HEADS, tokens, width)
    block = tokens * width * kv.itemsize
    size, where = count * block, (1, count)
    report.case = f"{'rows' if block < 1 << 14 else 'blocks'}-{block >> 10}KB"
    frames = torch.empty(2 * count, tokens, width, dtype=kv.dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    sources = torch.randperm(kv.shape[0] * HEADS, generator=generator)[:count]
    listed = torch.stack((sources, torch.randperm(2 * count, generator=generator)[:count]), dim=1).int()
    copies, number = listed.to(device), torch.tensor([count], dtype=torch.int32, device=device)
    flat, pairs = kv.flatten(0, 1), listed.tolist()

    def check() -> None:
        torch.cuda.synchronize()
        if not torch.equal(frames[copies[:, 1].long()].cpu(), flat[listed[:, 0].long()]):
            raise RuntimeError("blocks arrived wrong")

    def launch(programs: int | None = None, warps: int | None = None, tile: int = TILE) -> None:
        block_copy(kv, frames, copies, number, programs=programs, warps=warps, tile=tile)

    def one_each() -> None:
        for source, frame in pairs:
            frames[frame].copy_(flat[source], non_blocking=True)

    def measure(name: str, run: Callable[[], object], repeats: int = 3) -> None:
        with report.measuring(*where, name):
            frames.zero_()
            run()
            check()
            report.add("gather_gbps", gbps(size, run, repeats), "GB/s")

    measure("uva", launch, 7)
    Sweep(report, "gather_gbps", size, where, everything)("uva", launch)
    if everything:
        for tile in (8192, 32768):
            measure(f"uva:tile={tile}", lambda tile=tile: launch(tile=tile), 7)
    measure("memcpy_each", one_each)
    measure("memcpy_each:captured", Captured(one_each))
    with report.measuring(*where, "limit"):
        report.add("gather_gbps", gbps(size, lambda: frames[:count].copy_(flat[:count], non_blocking=True)), "GB/s")


@triton.jit
def _save_kernel(
    p_k,
    p_v,
    p_kv,
    p_slots,
    items,
    blocks,
    batch_stride,
    head_stride,
    token_stride,
    slots_batch,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    """Write blocks of ``k, v [batch, H, n, D]`` into their slots ``[H, BLOCK, 2 D]``; a program takes every n-th."""
    o_t, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        i_head, i_block, i_batch = item % HEADS, item // HEADS % blocks, item // (HEADS * blocks)
        slot = tl.load(p_slots + i_batch * slots_batch + i_block).to(tl.int64)
        o_from = i_batch.to(tl.int64) * batch_stride + i_head * head_stride
        o_from += (i_block * BLOCK + o_t)[:, None] * token_stride + o_d[None, :]
        b_k = tl.load(p_k + o_from)  # [BLOCK, D]
        b_v = tl.load(p_v + o_from)  # [BLOCK, D]
        p_to = p_kv + (slot * HEADS + i_head) * BLOCK * 2 * D + o_t[:, None] * 2 * D + o_d[None, :]
        tl.store(p_to, b_k)
        tl.store(p_to + D, b_v)


def save(report: Report, host: Tensor, device: torch.device, batch: int, n: int, everything: bool) -> None:
    """Keys and values of ``n`` tokens into scattered slots of pinned memory."""
    kv, where = host.view(-1, HEADS, BLOCK, 2 * DIM), (batch, n)
    report.case = "prompt"
    # As a projection gives them: the heads of a token side by side.
    k, v = (torch.randn(batch, n, HEADS, DIM, dtype=kv.dtype, device=device).transpose(1, 2) for _ in range(2))
    size, blocks = 2 * k.numel() * k.itemsize, n // BLOCK
    taken = torch.randperm(len(kv), generator=torch.Generator().manual_seed(0))[: batch * blocks]
    slots = taken.int().view(batch, blocks).to(device)
    staged = torch.empty(batch * blocks, *kv.shape[1:], dtype=kv.dtype, device=device)
    front, homes = kv[: batch * blocks], taken.tolist()

    def permute() -> None:
        parts = [x.unflatten(2, (blocks, BLOCK)).transpose(1, 2) for x in (k, v)]  # [batch, blocks, H, BLOCK, D]
        torch.cat(parts, dim=-1, out=staged.view(batch, blocks, HEADS, BLOCK, 2 * DIM))

    def permute_and_copy() -> None:
        permute()
        front.copy_(staged, non_blocking=True)

    def one_each() -> None:
        for at, slot in enumerate(homes):
            for head in range(HEADS):
                kv[slot, head].copy_(staged[at, head], non_blocking=True)

    def permute_and_one_each() -> None:
        permute()
        one_each()

    def write(programs: int, warps: int) -> None:
        strides = (k.stride(0), k.stride(1), k.stride(2), slots.stride(0))
        items = batch * blocks * HEADS
        _save_kernel[(programs,)](k, v, kv, slots, items, blocks, *strides, HEADS, BLOCK, DIM, num_warps=warps)

    def measure(name: str, run: Callable[[], object], there: Callable[[], Tensor], repeats: int = 3) -> None:
        with report.measuring(*where, name):
            kv[taken] = 0
            permute()
            expected = staged.cpu()
            run()
            torch.cuda.synchronize()
            if not torch.equal(there(), expected):
                raise RuntimeError("blocks were written wrong")
            report.add("save_gbps", gbps(size, run, repeats), "GB/s")

    def scattered() -> Tensor:
        return kv[taken]

    measure("limit", lambda: front.copy_(staged, non_blocking=True), lambda: front, 7)
    with report.measuring(*where, "permute_alone"):
        report.add("save_gbps", gbps(size, permute), "GB/s")
    measure("permute_and_copy", permute_and_copy, lambda: front, 7)
    measure("memcpy_each", permute_and_one_each, scattered)
    measure("memcpy_each:captured", Captured(permute_and_one_each), scattered)
    measure("in_place", lambda: write(DEFAULT.programs, DEFAULT.warps), scattered, 7)
    Sweep(report, "save_gbps", size, where, everything)("in_place", write)


def run(part: str, session, report: Report) -> None:
    """All gathers and saves."""
    host, everything = pinned(session.device), session.args.sweep
    for tokens, width, count in GATHERS:
        gather(report, host, session.device, tokens, width, count, everything)
    for batch, n in SAVES:
        save(report, host, session.device, batch, n, everything)
