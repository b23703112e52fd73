"""What each client is asked to do: ``CLIENT_plain``, ``_stream``, ``_tools`` and ``_typed``, of a server's address.

The server answers as ``scripted.py`` says. A case raises an error if the client does not come by that answer.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

MODEL = "scripted"
ASKED = "What is the weather in Oslo?"
MESSAGES = [{"role": "user", "content": ASKED}]
SENTENCE = "It rains in Oslo, at 7 degrees."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
CLIENTS = {  # by the package whose version is shown
    "openai": "openai",
    "responses": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "llama-index": "llama-index-llms-openai-like",
    "instructor": "instructor",
    "pydantic-ai": "pydantic-ai-slim",
    "openai-agents": "openai-agents",
    "dspy": "dspy",
    "smolagents": "smolagents",
    "aiohttp": "aiohttp",
}


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    celsius: int


TYPED = Weather(city="Oslo", celsius=7)


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    assert city == "Oslo", city
    return "rain, 7 degrees"


def same(found: Any, expected: Any) -> None:
    """Raise an error unless both are equal."""
    if found != expected:
        raise ValueError(f"{found!r} is not {expected!r}")


# ---------------------------------------------------------------------- OpenAI's own


def _openai(url: str):
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", max_retries=0)


def openai_plain(url: str) -> None:
    answer = _openai(url).chat.completions.create(model=MODEL, messages=MESSAGES)
    same(answer.choices[0].message.content, SENTENCE)
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


def openai_stream(url: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = _openai(url).chat.completions.create(model=MODEL, messages=MESSAGES, **options)
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), SENTENCE)
    same(last.usage.completion_tokens > 5, True)


def openai_tools(url: str) -> None:
    client = _openai(url)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    same(json.loads(call.function.arguments), {"city": "Oslo"})
    messages = [*MESSAGES, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    again = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    same(again.choices[0].message.content, SENTENCE)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL]) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    same(streamed.function.arguments, call.function.arguments)


def openai_typed(url: str) -> None:
    client = _openai(url)
    parse = client.chat.completions.parse
    same(parse(model=MODEL, messages=MESSAGES, response_format=Weather).choices[0].message.parsed, TYPED)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Weather) as stream:
        same(stream.get_final_completion().choices[0].message.parsed, TYPED)
    strict = {**TOOL["function"], "strict": True, "parameters": {**CITY, "additionalProperties": False}}
    tools = [{"type": "function", "function": strict}]
    both = parse(model=MODEL, messages=MESSAGES, response_format=Weather, tools=tools)
    same(both.choices[0].message.tool_calls[0].function.name, "weather")


def responses_plain(url: str) -> None:
    same(_openai(url).responses.create(model=MODEL, input=ASKED, store=False).output_text, SENTENCE)


def responses_stream(url: str) -> None:
    events = list(_openai(url).responses.create(model=MODEL, input=ASKED, store=False, stream=True))
    same("".join(one.delta for one in events if one.type == "response.output_text.delta"), SENTENCE)
    same(events[-1].response.output_text, SENTENCE)


def responses_tools(url: str) -> None:
    tool = {"type": "function", "name": "weather", "description": "of a city", "parameters": CITY, "strict": False}
    client = _openai(url)
    answer = client.responses.create(model=MODEL, input=ASKED, tools=[tool], store=False)
    (call,) = [one for one in answer.output if one.type == "function_call"]
    same(json.loads(call.arguments), {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given = [{"role": "user", "content": ASKED}, *answer.output, result]
    same(client.responses.create(model=MODEL, input=given, tools=[tool], store=False).output_text, SENTENCE)


def responses_typed(url: str) -> None:
    answer = _openai(url).responses.parse(model=MODEL, input=ASKED, text_format=Weather, store=False)
    same(answer.output_parsed, TYPED)


# ---------------------------------------------------------------------- Anthropic's


def _anthropic(url: str):
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key="none", max_retries=0)


def anthropic_plain(url: str) -> None:
    client = _anthropic(url)
    answer = client.messages.create(model=MODEL, max_tokens=100, messages=MESSAGES)
    same(answer.content[0].text, SENTENCE)
    same(client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens, answer.usage.input_tokens)


def anthropic_stream(url: str) -> None:
    with _anthropic(url).messages.stream(model=MODEL, max_tokens=100, messages=MESSAGES) as stream:
        same("".join(stream.text_stream), SENTENCE)


def anthropic_tools(url: str) -> None:
    tool = {"name": "weather", "description": "of a city", "input_schema": CITY}
    client, asked = _anthropic(url), {"model": MODEL, "max_tokens": 200, "tools": [tool]}
    answer = client.messages.create(**asked, messages=MESSAGES)
    (call,) = [one for one in answer.content if one.type == "tool_use"]
    same((call.name, call.input, answer.stop_reason), ("weather", {"city": "Oslo"}, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    same(client.messages.create(**asked, messages=messages).content[0].text, SENTENCE)


# ---------------------------------------------------------------------- libraries over them


def _litellm(url: str, **more: Any):
    import litellm

    return litellm.completion(model=f"openai/{MODEL}", api_base=f"{url}/v1", messages=MESSAGES, num_retries=0, **more)


def litellm_plain(url: str) -> None:
    import litellm

    same(_litellm(url).choices[0].message.content, SENTENCE)
    try:
        _litellm(url, max_tokens=1_000_000)
    except litellm.ContextWindowExceededError:
        return
    raise ValueError("a prompt over the context is not known as one")


def litellm_stream(url: str) -> None:
    same("".join(one.choices[0].delta.content or "" for one in _litellm(url, stream=True)), SENTENCE)


def litellm_tools(url: str) -> None:
    (call,) = _litellm(url, tools=[TOOL]).choices[0].message.tool_calls
    same(json.loads(call.function.arguments), {"city": "Oslo"})


def litellm_typed(url: str) -> None:
    answer = _litellm(url, response_format=Weather)
    same(Weather.model_validate_json(answer.choices[0].message.content), TYPED)


def _langchain(url: str, **more: Any):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", max_retries=0, **more)


def langchain_plain(url: str) -> None:
    from langchain_core.exceptions import ContextOverflowError

    same(_langchain(url).invoke(ASKED).content, SENTENCE)
    try:
        _langchain(url, max_tokens=1_000_000).invoke(ASKED)
    except ContextOverflowError:
        return
    raise ValueError("a prompt over the context is not known as one")


def langchain_stream(url: str) -> None:
    pieces = list(_langchain(url, stream_usage=True).stream(ASKED))
    same("".join(piece.content for piece in pieces), SENTENCE)
    same(sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) > 5, True)


def langchain_tools(url: str) -> None:
    client = _langchain(url).bind_tools([weather])
    answer = client.invoke(ASKED)
    (call,) = answer.tool_calls
    same((call["name"], call["args"]), ("weather", {"city": "Oslo"}))
    result = {"role": "tool", "tool_call_id": call["id"], "content": weather(**call["args"])}
    same(client.invoke([("user", ASKED), answer, result]).content, SENTENCE)


def langchain_typed(url: str) -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        same(_langchain(url).with_structured_output(Weather, method=method).invoke(ASKED), TYPED)


def _llama_index(url: str):
    from llama_index.llms.openai_like import OpenAILike

    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 20_000}
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", max_retries=0, **options)


def llama_index_plain(url: str) -> None:
    same(_llama_index(url).complete(ASKED).text, SENTENCE)


def llama_index_stream(url: str) -> None:
    same("".join(one.delta or "" for one in _llama_index(url).stream_complete(ASKED)), SENTENCE)


def llama_index_tools(url: str) -> None:
    from llama_index.core.tools import FunctionTool

    client, tool = _llama_index(url), FunctionTool.from_defaults(weather)
    answer = client.chat_with_tools([tool], user_msg=ASKED)
    (call,) = client.get_tool_calls_from_response(answer)
    same((call.tool_name, call.tool_kwargs), ("weather", {"city": "Oslo"}))


def llama_index_typed(url: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    same(_llama_index(url).structured_predict(Weather, PromptTemplate(ASKED)), TYPED)


def _instructor(url: str, mode: str):
    import instructor

    return instructor.from_openai(_openai(url), mode=instructor.Mode[mode])


def instructor_stream(url: str) -> None:
    client = _instructor(url, "TOOLS")
    *_, last = client.chat.completions.create_partial(model=MODEL, messages=MESSAGES, response_model=Weather)
    same((last.city, last.celsius), (TYPED.city, TYPED.celsius))


def instructor_typed(url: str) -> None:
    for mode in ("TOOLS", "JSON_SCHEMA", "JSON"):
        create = _instructor(url, mode).chat.completions.create
        found = create(model=MODEL, messages=MESSAGES, response_model=Weather, max_retries=0)
        same(found.model_dump(), TYPED.model_dump())  # of a class of its own


def _pydantic_ai(url: str, **more: Any):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return Agent(OpenAIChatModel(MODEL, provider=provider), **more)


def pydantic_ai_plain(url: str) -> None:
    same(_pydantic_ai(url).run_sync(ASKED).output, SENTENCE)


async def pydantic_ai_stream(url: str) -> None:
    async with _pydantic_ai(url).run_stream(ASKED) as stream:
        same("".join([piece async for piece in stream.stream_text(delta=True)]), SENTENCE)


async def pydantic_ai_tools(url: str) -> None:
    asked: list[str] = []

    def weather_of(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain, 7 degrees"

    same((await _pydantic_ai(url, tools=[weather_of]).run(ASKED)).output, SENTENCE)
    same(asked, ["Oslo"])


async def pydantic_ai_typed(url: str) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    for kind in (ToolOutput, NativeOutput):
        for tools in ([], [weather]):
            same((await _pydantic_ai(url, tools=tools, output_type=kind(Weather)).run(ASKED)).output, TYPED)


def _agent(url: str, **more: Any):
    from agents import Agent, OpenAIChatCompletionsModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)
    return Agent(name="a", model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client), **more)


async def openai_agents_plain(url: str) -> None:
    from agents import Runner

    same((await Runner.run(_agent(url), ASKED)).final_output, SENTENCE)


async def openai_agents_stream(url: str) -> None:
    from agents import Runner

    run = Runner.run_streamed(_agent(url), ASKED)
    deltas = [
        one.data.delta async for one in run.stream_events() if getattr(one, "data", None) and "delta" in one.data.type
    ]
    same(("".join(map(str, deltas)), run.final_output), (SENTENCE, SENTENCE))


async def openai_agents_tools(url: str) -> None:
    from agents import Runner, function_tool

    same((await Runner.run(_agent(url, tools=[function_tool(weather)]), ASKED)).final_output, SENTENCE)


async def openai_agents_typed(url: str) -> None:
    from agents import Runner, function_tool

    for tools in ([], [function_tool(weather)]):
        same((await Runner.run(_agent(url, tools=tools, output_type=Weather), ASKED)).final_output, TYPED)


def _dspy(url: str):
    import dspy

    lm = dspy.LM(f"openai/{MODEL}", api_base=f"{url}/v1", api_key="none", cache=False, num_retries=0)
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
    return dspy, lm


def dspy_plain(url: str) -> None:
    (answer,) = _dspy(url)[1](ASKED)
    same(answer if isinstance(answer, str) else answer["text"], SENTENCE)


def dspy_tools(url: str) -> None:
    dspy, _ = _dspy(url)
    same(dspy.ReAct("question -> city: str, celsius: int", tools=[weather])(question=ASKED).celsius, 7)


def dspy_typed(url: str) -> None:
    dspy, _ = _dspy(url)
    found = dspy.Predict("question -> city: str, celsius: int")(question=ASKED)
    same((found.city, found.celsius), ("Oslo", 7))


def _smolagents(url: str):
    from smolagents import OpenAIModel

    return OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none")


def _of_smolagents() -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]


def smolagents_plain(url: str) -> None:
    same(_smolagents(url).generate(_of_smolagents()).content, SENTENCE)


def smolagents_stream(url: str) -> None:
    same("".join(one.content or "" for one in _smolagents(url).generate_stream(_of_smolagents())), SENTENCE)


def smolagents_tools(url: str) -> None:
    from smolagents import ToolCallingAgent, tool

    same(
        ToolCallingAgent(tools=[tool(weather)], model=_smolagents(url), max_steps=4, verbosity_level=0).run(ASKED),
        SENTENCE,
    )


def smolagents_typed(url: str) -> None:
    schema = {"name": "Weather", "schema": Weather.model_json_schema(), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = _smolagents(url).generate(_of_smolagents(), response_format=form)
    same(Weather.model_validate_json(answer.content), TYPED)


# ---------------------------------------------------------------------- connections


async def aiohttp_plain(url: str) -> None:
    """Connections that are idle for longer and longer, up to aiohttp's own 15 s, lose no request."""
    import asyncio

    import aiohttp

    body = {"model": MODEL, "messages": MESSAGES}
    async with aiohttp.ClientSession() as session:

        async def ask(idle: float) -> None:
            for _ in range(3):
                async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                    same((await answer.json())["choices"][0]["message"]["content"], SENTENCE)
                await asyncio.sleep(idle)

        await asyncio.gather(*(ask(idle) for idle in (0.1, 4.9, 5.0, 5.1, 7.5) for _ in range(8)))
