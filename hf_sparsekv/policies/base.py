"""What a selection policy is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor

from ..attention.exact import AttentionSpec
from ..config import OffloadConfig, SparseConfig
from ..kv.store import LayerStore
from ..ops.seal import Index
from ..telemetry.watch import BlockWatch
from ..tuning.crossover import dense_tokens
from .memory import Memory, Request
from .shared import Shared

if TYPE_CHECKING:
    from ..telemetry.stats import PackStats, WalkStats


class Policy:
    """Dense attention, and the interface of everything sparser. One object a layer.

    A subclass overrides :meth:`start`, :meth:`index`, :meth:`attend` and, if it keeps state, the rest. It reads the
    cache through its :class:`LayerStore` and never knows whether a block lies on the device or the host.
    """

    method: str | None = None  # what the table of crossovers calls it

    def __init__(self, config: SparseConfig, layer_idx: int, offloaded: bool) -> None:
        self.config, self.layer_idx, self.offloaded = config, layer_idx, offloaded
        self._dense_blocks: tuple[int, int] = (0, 0)  # batch, and the blocks up to which a step of it is dense
        self.watch: BlockWatch | None = None  # a sparse step marks there which blocks it attends to

    # ------------------------------------------------------------------ of the whole cache

    @classmethod
    def place(cls, config: SparseConfig, offload: OffloadConfig | None) -> OffloadConfig | None:
        """Where the blocks are to live, given what the user asked for. Raises ValueError for what cannot be."""
        return offload

    @classmethod
    def share(cls, config: SparseConfig, offload: OffloadConfig | None) -> Shared:
        """Make what all layers of a cache have in common; called once a cache, with what :meth:`place` said."""
        return Shared(cls, config, offload)

    @classmethod
    def needs(cls, request: Request) -> Memory:
        """Bytes that the sparse layers of such a cache will take."""
        return Memory(blocks=request.blocks)

    @classmethod
    def crossover(cls, config: SparseConfig, offloaded: bool) -> str | None:
        """What the table of crossovers calls the selection."""
        return cls.method

    # ------------------------------------------------------------------ of one layer

    fetches = False  # chosen blocks are brought to the device
    store_type = LayerStore
    bundle = 1  # layers that begin to look ahead together in a captured step
    yields = True  # what looks ahead takes the processors that the step itself leaves

    def prepare(self, store: LayerStore) -> None:
        """A step is about to be captured or replayed: make what it uses and is not there yet."""

    def start(self, store: LayerStore, q_heads: int) -> None:
        """The layer's first tokens have arrived: claim per-slot fields."""
        self._dense_blocks = (0, 0)  # perhaps another device

    def below_crossover(self, store: LayerStore) -> bool:
        """Dense attention is as quick as selecting at this batch and length (``config.dense_below``).

        Sealed blocks are what counts: they are what there is to select from, and they change between steps only, so
        everybody who asks about a step gets the same answer.
        """
        batch, blocks = self._dense_blocks
        if batch != store.batch:
            config, width = self.config, store.heads * store.token_bytes
            method = self.method if not store.latent else f"{self.method}:mla"  # other kernels, other numbers
            tokens = dense_tokens(config.dense_below, method, store.device, self.offloaded, store.batch, width)
            blocks = tokens // store.block_size
            self._dense_blocks = (store.batch, blocks)
        return store.sealed <= blocks

    @property
    def observes(self) -> bool:
        """:meth:`observe` has anything to do: over latents its arguments have to be made."""
        return type(self).observe is not Policy.observe

    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        """New queries ``[batch, Hq, n, Dk]`` and keys ``[batch, H, n, Dk]``, before they are stored.

        Of a long prompt over latents: some of the ``new`` tokens, the last 64 among them.
        """

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        """Per-slot fields of blocks being sealed: ``kv [n, batch, H, block_size, Dk + Dv]``."""
        return {}

    def sealing(self, store: LayerStore) -> Index | None:
        """Where the fields of :meth:`index` are kept, for the kernel that seals one block; None if it cannot."""
        return Index(store.key_dim) if type(self).index is Policy.index else None

    def attend(self, q: Tensor, store: LayerStore, spec: AttentionSpec) -> Tensor:
        """Attention of one query per row, ``q [batch, Hq, Dk]`` to ``[batch, Hq, Dv]``."""
        return store.attend(q, None, "all", spec)

    def mode(self, store: LayerStore) -> Hashable:
        """What the host decides for the next step. A captured step serves one mode; None cannot be captured."""
        return "dense"

    def account(self, store: LayerStore) -> None:
        """The host's share of a step, after its attention: counters, and what :meth:`mode` depends on."""
        store.count_step("all")

    def audit(self, q: Tensor, store: LayerStore) -> None:
        """The step's attention is done, nothing is sealed yet: look at what it left out. May wait for the GPU."""

    def walks(self) -> WalkStats | None:
        """What walks over ranked blocks have read, if the method makes any. Synchronises."""
        return None

    def packing(self) -> PackStats | None:
        """What was copied to keep chosen tokens together, if the method does that. Synchronises."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes on the device beside the store's."""
        return 0

    second_bytes = 0  # on a second device

    def looks_ahead(self, store: LayerStore) -> bool:
        """Whether :meth:`look_ahead` has anything to do."""
        return False

    def replayed(self, store: LayerStore, looked: bool) -> None:
        """The device has repeated a captured step: what the host keeps beside it follows.

        ``looked``: :meth:`look_ahead` was part of it.
        """

    def note(self, q: Tensor, store: LayerStore) -> None:
        """A captured step's query is known: what needs no more than that, and changes nothing that the step reads."""

    @property
    def notes(self) -> bool:
        """:meth:`note` has anything to do."""
        return type(self).note is not Policy.note

    def look_ahead(self, q: Tensor, store: LayerStore, again: bool = False) -> None:
        """The step's attention is done and its blocks are sealed: prepare the next step.

        ``again``: it was done before a block was sealed, and counted.
        """

    def reopened(self) -> None:
        """A deep crop has taken sealed blocks back: what names them is void."""

    def map_rows(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Changes when a tensor that a captured step uses has moved."""
        return ()

    def save(self) -> dict:
        """State that a trial step changes: tensors by value, the rest as it is."""
        return {}

    def restore_host(self, saved: dict) -> None:
        """Put back what :meth:`save` kept, except the contents of tensors."""

    def restore_device(self, saved: dict) -> None:
        """Put back the contents of tensors."""

    def to_file(self, about: dict, store: LayerStore) -> dict[str, Tensor]:
        """Tensors to save with the layer, by name. ``about`` takes what is no tensor (JSON values)."""
        return {}

    def file_fits(self, about: dict) -> dict[str, bool]:
        """By field: whether what a file says of a layer can be this policy's. No memory is taken for it yet."""
        names = ("channels", "stats_tokens", "query_heads", "previous", "chosen", "ring")
        return {name: about[name] is None for name in names}

    @classmethod
    def reserves(cls, config: SparseConfig, offloaded: bool) -> int:
        """Ids of a row and KV head that the configuration alone makes a layer keep."""
        return 0

    def from_file(self, about: dict, held: dict[str, Tensor], store: LayerStore) -> None:
        """Take what :meth:`to_file` gave out of ``held``; the store is as it was. The tensors lie on the CPU.

        Raises:
            ValueError: with the name of what does not fit this policy.
        """

    def reset(self) -> None:
        """Forget everything that came from tokens."""

    def copy(self) -> Policy:
        """An independent policy in the same state; tensors that are only ever replaced may be shared."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.watch = None if self.watch is None else BlockWatch()
        return new
