"""How fast do blocks cross the link, each way, and with how many programs?

    python benchmarks/probes/transfer.py

To the GPU: scattered blocks of 32 KB and rows of 4 KB by ``ops.block_copy`` (the kernel that reads pinned memory in
place, over programs and warps; the copy engine), one copy each, and one large copy. From the GPU: keys and values of a
prompt chunk as one large copy, permuted on the GPU and then copied, and written into their blocks in place.
Prints medians in GB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_sparsekv.ops.block_copy import dma
from hf_sparsekv.ops.block_copy.triton import block_copy

POOL = 1 << 30  # bytes of pinned memory
HEADS, BLOCK, DIM = 8, 64, 128
GRIDS = [(16, 4), (16, 8), (32, 4), (32, 8), (64, 2), (64, 4), (64, 8), (132, 1), (132, 4), (264, 4)]


def median_us(run, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[2:])[repeats // 2]


def report(name: str, size: int, run, repeats: int = 7) -> float:
    us = median_us(run, repeats)
    print(f"  {name:44} {us:10.1f} us {size / us / 1e3:8.1f} GB/s", flush=True)
    return size / us / 1e3


def scattered(host: torch.Tensor, tokens: int, width: int, count: int, tiles: tuple[int, ...]) -> None:
    """``count`` blocks of ``[tokens, width]`` from anywhere in ``host`` into anywhere."""
    kv = host.view(-1, HEADS, tokens, width)
    size = count * tokens * width * kv.itemsize
    frames = torch.empty(2 * count, tokens, width, dtype=kv.dtype, device="cuda")
    generator = torch.Generator().manual_seed(0)
    sources = torch.randperm(kv.shape[0] * HEADS, generator=generator)[:count]
    listed = torch.stack((sources, torch.randperm(2 * count, generator=generator)[:count]), dim=1).int()
    copies, number = listed.cuda(), torch.tensor([count], dtype=torch.int32, device="cuda")

    print(f"{count} blocks of {tokens * width * kv.itemsize} bytes to the GPU")
    best = 0.0, ""
    for programs, warps in GRIDS:
        for tile in tiles:

            def run(programs: int = programs, warps: int = warps, tile: int = tile) -> None:
                block_copy(kv, frames, copies, number, programs=programs, warps=warps, tile=tile)

            name = f"uva, {programs} programs x {warps} warps, {tile} bytes"
            best = max(best, (report(name, size, run), name))
    print(f"  best: {best[1]}")
    block_copy(kv, frames, copies, number)
    right = kv.flatten(0, 1)[listed[:, 0].long()]
    assert torch.equal(frames[copies[:, 1].long()].cpu(), right), "copied wrongly"
    report("dma, runs", size, lambda: dma.block_copy(kv, frames, copies, number), 3)

    flat, pairs = kv.flatten(0, 1), listed.tolist()

    def one_each() -> None:
        for source, frame in pairs:
            frames[frame].copy_(flat[source], non_blocking=True)

    report("one copy each", size, one_each, 3)
    report("one large copy", size, lambda: frames[:count].copy_(flat[:count], non_blocking=True))


@triton.jit
def save(
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


def saved(host: torch.Tensor, batch: int, n: int) -> None:
    """Keys and values of ``n`` tokens into scattered slots."""
    kv = host.view(-1, HEADS, BLOCK, 2 * DIM)
    # As a projection gives them: the heads of a token side by side.
    k, v = (torch.randn(batch, n, HEADS, DIM, dtype=kv.dtype, device="cuda").transpose(1, 2) for _ in range(2))
    size, blocks = 2 * k.numel() * k.itemsize, n // BLOCK
    slots = torch.randperm(len(kv), generator=torch.Generator().manual_seed(0))[: batch * blocks].int()
    slots = slots.view(batch, blocks).cuda()
    device, host_slots = torch.empty(batch * blocks, *kv.shape[1:], dtype=kv.dtype, device="cuda"), kv[: batch * blocks]

    def permute() -> None:
        parts = [x.unflatten(2, (blocks, BLOCK)).transpose(1, 2) for x in (k, v)]  # [batch, blocks, H, BLOCK, D]
        torch.cat(parts, dim=-1, out=device.view(batch, blocks, HEADS, BLOCK, 2 * DIM))

    def permute_and_copy() -> None:
        permute()
        host_slots.copy_(device, non_blocking=True)

    print(f"{batch} x {n} tokens to the host")
    report("one large copy", size, lambda: host_slots.copy_(device, non_blocking=True))
    report("permuted on the GPU", size, permute)
    report("permuted, then one large copy", size, permute_and_copy)

    def write(programs: int, warps: int) -> None:
        items = batch * blocks * HEADS
        strides = (k.stride(0), k.stride(1), k.stride(2), slots.stride(0))
        save[(programs,)](k, v, kv, slots, items, blocks, *strides, HEADS, BLOCK, DIM, num_warps=warps)

    for programs, warps in GRIDS:
        name = f"written in place, {programs} programs x {warps} warps"
        report(name, size, lambda programs=programs, warps=warps: write(programs, warps))
    kv[slots.flatten().cpu().long()] = 0
    write(64, 4)
    torch.cuda.synchronize()
    permute()
    assert torch.equal(kv[slots.flatten().cpu().long()], device.cpu()), "written wrongly"


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    host = torch.empty(POOL // 2, dtype=torch.bfloat16, pin_memory=True)
    host.copy_(torch.randn(host.shape, dtype=host.dtype, device="cuda"))
    for count in (64, 512, 8192):
        scattered(host, BLOCK, 2 * DIM, count, (8192, 16384, 32768) if count == 512 else (16384,))
    scattered(host, 8, 256, 8192, (4096,))
    for batch, n in ((1, 512), (1, 8192), (4, 8192)):
        saved(host, batch, n)


if __name__ == "__main__":
    main()
