"""``/tokenize`` and ``/detokenize``, as vLLM has them: tokens of a prompt or a conversation, and the text of tokens.

The engine sees none of it. :mod:`.prompts` makes the tokens of requests in the same way.
"""

from __future__ import annotations

from typing import Any

from hf_sparsekv.serving.sampling import shown

from ..process import step_aside
from . import fields as fields_of
from . import schema
from .engine import Engine
from .errors import ApiError
from .fields import Fields
from .prompts import Prompts
from .scan import Scan
from .values import whole


class Tokenizing:
    """Any thread may call it.

    Args:
        engine: whose tokenizer it asks.
        prompts: make the tokens of conversations.
    """

    def __init__(self, engine: Engine, prompts: Prompts) -> None:
        self._engine, self._prompts = engine, prompts

    def tokenize(self, body: bytes, scan: Scan) -> dict[str, Any]:
        """The answer to ``/tokenize``."""
        step_aside()
        with self._prompts.turn(body):
            given = self._prompts.loaded(body)
            fields = Fields(self._prompts.ignore_unknown)
            if "messages" in given:
                known = fields.of(given, fields_of.TOKENIZED_CHAT)
                names = schema.flag(known, "return_token_strs")
                asked = {name: value for name, value in known.items() if name != "return_token_strs"}
                ids = self._prompts.of_conversation(schema.chat(asked, scan, self._prompts.ignore_unknown))
            else:
                known = fields.of(given, fields_of.TOKENIZED)
                names, special = schema.flag(known, "return_token_strs"), schema.flag(known, "add_special_tokens", True)
                if not isinstance(text := known.get("prompt"), str):
                    raise ApiError(400, f"prompt must be text, got {shown(text)}: or give messages", "prompt")
                whole(text, "prompt")
                ids = self._prompts.of_text(text, add_special_tokens=special)
        about = {"count": len(ids), "max_model_len": self._engine.max_length, "tokens": ids}
        strings = self._tokenizer("prompt").convert_ids_to_tokens(ids) if names else None
        return {**about, "token_strs": strings}

    def detokenize(self, body: bytes, scan: Scan) -> dict[str, Any]:
        """The answer to ``/detokenize``."""
        step_aside()
        with self._prompts.turn(body):
            given = self._prompts.loaded(body)
            tokens = Fields(self._prompts.ignore_unknown).of(given, fields_of.DETOKENIZED).get("tokens")
            if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
                raise ApiError(400, f"tokens must be a list of token ids, got {shown(tokens)}", "tokens")
            tokenizer = self._tokenizer("tokens")
            known = range(len(tokenizer))
            wrong = next((one for one in tokens if one not in known), None)
            if wrong is not None:
                why = f"tokens: id {shown(wrong)} is outside the vocabulary of {len(tokenizer)}"
                raise ApiError(400, why, "tokens")
            return {"prompt": str(tokenizer.decode(tokens, skip_special_tokens=False))}

    def _tokenizer(self, field: str) -> Any:
        if self._engine.tokenizer is None:
            raise ApiError(400, "this server has no tokenizer", field)
        return self._engine.tokenizer
