"""The caches to choose from, and their controls. A new method is among them, with the slider that it names itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hf_sparsekv import OffloadConfig, PredictiveConfig, ProgressiveConfig, SparseCache, TokenConfig
from hf_sparsekv.policies.registry import Method as Registered
from hf_sparsekv.policies.registry import methods

DENSE = "dense"


@dataclass(frozen=True)
class Control:
    """A slider.

    Args:
        name: field of the configuration.
        value: at first; ``on_gpu``: at first on a GPU, where contexts are longer.
    """

    name: str
    label: str
    minimum: float
    maximum: float
    step: float
    value: float
    on_gpu: float | None = None
    info: str | None = None


@dataclass(frozen=True)
class Method:
    """A cache to race against full attention.

    Args:
        config: class of its configuration; ``None``: full attention twice, which shows what the clocks are worth.
        settings: fixed fields of the configuration.
        adjust: makes values fit each other before the configuration checks them.
        plain: nothing but what the method says of itself.
    """

    label: str
    about: str
    config: type | None = None
    controls: tuple[Control, ...] = ()
    settings: dict = field(default_factory=dict)
    adjust: Callable[[dict], dict] = dict
    plain: bool = False

    def make(self, values: dict, offload: bool, model_config, max_length: int):
        """A new empty cache.

        Raises:
            ValueError: values that do not fit each other; the message says which.
        """
        chosen = {c.name: _number(c, values[c.name]) for c in self.controls}
        config = self.config(max_length=max_length, **self.settings, **self.adjust(chosen))
        return SparseCache(config, OffloadConfig() if offload else None, model_config)


def _number(control: Control, value: float) -> float | int:
    """Sliders give 256.0 for 256."""
    return int(value) if float(control.step).is_integer() else float(value)


_MASS = Control(
    "mass", "Share of the attention mass", 0.5, 1.0, 0.005, 0.9, 0.9, "of each head, to be covered by tokens"
)
_BUDGET = Control("token_budget", "Token budget", 64, 4096, 64, 256, 1024, "tokens attended, beside recent ones")


def _zero_is_never(values: dict) -> dict:
    return {**values, "audit_every": values["audit_every"] or None}


def _plain(method: Registered) -> Method:
    """A method with the one slider that it names itself."""
    knob = method.knob
    default, whole = method.config.__dataclass_fields__[knob.name].default, isinstance(knob.least, int)
    first, step = (4 * knob.least, knob.least) if whole else (default, 0.001)
    label = knob.name.replace("_", " ").capitalize()
    control = Control(knob.name, label, knob.least, knob.most, step, first, default)
    return Method(method.name.replace("_", " ").capitalize(), method.about, method.config, (control,), plain=True)


METHODS: dict[str, Method] = {
    "two_level": Method(
        "Tokens by need",
        "the tokens that hold a share of each head's attention, by labels of 4 bits a channel: the default",
        TokenConfig,
        (_MASS,),
        {"dense_below": 0},  # short contexts, too, show what is read
    ),
    "blocks": Method(
        "Two levels",
        "blocks by a bound on their scores, then the best tokens in them (AsyncTLS)",
        TokenConfig,
        (
            _BUDGET,
            Control("num_blocks", "Blocks", 4, 512, 4, 32, 128, "of 64 tokens, among which tokens are chosen"),
        ),
        adjust=lambda v: {**v, "num_blocks": max(v["num_blocks"], -(-v["token_budget"] // 64))},
    ),
    "progressive": Method(
        "Progressive",
        "tokens in order of importance until enough attention mass is covered (PSA)",
        ProgressiveConfig,
        (
            Control("mass", "Mass to cover", 0.5, 0.999, 0.001, 0.95, None, "share of attention, estimated"),
            Control("min_tokens", "Tokens at least", 0, 4096, 32, 256),
            Control("audit_every", "Measure the true mass every", 0, 64, 1, 0, None, "tokens; 0 never. Takes time"),
        ),
        adjust=_zero_is_never,
    ),
    "predictive": Method(
        "Predictive",
        "the next query is predicted, its tokens are ready when it comes (AsyncSpade)",
        PredictiveConfig,
        (_MASS,),
    ),
}
METHODS |= {
    name: _plain(method) for name, method in methods().items() if METHODS.keys().isdisjoint((name, *method.aliases))
}
METHODS[DENSE] = Method("Dense again", "full attention in both panes: how far apart equal runs are")
