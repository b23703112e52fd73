"""``hf-sparsekv eval``: ruler, needle, tasks, perplexity, agreement, output, longbench; ``eval all`` runs them all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hf_sparsekv.cli.output import CommandError
from hf_sparsekv_cli.evaluate import PromptOptions, RunOptions, TextOptions
from hf_sparsekv_cli.values import parse_lengths, parse_names, parse_samples, parse_tokens

from .evaluate_run import (
    Run,
    documents_of,
    passages_of,
    text_ids,
    text_settings,
)


def _answered(run: Run, samples: Iterable, count: int, batch: int, steps: int = 0, against: bool = False) -> None:
    """Answer ``count`` samples with all caches and report, see :func:`..generation.evaluate`."""
    from .. import generation

    args = run.model, run.tokenizer, samples, run.caches, run.results, batch, steps
    with run.progress(count) as advance:
        generation.evaluate(*args, advance, against=against)
    run.report(generation.COMPARED if against else generation.MEASURES, (generation.SCORE, generation.STEPPED))


def ruler(
    *,
    model: str,
    lengths: str,
    families: str | None,
    data: Path | None,
    samples: str,
    prompts: PromptOptions,
    options: RunOptions,
) -> None:
    """RULER's tasks: needles, variable tracking, word counts, question answering; their own for probe models."""
    from .. import ruler as text
    from .. import ruler_data, ruler_paper, ruler_probe

    sizes, chosen = parse_lengths(lengths), parse_samples(samples)
    there = ruler_paper.FAMILIES if data else text.FAMILIES
    if data:
        own, settings = ruler_data.read(data, parse_names(families, there, "family")), {"data": str(data)}
    else:
        parse_names(families, (*there, *ruler_probe.FAMILIES), "family")  # which of both: decided with the model
        own, settings = None, {}
    with Run("ruler", model, options, **vars(prompts), **settings) as run:
        probe = ruler_probe.speaks_probe(run.tokenizer)
        if probe and data:
            raise CommandError("a probe model knows no words, and has tasks of its own: leave --data out")
        names = parse_names(families, ruler_probe.FAMILIES if probe else there, "family")
        run.check(sizes)
        run.results.shown = chosen
        chat, seed = run.chat(prompts.chat), prompts.seed

        def make(name: str, length: int, index: int):
            if probe:
                return ruler_probe.make_sample(run.tokenizer, name, length, index, seed)
            if own:
                return ruler_paper.make_sample(run.tokenizer, own, name, length, index, seed, chat)
            return text.make_sample(run.tokenizer, name, length, index, seed, chat)

        all_samples = (make(name, n, i) for n in sizes for name in names for i in chosen)
        count = len(sizes) * len(names) * len(chosen)
        _answered(run, all_samples, count, options.batch, run.steps(prompts.question_steps))


def tasks(
    *,
    model: str,
    lengths: str,
    families: str | None,
    samples: str,
    prompts: PromptOptions,
    options: RunOptions,
) -> None:
    """Chains of facts, code, a dialogue, JSON from a long text: invented texts; against what full attention finds."""
    from .. import long_tasks

    sizes, chosen = parse_lengths(lengths), parse_samples(samples)
    names = parse_names(families, long_tasks.FAMILIES, "task")
    with Run("tasks", model, options, **vars(prompts)) as run:
        run.needs_text("tasks")
        run.check(sizes)
        run.results.shown = chosen
        chat, seed = run.chat(prompts.chat), prompts.seed
        all_samples = (
            long_tasks.make_sample(run.tokenizer, name, n, i, seed, chat)
            for n in sizes
            for name in names
            for i in chosen
        )
        count = len(sizes) * len(names) * len(chosen)
        _answered(run, all_samples, count, options.batch, run.steps(prompts.question_steps), against=True)


def needle(
    *,
    model: str,
    lengths: str,
    depths: int,
    samples: str,
    question_steps: int | None,
    seed: int,
    options: RunOptions,
) -> None:
    """One fact, by depth and length of the prompt: a heat map (heatmap.png), one panel a cache."""
    from .. import generation, needles
    from ..extra import needs

    sizes, chosen = parse_lengths(lengths), parse_samples(samples)
    needs("the heat map of `eval needle`", "matplotlib")  # before the hours that the samples take
    with Run("needle", model, options, seed=seed, question_steps=question_steps) as run:
        run.check(sizes)
        run.results.shown = chosen
        places = [i / (depths - 1) for i in range(depths)]
        all_samples = (needles.make_sample(run.tokenizer, n, d, i, seed) for n in sizes for d in places for i in chosen)
        _answered(run, all_samples, len(sizes) * depths * len(chosen), options.batch, run.steps(question_steps))
        needles.plot(run.results.figures(generation.MEASURES), run.out / "heatmap.png", run.title)


