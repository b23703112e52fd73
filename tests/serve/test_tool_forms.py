"""Answers as models of each family write them, whole and cut anywhere: calls, reasoning, and no text lost."""

from __future__ import annotations

import json
import random
import time

import pytest

from hf_sparsekv_cli.serve import TOOL_FORMATS
from hf_sparsekv_serve.forms import known, thinking
from hf_sparsekv_serve.forms.calls import Tools
from hf_sparsekv_serve.forms.deepseek import BAR
from hf_sparsekv_serve.forms.events import MOST_CALLS, Arguments, Begin, End, Thought
from hf_sparsekv_serve.forms.message import Message

THINK = thinking.KNOWN[0]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "dry": {"type": "boolean"},
        "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = Tools({"weather": CITY, "edit": EDIT, "now": None})
KOELN = ("weather", {"city": "Köln", "days": 2})
CODE = 'if a < b:\n    print("</x>\\n")\n'
CHANGE = ("edit", {"path": "a.py", "text": CODE, "lines": [1, 2], "dry": True})
NOW = ("now", {})

DS = {one: f"<{BAR}tool▁{one.replace(' ', '▁')}{BAR}>" for one in ("calls begin", "calls end", "call begin")}
DS |= {one: f"<{BAR}tool▁{one.replace(' ', '▁')}{BAR}>" for one in ("call end", "sep")}
D = f"{BAR}DSML{BAR}"


def deepseek(name: str, arguments: dict, old: bool) -> str:
    given = json.dumps(arguments, ensure_ascii=False)
    inner = f"function{DS['sep']}{name}\n```json\n{given}\n```" if old else f"{name}{DS['sep']}{given}"
    return DS["call begin"] + inner + DS["call end"]


