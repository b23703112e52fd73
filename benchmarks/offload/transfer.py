"""How fast blocks cross the link, each way.

To the GPU: scattered blocks of 32 KB and rows of 4 KB by ``ops.storage.block_copy`` (``uva``: a kernel that reads
pinned memory in place), by one ``cudaMemcpy`` each, and one large copy as the limit. From the GPU: keys and values of a
prompt as one large copy (the limit), permuted into blocks and then copied, written into their blocks by a kernel, and
one ``cudaMemcpy`` a block. How many programs the kernel needs: docs/offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparsekv.ops.storage.block_copy.triton import block_copy

from ..report import Report

POOL = 1 << 30  # bytes of pinned memory
WARM_UP = 2  # runs of a copy that are not counted
HEADS, BLOCK, DIM = 8, 64, 128
SAVE_PROGRAMS, SAVE_WARPS = 16, 4
# tokens and width of a block, and how many: blocks of 32 KB, few and many, and rows of 4 KB
GATHERS = ((BLOCK, 2 * DIM, 512), (BLOCK, 2 * DIM, 8192), (8, 256, 8192))
SAVES = ((1, 8192), (4, 8192))  # rows and tokens


def gbps(size: int, run: Callable[[], object], repeats: int = 7) -> list[float]:
    """GB/s (10^9 bytes a second) of each of ``repeats`` runs that move ``size`` bytes."""
    found = []
    for _ in range(repeats + WARM_UP):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(size / start.elapsed_time(end) / 1e6)
    return found[WARM_UP:]


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


def measure(
    report: Report,
    metric: str,
    where: tuple[int, int],
    size: int,
    ways: dict[str, Callable],
    clear: Callable[[], object],
    right: Callable[[str], bool],
) -> None:
    """Run each way once after ``clear()``, ask whether what arrived is right, and time it."""
    for name, run in ways.items():
        with report.measuring(*where, name):
            clear()
            run()
            torch.cuda.synchronize()
            if not right(name):
                raise RuntimeError("blocks arrived wrong")
            report.add(metric, gbps(size, run, 3 if "each" in name else 7), "GB/s")


def gather(report: Report, host: Tensor, device: torch.device, tokens: int, width: int, count: int) -> None:
    """``count`` blocks of ``[tokens, width]`` from anywhere in ``host`` into pages anywhere."""
    kv = host.view(-1, HEADS, tokens, width)
    block = tokens * width * kv.itemsize
    report.case = f"{'rows' if block < 1 << 14 else 'blocks'}-{block >> 10}KB"
    pages = torch.empty(2 * count, tokens, width, dtype=kv.dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    sources = torch.randperm(kv.shape[0] * HEADS, generator=generator)[:count]
    listed = torch.stack((sources, torch.randperm(2 * count, generator=generator)[:count]), dim=1).int()
    copies, number = listed.to(device), torch.tensor([count], dtype=torch.int32, device=device)
    flat, pairs = kv.flatten(0, 1), listed.tolist()

    def one_each() -> None:
        for source, page in pairs:
            pages[page].copy_(flat[source], non_blocking=True)

    def right(name: str) -> bool:
        if name == "limit":
            return torch.equal(pages[:count].cpu(), flat[:count])
        return torch.equal(pages[copies[:, 1].long()].cpu(), flat[listed[:, 0].long()])

    ways = {
        "uva": lambda: block_copy(kv, pages, copies, number),
        "memcpy_each": one_each,
        "memcpy_each:captured": Captured(one_each),
        "limit": lambda: pages[:count].copy_(flat[:count], non_blocking=True),
    }
    measure(report, "gather_gbps", (1, count), count * block, ways, pages.zero_, right)


@triton.jit
def _save_kernel(
    p_k,
    p_v,
    p_kv,
    p_block_table,
    items,
    blocks,
    batch_stride,
    head_stride,
    token_stride,
    block_table_batch,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
):
    """Write blocks of ``k, v [batch, H, n, D]`` into blocks ``[H, BLOCK, 2 D]``; a program takes every n-th."""
    o_t, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        i_head, i_block, i_batch = item % HEADS, item // HEADS % blocks, item // (HEADS * blocks)
        physical_id = tl.load(p_block_table + i_batch * block_table_batch + i_block).to(tl.int64)
        o_from = i_batch.to(tl.int64) * batch_stride + i_head * head_stride
        o_from += (i_block * BLOCK + o_t)[:, None] * token_stride + o_d[None, :]
        b_k = tl.load(p_k + o_from)  # [BLOCK, D]
        b_v = tl.load(p_v + o_from)  # [BLOCK, D]
        p_to = p_kv + (physical_id * HEADS + i_head) * BLOCK * 2 * D + o_t[:, None] * 2 * D + o_d[None, :]
        tl.store(p_to, b_k)
        tl.store(p_to + D, b_v)


def save(report: Report, host: Tensor, device: torch.device, batch: int, n: int) -> None:
    """Keys and values of ``n`` tokens into scattered blocks of pinned memory."""
    kv = host.view(-1, HEADS, BLOCK, 2 * DIM)
    report.case = "prompt"
    # As a projection gives them: the heads of a token side by side.
    k, v = (torch.randn(batch, n, HEADS, DIM, dtype=kv.dtype, device=device).transpose(1, 2) for _ in range(2))
    blocks = n // BLOCK
    taken = torch.randperm(len(kv), generator=torch.Generator().manual_seed(0))[: batch * blocks]
    block_table = taken.int().view(batch, blocks).to(device)
    staged = torch.empty(batch * blocks, *kv.shape[1:], dtype=kv.dtype, device=device)
    front, homes = kv[: batch * blocks], taken.tolist()

    def permute() -> None:
        parts = [x.unflatten(2, (blocks, BLOCK)).transpose(1, 2) for x in (k, v)]  # [batch, blocks, H, BLOCK, D]
        torch.cat(parts, dim=-1, out=staged.view(batch, blocks, HEADS, BLOCK, 2 * DIM))

    def permute_and_copy() -> None:
        permute()
        front.copy_(staged, non_blocking=True)

    def permute_and_one_each() -> None:
        permute()
        for at, physical_id in enumerate(homes):
            for head in range(HEADS):
                kv[physical_id, head].copy_(staged[at, head], non_blocking=True)

    def write() -> None:
        strides = (k.stride(0), k.stride(1), k.stride(2), block_table.stride(0))
        sizes = (batch * blocks * HEADS, blocks, *strides, HEADS, BLOCK, DIM)
        _save_kernel[(SAVE_PROGRAMS,)](k, v, kv, block_table, *sizes, num_warps=SAVE_WARPS)

    def clear() -> None:
        kv[taken] = front[:] = 0

    def right(name: str) -> bool:
        got = {"limit": front, "permute_and_copy": front, "permute_alone": staged.cpu()}.get(name)
        return torch.equal(kv[taken] if got is None else got, expected)

    permute()
    expected = staged.cpu()
    ways = {
        "limit": lambda: front.copy_(staged, non_blocking=True),
        "permute_alone": permute,
        "permute_and_copy": permute_and_copy,
        "memcpy_each": permute_and_one_each,
        "memcpy_each:captured": Captured(permute_and_one_each),
        "in_place": write,
    }
    measure(report, "save_gbps", (batch, n), 2 * k.numel() * k.itemsize, ways, clear, right)


def run(part: str, session, report: Report) -> None:
    """All gathers and saves."""
    host = pinned(session.device)
    for shape in GATHERS:
        gather(report, host, session.device, *shape)
    for shape in SAVES:
        save(report, host, session.device, *shape)
