"""How forms whose arguments are JSON write calls, for grammars of answers that have to be calls."""

from __future__ import annotations

from dataclasses import dataclass

from . import deepseek, harmony, hermes, kimi, mistral

NUMBER = "{n}"  # in a text: digits


@dataclass(frozen=True)
class Spelling:
    """The texts around names and arguments of calls.

    Attributes:
        begin, middle, end: before the name, between it and the arguments, and after these.
        first, last, between: before the first call, after the last, and between two; None: there is only one.
        quoted: the name is a string of JSON.
    """

    begin: str
    middle: str
    end: str = ""
    first: str = ""
    last: str = ""
    between: str | None = ""
    quoted: bool = False


_CALL = f"{deepseek.CALL}{deepseek.KIND}{deepseek.SEPARATOR}"
_V3 = Spelling(
    *(_CALL, f"\n{deepseek.CODE}\n", f"\n{deepseek.CODE_END}{deepseek.CALL_END}"),
    *(deepseek.OPEN, deepseek.CLOSE, "\n"),
)
_V3_1 = Spelling(deepseek.CALL, deepseek.SEPARATOR, deepseek.CALL_END, deepseek.OPEN, deepseek.CLOSE)
_KIMI = Spelling(f"{kimi.CALL}functions.", f":{NUMBER}{kimi.ARGUMENTS}", kimi.CALL_END, kimi.OPEN, kimi.CLOSE)
_LISTED = Spelling('{"name": ', ', "arguments": ', "}", f"{mistral.OPEN}[", "]", ", ", quoted=True)
_HERMES = Spelling(*(f'{hermes.OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{hermes.CLOSE}"), between="\n", quoted=True)
_LLAMA = Spelling('{"name": ', ', "parameters": ', "}", between="; ", quoted=True)
_HARMONY = Spelling(
    *(f"{harmony.CHANNEL}commentary to=functions.", f" {harmony.MARKS[-1]}json{harmony.MESSAGE}"), between=None
)


def spelling_of(form: str | None, template: str) -> Spelling | None:
    """That of a form, as a chat template shows it; None: its calls are known for reading only."""
    if form == "deepseek":
        return _V3 if deepseek.CODE in template else _V3_1
    if form == "mistral":
        return Spelling(mistral.OPEN, mistral.ARGS) if mistral.ARGS in template else _LISTED
    return {"hermes": _HERMES, "llama": _LLAMA, "kimi": _KIMI, "harmony": _HARMONY}.get(form or "")