def hermes(name: str, arguments: dict) -> str:
    given = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def qwen(name: str, arguments: dict) -> str:
    given = "".join(f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def glm(name: str, arguments: dict, line: str = "\n") -> str:
    given = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{shown(value)}</arg_value>{line}" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{line}{given}</tool_call>"


def kimi(name: str, arguments: dict, i: int) -> str:
    given = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{given}<|tool_call_end|>"


def gemma(
    name: str, arguments: dict, quote: str = '<|"|>', open: str = "<|tool_call>", end: str = "<tool_call|>"
) -> str:
    given = ",".join(
        f"{key}:{quote}{value}{quote}" if isinstance(value, str) else f"{key}:{json.dumps(value)}"
        for key, value in arguments.items()
    )
    return f"{open}call:{name}{{{given}}}{end}"


def invoke(name: str, arguments: dict, prefix: str = "") -> str:
    given = ""
    for key, value in arguments.items():
        said = f' string="{str(isinstance(value, str)).lower()}"' if prefix else ""
        given += f'<{prefix}parameter name="{key}"{said}>{shown(value)}</{prefix}parameter>\n'
    return f'<{prefix}invoke name="{name}">\n{given}</{prefix}invoke>\n'


def listed(*calls: tuple[str, dict]) -> str:
    return json.dumps([{"name": name, "arguments": given} for name, given in calls], ensure_ascii=False)


H = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
HARMONY_CALL = H.format("weather", '{"city": "Köln", "days": 2}')
ANSWERS = {  # form, the answer, text, reasoning, calls
    "hermes": ("hermes", "See.\n" + hermes(*KOELN), "See.", "", [KOELN]),
    "hermes, several": (
        "hermes",
        "<think>\nHm.\n</think>\n\n" + "\n".join([hermes(*KOELN), hermes(*CHANGE), hermes(*NOW)]),
        "",
        "Hm.",
        [KOELN, CHANGE, NOW],
    ),
    "hermes, not closed": ("hermes", hermes(*KOELN).removesuffix("\n</tool_call>"), "", "", [KOELN]),
    "hermes, turned round": (
        "hermes",
        '<tool_call>{"arguments": {"city": "Köln", "days": 2}, "name": "weather"}</tool_call>\n',
        "",
        "",
        [KOELN],
    ),
    "hermes, arguments in a string": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Köln\\", \\"days\\": 2}"}</tool_call>',
        "",
        "",
        [KOELN],
    ),
    "hermes, line ends as they are": (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a\n\tb"}}</tool_call>',
        "",
        "",
        [("weather", {"city": "a\n\tb"})],
    ),
    "hermes, text behind": ("hermes", f"before\n{hermes(*NOW)}\nbehind", "before\nbehind", "", [NOW]),
    "qwen": ("qwen", "I edit.\n\n" + qwen(*CHANGE), "I edit.", "", [CHANGE]),
    "qwen, several": ("qwen", "\n".join([qwen(*CHANGE), qwen(*KOELN), qwen(*NOW)]), "", "", [CHANGE, KOELN, NOW]),
    "qwen, no outer tag": (
        "qwen",
        qwen(*KOELN).removeprefix("<tool_call>\n"),
        "",
        "",
        [KOELN],
    ),
    "qwen, thinking": ("qwen", "<think>\nwhich?\n</think>\n\nYes.\n" + qwen(*KOELN), "Yes.", "which?", [KOELN]),
    "glm 4.5": ("glm", "<think>so</think>\nOk.\n" + glm(*KOELN) + "\n" + glm(*CHANGE), "Ok.", "so", [KOELN, CHANGE]),
    "glm 4.7": ("glm", glm(*CHANGE, "") + glm(*NOW, ""), "", "", [CHANGE, NOW]),
    "deepseek v3": (
        "deepseek",
        "Look:" + DS["calls begin"] + "\n".join([deepseek(*KOELN, True), deepseek(*CHANGE, True)]) + DS["calls end"],
        "Look:",
        "",
        [KOELN, CHANGE],
    ),
    "deepseek v3.1": (
        "deepseek",
        "<think>x</think>" + DS["calls begin"] + deepseek(*KOELN, False) + deepseek(*NOW, False) + DS["calls end"],
        "",
        "x",
        [KOELN, NOW],
    ),
    "deepseek v3.2": (
        "deepseek-3.2",
        f"Ok\n\n<{D}function_calls>\n{invoke(*CHANGE, D)}{invoke(*KOELN, D)}</{D}function_calls>",
        "Ok",
        "",
        [CHANGE, KOELN],
    ),
    "minimax": (
        "minimax",
        f"<think>m</think>\n<minimax:tool_call>\n{invoke(*CHANGE)}</minimax:tool_call>",
        "",
        "m",
        [CHANGE],
    ),
    "kimi": (
        "kimi",
        "See.<|tool_calls_section_begin|>" + kimi(*KOELN, 0) + kimi(*NOW, 1) + "<|tool_calls_section_end|>",
        "See.",
        "",
        [KOELN, NOW],
    ),
    "gemma 4": ("gemma", "Ok." + gemma(*CHANGE) + gemma(*KOELN), "Ok.", "", [CHANGE, KOELN]),
    "gemma 4, thinking": (
        "gemma",
        "<|channel>thought\nHm, yes.\n<channel|>" + gemma(*NOW),
        "",
        "Hm, yes.",
        [NOW],
    ),
    "functiongemma": (
        "function-gemma",
        gemma(*KOELN, "<escape>", "<start_function_call>", "<end_function_call>"),
        "",
        "",
        [KOELN],
    ),
    "mistral, list": ("mistral", "[TOOL_CALLS]" + listed(KOELN, NOW), "", "", [KOELN, NOW]),
    "mistral, names": (
        "mistral",
        'So.[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 2}[TOOL_CALLS]now[ARGS]{}',
        "So.",
        "",
        [KOELN, NOW],
    ),
    "mistral, ids": (
        "mistral",
        '[TOOL_CALLS]weather[CALL_ID]abcdefgh9[ARGS]{"city": "Köln", "days": 2}',
        "",
        "",
        [KOELN],
    ),
    "magistral": ("mistral", "[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]now[ARGS]{}", "Yes.", "Hm.", [NOW]),
    "llama 3": ("llama", '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}', "", "", [KOELN]),
    "llama 3, tag": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Köln", "days": 2}}; '
        '{"name": "now", "parameters": {}}',
        "",
        "",
        [KOELN, NOW],
    ),
    "llama 4": (
        "llama",
        "[weather(city='Köln', days=2), edit(path=\"a.py\", text='if a < b:\\n    print(\"</x>\\\\n\")\\n', "
        "lines=[1, 2], dry=True), now()]",
        "",
        "",
        [KOELN, CHANGE, NOW],
    ),
    "llama 4, marks": (
        "llama",
        '<|python_start|>[weather(city="Köln", days=2)]<|python_end|>',
        "",
        "",
        [KOELN],
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant" + HARMONY_CALL,
        "",
        "Need it.",
        [KOELN],
    ),
    "harmony, recipient first": (
        "harmony",
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Köln", "days": 2}',
        "",
        "",
        [KOELN],
    ),
    "harmony, preamble": (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + HARMONY_CALL,
        "I look.",
        "",
        [KOELN],
    ),
    "harmony, final": (
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
        "It is 3.",
        "a",
        [],
    ),
}
PLAIN = {  # answers that have no call, and come out as they are
    "hermes": [
        'no call<tool_call>{broken</tool_call> and <tool_call> {"a": 1}</tool_call>',
        '<tool_call>{"name": "weather"',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": tru}}</tool_call> x',
        '<tool_call>{"name": "weather", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": "b\\q"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"a": 1}} junk</tool_call>',
        "<tool_call>" * 50,
        "a < b <tool> <tool_cal",
        "  \n the text\n\n",
    ],
    "qwen": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</function>",
        "call <function=nobody>\n</function> or <tool_call>x</tool_call>",
        "<tool_call>\n<function=weather>\nKöln</function>",
        "<tool_call>\n<function=weather>\n<parameter=city>a</parameter><parameter=city>b</parameter></function>",
    ],
    "glm": ["<tool_call>two words</tool_call>", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>", "<tool_"],
    "deepseek": [
        DS["calls begin"] + "nothing" + DS["calls end"],
        DS["calls begin"] + DS["call begin"] + "weather" + DS["sep"] + '{"city": }' + DS["call end"],
    ],
    "deepseek-3.2": [f'<{D}function_calls>\n<{D}invoke name="weather">\nx</{D}invoke>', f"<{D}function_calls>x"],
    "minimax": ["<minimax:tool_call>\n<invoke name=>", '<minimax:tool_call><invoke name="a b"></invoke>'],
    "kimi": ["<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|>"],
    "gemma": ["<|tool_call>call:weather{city:Köln}<tool_call|>", "<|tool_call>weather{}<tool_call|>", "<|tool"],
    "function-gemma": ["<start_function_call>call weather"],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS]weather[ARGS]{"a": }', "[TOOL_CALLS] [1, 2]", "a [TOOL_CALL"],
    "llama": [
        '{"name": "nobody", "parameters": {}}',
        '{"a": 1}',
        "[1, 2, 3]",
        "[weather(city=x)]",
        "[weather(1)]",
        "[nobody(a=1)]",
        '<|python_tag|>brave_search.call(query="x")',
        'It is {"name": "weather", "parameters": {}}',
        "[",
        "[weather(city='a'",
    ],
    "harmony": ["just text", "<|channel|>", "<|start|>", "to=functions.weather<|message", "to be"],
}


