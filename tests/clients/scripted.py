"""A server for clients without a model: it calls tools, answers by schemas, and says one sentence otherwise.

    python tests/clients/scripted.py COMMAND ...

runs a command with its address as the last argument, and returns what that returns. Answers that a schema or a grammar
asks for are checked by llguidance, token by token, as the engine's are drawn.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from fake_engine import FakeEngine  # noqa: E402
from http_server import serving  # noqa: E402
from tokenizers_made import byte_level  # noqa: E402

from hf_sparsekv.serving.grammar import Grammars  # noqa: E402
from hf_sparsekv.serving.sampling import Sampling  # noqa: E402
from hf_sparsekv_serve.http import create_app  # noqa: E402

SENTENCE = "It rains in Oslo, at 7 degrees."
VALUES = {"city": "Oslo", "celsius": 7, "reasoning": "It is in the tool's result.", "next_thought": "I ask the tool."}
# All of a conversation as JSON, and the tags that say how calls are written.
TEMPLATE = "{{ {'messages': messages, 'tools': tools} | tojson }}"
TEMPLATE += "{# <|im_start|> <tool_call> </tool_call> arguments message.tool_calls #}"


class ScriptedEngine(FakeEngine):
    """Answers each request by its prompt and by what the answer has to follow."""

    def __init__(self) -> None:
        tokenizer = byte_level()
        tokenizer.chat_template = TEMPLATE
        super().__init__(tokenizer, step_s=0.0005, max_length=20_000)
        self._grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])

    def submit(self, prompt, sampling: Sampling = Sampling()):  # noqa: B008 (it is frozen)
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        text = str(self.tokenizer.decode(ids))
        fits = (one for one in answers(text, sampling) if self._follows(one, sampling))
        answer = next(fits, None)
        if answer is None:
            raise ValueError(f"no answer of the script follows {sampling.json_schema or sampling.grammar}")
        return super().submit(prompt, sampling, script=[*self.tokenizer(answer).input_ids, self.tokenizer.eos_token_id])

    def _follows(self, text: str, sampling: Sampling) -> bool:
        constraint = self._grammars.constraint(sampling)
        if constraint is None:
            return True
        words = torch.zeros(-(-len(self.tokenizer) // 32), dtype=torch.int32)
        try:
            for token in [*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id]:
                constraint.ask()
                constraint.fill(words)
                if constraint.error is not None or not words[token // 32] >> (token % 32) & 1:
                    return False
                constraint.unread.append(lambda token=token: token)
            return True
        finally:
            constraint.close()


def answers(prompt: str, sampling: Sampling) -> Iterator[str]:
    """What the script would say, the likeliest first."""
    try:
        seen = json.loads(prompt)
    except ValueError:  # of a completion
        yield SENTENCE
        return
    messages, tools = seen["messages"], [one["function"] for one in seen["tools"] or []]
    told = any(one["role"] == "tool" or "rain" in str(one["content"]) for one in messages)
    calls = {tool["name"]: call(tool) for tool in tools}
    asked = [calls[name] for name in calls if "weather" in name]
    others = [calls[name] for name in calls if "weather" not in name]
    typed = [json.dumps({"city": "Oslo", "celsius": 7})]
    reasoned = json.dumps({"reasoning": VALUES["reasoning"], "city": "Oslo", "celsius": 7})
    typed.insert(0 if "`reasoning`" in prompt else 1, reasoned)
    if "next_tool_name" in prompt:  # dspy's steps
        done = "observation_0" in prompt
        step = {"next_tool_name": "finish", "next_tool_args": {}}
        step = step if done else {"next_tool_name": "weather", "next_tool_args": {"city": "Oslo"}}
        typed.insert(0, json.dumps({"next_thought": VALUES["next_thought"], **step}))
    # dspy asks for JSON by words alone.
    free = sampling.json_schema is None and sampling.grammar is None and "JSON object in" not in prompt
    if told:
        first = [*others, SENTENCE] if free and others else [SENTENCE]
        yield from [*typed, *others, SENTENCE] if not free else first
    else:
        yield from [*asked, *others, *typed, SENTENCE] if (asked or others or not free) else [SENTENCE]
    yield from calls.values()


def call(tool: dict[str, Any]) -> str:
    """A call of a tool, as Hermes writes it, with what its parameters ask for."""
    arguments = filled(tool.get("parameters") or {})
    return f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': arguments})}\n</tool_call>"


def filled(schema: dict[str, Any]) -> Any:
    """A value that follows a simple schema."""
    found = {}
    for name, about in schema.get("properties", {}).items():
        kind = about.get("type", "string")
        found[name] = VALUES.get(name, {"integer": 7, "number": 7, "boolean": True, "object": {}}.get(kind, SENTENCE))
    return found


def main() -> int:
    """Serve while the command runs."""
    with ScriptedEngine() as engine, serving(create_app(engine, "scripted")) as url:
        return subprocess.run([*sys.argv[1:], url]).returncode


if __name__ == "__main__":
    sys.exit(main())
