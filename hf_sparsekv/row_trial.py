"""A trial on made-up input: do rows of one batch get the answers that they would get alone?

In continuous batching, rows differ in length, share blocks, and are read in chunks. This works only with some models.
They must take each token's position from ``position_ids``. Their rotary factors must depend on the token alone, and
prompt tokens must see no later ones. :func:`check_rows` tries it with some 100 made-up tokens, and reports what fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_sparsekv_config.tokens import TokenConfig

from .attention.mla import passes_on
from .attention.rotary import unfixed
from .cache import SparseCache
from .cache_name import cache_name
from .cuda_graph.optimize import runner_of
from .row_batch import no_positions, positions
from .transformers_compat import has_indexer

passes_on(__name__)

BLOCK, STEPS = 16, 3
LONG, SHORT, CHUNK = 21, 9, 8  # tokens of the rows' prompts, and of a chunk
# Largest relative distance from a row that is alone. Keys of the first layer differ by rounding only. In later layers
# rounding errors add up, and a mixture of experts may route a token or two differently (so the median counts).
SHARP = {torch.float32: 0.01, torch.float64: 0.01}
SHARP_16, LOOSE = 0.06, 0.25


class _Pass(NamedTuple):
    """Result of a forward pass: keys of each layer ``[rows, n, ...]``, and logits ``[rows, n, vocabulary]``."""

    keys: list[Tensor]
    logits: Tensor


class _Recording(SparseCache):
    """A cache that records the keys of the last pass. Caches made by :meth:`beside` record in the same list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: list[Tensor] = []
        self.last = 1 << 30  # layer that came last, of this cache: the first pass begins after others, too

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx <= self.last:
            self.given.clear()
        self.last = layer_idx
        # With latents (MLA) the second tensor has the positions.
        both = [t.transpose(1, 2).flatten(2) for t in (key_states, value_states)]
        self.given.append(torch.cat(both, dim=-1))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def beside(self) -> SparseCache:
        new = super().beside()
        new.given = self.given
        return new


def check_rows(model: nn.Module, max_length: int) -> None:
    """Check on made-up input that continuous batching gives each row of ``model`` the answer that it gets alone.

    It runs some fifteen forward passes, about 100 tokens together, in a cache of its own. The model, its mode and the
    random state do not change. An :class:`..Engine` does this when it opens. Call it once, in ``eval()`` mode, before
    you use ``cache.rows()`` directly.

    Args:
        model: with ``attn_implementation="sparsekv"``, inside :func:`..fixed_rotary` if its rotary factors need it.
        max_length: most tokens of a row.

    Raises:
        ValueError: rows would get other answers than alone; the message says which property does not hold.
    """
    if (why := why_not(model, max_length)) is not None:
        raise ValueError(why)


def why_not(model: nn.Module, max_length: int) -> str | None:
    """Why :func:`check_rows` refuses ``model``; None: it accepts it."""
    name = type(model).__name__
    if (why := no_positions(model) or unfixed(model, max_length)) is not None:
        return f"rows of {name} cannot share a batch: {why}"
    with torch.no_grad():
        failed = _Trial(model, max_length).failed()
    if failed is None:
        return None
    return (
        f"rows of {name} cannot share a batch: tried on made-up input, {failed}. Answers would depend on the other "
        "rows: use generate()"
    )


