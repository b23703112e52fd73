"""Short prompts: captured in a few sizes, for every cache. And short pieces after a long text.

A pass over some hundred tokens takes the GPU some 15 ms and the host 100. No graph of it can hold the addresses of a
cache that does not exist yet. So it holds none: what the layers get is kept in memory of its own. From there all layers
of the cache take it at once (:mod:`..layers.adopting`), while the GPU still computes.

Steps differ: they are captured for one cache, at a length that the device knows.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..cache_name import NAMES, output_name
from ..layers.adopting import Computed, adopt, adopts
from ..layers.cache_state import CacheState
from ..layers.kinds import face
from ..layers.together import check_complete
from ..model_watch import ModelWatch
from ..tensors import any_autocast, no_inference_mode
from .eligibility import Eligibility
from .inputs import OF_DRAFTS, STATIC, all_tokens
from .prompt_graphs import CapturedPiece, CapturedPrompt, Kind, Piece
from .prompt_tape import Kept, Shape
from .recorder import Recorder, Sides

SIZES = (128, 256, 512, 768, 1024, 1536, 2048)  # tokens, all rows together; prompts are padded to one of these
PIECES = (16, 32, 64, 128, 192, 256)  # tokens of a row after what is cached
WORK = 2e13  # operations of a piece's attention in a graph: eager passes have faster kernels, which longer ones repay
MOST = 6  # graphs of pieces; each is for some block pools
QUICK = 512  # of these, what takes no longer than a turn between decode steps
EAGER = 2  # prompts of a size that run eagerly: a capture takes as long as three
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)  # their code waits for the host, or reads all weights


class _Here(threading.local):
    paused = False


_here = _Here()


@contextmanager
def paused_passes() -> Iterator[None]:
    """Inside, in this thread, passes may pause between layers: none is captured, and only quick ones are replayed."""
    before, _here.paused = _here.paused, True
    try:
        yield
    finally:
        _here.paused = before


class Prompts:
    """Captures and replays the short prompts of one model.

    Args:
        model: the model. forward: its own. keeps: it can be asked for the logits of one token.
        eligibility: says whether the model can be captured. recorder: captures. watch: of the model's changes.

    Attributes:
        graphs: by kind.
        captures, replays: counted.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable,
        eligibility: Eligibility,
        recorder: Recorder,
        watch: ModelWatch,
        keeps: bool,
    ) -> None:
        self.model, self.forward, self.eligibility, self.watch = model, forward, eligibility, watch
        self.recorder, self._keeps = recorder, keeps
        self.graphs: dict[Kind | Piece, CapturedPrompt] = {}
        self.captures = self.replays = 0
        self._pieces = True  # they can be captured
        self._memory: tuple[Tensor, Tensor] | None = None  # of keys and values, which all graphs share
        self.forget()

    def forget(self) -> None:
        """The model has changed."""
        self.graphs.clear()
        self._met: Counter[Kind | Piece] = Counter()
        self._config: Any = None  # of its attention modules, once a prompt has run
        self._shape: Shape | None = None
        self._able = self._keeps

    def close(self) -> None:
        """Free all memory."""
        self.forget()
        self._memory = None

    def learn(self, cache: CacheState) -> None:
        """A prompt has run eagerly: what layers the model has, if that is not known."""
        if self._shape is not None or not self._able or cache.row_batch is not None:
            return
        layers, found = cache.sparse_layers, set()
        for layer in layers:
            if face(layer).kind == "full" and not layer.latent and (store := layer.store) is not None:
                dims = store.split, store.width - store.split, layer.q_heads
                found.add(Shape(len(layers), store.heads, *dims, store.dtype, store.device))
            else:
                found.clear()
                break
        config = cache.model_config
        self._able = len(found) == 1 and len(layers) == len(cache.layers) and config is not None and self._plain(config)
        if self._able:
            (self._shape,), self._config = found, config

    def _plain(self, config: Any) -> bool:
        """No experts are chosen, and no module has hooks of others, which a replay would not call."""
        text = config.get_text_config(decoder=True)
        if any(getattr(text, name, None) for name in _EXPERTS):
            return False
        for module in self.model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                if any(not getattr(hook, "__module__", "").startswith("hf_sparsekv.") for hook in hooks.values()):
                    return False
        return True

    # ------------------------------------------------------------------ a prompt

    def is_short(self, given: dict) -> bool:
        """The tokens of a pass are few enough for a graph."""
        ids = given.get("input_ids")
        return self._able and isinstance(ids, Tensor) and 0 < ids.numel() <= SIZES[-1]

    def run(self, given: dict, cache: CacheState) -> Any:
        """The model's result for a prompt into an empty cache; None: it has to run eagerly."""
        kind = self._kind(given, cache)
        if kind is None:
            return None
        step = self.graphs.get(kind)
        if step is None:
            self._met[kind] += not _here.paused
            if _here.paused or self._met[kind] <= EAGER:
                return None
        elif _here.paused and kind.batch * kind.size > QUICK:
            return None
        ids, mask = given["input_ids"], given.get("attention_mask")
        if mask is not None and not all_tokens(mask, mask.shape[1]):
            return None
        if step is None:
            step = self._new(kind)
            if step is None:
                return None
            step.give(ids, given.get("position_ids"), cache)
            if not self._captured(step):
                return None
        else:
            step.give(ids, given.get("position_ids"), cache)
        step.graph.replay()
        self.replays += 1
        kept = step.kept
        adopt(cache, Computed(ids.shape[1], kept.k, kept.v, kept.last, kept.queries, kept.params))
        kind_of = type(step.output)
        logits = step.output["logits"][:, : ids.shape[1]].clone()  # of the last token, or of all
        return kind_of(**{**step.output, "logits": logits, output_name(kind_of): cache})

    def _kind(self, given: dict, cache: CacheState) -> Kind | Piece | None:
        """The kind of a pass that can be captured, else None."""
        ids: Any = given.get("input_ids")
        shape = self._shape
        if shape is None or not self.is_short(given) or ids.ndim != 2 or cache.row_batch is not None:
            return None
        batch, n = ids.shape
        past = int(cache.get_seq_length())
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if (
            n < 2
            or ids.device != shape.device
            or (mask is not None and getattr(mask, "shape", None) != (batch, past + n))
            or (positions is not None and (positions.ndim != 2 or positions.shape[1] != n))
            or not (isinstance(keep := given.get("logits_to_keep"), int) and (keep == 1 or (past and keep == n)))
            or given.get("return_dict") is False
            or any(not (value is None or value is False) for name, value in given.items() if name not in _KNOWN)
            or (cache.config.prefill is not None and not past and n >= cache.config.prefill_below)  # it is sparse
            or any_autocast()
            or self.eligibility.why_no_prompt(ids) is not None
        ):
            return None
        if cache.model_config is None:
            cache.bind(self._config)
        layers = cache.sparse_layers
        if len(layers) != len(cache.layers) or any(layer.broken or layer.pending is not None for layer in layers):
            return None
        policies = [layer.policy for layer in layers]
        if len(layers) != shape.layers or not all(face(layer).kind == "full" for layer in layers):
            return None
        if past:
            return self._piece(batch, n, cache, shape, keep > 1) if all(map(adopts, policies)) else None
        size = next(size for size in SIZES if batch * n <= size) // batch
        observing = [i for i, policy in enumerate(policies) if policy.observes]
        if not all(map(adopts, policies)) or observing != [*range(shape.layers)][shape.layers - len(observing) :]:
            return None
        labels = policies[-1].labels if observing else None
        if labels is None:
            return Kind(shape, batch, size, 0, None)
        return Kind(shape, batch, size, len(observing), labels.wanted)

    def _piece(self, batch: int, n: int, cache: CacheState, shape: Shape, whole: bool) -> Piece | None:
        """The kind of a short piece after what is cached on the device, if a graph of it is no slower.

        ``whole``: all of its logits are asked for.
        """
        size = next((size for size in PIECES if n <= size), None)
        layers = cache.sparse_layers
        if size is None or not self._pieces or any(layer.policy.offloaded or layer.policy.observes for layer in layers):
            return None
        check_complete(cache.layers)
        rows, stores = cache.joined_rows(), [layer.store for layer in layers]
        if rows.valid is not None or rows.batch != batch or any(store.capturing for store in stores):
            return None
        pairs = shape.layers * shape.q_heads * size * sum(rows.lengths)
        if 2 * pairs * (shape.k_dim + shape.v_dim) > WORK:
            return None
        width = 1 << (max(stores[0].block_table.shape[1], stores[0].pool.capacity) - 1).bit_length()
        pools = tuple([store.pool.kv.data_ptr() for store in stores])
        ring, of_block = tuple(stores[0].recent_kv.shape), (stores[0].sinks, stores[0].block_size)
        return Piece(shape, batch, size, width, ring, *of_block, pools, whole)

    # ------------------------------------------------------------------ its graph

    @no_inference_mode
    def _new(self, kind: Kind | Piece) -> CapturedPrompt | None:
        """The memory of another graph; None, and a warning says why, if there is none."""
        pieces = [known for known in self.graphs if isinstance(known, Piece)]
        if isinstance(kind, Piece) and len(pieces) >= MOST:
            del self.graphs[pieces[0]]
        try:
            made = CapturedPiece if isinstance(kind, Piece) else CapturedPrompt
            return made(kind, self._room(kind), kind.shape.device)  # type: ignore[arg-type]
        except torch.OutOfMemoryError as error:
            self._cannot(kind, error)
            return None

    @no_inference_mode
    @torch.no_grad()
    def _captured(self, step: CapturedPrompt) -> bool:
        """Capture it, whose inputs are there. If that cannot be, a warning says why."""
        kind = step.kind
        shape = kind.shape
        try:
            with self.watch.ignoring():

                def run(sides: Sides | None) -> Any:
                    return step.run(self.model, self.forward)

                self.recorder.warm_up(run, shape.device)
                step.graph, step.output = self.recorder.record(run, shape.device, [])
        except Exception as error:  # no memory, what waits for the host, a kernel that does not fit the GPU
            self._cannot(kind, error)
            return False
        self.captures += 1
        self.graphs[kind] = step
        return True

    def _cannot(self, kind: Kind | Piece, error: Exception) -> None:
        """No prompt, or no piece, is captured from here on. (A failed capture takes the others' memory along.)"""
        self.forget()
        if isinstance(kind, Piece):
            self._pieces = False
        else:
            self._able, self._memory = False, None
        why = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(f"short prompts run eagerly ({why})", stacklevel=7)

    def _room(self, kind: Kind | Piece) -> Kept:
        """Memory for the keys and values of a prompt. All graphs share it, for the cache takes them at once."""
        shape = kind.shape
        places = shape.layers * shape.heads
        if self._memory is None:
            self._memory = tuple(
                torch.zeros(places * SIZES[-1] * dim, dtype=shape.dtype, device=shape.device)
                for dim in (shape.k_dim, shape.v_dim)
            )  # type: ignore[assignment]
        assert self._memory is not None
        k, v = (
            held[: places * kind.batch * kind.size * dim].view(shape.layers, kind.batch, shape.heads, kind.size, dim)
            for held, dim in zip(self._memory, (shape.k_dim, shape.v_dim))
        )
        return Kept(shape, k, v, kind.observing)


_KNOWN = (*STATIC, *OF_DRAFTS, *NAMES)
