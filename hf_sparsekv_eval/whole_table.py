"""The whole table: every task on one model with a list of caches, each part in a directory of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from hf_sparsekv.policies.registry import methods

from . import drift, forced, generation, long_tasks, longbench, needles, ruler, ruler_probe, ruler_tasks
from .cache_specs import FULL, CacheSpec, parse_cache
from .measures import Measure
from .records import Results
from .samples import Sample

PARTS = ("ruler", "needle", "tasks", "text", "output", "longbench")
_PREFILL = 16  # prompt tokens that take about as long as one decode step: for the time estimate only


@dataclass(frozen=True)
class Plan:
    """The plan of a run: its measurements.

    Args:
        lengths: of prompts, in tokens.
        samples: prompts of each family of RULER and of each task, for each length.
        families: of RULER; ``None``: all that the model's language has.
        depths: of the needle.
        passages, held: passages of held-out text, and tokens of each that are fed one by one.
        answers, answer, window: long answers for each length, their tokens, and those of a window of them.
        seed: of prompts.
        steps: tokens of a question that are fed as decode steps, when it is not prefilled.
        chat: use the chat template.
        batch: rows decoded together.
        longbench: where LongBench's data are (:func:`.longbench.load_rows`); ``None``: leave it out.
        longbench_length: tokens of its prompts at most.
        room: bound for the answers of RULER's families; ``None``: the paper's.
    """

    lengths: tuple[int, ...]
    samples: int
    families: tuple[str, ...] | None
    depths: int
    passages: int
    held: int
    answers: int
    answer: int
    window: int
    seed: int
    steps: int
    chat: bool
    batch: int
    longbench: str | None = None
    longbench_length: int = 0
    room: int | None = None


@dataclass(frozen=True)
class Part:
    """One task for all caches.

    Args:
        name: of its directory; ``title``: of its section in reports.
        measures: what its records hold; ``notes``: what these mean, a sentence or two each.
        settings: what its records depend on.
        pairs: samples that each cache answers; ``cost``: of one, in decode steps, roughly.
        run: ``(results, advance)``: measure what is not in the results yet; calls ``advance`` with finished pairs.
    """

    name: str
    title: str
    measures: list[Measure]
    notes: tuple[str, ...]
    settings: dict
    pairs: int
    cost: float
    run: Callable[[Results, Callable[[int], None]], None]


def default_caches() -> list[CacheSpec]:
    """Full attention and the default configuration of each method, also what it selects of offloaded blocks."""
    specs = [FULL]
    for name, method in methods().items():
        specs.append(name)
        # ``level="auto"`` means two_level with offloading, which is faster to measure without offloading.
        if getattr(method.config(), "level", None) == "auto":
            specs.append(f"{name}:level=two_level")
    return [parse_cache(spec) for spec in specs]


def parts(model, tokenizer, words: Tensor, text: str | None, plan: Plan, caches: list[CacheSpec], only) -> list[Part]:
    """The parts of the table in the order in which they run.

    Args:
        words: ids ``[n]`` of the text for held-out passages and long answers; ``text``: its name, for the records.
        only: those of :data:`PARTS` to make. A probe model has no words for ``tasks``; ``longbench`` needs data.

    Raises:
        ValueError: a task does not fit the shortest length, or the text is too short.
    """
    probe = ruler_probe.speaks_probe(tokenizer)
    made: list[Part] = []
    shared = {"seed": plan.seed, "question_steps": plan.steps, "chat": plan.chat}
    mean = sum(plan.lengths) / len(plan.lengths)

    def answered(name, title, make, count, room, settings, notes=()) -> None:
        def run(results: Results, advance: Callable[[int], None]) -> None:
            generation.evaluate(
                model, tokenizer, make(), caches, results, plan.batch, plan.steps, advance, against=True
            )

        cost = mean / _PREFILL / len(caches) + 2 * room + plan.steps
        made.append(Part(name, title, generation.COMPARED, (*generation.NOTES, *notes), settings, count, cost, run))

    if "ruler" in only:
        module = ruler_probe if probe else ruler
        families = plan.families or module.FAMILIES

        def one(name: str, length: int, index: int) -> Sample:
            if probe:
                return ruler_probe.make_sample(tokenizer, name, length, index, plan.seed)
            room = plan.room and min(plan.room, ruler_tasks.answer_tokens(name))
            return ruler.make_sample(tokenizer, name, length, index, plan.seed, plan.chat, room)

        make = _samples(one, families, plan)
        settings = {**shared, "quick": plan.room is not None}
        answered("ruler", "RULER", make, len(families) * plan.samples * len(plan.lengths), 64, settings)
    if "needle" in only:
        depths = [i / max(1, plan.depths - 1) for i in range(plan.depths)]

        def needle() -> Iterator[Sample]:
            for length in plan.lengths:
                for depth in depths:
                    yield needles.make_sample(tokenizer, length, depth, 0, plan.seed)

        settings = {"seed": plan.seed, "question_steps": plan.steps, "depths": plan.depths}
        answered("needle", "One fact by depth", needle, len(depths) * len(plan.lengths), 12, settings)
    if "tasks" in only and not probe:

        def task(name: str, length: int, index: int) -> Sample:
            return long_tasks.make_sample(tokenizer, name, length, index, plan.seed, plan.chat)

        for name in long_tasks.FAMILIES:
            task(name, min(plan.lengths), 0)  # raises now if a task does not fit the shortest length
        count = len(long_tasks.FAMILIES) * plan.samples * len(plan.lengths)
        answered(
            "tasks", "Tasks that nothing was trained on", _samples(task, long_tasks.FAMILIES, plan), count, 32, shared
        )
    if "text" in only:
        made.append(_text(model, words, text, plan, caches, mean))
    if "output" in only:
        made.append(_output(model, tokenizer, words, text, plan, caches, mean, plan.chat))
    if "longbench" in only and plan.longbench is not None and not probe:
        rows = {name: longbench.load_rows(name, plan.longbench)[: plan.samples] for name in longbench.tasks()}

        def bench() -> Iterator[Sample]:
            for name, held in rows.items():
                for i, row in enumerate(held):
                    yield longbench.make_sample(tokenizer, name, row, i, plan.longbench_length, plan.chat)

        settings = {**shared, "longbench": plan.longbench, "lengths": plan.longbench_length}
        answered("longbench", "LongBench", bench, sum(map(len, rows.values())), 128, settings)
    return made


def _samples(one: Callable[[str, int, int], Sample], names, plan: Plan) -> Callable[[], Iterator[Sample]]:
    return lambda: (one(name, n, i) for n in plan.lengths for name in names for i in range(plan.samples))


def _text(model, words: Tensor, text: str | None, plan: Plan, caches: list[CacheSpec], mean: float) -> Part:
    starts = {n: forced.passages(words, n, plan.held, plan.passages) for n in plan.lengths}

    def run(results: Results, advance: Callable[[int], None]) -> None:
        for n, at in starts.items():
            forced.evaluate(model, words, at, n, plan.held, caches, results, "agreement", plan.batch, advance=advance)

    notes = ("Held-out text after a context, fed token by token; agreement and KL against full attention.",)
    settings = {"tokens": plan.held, "passages": plan.passages, "text": text}
    cost = mean / _PREFILL / len(caches) + plan.held
    count = plan.passages * len(plan.lengths)
    return Part("text", "Held-out text", forced.MEASURES["agreement"], notes, settings, count, cost, run)


def _output(model, tokenizer, words, text, plan: Plan, caches: list[CacheSpec], mean: float, chat: bool) -> Part:
    prompts = {n: drift.prompts(tokenizer, words, n, plan.answers, chat) for n in plan.lengths}
    stop = generation.stop_ids(model, tokenizer)

    def run(results: Results, advance: Callable[[int], None]) -> None:
        for n, ids in prompts.items():
            drift.evaluate(model, ids, n, plan.answer, plan.window, caches, results, stop, advance)

    settings = {
        "answer_tokens": plan.answer,
        "window": plan.window,
        "answers": plan.answers,
        "text": text,
        "chat": chat,
    }
    cost = mean / _PREFILL / len(caches) + plan.answer
    count = plan.answers * len(plan.lengths)
    title = f"Long own output: {plan.answer:,} tokens"
    return Part("output", title, drift.MEASURES, drift.NOTES, settings, count, cost, run)
