"""Audits of ``generate()``: each token that a sparse step has drawn is compared with full attention, in hindsight.

The text is the one that comes out without: its loop, its cache and its random numbers are left alone. Full attention
reads the text over a copy of the cache, an interval at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_sparsekv_config.audit import AuditConfig

from ..attention.rotary import switches
from ..cache_name import NAMES
from ..kv.audited import NUMBERS, Audited
from ..layers.cache_state import CacheState
from ..layers.kinds import face
from ..prefix import PrefixCache
from ..ranks import ranks_of
from ..transformers_compat import has_indexer
from .call import PLAIN, Call
from .exact_copy import exact_copy
from .limit import Limited
from .losses import losses
from .passes import logits_of
from .recording import Recorder, Watched

_OF_THE_LOOP = ("tokenizer", "output_hidden_states")  # arguments that passes of ours can do without
CHUNK = 2048  # tokens of a row that a pass reads at most, where an earlier answer has to be read again


def check_of(config: AuditConfig) -> Audit | Limited:
    """The check that ``config`` asks for."""
    return Audit(config) if config.max_loss is None else Limited(config)


@dataclass(frozen=True)
class Audit:
    """An audit that leaves the text as it is, as :func:`..generating.sparse` was asked for it."""

    config: AuditConfig = field(default_factory=AuditConfig)

    def check(self, cache: CacheState) -> None:
        """Raise ``ValueError`` if no exact pass can be had beside ``cache``."""
        if cache.config.prefill is not None:
            raise ValueError(
                "audit=True compares with full attention over an exact prompt: leave prefill out, or audit; "
                "stats().prompts says what sparse prompts covered"
            )
        if cache.offload_config is not None and cache.offload_config.kv_dtype is not None:
            raise ValueError(
                "audit=True compares with full attention, and keys and values of kv_dtype are rounded: leave kv_dtype "
                "out, or audit"
            )
        if isinstance(cache, PrefixCache):
            raise ValueError("audit=True is for caches that decode sparsely: a PrefixCache attends to everything")
        if "second" in cache.shared.places:
            raise ValueError(
                "audit=True is not for blocks on a second device: full attention cannot read them. Leave audit out, or "
                "use offload=True"
            )

    def begin(self, cache: CacheState) -> None:
        """The texts of ``cache`` are audited from here on; raises as :meth:`check`."""
        self.check(cache)
        cache.row_table.exactness.begin(self, everything=False)

    def generate(self, call: Call) -> Any:
        """The text of the model's own loop."""
        _check_call(call)
        return _Auditing(call, self.config.interval).run()

    def refuse(self, what: str) -> None:
        """Raise ``ValueError`` for another loop than that of greedy decoding and sampling."""
        raise ValueError(f"audit=True is for greedy decoding and sampling, not for {what}: leave audit out, or {what}")

    def __str__(self) -> str:
        return f"audited each {self.config.interval} tokens"


def _check_call(call: Call) -> None:
    """Raise ``ValueError`` if full attention cannot read the text of a call again."""
    model, cache, mask = call.model, call.cache, call.kwargs.get("attention_mask")
    if cache.model_config is None:
        cache.bind(model.config.get_text_config(decoder=True))
    others = [name for name, value in call.kwargs.items() if value is not None and name not in {*PLAIN, *_OF_THE_LOOP}]
    if others:
        raise ValueError(f"audit=True reads texts of token ids, and this call has {', '.join(others)}: leave audit out")
    if mask is None or mask.shape != call.ids.shape:
        raise ValueError(
            "audit=True reads the text again, so it needs all of its tokens: give input_ids with an attention_mask "
            "[batch, columns], of the whole conversation, and no inputs_embeds"
        )
    if model.training:
        raise ValueError("audit=True needs the model in eval mode: dropout draws numbers in each pass. Call eval()")
    if call.synced_gpus or ranks_of(model) is not None:
        raise ValueError("audit=True is not for models on several processes: leave audit out")
    if has_indexer(cache.model_config):
        raise ValueError(
            "audit=True is not for models with an indexer: they select tokens without sparse attention too"
        )
    if not all(face(layer).can_take_back(1) for layer in cache.layers):
        raise ValueError(
            "audit=True is not for models with recurrent layers or chunked attention: an exact pass over several "
            "tokens cannot go on from their states. Leave audit out"
        )
    longest = call.criteria.max_length
    if any(longest is None or longest > switch.tokens for switch in switches(model)):
        raise ValueError(
            "audit=True is not for texts that may pass the length at which the model's rotary factors change: give a "
            "max_new_tokens that ends before it"
        )
    exact = cache.row_table.exactness.inexact_from
    if exact is not None and not (exact and all(face(layer).selects for layer in cache.layers)):
        raise ValueError(
            "audit=True starts from keys and values of full attention, and this cache cannot go back to any: leave "
            "past_key_values out, or call its reset()"
        )