class _Trial:
    """The passes of a trial. Each check compares with rows that are alone in their cache and read in one pass."""

    def __init__(self, model: nn.Module, max_length: int) -> None:
        runner = runner_of(model)
        self.keyword = cache_name(model)
        self.run: Callable[..., Any] = model if runner is None else runner.original  # nothing is captured
        self.device = next(model.parameters()).device
        self.model_config = config = getattr(model, "config", None)
        kinds = getattr(config and config.get_text_config(decoder=True), "layer_types", None) or [""]
        # Rounding errors of layers before the first one that has keys add up, too.
        self.first_sharp = kinds[0] not in ("linear_attention", "conv", "mamba")
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.max_length = max_length
        size = max(max_length, 1)
        self.long, self.short = min(LONG, max(size - STEPS, 1)), min(SHORT, max(size - STEPS, 1))
        self.steps = min(STEPS, size - self.long)
        self.config = TokenConfig(block_size=BLOCK, window=BLOCK)
        if not has_indexer(getattr(model, "config", None)):  # else it chooses itself
            self.config = replace(self.config, token_budget=4096, calibration_tokens=BLOCK)

    def new_cache(self) -> _Recording:
        return _Recording(self.config, None, self.model_config)

    def ids(self, n: int, seed: int) -> Tensor:
        """Made-up tokens ``[1, n]``, the same each time."""
        return ((torch.arange(n, device=self.device) * (7 + 2 * seed) + 3 + 5 * seed) % self.vocabulary)[None]

    def read(self, ids: Tensor, cache: _Recording | None = None, at: int = 0, places: Tensor | None = None) -> _Pass:
        """A pass of tokens at ``places``, or from position ``at`` on."""
        cache = self.new_cache() if cache is None else cache
        places = positions(at, at + ids.shape[1], self.device) if places is None else places
        out = self.run(input_ids=ids, position_ids=places, **{self.keyword: cache}, use_cache=True)
        return _Pass(list(cache.given), out.logits)

    def failed(self) -> str | None:
        """The property that does not hold; None: all hold."""
        return self._at_other_positions() or self._in_rows()

    def _at_other_positions(self) -> str | None:
        """Rows at positions far apart, in one pass and each alone; the first once more, after the others."""
        n = min(4, self.max_length)
        starts = sorted({max(self.max_length // part - n, 0) for part in (1, 3, 12)})
        ids = self.ids(n, 2)
        places = torch.arange(n, device=self.device) + torch.tensor(starts, device=self.device)[:, None]
        alone = [self.read(ids, places=row[None]) for row in places]
        together = self.read(ids.expand(len(places), -1), places=places)
        again = self.read(ids, places=places[:1])
        for row, each in enumerate(alone):
            if not self._alike(each, _Pass([k[row : row + 1] for k in together.keys], together.logits[row : row + 1])):
                return "a token's keys or logits depend on the positions of other rows in its forward pass"
        if not self._alike(alone[0], again):
            return "a token's keys or logits depend on earlier forward passes"
        return None

    def _in_rows(self) -> str | None:
        """Two rows of different lengths, one read in chunks and one at once, that decode together."""
        lengths = self.long, self.short
        ids = [self.ids(n + self.steps, seed) for seed, n in enumerate(lengths)]
        alone = [self.read(each) for each in ids]
        cache = self.new_cache()
        rows = cache.rows(2, self.long + self.steps)
        for each, n, whole, chunk in zip(ids, lengths, alone, (CHUNK, self.short)):
            one, at = cache.beside(), 0
            for part in each[:, :n].split(chunk, dim=1):
                here = self.read(part, one, at)
                if not self._alike(_part(whole, at, at + part.shape[1]), here):
                    return (
                        "tokens of a prompt attend to later ones, or count from its end: read in chunks, or after a "
                        "shared prefix, they are others than if read at once"
                    )
                at += part.shape[1]
            rows.adopt(one)
            rows.join(one)
        made = []
        for step in range(self.steps):
            tokens = torch.cat([each[0, n + step, None] for each, n in zip(ids, lengths)])
            logits = rows.step(self.run, tokens).clone()
            made.append(_Pass(list(cache.given), logits[:, None]))
        for row, n in enumerate(lengths if made else ()):
            keys = [torch.cat([k[row : row + 1] for k in layer], dim=1) for layer in zip(*(one.keys for one in made))]
            here = _Pass(keys, torch.cat([one.logits[row : row + 1] for one in made], dim=1))
            if not self._alike(_part(alone[row], n, n + self.steps), here):
                return "a row that decodes beside one of another length is another one than alone"
        return None

    def _alike(self, expected: _Pass, found: _Pass) -> bool:
        """They differ by rounding alone."""
        sharp = SHARP.get(expected.keys[0].dtype, SHARP_16) if self.first_sharp else LOOSE
        if _distance(expected.keys[0], found.keys[0]) > sharp:
            return False
        each = (*zip(expected.keys[1:], found.keys[1:]), (expected.logits, found.logits))
        return all(_distance(a, b) <= LOOSE for a, b in each)


def _part(whole: _Pass, start: int, end: int) -> _Pass:
    return _Pass([k[:, start:end] for k in whole.keys], whole.logits[:, start:end])


def _distance(expected: Tensor, found: Tensor) -> float:
    """Relative distance of ``[rows, n, ...]``, the median over tokens."""
    a, b = (torch.nan_to_num(t.float()) for t in (expected, found))
    far = (a - b).flatten(2).norm(dim=-1) / a.flatten(2).norm(dim=-1).clamp_min(1e-6)
    return float(far.median())
