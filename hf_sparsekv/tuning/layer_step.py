"""One layer's decode step, to be timed: the tensors of its store, and the operators over them.

The tensors have the shapes, strides and physical block order that ``LayerStore`` gives them after a prompt. Keys and
values are random, and bounds and labels are computed from the keys. Every buffer that a step writes is allocated
beforehand, so a captured step allocates only the operators' scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_sparsekv_config.tokens import TokenConfig

from ..kv.block_ids import bucket
from ..kv.ring import ring_tokens
from ..layers.dense_drafts import attend_at_once
from ..ops._device import gpu
from ..ops.attention.sparse_decode import sparse_decode
from ..ops.selection.block_score import block_score
from ..ops.selection.token_score import token_score
from ..ops.selection.topk_select import block_select, token_select
from ..ops.storage.append import append
from ..ops.storage.quantise import quantise
from ..ops.storage.seal import quantise_labels
from ..policies.label_index import default_channels
from ..types import AttentionParams

MODELS = {
    "qwen3-8b": {"q_heads": 32, "heads": 8, "dim": 128, "value_dim": None},
    "glm-4.7-flash": {"q_heads": 20, "heads": 1, "dim": 576, "value_dim": 512},
    "deepseek-v3": {"q_heads": 128, "heads": 1, "dim": 576, "value_dim": 512},
}
ROUND_BYTES = 1 << 27  # a round of inputs reads at least this much if it can, and twice the L2 cache
MEMORY = 0.45  # share of the device's memory for the sets of inputs
VERIFIED = (4, 8, 16)  # drafts of a pass, with the token before them
PIECE = 1 << 28  # entries of the stored keys that are indexed at once, which bounds the temporaries


BLOCKS = TokenConfig(level="two_level", num_blocks=128)


@dataclass(frozen=True)
class Shape:
    """One layer at one batch and context."""

    batch: int
    context: int
    q_heads: int = 32
    heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    config: TokenConfig = field(default_factory=lambda: BLOCKS)
    value_dim: int | None = None  # latents only: the first `value_dim` numbers of a key are its value

    @property
    def case(self) -> str:
        """Name of the shape in result rows: a model's name, or the numbers."""
        for name, sizes in MODELS.items():
            if sizes == {size: getattr(self, size) for size in sizes}:
                return name
        return f"q{self.q_heads}-kv{self.heads}-d{self.dim}" + (f"-v{self.value_dim}" if self.value_dim else "")

    @property
    def channels(self) -> int:
        return self.config.label_channels or default_channels(self.dim)

    @property
    def width(self) -> int:
        """Numbers stored per token and KV head."""
        return self.dim if self.value_dim else 2 * self.dim

    @property
    def values(self) -> int:
        """Channels of a value."""
        return self.value_dim or self.dim

    @property
    def recent(self) -> int:
        """Tokens in the ring after the step has appended its token: the most there can be."""
        return self.config.window + self.config.max_draft + self.config.block_size - 1

    @property
    def full_blocks(self) -> int:
        return (self.context - self.recent) // self.config.block_size

    @property
    def length(self) -> int:
        """Columns cached when the step attends."""
        return self.full_blocks * self.config.block_size + self.recent

    def bytes_read(self, variant: str) -> int:
        """Fewest bytes that a step must read; ``variant``: ``two_level`` or ``dense``."""
        item = self.dtype.itemsize
        token = self.width * item
        stored = self.full_blocks * self.config.block_size
        bounds = self.full_blocks * 2 * self.dim * item
        label = self.channels // 2 + 4
        recent = (self.config.sinks + self.recent) * token
        chosen = min(self.config.budget, stored) * token
        kept = min(self.config.coarse_blocks, self.full_blocks) * self.config.block_size
        each = {
            "two_level": bounds + kept * label + chosen + recent,
            "dense": stored * token + recent,
        }
        return self.batch * self.heads * each[variant]