def read(form: str, pieces: list[str], tools: Tools | None = TOOLS, begun: bool = False) -> Message:
    found = known.FORMS[form]
    marks = None if found.thinks else thinking.KNOWN[{"mistral": 1, "gemma": 2}.get(form, 0)]
    reader = known.reader(found, tools, marks, begun)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return Message.of([*events, *reader.finish()])


def called(message: Message) -> list[tuple[str, dict]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


def cuts(text: str) -> list[list[str]]:
    """The text in pieces: at each place, of each length, and at random."""
    found = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    found += [[text[at : at + size] for at in range(0, len(text), size)] for size in range(1, 8)]
    drawn = random.Random(len(text))
    for _ in range(20):
        places = sorted(drawn.sample(range(len(text) + 1), min(len(text), drawn.randint(1, 12))))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)])])
    return found


def comparable(message: Message) -> tuple:
    ids = [call.id for call in message.calls if call.id is not None and ":" in call.id]
    return message.text, message.reasoning, [(call.name, call.arguments) for call in message.calls], ids


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_whole_and_cut_anywhere(name):
    form, answer, text, reasoning, calls = ANSWERS[name]
    whole = read(form, [answer])
    assert (whole.text, whole.reasoning, called(whole)) == (text, reasoning, calls)
    for pieces in cuts(answer):
        assert comparable(read(form, pieces)) == comparable(whole), pieces


