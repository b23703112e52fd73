"""Two-level selection written a second time, slowly, over the keys of a stock ``DynamicCache``.

Nothing of the oracle comes from the package but the configuration's fields. Everything is recomputed at every step from
the plain keys and queries: which columns are sealed, the channels, the block bounds, the labels, the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from captured import Imitation
from models import build, model, prompt
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from hf_sparsekv import SparseCache

NAME = "two_level_oracle"


class LayerState:
    def __init__(self) -> None:
        self.queries: Tensor | None = None  # [batch, Hq, columns, D]
        self.full_blocks: list[int] = []  # of each row, blocks that had become old when the last forward ended
        self.channels: list[list[list[int]]] | None = None  # [row][head] -> channels
        self.norms: list[list[tuple[Tensor, Tensor]]] | None = None  # [row][head] -> mean and spread of each of these
        self.last_query: Tensor | None = None  # [batch, Hq, D]: what the lagging block choice goes by


class Oracle:
    """The tokens that each decode step must attend to, by the definitions in ``TokenConfig``'s documentation.

    Args:
        config: the configuration under test.
        lag: whether the block choice is one step old.
        level: what the configuration's level comes to; None: as it says.
        valid: bool ``[batch, columns]``, False for padding; the test sets it before each forward.
    """

    def __init__(self, config, lag: bool, level: str | None = None) -> None:
        self.config, self.lag, self.level = config, lag, level or config.level
        self.valid: Tensor | None = None
        self.layers: dict[int, LayerState] = {}
        self.attended = self.blocks = self.decode_calls = 0  # over all decode steps, layers, rows and KV heads

    # ------------------------------------------------------------------ a forward of one layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        state = self.layers.setdefault(layer, LayerState())
        fine = self.level != "block" and layer >= self.config.dense_layers
        past = 0 if state.queries is None else state.queries.shape[2]
        state.queries = query if past == 0 else torch.cat((state.queries, query), dim=2)
        length = key.shape[2]
        if fine and state.channels is None and length >= self.config.calibration_tokens:
            state.channels = self.choose_channels(state.queries, key)
            state.norms = self.measure_keys(state.channels, key)
        batch, heads, q = query.shape[0], key.shape[1], query.shape[2]
        group = query.shape[1] // heads
        allowed = torch.zeros(batch, heads, q, length, dtype=torch.bool)
        for row in range(batch):
            if q > 1:
                allowed[row] = self.valid[row, :length] & (torch.arange(length) <= past + torch.arange(q)[:, None])
                continue
            for head in range(heads):
                columns = self.decode_columns(state, layer, row, head, group, query, key)
                allowed[row, head, 0, columns] = True
                self.attended += len(columns)
        self.decode_calls += q == 1
        if layer < self.config.dense_layers:
            return dense_attention(query, key, value, allowed, group, scale)
        recent, before = self.config.window + self.config.max_draft, state.full_blocks
        old = [(len(self.real(row, length)) - recent) // self.config.block_size for row in range(batch)]
        state.full_blocks = [max(both) for both in zip(state.full_blocks or [0] * batch, old)]
        if self.lag and (not fine or state.channels is not None):
            # A step looks ahead if there is something to choose from before it seals a block, a prompt behind it.
            looks = self.looks_ahead(before if q == 1 else state.full_blocks)
            state.last_query = query[:, :, -1] if looks else None
        return dense_attention(query, key, value, allowed, group, scale)

    @property
    def kept_blocks(self) -> int:
        """Blocks that the coarse level keeps."""
        config, size = self.config, self.config.block_size
        if self.level == "block":
            return config.token_budget // size
        return config.num_blocks or max(128, -(-config.token_budget // size))

    def looks_ahead(self, full_blocks: list[int]) -> bool:
        """Rows of so many full blocks have more than is kept anyway."""
        return max(full_blocks) > self.kept_blocks

    def decode_columns(self, state, layer, row, head, group, query, key) -> list[int]:
        config, size = self.config, self.config.block_size
        length = key.shape[2]
        real = self.real(row, length)
        fine = self.level != "block"
        if layer < config.dense_layers or (fine and state.channels is None):
            return real
        sinks, near, free = self.parts(state, row, real)
        block_of = {c: i // size for i, c in enumerate(real)}
        mine = slice(head * group, (head + 1) * group)

        blocks = sorted({block_of[c] for c in free})
        if self.level != "token":
            keep = self.kept_blocks
            asking = state.last_query if self.lag else query[:, :, 0]
            if asking is not None:
                inside = {block: [c for c in free if block_of[c] == block] for block in blocks}
                scores = {b: self.block_bound(asking[row, mine], key[row, head, cs]) for b, cs in inside.items()}
                blocks = sorted(blocks, key=lambda b: (-scores[b], b))[:keep]
        candidates = [c for c in free if block_of[c] in blocks]
        if self.level == "block":
            return sorted({*sinks, *near, *candidates})
        score = self.token_scores(query[row, mine, 0], key[row, head], candidates, state, row, head)
        scores = dict(zip(candidates, score.tolist()))
        chosen = sorted(candidates, key=lambda c: (-scores[c], c))[: config.token_budget]
        return sorted({*sinks, *near, *chosen})

    # ------------------------------------------------------------------ definitions

    def token_scores(self, queries: Tensor, keys: Tensor, columns: list[int], state, row: int, head: int) -> Tensor:
        """Scores of these columns' labels for the queries of a KV head."""
        channels = state.channels[row][head]
        labels = self.labels(keys[columns][:, channels], *state.norms[row][head])
        each = queries[:, channels].float() @ labels.T  # [query heads, columns]
        return each.amax(0) if self.config.token_reduce == "max" else each.mean(0)

    def parts(self, state, row: int, real: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Columns of a row's tokens: sinks, those that are not in full blocks, and what can be chosen."""
        stored = (state.full_blocks[row] if state.full_blocks else 0) * self.config.block_size
        sinks = real[: self.config.sinks]
        return sinks, real[stored:], real[len(sinks) : stored]

    def real(self, row: int, length: int) -> list[int]:
        """The columns of a row that are no padding."""
        return self.valid[row, :length].nonzero().flatten().tolist()

    def block_bounds(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The largest q . k that a key inside the block's box could have, per query head."""
        return torch.maximum(queries * keys.amax(0), queries * keys.amin(0)).sum(1)

    def block_bound(self, queries: Tensor, keys: Tensor) -> float:
        """The same for the KV head."""
        bounds = self.block_bounds(queries, keys).tolist()
        return max(bounds) if self.config.token_reduce == "max" else sum(bounds) / len(bounds)

    def choose_channels(self, queries: Tensor, keys: Tensor) -> list[list[list[int]]]:
        batch, heads, length, dim = keys.shape
        group = queries.shape[1] // heads
        r = self.config.label_channels or min(dim, max(64, dim // 2), 128)
        rows = []
        for row in range(batch):
            real = self.real(row, length)
            picks = []
            for head in range(heads):
                mine = queries[row, head * group : (head + 1) * group][:, real]
                importance = mine.square().mean((0, 1)).sqrt() * keys[row, head, real].std(0, correction=0)
                picks.append(sorted(range(dim), key=lambda j: (-float(importance[j]), j))[:r])
            rows.append(picks)
        return rows

    def measure_keys(self, channels: list[list[list[int]]], keys: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
        """Mean and spread of the chosen channels, as if one more key deviated as much as all channels do."""
        found = []
        for row, heads in enumerate(channels):
            real = self.real(row, keys.shape[2])
            found.append([])
            for head, kept in enumerate(heads):
                k = keys[row, head, real].float()
                squares = (k - k.mean(0)).square()
                spread = ((squares.sum(0) + squares.mean()) / (len(real) + 1)).sqrt()
                found[-1].append((k.mean(0)[kept], spread[kept]))
        return found

    def labels(self, kept: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
        """Labels of tokens as kept, of their channels ``[tokens, r]``."""
        kept = ((kept.float() - mean) / spread).clamp(-6, 6)
        scale = ((kept.amax(1) - kept.amin(1)) / 15).half().float()[:, None]
        zero = kept.amin(1).half().float()[:, None]
        codes = ((kept - zero) / scale).nan_to_num(0.0).round().clamp(0, 15)
        return (codes * scale + zero) * spread + mean

    def crop(self, length: int) -> None:
        """Blocks that would leave the window short are open again, and then there is no choice to lag behind."""
        for state in self.layers.values():
            state.queries = state.queries[:, :, :length]
            tokens = [len(self.real(row, length)) for row in range(len(state.full_blocks))]
            most = [max(0, n - self.config.window) // self.config.block_size for n in tokens]
            kept = [min(both) for both in zip(state.full_blocks, most)]
            if kept != state.full_blocks:
                state.full_blocks, state.last_query = kept, None

    def map_rows(self, index: Tensor) -> None:
        self.valid = self.valid[index]
        for state in self.layers.values():
            state.queries = state.queries[index]
            state.channels = None if state.channels is None else [state.channels[i] for i in index.tolist()]
            state.norms = None if state.norms is None else [state.norms[i] for i in index.tolist()]
            state.last_query = None if state.last_query is None else state.last_query[index]
            state.full_blocks = [state.full_blocks[i] for i in index.tolist()]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, group: int, scale: float) -> Tensor:
    """Softmax attention over ``allowed [batch, H, q, n]``; a query without any (padding) gives zeros."""
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    allowed = allowed.repeat_interleave(group, 1)
    logits = (query @ key.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ value


_active: Oracle | None = None


@contextmanager
def asked(oracle: Oracle) -> Iterator[None]:
    """Models with ``attn_implementation=NAME`` attend as ``oracle`` says."""
    global _active
    _active = oracle
    try:
        yield
    finally:
        _active = None


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    # No mask function is registered under the name: transformers makes no mask, the oracle knows its columns.
    return _active.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


TOLERANCE = 2e-3  # of logits whose spread is about 10


def _worst(found: Iterable[float]) -> float:
    """The largest of some differences; NaN if one is, which ``max()`` may pass over."""
    return float(torch.tensor(list(found)).max())


class Race:
    """One model twice, with our cache and with an oracle over a stock cache, fed the same tokens.

    Attributes:
        runner: replays our steps, with ``captured``.
    """

    def __init__(self, ours: SparseCache, oracle: Oracle, name: str = "llama", captured: bool = False) -> None:
        self.ours, self.oracle, self.stock = ours, oracle, DynamicCache()
        self.model, self.plain = build(name, "sparsekv") if captured else model(name), model(name, NAME)
        self.mask: Tensor | None = None
        if captured:
            self.runner = Imitation(self.model)
            self.runner.install()

    @torch.no_grad()
    def logits(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the last column, ours and the oracle's. ``mask`` covers the new columns."""
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if self.mask is None else torch.cat((self.mask, mask), dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        self.oracle.valid = self.mask.bool()
        common = {"position_ids": positions, "logits_to_keep": 1}
        ours = self.model(ids, attention_mask=self.mask, past_key_values=self.ours, **common).logits[:, -1].clone()
        with asked(self.oracle):
            theirs = self.plain(ids, past_key_values=self.stock, **common).logits[:, -1]
        return ours, theirs

    def read(self, tokens: int, pads=None, seed: int = 0) -> float:
        """:meth:`feed` a prompt: of two rows with ``pads`` columns of padding, or of one."""
        start = prompt(2 if pads else 1, tokens, pads, seed=seed)
        return self.feed(start["input_ids"], start["attention_mask"])

    def feed(self, ids: Tensor, mask: Tensor | None = None) -> float:
        """The largest difference of the last column's logits."""
        ours, theirs = self.logits(ids, mask)
        return float((ours - theirs).abs().max())

    def run(self, steps: int, seed: int = 7) -> float:
        """Feed random tokens one by one; the largest difference of any logit."""
        tokens = prompt(self.mask.shape[0], steps, seed=seed)["input_ids"]
        return _worst(self.feed(token) for token in tokens.split(1, dim=1))

    def crop(self, remove: int) -> None:
        self.mask = self.mask[:, :-remove]
        self.ours.crop(-remove)
        self.stock.crop(-remove)
        self.oracle.crop(self.mask.shape[1])
        self.oracle.valid = self.mask.bool()

    def map_rows(self, index: Tensor) -> None:
        self.mask = self.mask[index]
        self.ours.reorder_cache(index)
        self.stock.reorder_cache(index)
        self.oracle.map_rows(index)

    def turns(self, removed: Sequence[int], seed: int = 2) -> float:
        """Two turns of three rows, crops by ``removed``, then rows as beams regroup them; the largest difference."""
        first = prompt(3, 100, (0, 5, 35))
        found = [self.feed(first["input_ids"], first["attention_mask"]), self.run(10)]
        second = prompt(3, 40, (17, 0, 39), seed=1)  # leaves holes in the middle of the rows
        found += [self.feed(second["input_ids"], second["attention_mask"]), self.run(10, seed)]
        for step, remove in enumerate(removed):
            self.crop(remove)
            found.append(self.run(10, step))
        for index in ([2, 0, 0], [1, 2], [0, 1, 1, 0]):
            self.map_rows(torch.tensor(index))
            found.append(self.run(8, seed=4))
        return _worst(found)