class _Auditing:
    """One call that is audited.

    Args:
        interval: tokens of a row between two passes.
    """

    def __init__(self, call: Call, interval: int) -> None:
        self.call, self.interval = call, interval
        head = call.model.get_output_embeddings()
        dtype = getattr(getattr(head, "weight", None), "dtype", torch.float32)
        self.recorder = Recorder(dtype if dtype.is_floating_point else torch.float32)
        self.watched = Watched(call.criteria, self._told)
        self.log = call.cache.row_table.exactness.audited or Audited()
        self.copy: CacheState | None = None  # made with the first token
        self.name = next(name for name in NAMES if name in call.kwargs)
        left_out = {self.name, *_OF_THE_LOOP}
        self.kwargs = {name: value for name, value in call.kwargs.items() if name not in left_out}
        self.columns = self.audited = call.ids.shape[1]  # that self.kwargs tell of; of the text that is compared

    def run(self) -> Any:
        """Run the loop: its result."""
        call = self.call
        call.processors, call.criteria = LogitsProcessorList([self.recorder, *call.processors]), self.watched
        try:
            out = call.plain()
            self._audit(out if isinstance(out, Tensor) else out.sequences)
        finally:
            self.copy = None  # now: criteria and this object hold each other
            self.recorder.kept.clear()
        return out

    def _told(self, ids: Tensor) -> None:
        """There is another token, the last column of ``ids``; all columns before it are cached."""
        if self.copy is None:
            longest = self.call.criteria.max_length
            self.copy = exact_copy(self.call.cache, 0 if longest is None else longest - ids.shape[1])
            self.call.cache.row_table.exactness.audited = self.log  # not before: a first prompt clears it
        if len(self.recorder.kept) == self.interval:
            self._audit(ids)

    def _audit(self, ids: Tensor) -> None:
        """Compare the last tokens of ``ids [batch, n]``, which were not compared yet."""
        n, first = ids.shape[1], self.audited
        new = max(0, n - first)
        kept, ended = self.recorder.kept[:new], self.watched.done[:new]
        self.recorder.kept, self.watched.done = [], self.watched.done[-1:]  # one token too many may have been drawn
        self.audited = n
        if not new or self.copy is None:
            return
        known = n - 1 - max(self.copy.get_seq_length(), first - 1)  # the first token may be one of an exact prompt
        tokens = ids[:, first:]
        numbers, sparse = tokens.new_zeros((*tokens.shape, NUMBERS), dtype=torch.float32), torch.zeros_like(tokens)
        if known:
            full = self._read(ids[:, :-1], known).to(ids.device)
            found = losses(full, torch.stack(kept[new - known :], dim=1), tokens[:, new - known :])
            numbers[:, new - known :], sparse[:, new - known :] = found.numbers, 1
        counts = (~torch.stack(ended, dim=1)).sum(1).tolist()
        self.log.add(counts, [first] * len(ids), tokens, numbers, sparse.bool())

    def _read(self, ids: Tensor, kept: int) -> Tensor:
        """Full attention's logits at the last columns of ``ids [batch, n]``: ``[batch, kept, vocabulary]``."""
        copy, n, found = cast(CacheState, self.copy), ids.shape[1], []
        update = self.call.model._update_model_kwargs_for_generation
        self.kwargs = update({}, self.kwargs, num_new_tokens=n - self.columns) if n > self.columns else self.kwargs
        self.columns = max(n, self.columns)
        with torch.no_grad():
            for start in range(copy.get_seq_length(), n, CHUNK):
                end = min(start + CHUNK, n)
                asked = max(0, min(end - start, end - (n - kept)))
                kwargs = {name: _until(value, end) for name, value in self.kwargs.items()} | {self.name: copy}
                logits = logits_of(self.call.model, ids[:, :end], end - start, max(asked, 1), kwargs)
                if asked:
                    found.append(logits)
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _until(value: Any, columns: int) -> Any:
    """An argument of a forward pass for the first ``columns`` of a text."""
    return value[..., :columns] if isinstance(value, Tensor) and value.ndim >= 2 else value