@pytest.mark.parametrize(("form", "answer"), [(form, answer) for form, given in PLAIN.items() for answer in given])
def test_what_is_no_call_is_text(form, answer):
    for pieces in ([answer], *cuts(answer)):
        assert comparable(read(form, pieces)) == (answer, "", [], []), pieces


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_cut_off_have_the_calls_before(name):
    """At any place: the calls are the first of those that the whole answer has, and the rest is there as text."""
    form, answer, _, _, calls = ANSWERS[name]
    for end in range(len(answer)):
        found = read(form, [answer[:end]])
        assert called(found) == calls[: len(found.calls)]


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_of_arguments_come_before_the_call_has_ended(name):
    form, answer, _, _, calls = ANSWERS[name]
    found = known.FORMS[form]
    reader = known.reader(found, TOOLS, None if found.thinks else THINK)
    events = [event for mark in answer for event in reader.feed(mark)]
    if len(calls) == 1 and len(calls[0][1]) > 1 and "string" not in name and "round" not in name:
        first = [type(event) for event in events]
        assert first.count(Arguments) > 5 and (End not in first or first.index(End) > first.index(Arguments) + 5)


@pytest.mark.parametrize("form", known.FORMS)
def test_noise_is_neither_lost_nor_taken_for_calls(form):
    """Marks of all forms in any order: what is no call is text, and how it is cut does not matter."""
    drawn = random.Random(7)
    parts = [*known.FORMS[form].marks, "{", "}", '"', "name", "weather", ":", " ", "\n", "x", "<", "functions.now", "("]
    for _ in range(400):
        answer = "x" + "".join(drawn.choices(parts, k=drawn.randint(1, 14)))
        whole = read(form, [answer])
        if not whole.calls and not known.FORMS[form].thinks:
            assert whole.text == answer
        for pieces in ([*answer], [answer[i : i + 3] for i in range(0, len(answer), 3)]):
            assert comparable(read(form, pieces)) == comparable(whole)


def test_without_tools_there_are_no_calls():
    for name in ("hermes", "qwen", "mistral, list", "llama 3"):
        form, answer, *_ = ANSWERS[name]
        assert comparable(read(form, [answer], None)) == (answer, "", [], [])


def test_reasoning_that_the_template_has_begun():
    for answer in ("Hm.\n</think>\n\n" + hermes(*NOW), "Hm.</think>" + hermes(*NOW)):
        for pieces in ([answer], *cuts(answer)):
            found = read("hermes", pieces, begun=True)
            assert (found.text, found.reasoning, called(found)) == ("", "Hm.", [NOW])
    assert read("hermes", ["no end"], begun=True) == Message("", "no end", [])
    assert thinking.begun("<|im_start|>assistant\n<think>\n", THINK)
    assert not thinking.begun("<think>\n\n</think>\n\n", THINK)
    assert not thinking.begun("<|turn>model\n<|channel>thought\n<channel|>", thinking.KNOWN[2])


def test_reasoning_comes_as_it_is_written():
    reader = known.reader(None, None, THINK)
    assert reader.feed("<think>a ") == [Thought("a")] and reader.feed("b") == [Thought(" b")]


