"""Whether a forward pass fits what a layer has cached.

These checks come before anything is stored, and change nothing in the layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention.masks import is_whole, seen_columns
from ..kv.rows import Rows
from ..kv.store import LayerStore


def check_tokens(store: LayerStore | None, index: int, k: Tensor, v: Tensor) -> Rows | None:
    """Check that ``k, v [batch, H, q, D]`` can follow what layer ``index`` has cached.

    Returns:
        The cached rows; None: nothing is cached.

    Raises:
        ValueError: they cannot.
    """
    before = None if store is None else store.held
    if store is None or before is None or not before.columns:
        return None
    if k.shape[0] != store.batch:
        raise ValueError(
            f"the batch size changed from {store.batch} to {k.shape[0]} in mid-cache: use a new cache, or "
            "batch_repeat_interleave() / batch_select_indices() before"
        )
    held = (store.heads, store.split, store.width - store.split)
    if (k.shape[1], k.shape[3], v.shape[3]) != held:
        raise ValueError(
            f"layer {index} caches {held[0]} KV heads of {held[1]} + {held[2]} channels, "
            f"got {k.shape[1]} of {k.shape[3]} + {v.shape[3]}: this cache was filled by another model"
        )
    for name, mine, given in (("dtype", store.dtype, k.dtype), ("device", store.device, k.device)):
        if mine != given:
            raise ValueError(
                f"layer {index} caches keys of {name} {mine}, got {given}: keep one {name} "
                "(inside or outside of torch.autocast), or use a new cache"
            )
    return before


def fits(store: LayerStore, k: Tensor, v: Tensor, latent: bool) -> bool:
    """The store could have been made for ``k, v [batch, H, q, D]``."""
    if any(len(t) != store.batch for t in (store.recent_kv, store.counters.attended, store.counters.from_host)):
        return False  # a change of rows stopped half-way
    mine = (store.batch, store.heads, store.split, store.width - store.split, store.latent, store.dtype, store.device)
    return mine == (k.shape[0], k.shape[1], k.shape[3], v.shape[3], latent, k.dtype, k.device)


def check_mask(store: LayerStore, mask: Tensor, past: int, drop_tokens: Callable[[Tensor], bool]) -> None:
    """Hold the tokens that the mask shows, when a pass begins: selection and attention are to agree with it.

    Args:
        mask: of ``past`` cached columns and the new ones.
        drop_tokens: see :func:`.changes.drop_tokens`.

    Raises:
        ValueError: it shows padding, or hides tokens before others that it shows.
    """
    rows = store.held
    padded = rows.valid is not None
    if mask.ndim == 4:
        if padded and bool((seen_columns(mask, past) & ~rows.valid_columns(store.device)).any()):
            raise ValueError(
                "a 4-D attention_mask shows columns that were padding when they were cached, which keep no keys: "
                "hide them, or start a new cache"
            )
        return
    # Rows with padding may have been left out, or the columns that had it: then only the device knows.
    if is_whole(mask) and not padded:
        return
    held, shown = rows.valid_columns(store.device), mask[:, :past].bool().expand(store.batch, -1)
    if torch.equal(held, shown) or drop_tokens(shown):
        return
    what = "shows padding again" if bool((shown & ~held).any()) else "hides tokens before others that it shows"
    raise ValueError(
        f"attention_mask differs from the one these tokens were cached with: it {what}. A later mask may hide the "
        "last tokens of a row, such as the padding after its answer, and nothing else: pass the same values for "
        "the other cached columns, or start a new cache"
    )


def moves_itself(held: object, *args: object, **kwargs: object) -> None:
    """In place of ``offload()`` and ``prefetch()`` of transformers' caches and layers, which move a whole layer.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a sparse cache moves its blocks by itself, those that a step chooses: leave offload() and prefetch() out, and "
        "make the cache with OffloadConfig(), or sparse(model, offload=True), to keep keys and values in host memory"
    )
