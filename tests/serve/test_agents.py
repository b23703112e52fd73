"""Coding agents: what Claude Code 2.1.197 and Codex 0.171.0 sent in a task with tools, and they themselves.

Recorded requests are one a line, without long texts and most tools. The programs run where they are installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

RECORDED = Path(__file__).parent / "recorded"
REQUESTS = [
    (name, json.loads(line))
    for name in ("claude", "codex")
    for line in (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
]
SHOWS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{{ tools | tojson if tools }}{# <tool_call> </tool_call> <think> </think> #}"
)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted(FakeEngine):
    """Answers by how many turns the assistant has had.

    Args:
        script: the answers.
        tool: a word of prompts of the task itself; agents ask for other things beside it.
    """

    def __init__(self, script: list[str], tool: str) -> None:
        tokenizer = byte_level()
        tokenizer.chat_template = SHOWS
        super().__init__(tokenizer, max_length=400_000, max_rows=1)
        self._script, self._tool = script, tool
        self.shown: list[str] = []

    def submit(self, prompt, sampling):
        text = self.tokenizer.decode(prompt)
        self.shown.append(text)
        turn = min(text.count("<|im_start|>assistant"), len(self._script) - 1)
        said = self._script[turn] if self._tool in text else "text"
        self.answer = [*self.tokenizer(said)["input_ids"], self.tokenizer.eos_token_id]
        return super().submit(prompt, sampling)


@pytest.mark.parametrize(("name", "request_"), REQUESTS, ids=lambda one: one if isinstance(one, str) else "")
def test_recorded_requests_are_served(name, request_):
    """By a server as it is, without options. What it does not follow is told."""
    answer = "<think>Hm.</think>Yes." + call("Bash", command="ls")
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS
    with FakeEngine(tokenizer, max_length=50_000, answer=answer) as engine, serving(create_app(engine, "m")) as url:
        address = f"{url}{request_['path']}?{request_['query']}"
        found = httpx.post(address, json=request_["body"], headers=request_["headers"])
        assert found.status_code == 200, found.text
        known = {"context_management", "thinking", "output_config.effort", "tools.3"}
        assert {*found.headers["x-ignored-fields"].split(", ")} <= known
        end = "event: message_stop" if name == "claude" else "event: response.completed"
        assert end in found.text
        shown = engine.tokenizer.decode(engine.prompts[-1])
        results = [part for part in ("<|im_start|>tool\n", "(exec_command", "(Write") if part in shown]
        assert bool(results) == ("call_" in json.dumps(request_["body"]))


def ran(program: str, arguments: list[str], home: Path, **environment: str) -> str:
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}: npm install -g @openai/codex @anthropic-ai/claude-code")
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "IS_SANDBOX": "1", **environment}
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        [program, *arguments],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_claude_code_does_a_task_with_tools(tmp_path):
    path = tmp_path / "home" / "work" / "b.py"
    script = [
        "<think>A file.</think>I write one.\n" + call("Write", file_path=str(path), content="print(6*7)\n"),
        call("Bash", command=f"python3 {path}", description="run") + "\n" + call("Read", file_path=str(path)),
        "It is 42.",
    ]
    with Scripted(script, "Bash") as engine, serving(create_app(engine, "m", api_key="k")) as url:
        keys = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "k", "ANTHROPIC_MODEL": "m"}
        keys["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
        said = ran("claude", ["-p", "6*7?", "--allowedTools", "Bash,Write,Read"], tmp_path / "home", **keys)
    assert "It is 42." in said and path.read_text() == "print(6*7)\n"
    assert any("<|im_start|>tool\n" in text and "42" in text for text in engine.shown)


def test_codex_does_a_task_with_tools(tmp_path):
    script = [
        "<think>A file.</think>I write one." + call("exec_command", cmd="echo 'print(6*7)' > a.py"),
        call("exec_command", cmd="python3 a.py"),
        "It is 42.",
    ]
    with Scripted(script, "exec_command") as engine, serving(create_app(engine, "m", api_key="k")) as url:
        given = {"model_provider": "local", "model": "m", "model_providers.local.name": "local"}
        given |= {"model_providers.local.base_url": f"{url}/v1", "model_providers.local.env_key": "LOCAL_KEY"}
        options = [word for name, value in given.items() for word in ("-c", f'{name}="{value}"')]
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        said = ran("codex", ["exec", *flags, *options, "6*7?"], tmp_path / "home", LOCAL_KEY="k")
    assert "It is 42." in said and (tmp_path / "home" / "work" / "a.py").exists()
    assert any("<|im_start|>tool\n" in text and "42" in text for text in engine.shown)