def test_types_of_arguments_are_those_of_the_schema():
    drawn = {"path": "1", "text": "true", "lines": "[1]", "dry": "True", "mode": "null"}
    for form, write in (("qwen", qwen), ("glm", glm)):
        (call,) = read(form, [write("edit", drawn)]).calls
        assert json.loads(call.arguments) == {"path": "1", "text": "true", "lines": [1], "dry": True, "mode": None}
        (call,) = read(form, [write("now", {"a": "1", "b": "x", "c": '{"d": 1}', "e": "NaN"})]).calls
        assert json.loads(call.arguments) == {"a": 1, "b": "x", "c": {"d": 1}, "e": "NaN"}


def test_ids_that_templates_need():
    _, answer, *_ = ANSWERS["kimi"]
    assert [call.id for call in read("kimi", [answer]).calls] == ["functions.weather:0", "functions.now:1"]
    assert [call.id for call in read("mistral", [ANSWERS["mistral, ids"][1]]).calls] == ["abcdefgh9"]
    for call in read("mistral", [ANSWERS["mistral, list"][1]]).calls:
        assert len(call.id) == 9 and call.id.isalnum()


def test_more_calls_than_an_answer_may_have_are_text():
    answer = "\n".join([hermes(*NOW)] * (MOST_CALLS + 2))
    for pieces in ([answer], [*answer]):
        found = read("hermes", pieces)
        assert len(found.calls) == MOST_CALLS and found.text.strip() == "\n".join([hermes(*NOW)] * 2)


def test_a_name_is_told_before_the_arguments():
    reader = known.reader(known.FORMS["hermes"], TOOLS, None)
    assert reader.feed('<tool_call>{"name": "weather", "arguments": {"ci') == [
        Begin("weather", None),
        Arguments('{"ci'),
    ]


@pytest.mark.parametrize("form", known.FORMS)
def test_time_grows_with_the_text_alone(form):
    """Twice the text takes about twice the time, also in small pieces."""

    def taken(count: int) -> float:
        began = time.thread_time()
        for part in (*known.FORMS[form].marks[:2], '{"a":[', "{", '"'):
            read(form, [begins + part * count])
            read(form, [begins, *[part] * count])
        return time.thread_time() - began

    begins = ANSWERS[next(name for name in ANSWERS if ANSWERS[name][0] == form)][1][:-20]
    few, many = min(taken(1000) for _ in range(3)), taken(8000)
    assert many < 8 * 3 * few + 0.1, (few, many)


TEMPLATES = {  # excerpts of published chat templates
    "hermes": """return a json object <tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": }\\n</tool_call>""",
    "qwen": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1",
    "glm": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>",
    "llama": """Environment: ipython ... Respond in the format {"name": function name, "parameters": dictionary}""",
    "mistral": """{%- if message.tool_calls %}{{- "[TOOL_CALLS][" }}{{ message.tool_calls }}""",
    "harmony": """{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}""",
    "kimi": "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>",
    "deepseek": f"{DS['calls begin']}{DS['call begin']}",
    "deepseek-3.2": f"<{D}function_calls>",
    "minimax": "<minimax:tool_call>",
    "gemma": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "function-gemma": "<start_function_call>call:",
}


def test_forms_are_known_by_their_templates():
    assert {name: known.form_of(text) for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert known.form_of("{{ tools }}<|im_start|>") is None
    assert (*known.FORMS, "template") == TOOL_FORMATS and set(TEMPLATES) == set(known.FORMS)


def test_reasoning_is_known_by_its_marks():
    assert thinking.marks_of("{{ '<think>' }} </think>", set()) == THINK
    assert thinking.marks_of("", {"<think>", "</think>"}) == THINK
    assert thinking.marks_of("", {"[THINK]", "[/THINK]"}) == thinking.KNOWN[1]
    assert thinking.marks_of("<|turn>model <|channel>thought\n<channel|>", set()) == thinking.KNOWN[2]
    assert thinking.marks_of("<|im_start|>", {"<tool_call>"}) is None
