"""Tasks over long texts that no probe model was trained on: chains of facts, code, a dialogue, JSON from a text.

All texts are invented (:mod:`.invented`; this project's own, Apache-2.0), made offline for any tokenizer and length,
the same for the same seed. Facts stand among others of their kind, so that no block of the text is found by its style.
Scores are RULER's: the share of right parts in the answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from .invented import Names, chronicle, insert, spread, words
from .samples import Sample, found, found_share, largest
from .source_text import module

FAMILIES = ("chain_2", "chain_3", "chain_4", "code_constant", "code_call", "dialogue", "extract")
ANSWER_TOKENS = {"chain": 64, "code": 32, "dialogue": 16, "extract": 96}
OTHERS = 4  # distractors of each fact


@dataclass(frozen=True)
class Draft:
    """A prompt before it is tokens.

    Args:
        turns: what user and assistant say in turn, the user first and last.
        lead: the words that the answer begins with.
        references: right parts of the answer.
        items: ``(output, references)`` to what is right, part by part.
    """

    turns: tuple[str, ...]
    lead: str
    references: tuple[str, ...]
    items: Callable[[str, tuple[str, ...]], tuple[float, ...]] = found

    def text(self, tokenizer, chat: bool) -> str:
        """The prompt, in the tokenizer's chat template or as plain text."""
        roles = ("user", "assistant")
        if chat:
            turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.turns)]
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + self.lead
        if len(self.turns) == 1:
            return f"{self.turns[0]}\n{self.lead}"
        lines = [f"{roles[i % 2].capitalize()}: {text}" for i, text in enumerate((*self.turns, self.lead))]
        return "\n".join(lines)


def make_sample(
    tokenizer, family: str, length: int, index: int, seed: int = 0, chat: bool = False, answer_tokens: int | None = None
) -> Sample:
    """One prompt of at most ``length`` tokens, its answer included.

    Args:
        family: one of :data:`FAMILIES`.
        chat: put it into the tokenizer's chat template; a dialogue's turns become turns of it.
        answer_tokens: room for the answer; ``None``: what :data:`ANSWER_TOKENS` says.

    Raises:
        ValueError: no such family, or ``length`` has no room for the task.
    """
    if family not in FAMILIES:
        raise ValueError(f"there is no task {family!r}; there are {', '.join(FAMILIES)}")
    room = answer_tokens or ANSWER_TOKENS[family.split("_")[0]]

    def encode(size: int) -> tuple[list[int], Draft]:
        draft = _BUILDERS[family](random.Random(f"{family}-{length}-{index}-{seed}"), size)
        return tokenizer(draft.text(tokenizer, chat), add_special_tokens=not chat, verbose=False)["input_ids"], draft

    ids, draft = largest(encode, length - room)
    if ids is None:
        raise ValueError(f"{family} does not fit into {length} tokens (with {room} for the answer): give more")
    score = found_share if draft.items is found else Share(draft.items)
    return Sample(family, length, index, tuple(ids), draft.references, room, score, items=draft.items)


@dataclass(frozen=True)
class Share:
    """A score: the mean of an answer's parts."""

    items: Callable[[str, tuple[str, ...]], tuple[float, ...]]

    def __call__(self, output: str, references: tuple[str, ...]) -> float:
        """The share of parts that are right."""
        parts = self.items(output, references)
        return sum(parts) / len(parts)


# ---------------------------------------------------------------------- chains of facts


_KINDS = ("place", "thing", "person", "town", "number")


def _chain(hops: int) -> Callable[[random.Random, int], Draft]:
    """A chain of facts: a building's key, the key's owner, the owner's town, the town's number.

    Each fact names the subject of the next one. The answer follows the chain, and each fact is one part of the score.
    """

    def build(rng: random.Random, size: int) -> Draft:
        names = Names(rng)

        def chain() -> tuple[dict[str, str], list[str]]:
            name = {kind: names.draw(kind) for kind in _KINDS}
            said = [
                f"The {name['place']} opens with the {name['thing']} key.",
                f"The {name['thing']} key belongs to {name['person']}.",
                f"{name['person']} lives in {name['town']}.",
                f"The postal number of {name['town']} is {name['number']}.",
            ]
            return name, said[-hops:]

        name, facts = chain()
        others = [fact for _ in range(OTHERS) for fact in chain()[1]]
        who, lead = {
            2: (f"{name['person']} lives", f"{name['person']} lives in"),
            3: (f"the owner of the {name['thing']} key lives", f"The {name['thing']} key belongs to"),
            4: (f"the owner of the key to the {name['place']} lives", f"The {name['place']} opens with the"),
        }[hops]
        rng.shuffle(facts)
        body = " ".join(spread(rng, chronicle(rng, size), facts, others))
        text = (
            f"Read the chronicle below. At its end is a question.\n\n{body}\n\nWhat is the postal number of the town "
            f"in which {who}? Answer fact by fact, as the chronicle says them, with the number at the end."
        )
        return Draft((text,), lead, tuple(name[kind] for kind in _KINDS[-hops:]))

    return build


