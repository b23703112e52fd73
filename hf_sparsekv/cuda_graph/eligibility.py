"""Eligibility: whether a call can be a captured step, and if not, the reason in words.

It decides without running anything: it reads the model, the cache and the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention.drafts import are_drafts
from ..attention.rotary import PassRotary
from ..layers.cache_state import CacheState
from ..layers.drafts import captures_drafts
from ..layers.kinds import face, ready_for_steps
from ..ranks import Ranks
from .inputs import OF_DRAFTS, STATIC, all_tokens

_RESTLESS = 3  # steps in a row with a change of the model before each; after more, steps run eagerly


class Eligibility:
    """Decides for one model whether steps can be captured.

    Args:
        model: the model.
        counts_positions: whether its forward takes no ``position_ids``.
        rotary: its rotary embeddings.
        ranks: the ranks of a tensor parallel model.
        readable: whether a kernel can read a tensor in place.

    Attributes:
        cannot: why no step can be captured, if a capture has failed.
        drafts_cannot: whether a capture of drafts has failed.
        restless: number of latest steps in a row before which the model changed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        counts_positions: bool,
        rotary: PassRotary,
        ranks: Ranks | None,
        readable: Callable[[Tensor], bool],
    ) -> None:
        self.model, self.counts_positions, self.rotary = model, counts_positions, rotary
        self.ranks, self.readable = ranks, readable
        self.cannot: str | None = None
        self.drafts_cannot = False
        self.restless = 0
        self._found: tuple[set[torch.device], bool] | None = None  # see _weights()

    def forget(self) -> None:
        """Forget all findings, because the model has changed."""
        self.cannot = self._found = None
        self.drafts_cannot = False

    def look_again(self) -> None:
        """The weights may have moved."""
        self._found = None

    def new_tokens(self, given: dict, cache: CacheState) -> int:
        """Tokens of each row that a call decodes over a filled cache: 1, or several drafts; otherwise 0.

        Drafts are of one row, or are verified by full attention.
        """
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or cache.model_config is None or not cache.get_seq_length():
            return 0
        new = ids.shape[1]
        if cache.row_table.exactness.aside:
            return 0
        if new == 1:
            return 1
        alone = self.ranks is None or not self.ranks.captures
        alone &= len(ids) == 1 or cache.row_table.exactness.everything
        fixed = cache.row_batch is None or cache.row_table.exactness.counts is not None
        few = 1 < new <= cache.config.max_draft + 1 and fixed and alone
        return new if few and are_drafts(cache, new) else 0

    def drafts(self, given: dict, cache: CacheState, new: int) -> bool:
        """Whether a pass over ``new`` drafts can be captured, if a plain step can."""
        layers = cache.sparse_layers
        more = (value for name, value in given.items() if name not in STATIC and name not in OF_DRAFTS)
        return not (
            self.drafts_cannot
            or len(layers) < len(cache.layers)  # sliding layers are cropped as transformers' own are
            or any(value not in (None, False) for value in more)  # other inputs may not fit the padded tokens
            or not (cache.going_on or all_tokens(given.get("attention_mask"), new))
            or not any(layer.policy.drafts != "exact" for layer in layers)
            or not all(captures_drafts(layer.store, layer.policy, new) for layer in layers)
        )

    def why_not(self, given: dict, cache: CacheState) -> str | None:
        """Why this step cannot be captured; None: it can."""
        ids = given["input_ids"]
        return self.cannot or self._model(ids) or self._cache(cache, ids) or _call(given)

    def why_no_prompt(self, ids: Tensor) -> str | None:
        """Why a prompt cannot be captured, as far as the model is concerned; None: it can."""
        ranked = None if self.ranks is None else "the model is tensor parallel"
        return ranked or self.cannot or self._model(ids)

    def _model(self, ids: Tensor) -> str | None:
        """Reasons in the model: its weights, its attention, its mode."""
        devices, brought = self._weights()
        if brought:
            return (
                "some of the model's weights are offloaded, to host memory or to disk (device_map): their layers bring "
                "them again in every step, which a replay cannot"
            )
        if self.counts_positions:
            return "the model's forward takes no position_ids: it counts positions on the host, which a replay cannot"
        if (grows := self.rotary.why_not()) is not None:
            return grows
        if self.ranks is not None and not self.ranks.captures:
            return "the model is tensor parallel by other means than NCCL, whose sums no graph can hold"
        if not self.readable(ids):
            return "the model is not on a CUDA device"
        if torch.is_grad_enabled():
            return "gradients are enabled; call the model under torch.no_grad()"
        config = getattr(self.model, "config", None)
        if config is not None and (used := config.get_text_config(decoder=True)._attn_implementation) != "sparsekv":
            return f"the model's attention is {used!r} now; call model.set_attn_implementation('sparsekv')"
        if self.model.training:
            return "the model is in training mode; call model.eval()"
        if self.restless > _RESTLESS:  # until nothing has
            return "something changes the model before each step: its modules, their hooks or attributes"
        if devices != {ids.device}:
            return "the weights lie on several devices, or not all on the GPU"
        return None

    def _weights(self) -> tuple[set[torch.device], bool]:
        """Devices of the weights, and whether accelerate's hooks load some of them for each call.

        Looked up once, and again for each capture.
        """
        if self._found is None:
            devices = {p.device for p in self.model.parameters()}
            self._found = devices, any(map(_brings_weights, self.model.modules()))
        return self._found

    def _cache(self, cache: CacheState, ids: Tensor) -> str | None:
        """Reasons in the cache: its layers, where its memory is, padding."""
        text = cache.model_config.get_text_config(decoder=True)
        if getattr(text, "num_kv_shared_layers", 0) or any(getattr(text, "kv_sharing_modes", None) or ()):
            return "layers of the model share their keys and values"
        ready_for_steps(cache)
        kinds = [face(layer) for layer in cache.layers]
        if (why := next(filter(None, (kind.why_eager(cache) for kind in kinds)), None)) is not None:
            return why
        if not cache.sparse_layers:
            return "no layer of the model is sparse"
        if any(layer.store.device != ids.device or layer.store.batch != ids.shape[0] for layer in cache.sparse_layers):
            return "the cache lies on several devices, or has another batch size"
        if any(not self.readable(layer.store.pool.kv) for layer in cache.sparse_layers):
            return "offloaded blocks lie in memory that is not pinned, which a captured step cannot read"
        for layer in cache.sparse_layers:
            if layer.policy.sealing(layer.store) is None:  # only the device knows which rows have a full block
                return (
                    f"{type(layer.policy).__name__} keeps something of full blocks, index(), and has no sealing() that "
                    "says where"
                )
        if any(kind.in_columns for kind in kinds) and not cache.row_table.padded_in_front(
            cache.sparse_layers[0].store.held
        ):
            return (
                "rows have padding between their tokens, which sliding layers and indexers would take for tokens in a "
                "captured step"
            )
        return None


def _call(given: dict) -> str | None:
    """Reasons in the other arguments."""
    mask = given.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        return "a 4-D attention mask was passed"
    for name, value in given.items():
        if name not in STATIC and isinstance(value, Tensor | list | dict):
            return f"{name} was passed"
    if given.get("output_hidden_states") or given.get("output_attentions"):
        return "hidden states or attentions were asked for"
    if given.get("return_dict") is False:
        return "return_dict=False was passed"
    return None


def _brings_weights(module: torch.nn.Module) -> bool:
    """Whether the module's weights lie elsewhere between its calls."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # several, one after another
    return any(getattr(one, "offload", False) for one in hooks) or any(
        p.is_meta for p in module.parameters(recurse=False)
    )
