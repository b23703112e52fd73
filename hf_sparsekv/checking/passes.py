"""Forward passes over some of a text's tokens, as ``generate()``'s own loop would call the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def logits_of(model: Any, ids: Tensor, new: int, kept: int, kwargs: dict) -> Tensor:
    """Logits ``[batch, kept, vocabulary]`` of the last tokens, of a pass over the last ``new`` of ``ids [batch, n]``.

    ``kwargs``: the model's further arguments for all of ``ids``, the cache among them.
    """
    given = model.prepare_inputs_for_generation(ids, next_sequence_length=new, **kwargs)
    if "logits_to_keep" in given:
        given["logits_to_keep"] = kept
    return model(**given, return_dict=True).logits[:, -kept:]