# ---------------------------------------------------------------------- code


def _constant(rng: random.Random, size: int) -> Draft:
    """A constant from far above is compared with its value."""
    code = module(rng, size, depth=rng.uniform(0, 0.5), others=OTHERS)
    task = f"Below is a Python module. Write its next line, in which {code.constant} is compared with its value."
    lead = f"assert {code.constant} =="
    return Draft((f"{task}\n\n{code.text}",), lead, (code.value,), Literal())


def _call(rng: random.Random, size: int) -> Draft:
    """A function from far above is called with all of its keyword arguments; the first is given, for the form."""
    code = module(rng, size, depth=rng.uniform(0, 0.5), others=OTHERS)
    first, *others = code.arguments
    task = (
        f"Below is a Python module. Write its next line, a call of {code.function} with all of its keyword arguments."
    )
    lead = f"result = {code.function}(entries, {first}=1,"
    return Draft((f"{task}\n\n{code.text}",), lead, tuple(others), Keywords())


@dataclass(frozen=True)
class Literal:
    """Right if the rest of the line begins with the number."""

    def __call__(self, output: str, references: tuple[str, ...]) -> tuple[float, ...]:
        """One part."""
        number = re.match(r"\s*([\d_]+)", output)
        return (float(number is not None and number[1].replace("_", "") == references[0]),)


@dataclass(frozen=True)
class Keywords:
    """Checks the arguments of a call whose beginning was given. Additional arguments do not count."""

    def __call__(self, output: str, references: tuple[str, ...]) -> tuple[float, ...]:
        """A part an argument."""
        depth, end = 1, len(output)
        for at, sign in enumerate(output):
            depth += (sign == "(") - (sign == ")")
            if not depth:
                end = at
                break
        named = set(re.findall(r"(\w+)\s*=(?!=)", output[:end]))
        return tuple(float(reference in named) for reference in references)


# ---------------------------------------------------------------------- a dialogue

_RELATIVES = words("sister brother aunt uncle cousin nephew niece neighbour colleague grandmother")
_VEHICLES = words("train ferry bus plane")
_ABOUT = (
    "sourdough bread;the dough;flour,hot stones,a linen cloth",
    "tomato plants;the stems;compost,bamboo sticks,rain water",
    "an old bicycle;the chain;thin oil,a soft brush,new brake pads",
    "a wooden table;the surface;linseed oil,fine sandpaper,beeswax",
    "a small aquarium;the water;smooth gravel,a quiet pump,floating plants",
    "a watercolour painting;the paper;broad brushes,clean water,masking tape",
    "a long hike;the boots;wool socks,dried fruit,a paper map",
    "a vegetable soup;the broth;celery,bay leaves,white beans",
    "a bird feeder;the roof;sunflower seeds,a steel wire,cedar boards",
    "a piano piece;the left hand;a slow metronome,short sections,a pencil",
)
_ASKS = (
    "What should I know about {0} before I begin?",
    "I had some trouble with {0} last week. What would you change?",
    "A friend says that {1} matters most for {0}. Is that so?",
    "Could you explain once more how to take care of {0}?",
)
_SAYS = (
    "Begin with {2}, and give {1} some time. Most people hurry here and have to start again.",
    "It depends on {1}. With {2} you are on the safe side, and nothing can go wrong.",
    "For {0} I would try {2} first. If that does not help, look at {1} again.",
    "Many swear by {2}. I would not go that far, but {1} does get better with it.",
)


def _dialogue(rng: random.Random, size: int) -> Draft:
    """A question at the end of a dialogue about a fact that the user mentioned in its first half."""
    pairs = [(relative, vehicle) for relative in _RELATIVES for vehicle in _VEHICLES]
    asked, *others = rng.sample(pairs, 1 + OTHERS)
    times = rng.sample(range(6 * 60, 23 * 60), 1 + OTHERS)
    clock = [f"{time // 60:02}:{time % 60:02}" for time in times]

    def mention(who: tuple[str, str], time: str) -> tuple[str, str]:
        said = f"Before I forget: my {who[0]}'s {who[1]} arrives at {time} on Friday."
        return said, "Thank you, I will keep it in mind."

    exchanges = []
    for _ in range(size):
        topic, part, means = rng.choice(_ABOUT).split(";")
        fill = (topic, part, rng.choice(means.split(",")))
        exchanges.append((rng.choice(_ASKS).format(*fill), rng.choice(_SAYS).format(*fill)))
    places = [(rng.random(), mention(who, time)) for who, time in zip(others, clock[1:])]
    places.append((rng.uniform(0, 0.5), mention(asked, clock[0])))
    turns = [text for exchange in insert(exchanges, places) for text in exchange]
    last = f"One more thing: I told you when my {asked[0]}'s {asked[1]} arrives on Friday. What time was that?"
    return Draft((*turns, last), f"Your {asked[0]}'s {asked[1]} arrives at", (clock[0],))


