"""Options of methods that choose by need: as many tokens as cover a share of the attention mass.

Apart from the configurations because those that also know a fixed budget say in the same way which of the two holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from ..config import SparseConfig
from ..option_checks import positive, share

MASS = 0.9  # covered by default: docs/studies/by-need.md
# A share m of the mass is reckoned to take READ * (1 - m) ** POWER of the tokens. Fitted to all that steps read of
# replayed keys with labels of 32 channels (.070, .086, .116 at 80, 85, 90 %): on the safe side.
READ, POWER = 0.0206, -0.75
FIXED = 1024  # tokens, where blocks are chosen, or a second device chooses, and the configuration says nothing
MIN_TOKENS = 64  # of a selection by need


class NeedOptions(Protocol):
    """What a selection by need (:mod:`.by_need`) asks of a configuration.

    Attributes:
        threshold: share of the mass to cover; None: the number of tokens is fixed.
        min_tokens, max_tokens: tokens attended at least, and at most (None: all).
        group_reduce: see :func:`..ops.selection.mass_select.mass_select`.
    """

    @property
    def threshold(self) -> float | None: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def group_reduce(self) -> Literal["all", "sum"]: ...


@dataclass(frozen=True, kw_only=True)
class BudgetOrMass(SparseConfig):
    """As many tokens as ``mass`` takes, a fixed number ``token_budget``, or with both as many as it takes at most."""

    group_reduce: ClassVar[Literal["all"]] = "all"
    audit_every: ClassVar[None] = None

    token_budget: int | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget is not None:
            positive("token_budget", self.token_budget)
        if self.mass is not None:
            share("mass", self.mass)

    @property
    def can_need(self) -> bool:
        """Tokens can be chosen by need."""
        return True

    @property
    def threshold(self) -> float | None:
        """Share of the mass to cover; None: the number of tokens is fixed."""
        if self.mass is None and self.token_budget is None and self.can_need:
            return MASS
        return self.mass

    @property
    def budget(self) -> int:
        """The number of tokens, where it is fixed."""
        return self.token_budget or (FIXED if self.threshold is None else 0)

    @property
    def min_tokens(self) -> int:
        """Tokens attended at least."""
        return min(MIN_TOKENS, self.token_budget or MIN_TOKENS)

    @property
    def max_tokens(self) -> int | None:
        """Tokens attended at most."""
        return self.token_budget


def whole_tokens(config: BudgetOrMass) -> int:
    """So many tokens in full blocks are all attended to."""
    return config.budget if config.threshold is None else config.min_tokens


def reads(config: SparseConfig, tokens: int) -> int:
    """Of a row's ``tokens``, how many a step is reckoned to attend to."""
    need = tokens
    if isinstance(config, BudgetOrMass) and config.threshold is not None:
        need = max(config.min_tokens, round(READ * max(1 - config.threshold, 1e-3) ** POWER * tokens))
    return min(config.budget or need, need, tokens)
