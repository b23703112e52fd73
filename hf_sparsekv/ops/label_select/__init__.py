"""The tokens whose labels score best: in one launch where the GPU has clusters of blocks, otherwise in two steps."""

from __future__ import annotations

from functools import wraps

from .._dispatch import has_triton
from ..token_score import token_score
from ..topk_select import token_select
from . import reference

__all__ = ["label_select"]


@wraps(reference.label_select)
def label_select(q, codes, qparams, channels, rows, block_table, k, reduce, *, sinks, out=None):
    labels = codes, qparams, channels, rows, block_table
    if q.is_cuda and has_triton():
        from ..topk_select.cluster import select_by_labels
        from ..topk_select.config import Config

        found = select_by_labels(q, *labels, k, reduce, sinks, out, Config())
        if found is not None:
            return found
    scores = token_score(q, *labels, None, reduce, sinks=sinks, fill=False)
    return token_select(scores, None, k, codes.shape[2], rows=rows, out=out)