class Layer:
    """The store of one layer just before a decode step, and the steps that the benchmark times."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self.shape = s = shape
        config, size = s.config, s.config.block_size
        if s.full_blocks < config.coarse_blocks:
            raise ValueError(
                f"a context of {s.context} has {s.full_blocks} stored blocks, {config.coarse_blocks} are chosen"
            )
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=s.dtype, device=device, generator=generator)

        def empty(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        self.q = randn(s.batch, s.q_heads, s.dim)
        # In the form that update() gets: for latents, the latent and its rotary part.
        self.k, self.v = randn(s.batch, s.heads, 1, s.width).split((s.values, s.width - s.values), dim=-1)

        # Physical blocks in the order in which a prompt allocates them: all rows' first blocks, then the second ones.
        count = s.full_blocks * s.batch
        self.block_table = torch.full((s.batch, bucket(s.full_blocks)), -1, dtype=torch.int32, device=device)
        order = torch.arange(count, dtype=torch.int32, device=device)
        self.block_table[:, : s.full_blocks] = order.view(s.full_blocks, s.batch).T
        self.kv = empty(count, s.heads, size, s.width, dtype=s.dtype)
        self.scales: Tensor | None = None  # scales of codes
        every = torch.rand(s.batch, s.heads, s.dim, device=device, generator=generator)
        self.channels = every.argsort(-1)[..., : s.channels].int().contiguous()
        self.norms = torch.zeros(s.batch, s.heads, 2, s.channels, device=device)
        self.norms[:, :, 1] = 1.0
        self.bounds = empty(count, s.heads, 2, s.dim, dtype=s.dtype)
        self.codes = empty(count, s.heads, size, s.channels // 2, dtype=torch.uint8)
        self.qparams = empty(count, s.heads, size, 2, dtype=torch.float16)
        piece = max(1, PIECE // (s.batch * s.heads * size * s.width)) * s.batch
        for lo in range(0, count, piece):
            self._index(slice(lo, lo + piece), generator)

        self.sinks, ring = config.sinks, ring_tokens(config)
        self.recent_kv = randn(s.batch, s.heads, self.sinks + ring, s.width)
        self.newest = self.sinks + (s.length - 1) % ring  # ring position of the step's token
        counts = torch.tensor([s.length, s.full_blocks * size], dtype=torch.int32, device=device)
        self.rows = counts.repeat(s.batch, 1)
        self.past = self.rows[:, 0] - 1

        kept, cap = config.coarse_blocks, self.block_table.shape[1]
        self.block_scores = empty(s.batch, s.heads, cap, dtype=torch.float32)
        self.blocks = empty(s.batch, s.heads, kept, dtype=torch.int32)
        # The preceding step's selection, for the lagged step: other blocks than this query's own.
        chosen = torch.rand(s.batch, s.heads, s.full_blocks, device=device, generator=generator).argsort(-1)
        self.previous = chosen[..., :kept].sort(-1).values.int().contiguous()
        self.token_scores = empty(s.batch, s.heads, kept * size, dtype=torch.float32)
        self.tokens = empty(s.batch, s.heads, config.budget, dtype=torch.int32)
        self.few_blocks = empty(s.batch, s.heads, max(1, config.budget // size), dtype=torch.int32)
        self.attended = torch.zeros(s.batch, s.heads, dtype=torch.int64, device=device)
        self.out = empty(s.batch, s.q_heads, s.values, dtype=s.dtype)

    def _index(self, at: slice, generator: torch.Generator) -> None:
        """Fill physical blocks ``at``: keys and values, and their index."""
        s, kv = self.shape, self.kv[at]
        kv.normal_(generator=generator)
        keys = kv[..., : s.dim]
        self.bounds[at, :, 0], self.bounds[at, :, 1] = keys.amax(2), keys.amin(2)
        row = torch.arange(kv.shape[0], device=kv.device) % s.batch
        channel = self.channels.long()[row][:, :, None].expand(-1, -1, kv.shape[2], -1)
        self.codes[at], self.qparams[at] = quantise_labels(keys.gather(-1, channel))

    def encode(self) -> None:
        """Convert stored keys and values to 8-bit codes, as with ``OffloadConfig.kv_dtype``."""
        self.kv, self.scales = quantise(self.kv, self.shape.dim)

    # ------------------------------------------------------------------ operators

    def append(self) -> None:
        append(self.k, self.v, None, self.recent_kv, self.past, self.sinks)

    def block_score(self) -> None:
        config = self.shape.config
        live = {"tokens": config.block_size, "sinks": self.sinks}
        block_score(
            self.q, self.bounds, self.rows, self.block_table, config.token_reduce, **live, out=self.block_scores
        )

    def block_select(self) -> None:
        self._best_blocks(self.blocks)

    def _best_blocks(self, out: Tensor) -> None:
        size = self.shape.config.block_size
        block_select(self.block_scores, out.shape[-1], rows=self.rows, block_size=size, out=out)

    def token_score(self, blocks: Tensor | None, out: Tensor) -> None:
        reduce = self.shape.config.token_reduce
        labels = (self.codes, self.qparams, self.channels, self.rows)
        named = {"sinks": self.sinks, "norms": self.norms, "out": out}
        token_score(self.q, *labels, self.block_table, blocks, reduce, **named)

    def token_select(self, blocks: Tensor | None, scores: Tensor) -> None:
        config, rows = self.shape.config, self.rows if blocks is None else None
        token_select(scores, blocks, self.tokens.shape[-1], config.block_size, rows=rows, out=self.tokens)

    def decode(self, ids: Tensor | None, granularity: str, used: Tensor | None = None) -> None:
        sparse_decode(
            self.q,
            self.kv,
            self.rows,
            self.block_table,
            ids,
            self.recent_kv,
            granularity=granularity,
            value_dim=self.shape.values,
            sinks=self.sinks,
            scale=self.shape.dim**-0.5,
            attended=self.attended,
            used=used,
            scales=self.scales,
            out=self.out,
        )

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Two-level selection for this query, then attention."""
        self.append()
        self.block_score()
        self.block_select()
        self._fine(self.blocks)

    def lagged_step(self, side: torch.cuda.Stream | None = None) -> None:
        """Tokens within the previous step's blocks; the next step's blocks on a stream that rejoins."""
        if side is None:
            self.append()
            self._fine(self.previous)
            self.block_score()
            self.block_select()
            return
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self.block_score()
            self.block_select()
        self.append()
        self._fine(self.previous)
        main.wait_stream(side)

    def _fine(self, blocks: Tensor) -> None:
        self.token_score(blocks, self.token_scores)
        self.token_select(blocks, self.token_scores)
        self.decode(self.tokens, "token")

    def dense_step(self) -> None:
        self.append()
        self.decode(None, "all")

    def verification(self, tokens: int) -> Callable[[], None]:
        """A pass over so many drafts of each row, which attend to everything."""
        s = self.shape
        q = self.q[:, :, None].expand(-1, -1, tokens, -1).contiguous()
        k, v = (one.expand(-1, -1, tokens, -1).contiguous() for one in (self.k, self.v))
        store: Any = SimpleNamespace(
            latent=s.value_dim is not None,
            heads=s.heads,
            pool=SimpleNamespace(kv=self.kv, fields={}),
            table=self.block_table,
            recent_kv=self.recent_kv,
            value_dim=s.values,
            sinks=self.sinks,
            counters=self,
        )

        def run() -> None:
            attend_at_once(store, q, k, v, self.rows, AttentionParams(scale=s.dim**-0.5))
            append(k, v, None, self.recent_kv, self.past, self.sinks)

        return run

    def block_step(self) -> None:
        """All tokens of the best blocks (Quest)."""
        self.append()
        self.block_score()
        self._best_blocks(self.few_blocks)
        self.decode(self.few_blocks, "block")

    def token_step(self, scores: Tensor) -> None:
        """The best tokens of all (Double Sparsity). ``scores`` is a buffer for all tokens."""
        self.append()
        self.token_score(None, scores)
        self.token_select(None, scores)
        self.decode(self.tokens, "token")


