"""Exact attention of one query per row over chosen cached tokens: the launches.

The tokens of a row and KV head are split over several programs, and a second kernel merges the parts. How many programs
there are depends on shapes alone; over keys and values, which row's tokens they take depends on the lengths of all rows
(:mod:`.share`).
"""

from __future__ import annotations

import torch
import triton

from ..._dispatch import require_dense_rows, require_rows
from ..._layout import empty_parts
from ..._operands import PagedKV, Pages, Query, Rows, Scales, Table, Tokens, operand
from ..._overlap import launch
from .cluster import attend_clusters
from .config import config as default
from .config import is_native
from .latents import sparse_decode_latent_blocks_kernel, sparse_decode_latent_tokens_kernel
from .merge import merge
from .reference import check_means, check_scales, has_latents
from .share import Kinds, batch_constant, programs
from .split import Logits, Means, Parts, Recent, Stored, sparse_decode_split_kernel


def sparse_decode(
    q,
    kv,
    rows,
    block_table,
    ids,
    recent_kv,
    *,
    granularity,
    value_dim,
    sinks,
    scale,
    softcap=None,
    sink_logits=None,
    attended=None,
    pages=None,
    page_ids=None,
    from_host=None,
    lse=None,
    used=None,
    means=None,
    mean_tokens=None,
    columns=None,
    scales=None,
    out=None,
    config=None,
):
    """As ``reference.sparse_decode``; ``config`` (:class:`.config.Config`) replaces the one for these shapes."""
    batch, q_heads, dk = q.shape
    heads, block_size = kv.shape[1:3]
    group = q_heads // heads
    require_rows(rows, batch)
    require_dense_rows(kv=kv, block_table=block_table, ids=ids, recent_kv=recent_kv, sink_logits=sink_logits)
    require_dense_rows(pages=pages, page_ids=page_ids, means=means, columns=columns, scales=scales)
    check_means(means, mean_tokens, granularity, block_size, pages is not None, columns)
    latents = has_latents(kv, q)
    check_scales(kv, scales, q.shape[-1])
    if pages is not None and granularity == "all":
        raise ValueError("page ids are for granularity 'token' or 'block', not for granularity='all'")
    if used is not None and granularity != "token":
        raise ValueError(f"used goes with granularity='token', not {granularity!r}: give fewer ids instead")
    if granularity == "token":
        n = ids.shape[-1]
    elif granularity == "block":
        n = ids.shape[-1] * block_size
    elif granularity == "all":
        n, ids = block_table.shape[-1] * block_size, None
    else:
        raise ValueError(f"granularity must be 'token', 'block' or 'all', got {granularity!r}")
    first, end = sinks if granularity == "all" else 0, recent_kv.shape[2]
    config = config or default(q, kv, recent_kv, value_dim, granularity, means is not None)
    if out is None:
        out = torch.empty(batch, q_heads, value_dim, dtype=q.dtype, device=q.device)
    # Lists with a length per head (`used`) keep the parts below: a longer list gets more of them, where a cluster has
    # as many blocks for a short one.
    clusters = config.clusters is not False and granularity == "token" and used is None
    if clusters and not latents and softcap is None:
        about = {"attended": attended, "from_host": from_host, "lse": lse, "sink_logits": sink_logits}
        listed = {"pages": pages, "means": means, "mean_tokens": mean_tokens, "columns": columns, "scales": scales}
        how = {"sinks": sinks, "scale": scale, "clusters": config.clusters, "out": out}
        if attend_clusters(q, kv, rows, block_table, ids, recent_kv, **about, **listed, **how):
            return out
    tile, span = config.tile, 1 if means is None else mean_tokens // block_size
    if latents and granularity != "token":  # a tile is within a block
        tile = min(tile, block_size)
    spans = 0 if means is None else triton.cdiv(block_table.shape[1], span)
    head_tiles = triton.cdiv(group, config.heads)
    if latents:  # each row has equally many, first those of one list of tiles, then those of the means
        each = max(1, config.programs // (batch * heads * head_tiles))
        near = triton.cdiv(n + end - first, tile)
        near = max(1, triton.cdiv(near, max(1, triton.cdiv(near, each))))
        by_means = triton.cdiv(spans, tile)
        by_row = near + triton.cdiv(by_means, max(1, triton.cdiv(by_means, each)))
        parts = batch * by_row
        beside = heads  # KV heads that have such parts each
    else:
        most = Kinds(*(triton.cdiv(tokens, tile) for tokens in (n, end - first, spans)))
        beside = heads if used is None else 1
        aim, parts = programs(config.programs // beside, batch * heads // beside, most)
    sizes = parts * beside * group * value_dim, parts * beside * group, parts * beside, 2 * batch * heads
    held = empty_parts(sizes, torch.float32, q.device)
    held = Parts(*held[:3], held[3].view(torch.int32))
    recent = Recent(*operand(Tokens, recent_kv), sinks, first, end)
    tensors = operand(Query, q), operand(PagedKV, kv), operand(Pages, pages), recent
    table, listed = operand(Table, block_table), operand(Rows, ids)
    page_ids, counted = operand(Rows, page_ids), operand(Rows, from_host)
    stand = None
    if means is not None:
        listed_columns = operand(Rows, ids if columns is None else columns)
        stand = Means(means, *means.stride()[:2], *listed_columns, span)
    logits = Logits(float(scale), None if softcap is None else float(softcap))
    fixed = {
        "NATIVE": is_native(q, kv if scales is None else recent_kv, recent_kv),
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "DK": dk,
        "DV": value_dim,
        "BN": tile,
        "STAGES": config.stages,
        "num_warps": config.warps,
    }
    if latents:
        fixed["BH"] = config.heads
        grid = parts * head_tiles, heads
        if granularity == "token":
            args = *tensors, rows, table, listed, operand(Rows, used), stand, held, counted, by_row, near, n, logits
            launch(sparse_decode_latent_tokens_kernel, grid, q, *args, **fixed)
        else:
            strides = {t.stride(-2) for t in (kv, recent_kv, pages) if t is not None}  # distance of two tokens' rows
            fixed["STEP"] = strides.pop() if len(strides) == 1 else 0
            args = *tensors, rows, table, listed, page_ids, held, counted, by_row, n, logits
            launch(sparse_decode_latent_blocks_kernel, grid, q, *args, **fixed)
    else:
        used = operand(Rows, used)
        tensors = tensors[0], Stored(*tensors[1], *(operand(Scales, scales) or ())), *tensors[2:]
        lists = batch * heads // beside
        shared = held._replace(aim=aim), counted, lists, n
        args = *tensors, rows, table, listed, page_ids, used, stand, *shared, logits
        fixed |= {"BATCH": batch_constant(lists), "HEADS": heads}
        if granularity == "all" and config.warps == 4 and max(dk, value_dim) <= 128:
            fixed["maxnreg"] = 128  # or Triton takes 152, and a processor holds three programs instead of four
        launch(sparse_decode_split_kernel, (parts, beside), q, *args, GRANULARITY=granularity, **fixed)
    # Not how many there are: that grows with the table, and another tile is another kernel.
    each = config.programs // max(1, batch * heads * head_tiles)
    merge(held, sink_logits, attended, lse, out, heads, beside, each)
    return out
