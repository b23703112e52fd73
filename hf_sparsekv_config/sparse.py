"""Options of every method, as frozen dataclasses that are checked when they are made.

The options of one method are in a file beside this one. A class lists in ``FREE`` the fields of its own
that only later steps depend on: a saved cache may be loaded with others (:meth:`SparseCache.load`). Every other field
must be as it was saved. ``PRESETS`` names settings that belong together (:meth:`SparseConfig.preset`); what each costs
and finds is in docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from .options import Count, Number, Options, Positive, Share, guess, require

Config = TypeVar("Config", bound="SparseConfig")
Bytes = Annotated[int, Number(0, unit="bytes")]
FreeShare = Annotated[float, Number(0, 1, above=True, below=True, unit="share of free memory")]


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Options):
    """Options that every sparse method shares: block layout and the tokens that are always attended.

    Args:
        block_size: tokens in a block, the unit of storage, transfer and coarse selection. A power of two
            in [16, 128].
        sinks: the first valid tokens of each row, attended at every step on top of any budget.
        window: the most recent tokens, attended at every step on top of any budget. The tokens that have
            not been sealed into a block yet (at most ``max_draft + block_size`` more) are attended too.
        dense_layers: layers ``0 .. dense_layers - 1`` attend densely: their attention is too flat to select. The first
            one matters, a second one hardly does (docs/studies/settings.md).
        max_draft: draft tokens that a ``crop()`` can take back without reopening a stored block (assisted and
            prompt-lookup decoding take back at most their draft length). A deeper crop is correct but slower. Passes
            of at most one token more, if they verify drafts, attend as decode steps do; longer ones to everything.
        max_length: longest sequence (prompt and answer, in tokens) to reserve storage for. ``None``: the
            storage grows in steps.
        dense_below: a decode step attends to everything while the layer's full blocks hold at most this many tokens,
            counted over all rows (batch x tokens a row, padding included). Recent tokens come on top. ``"auto"``: while
            that is measured or guessed to be as fast as selecting on this GPU (:mod:`hf_sparsekv.policies.crossover`;
            ``hf-sparsekv calibrate-device`` measures). So never with blocks in host memory that a GPU reads, or with
            progressive selection. Never for predicted queries over keys and values, either; over latents it is
            measured.
            ``None``: never. A number holds for offloaded blocks, too; with blocks on a second device it is an error.
        prefill: sparse prompts: each tile of 128 queries attends to the blocks of 64 keys that hold this share of its
            attention mass, as 0.98 (docs/sparse-prompts.md). Layers before ``dense_layers`` and the last 256 queries of
            a pass attend to everything. ``None``: prompts are exact.
        prefill_below: with ``prefill``, prompts are exact up to so many tokens, those cached before included; and
            pieces of fewer than 1,024 new ones.
    """

    FREE: ClassVar[tuple[str, ...]] = ("dense_below", "max_length", "prefill", "prefill_below")
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    block_size: Annotated[int, Literal[16, 32, 64, 128]] = 64
    sinks: Count = 4
    window: Positive = 64
    dense_layers: Count = 1
    max_draft: Count = 16
    max_length: Positive | None = None
    dense_below: Count | Literal["auto"] | None = "auto"
    prefill: Share | None = None
    prefill_below: Count = 16384  # at half of the blocks 16k gain 7 % of 521 ms, 8k 1 % (8B shape, H200)

    @classmethod
    def preset(cls: type[Config], name: str, **changes: Any) -> Config:
        """A configuration by name (docs/accuracy.md), with ``changes`` of single fields.

        ``"fast"`` and ``"accurate"`` lie on either side of the defaults; ``"paper"`` is the method's paper.

        Raises:
            ValueError: this class has no preset ``name``, or the changes do not fit it.
        """
        offered = ", ".join(map(repr, cls.PRESETS)) or "none"
        hint = guess(str(name), cls.PRESETS)
        require(name in cls.PRESETS, f"{cls.__name__} has no preset {name!r}{hint}; it has {offered}")
        return cls(**{**cls.PRESETS[name], **changes})

    @property
    def budget(self) -> int:
        """Tokens that a step attends to beside sinks and window, where that number is fixed; else 0."""
        return getattr(self, "token_budget", None) or 0

    def brief(self) -> str:
        """Class and options that differ from the defaults, on one line: ``"TokenConfig(token_budget=512)"``."""
        return f"{type(self).__name__}({self.changes()})"

    def changes(self) -> str:
        """Options that differ from the defaults: ``"token_budget=512, sinks=8"``."""
        held = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ", ".join(f"{name}={value!r}" for name, value, default in held if value != default)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Options):
    """Where full blocks live when a cache is offloaded.

    Args:
        pin_memory: page-lock the host blocks, so that the GPU can read them in place. ``None`` means yes where
            there is a GPU, and one warning if it fails; ``True`` makes that an error; ``False`` does not try. Without
            it every step copies the selected tokens through the CPU.
        max_host_bytes: refuse to grow beyond this many bytes of host memory over all layers. ``None`` means 80 %
            of the machine's (or container's) memory.
        device_pool: device memory for copies of chosen tokens or blocks. Bytes (int), or a share of what is free when
            decoding begins (float, below 1). ``None`` means eight times the tokens or four times the blocks that one
            step chooses, at most half of what is free. 0 means none: each step reads what it chooses in host memory.
            Any size gives the same tokens.
        keep_dense: blocks of the first, dense layers stay on the device: a step reads all of them, which takes long
            over the link. False: they go to host memory as well.
        kv_dtype: dtype of keys and values in host memory. ``"int8"``: symmetric codes of 8 bits, read back as the
            model's dtype. Each token and KV head has a scale for the key and one for the value, which stay on the
            device (4 bytes). Half the bytes in host memory and over the link of 16-bit KV. An entry's error is at most
            1/254 of the largest one beside it. Not for latents (MLA). ``None``: as they are.
    """

    pin_memory: bool | None = None
    max_host_bytes: Annotated[int, Number(1, unit="bytes")] | None = None
    device_pool: Bytes | FreeShare | None = None
    keep_dense: bool = True
    kv_dtype: Annotated[str, Literal["int8"]] | None = None


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """``config`` with other values of some options.

    Raises:
        TypeError: it has no such option.
        ValueError: the values do not fit it.
    """
    for name in changes:
        if name in OffloadConfig.__dataclass_fields__:
            raise TypeError(
                f"{name} is an option of OffloadConfig: give offload=OffloadConfig({name}={changes[name]!r})"
            )
    return replace(config, **changes) if changes else config


def checked(wanted: type[SparseConfig] | None, config: SparseConfig | None, offload: OffloadConfig | None):
    """``config``, or the default of the only kind that a cache takes (``wanted``; None: it takes any).

    Raises:
        TypeError: it is of another kind, or ``offload`` is no :class:`OffloadConfig`.
    """
    if wanted is not None:
        config = wanted() if config is None else config
        if not isinstance(config, wanted):
            raise TypeError(f"config must be a {wanted.__name__}, got {type(config).__name__}")
    if offload is not None and not isinstance(offload, OffloadConfig):
        raise TypeError(
            f"offload must be an OffloadConfig or None, got {type(offload).__name__}: "
            "OffloadConfig() is host memory, None the model's device"
        )
    return config