# ---------------------------------------------------------------------- JSON from a text

FIELDS = {
    "captain": "The {ship} sails under captain {value}.",
    "home_port": "The home port of the {ship} is {value}.",
    "cargo": "The {ship} carries {value} in her hold.",
    "tons": "The {ship} was measured at {value} tons.",
    "built": "The {ship} was built in {value}.",
    "berth": "The {ship} lies at berth {value}.",
}
_SHIPS = words("Albatross Buzzard Cormorant Dunlin Egret Fulmar Gannet Heron Kittiwake Lapwing Merlin Osprey Petrel")
_CARGO = words("salt tin timber wool slate copper oranges cement paper glass barley coffee resin marble")


def _extract(rng: random.Random, size: int) -> Draft:
    """Six facts about a ship, all over a report on several, as one JSON object."""
    names, ships, cargo = Names(rng), rng.sample(_SHIPS, 1 + OTHERS), rng.sample(_CARGO, 1 + OTHERS)
    years, berths = rng.sample(range(1870, 1990), 1 + OTHERS), rng.sample(range(10, 100), 1 + OTHERS)
    tons = rng.sample(range(200, 10_000), 1 + OTHERS)

    def values(i: int) -> dict[str, str]:
        own = (names.draw("person"), names.draw("town"), cargo[i], tons[i], years[i], berths[i])
        return dict(zip(FIELDS, map(str, own)))

    def facts(i: int) -> tuple[dict[str, str], list[str]]:
        held = values(i)
        return held, [text.format(ship=ships[i], value=held[key]) for key, text in FIELDS.items()]

    asked, mine = facts(0)
    others = [fact for i in range(1, 1 + OTHERS) for fact in facts(i)[1]]
    rng.shuffle(mine)
    body = " ".join(spread(rng, chronicle(rng, size), mine, others))
    keys = ", ".join(f'"{key}"' for key in FIELDS)
    text = (
        f"Read the harbour report below. You will be asked for details of one ship.\n\n{body}\n\n"
        f"Extract the details of the {ships[0]} from the report, as one JSON object with the keys {keys}."
    )
    lead = '{"captain":'
    return Draft((text,), lead, tuple(asked.values()), JsonFields(tuple(FIELDS), lead))


@dataclass(frozen=True)
class JsonFields:
    """Checks the fields of a JSON object. Text around it, further fields and a cut-off end do not matter.

    Args:
        keys: names of the fields, in the order of the references.
        lead: what was given of the answer.
    """

    keys: tuple[str, ...]
    lead: str = ""

    def __call__(self, output: str, references: tuple[str, ...]) -> tuple[float, ...]:
        """A part a field."""
        held = self.read(self.lead + output)
        return tuple(float(_plain(held.get(key)) == _plain(value)) for key, value in zip(self.keys, references))

    def read(self, text: str) -> dict:
        """The first object in ``text``; of one that is cut off or damaged, the fields that are whole."""
        start = text.find("{")
        try:
            held, _ = json.JSONDecoder().raw_decode(text[max(start, 0) :])
        except (ValueError, RecursionError):
            held = None
        if isinstance(held, dict):
            return held
        # A number is whole when something follows it.
        fields = re.findall(r'"(\w+)"\s*:\s*("(?:[^"\\]|\\.)*"|[-\d.]+(?=\s*[,}\n]))', text)
        out: dict = {}
        for key, value in fields:
            out.setdefault(key, value.strip('"'))
        return out


def _plain(value: object) -> str | None:
    """A string or number as it is compared: without case, spaces around it and thousands separators."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = " ".join(str(value).split()).casefold()
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text).removesuffix(".0")


_BUILDERS: dict[str, Callable[[random.Random, int], Draft]] = {
    "chain_2": _chain(2),
    "chain_3": _chain(3),
    "chain_4": _chain(4),
    "code_constant": _constant,
    "code_call": _call,
    "dialogue": _dialogue,
    "extract": _extract,
}