def _forced(task: str, stride, run: Run, text_file, sizes, tokens, samples, batch) -> None:
    from .. import forced

    words = text_ids(run.tokenizer, text_file)
    run.check(sizes, tokens)
    with run.progress(len(sizes) * samples) as advance:
        for n in sizes:
            starts = forced.passages(words, n, tokens, samples, stride)
            forced.evaluate(
                run.model, words, starts, n, tokens, run.caches, run.results, task, batch, task == "agreement", advance
            )
    run.report(forced.MEASURES[task])


def perplexity(
    *,
    model: str,
    lengths: str,
    tokens: int,
    samples: int,
    stride: int | None,
    text_file: Path | None,
    options: RunOptions,
) -> None:
    """Perplexity of held-out text after a context, through decode steps (prompts are exact unless asked)."""
    sizes, step = parse_lengths(lengths), stride or tokens
    settings = {"tokens": tokens, "stride": step, "text": text_file and str(text_file)}
    with Run("perplexity", model, options, **settings) as run:
        _forced("perplexity", step, run, text_file, sizes, tokens, samples, options.batch)


def agreement(
    *,
    model: str,
    lengths: str,
    tokens: int | None,
    samples: int,
    text: TextOptions,
    options: RunOptions,
) -> None:
    """Top-1 agreement and KL divergence against full attention at each step over held-out text (teacher-forced)."""
    from .. import forced

    sizes, texts = parse_lengths(lengths), documents_of(text)
    tokens = tokens or (64 if texts is None else 200)
    with Run("agreement", model, options, tokens=tokens, **text_settings(text, texts, samples)) as run:
        if texts is None:
            _forced("agreement", None, run, text.text_file, sizes, tokens, samples, options.batch)
            return
        run.check(sizes, tokens)
        # The same documents at all lengths.
        held = passages_of(run.tokenizer, texts, max(sizes) + tokens + 1, samples, text.join)
        with run.progress(len(sizes) * len(held.starts)) as advance:
            for n in sizes:
                args = n, tokens, run.caches, run.results, "agreement", options.batch, True, advance, held.indices
                forced.evaluate(run.model, held.words, held.starts, *args)
        run.report(forced.MEASURES["agreement"])


def output(
    *,
    model: str,
    lengths: str,
    tokens: str,
    window: int,
    samples: int,
    chat: bool | None,
    text: TextOptions,
    options: RunOptions,
) -> None:
    """Long own output: agreement and KL along full attention's greedy answer, and where a cache first differs."""
    from .. import drift, generation

    sizes, room = parse_lengths(lengths), parse_tokens(tokens)
    texts = documents_of(text)
    settings = {"tokens": room, "window": window, "chat": chat}
    with Run("output", model, options, **settings, **text_settings(text, texts, samples)) as run:
        chat = run.chat(chat)
        run.check(sizes, room)
        indices = None
        if texts is None:
            words = text_ids(run.tokenizer, text.text_file)
            prompts = {n: drift.prompts(run.tokenizer, words, n, samples, chat) for n in sizes}
        else:
            held = passages_of(run.tokenizer, texts, max(sizes), samples, text.join)
            indices = held.indices
            prompts = {
                n: [drift.prompt(run.tokenizer, held.words, start, n, chat) for start in held.starts] for n in sizes
            }
        stop = generation.stop_ids(run.model, run.tokenizer)
        with run.progress(sum(map(len, prompts.values()))) as advance:
            for n in sizes:
                drift.evaluate(run.model, prompts[n], n, room, window, run.caches, run.results, stop, advance, indices)
        run.report(drift.MEASURES)


def longbench(
    *,
    model: str,
    tasks: str | None,
    data: str | None,
    samples: int | None,
    max_length: str | None,
    chat: bool,
    options: RunOptions,
) -> None:
    """LongBench's English and code tasks with their prompts and metrics; data come from the hub."""
    from .. import longbench as bench
    from ..extra import needs

    names = parse_names(tasks, tuple(bench.tasks()), "task")
    needs("LongBench", "datasets")
    source = data or bench.DATASET
    with Run("longbench", model, options, data=source, max_length=max_length, chat=chat) as run:
        own = getattr(run.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        most = parse_tokens(max_length) if max_length else own
        if most is None:
            raise CommandError("the model does not say how long its prompts may be: give --max-length")
        data_rows = {name: bench.load_rows(name, source)[:samples] for name in names}
        all_samples = (
            bench.make_sample(run.tokenizer, name, row, i, most, chat)
            for name in names
            for i, row in enumerate(data_rows[name])
        )
        _answered(run, all_samples, sum(map(len, data_rows.values())), options.batch)