def set_count(shape: Shape, device: torch.device) -> int:
    """Sets of inputs: enough that a round does not stay in the L2 cache, as many as fit, at least three.

    A divisor of the repetitions, so that no set is read twice in short order where one replay follows another.
    """
    stored = shape.batch * shape.heads * shape.length * (shape.width * shape.dtype.itemsize + shape.channels)
    fits = int(MEMORY * torch.cuda.mem_get_info(device)[0]) // stored
    wanted = -(-max(ROUND_BYTES, 2 * gpu(device).l2_bytes) // shape.bytes_read("two_level"))
    return max((n for n in (4, 5, 10, 20) if n <= fits and n // 2 < wanted), default=3)


def _run(runs: list[Callable[[], None]], i: int) -> None:
    runs[i]()


def steps(layers: list[Layer], side: torch.cuda.Stream | None, coarse: bool = True) -> dict[str, Callable[[int], None]]:
    """A step over ``layers[i]``, by method; without ``coarse`` only methods of one level."""
    first = layers[0]
    every = first.block_table.shape[1] * first.shape.config.block_size
    scores = torch.empty(*first.blocks.shape[:2], every, dtype=torch.float32, device=first.q.device)
    found = {
        "dense": lambda i: layers[i].dense_step(),
        "block_only": lambda i: layers[i].block_step(),
        "token_only": lambda i: layers[i].token_step(scores),
    }
    for tokens in VERIFIED:
        runs = [layer.verification(tokens) for layer in layers]
        found[f"verify:{tokens}"] = partial(_run, runs)
    if coarse:
        found["two_level"] = lambda i: layers[i].step()
        found["two_level:lag"] = lambda i: layers[i].lagged_step(side)
    return found
