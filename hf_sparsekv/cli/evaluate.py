"""``hf-sparsekv eval``: ruler, needle, perplexity, agreement, longbench."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..results import append_rows
from . import loading
from .options import Device, DType, DTypeOption, Model, parse_tokens, takes, torch_dtype
from .output import CommandError, messages, note, one_line_errors, results

app = typer.Typer(
    name="eval",
    help="How close caches come to full attention on a task; several caches in one run.",
    no_args_is_help=True,
)


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take defaults of the other options from a YAML file."""
    if path is None:
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold a mapping of options")
    known = {p.name for p in context.command.params}
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    if "caches" in values:
        entries = values.pop("caches")
        if not isinstance(entries, list):
            raise typer.BadParameter(f"{path}: caches must be a list")
        values["cache"] = [
            yaml.safe_dump(e, default_flow_style=True, sort_keys=False, width=10**6).strip()
            if isinstance(e, dict)
            else str(e)
            for e in entries
        ]
    for key, value in values.items():
        if key not in known:
            raise typer.BadParameter(f"{path}: no option {key!r}; there are {', '.join(sorted(known - {'config'}))}")
        if key != "cache" and isinstance(value, list):
            values[key] = ",".join(map(str, value))
    context.default_map = {**(context.default_map or {}), **values}
    return path


Lengths = Annotated[str, typer.Option("--lengths", help="Tokens, as 4k,16k,32k.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Of each task and length.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of prompts.")]


@dataclass(frozen=True)
class RunOptions:
    """What every task takes."""

    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=_from_file, help="YAML file with options, and `caches`.", show_default=False
        ),
    ] = None
    cache: Annotated[
        list[str],
        typer.Option(
            help="full, two_level:token_budget=512,lag=true, block_only, token_only, progressive, predictive, oracle, "
            "random, or a YAML file with a list of them; may be repeated.",
        ),
    ] = ("full", "two_level")
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of results; default: eval-results/TASK-MODEL. An interrupted run goes on there."),
    ] = None
    dtype: DTypeOption = DType.auto
    device: Device = "auto"
    capture: Annotated[
        bool, typer.Option("--capture", help="Replay captured decode steps (GPU): for large models.")
    ] = False
    rows: Annotated[
        Path | None,
        typer.Option(help="Append the figures to this CSV file, too, as in benchmarks/results.", show_default=False),
    ] = None


def _lengths(text: str) -> list[int]:
    return [parse_tokens(part) for part in str(text).split(",")]


def _names(text: str | None, known: tuple[str, ...], what: str) -> list[str]:
    if text is None:
        return list(known)
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"no {what} {name!r}; there are {', '.join(known)}")
    return names


class _Run:
    """A loaded model, its caches, and where results go, in a ``with`` statement: the directory is locked until then."""

    def __init__(self, task: str, model: str, options: RunOptions, **settings):
        from ..evaluation.cache_specs import parse_caches
        from ..evaluation.records import Results

        try:
            self.caches = parse_caches(options.cache)  # before the model is loaded
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        where = loading.pick_device(options.device)
        short = Path(model.rstrip("/")).name
        self.out = options.out or Path("eval-results") / f"{task}-{short}"
        self.title, self.short, self.rows = f"{task}, {short}", short, options.rows
        self.results = Results(self.out, {"task": task, "model": model, "dtype": options.dtype.value, **settings})
        try:
            self.tokenizer, self.model = loading.load(model, torch_dtype(options.dtype), where)
            if options.capture:
                if where.type != "cuda":
                    raise CommandError("--capture needs a GPU")
                from ..cuda_graph.optimize import optimize

                optimize(self.model)
        except BaseException:
            self.results.close()
            raise

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *error) -> None:
        self.results.close()

    def check(self, lengths: list[int]) -> None:
        """Say so if the model was not made for such lengths."""
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        for length in lengths:
            if most and length > most:
                note(f"{length:,} tokens are more than the {most:,} that the model was made for")

    @contextmanager
    def progress(self, total: int) -> Iterator:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=messages, transient=True) as bar:
            task = bar.add_task(self.title, total=total * len(self.caches))
            yield lambda n: bar.advance(task, n)

    def report(self, measures) -> None:
        results.print(self.results.write(measures, self.title), markup=False)
        note(f"written to {self.out}: results.md, results.csv, results.json, samples.jsonl")
        if self.rows is not None:
            append_rows(self.rows, self.results.rows(measures, self.short))


@app.command()
@one_line_errors
@takes(RunOptions)
def ruler(
    model: Model,
    lengths: Lengths = "4k",
    families: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default: all that the model's language has.", show_default=False),
    ] = None,
    samples: Samples = 50,
    question_steps: Annotated[
        int, typer.Option(min=0, help="Feed so many tokens at the prompt's end, the question, as sparse decode steps.")
    ] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Chat template; default: if there is one.", show_default=False),
    ] = None,
    seed: Seed = 0,
    *,
    options: RunOptions,
) -> None:
    """RULER's synthetic tasks: needles, variable tracking, word counts; the probe models' own for probe models."""
    from ..evaluation import generation, ruler_probe
    from ..evaluation import ruler as text

    sizes = _lengths(lengths)
    with _Run("ruler", model, options, seed=seed, question_steps=question_steps, chat=chat) as run:
        probe = ruler_probe.speaks_probe(run.tokenizer)
        names = _names(families, ruler_probe.FAMILIES if probe else text.FAMILIES, "family")
        run.check(sizes)
        if chat is None:
            chat = run.tokenizer.chat_template is not None
        elif chat and run.tokenizer.chat_template is None:
            raise CommandError("this model has no chat template: use --no-chat")

        def make(name: str, length: int, index: int):
            if probe:
                return ruler_probe.make_sample(run.tokenizer, name, length, index, seed)
            return text.make_sample(run.tokenizer, name, length, index, seed, chat)

        all_samples = (make(name, n, i) for n in sizes for name in names for i in range(samples))
        with run.progress(len(sizes) * len(names) * samples) as advance:
            generation.evaluate(
                run.model, run.tokenizer, all_samples, run.caches, run.results, options.batch, question_steps, advance
            )
        run.report(generation.MEASURES)


@app.command()
@one_line_errors
@takes(RunOptions)
def needle(
    model: Model,
    lengths: Lengths = "1k,2k,4k",
    depths: Annotated[int, typer.Option(min=2, help="Depths, from the first to the last token.")] = 5,
    samples: Samples = 1,
    seed: Seed = 0,
    *,
    options: RunOptions,
) -> None:
    """One fact, by depth and length of the prompt: a heat map (heatmap.png), one panel a cache."""
    from ..evaluation import generation, needles

    sizes = _lengths(lengths)
    with _Run("needle", model, options, seed=seed) as run:
        run.check(sizes)
        places = [i / (depths - 1) for i in range(depths)]
        all_samples = (
            needles.make_sample(run.tokenizer, n, d, i, seed) for n in sizes for d in places for i in range(samples)
        )
        with run.progress(len(sizes) * depths * samples) as advance:
            generation.evaluate(
                run.model, run.tokenizer, all_samples, run.caches, run.results, options.batch, advance=advance
            )
        run.report(generation.MEASURES)
        needles.plot(run.results.figures(generation.MEASURES), run.out / "heatmap.png", run.title)


def _forced(task: str, stride, run: _Run, text_file, sizes, tokens, samples, batch) -> None:
    from ..evaluation import forced

    words = _text_ids(run.tokenizer, text_file)
    run.check([n + tokens for n in sizes])
    with run.progress(len(sizes) * samples) as advance:
        for n in sizes:
            starts = forced.passages(words, n, tokens, samples, stride)
            forced.evaluate(
                run.model, words, starts, n, tokens, run.caches, run.results, task, batch, task == "agreement", advance
            )
    run.report(forced.MEASURES[task])


def _text_ids(tokenizer, path: Path | None):
    """Ids ``[n]`` of a file, of Python's language reference, or, for a probe model, of its filler."""
    from ..evaluation import probe_language, ruler_probe
    from ..evaluation.text import python_reference

    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise CommandError(f"{path} is not UTF-8 text") from None
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error.strerror}") from error
    elif ruler_probe.speaks_probe(tokenizer):
        return probe_language.Filler(chains=1024, steps=512, seed=1).words.long() + probe_language.FILLER
    else:
        text = python_reference()
    return tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]


TextFile = Annotated[
    Path | None,
    typer.Option("--text-file", help="UTF-8 text; default: Python's language reference.", show_default=False),
]
Held = Annotated[int, typer.Option("--tokens", min=1, help="Held-out tokens of a passage, fed one by one.")]
Passages = Annotated[int, typer.Option("--samples", min=1, help="Passages of each length.")]


@app.command()
@one_line_errors
@takes(RunOptions)
def perplexity(
    model: Model,
    lengths: Lengths = "4k",
    tokens: Held = 128,
    samples: Passages = 8,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Distance of passages; default: --tokens, a window that slides.")
    ] = None,
    text_file: TextFile = None,
    *,
    options: RunOptions,
) -> None:
    """Perplexity of held-out text behind a context, through decode steps (prefill is exact with every cache)."""
    sizes, step = _lengths(lengths), stride or tokens
    settings = {"tokens": tokens, "stride": step, "text": text_file and str(text_file)}
    with _Run("perplexity", model, options, **settings) as run:
        _forced("perplexity", step, run, text_file, sizes, tokens, samples, options.batch)


@app.command()
@one_line_errors
@takes(RunOptions)
def agreement(
    model: Model,
    lengths: Lengths = "4k",
    tokens: Held = 64,
    samples: Passages = 4,
    text_file: TextFile = None,
    *,
    options: RunOptions,
) -> None:
    """Top-1 agreement and KL divergence against full attention at each step over held-out text (teacher-forced)."""
    sizes = _lengths(lengths)
    settings = {"tokens": tokens, "samples": samples, "text": text_file and str(text_file)}
    with _Run("agreement", model, options, **settings) as run:
        _forced("agreement", None, run, text_file, sizes, tokens, samples, options.batch)


@app.command()
@one_line_errors
@takes(RunOptions)
def longbench(
    model: Model,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated; default: the 16 English and code tasks.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Dataset on the hub, or directory with TASK.jsonl.", show_default=False)
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="First rows of each task; default: all.")] = None,
    max_length: Annotated[
        str | None,
        typer.Option(help="Longer prompts lose their middle; default: the model's length.", show_default=False),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Chat template where LongBench has it (not few-shot and code).")
    ] = True,
    *,
    options: RunOptions,
) -> None:
    """LongBench's English and code tasks with their prompts and metrics; data come from the hub."""
    from ..evaluation import generation
    from ..evaluation import longbench as bench

    names = _names(tasks, tuple(bench.tasks()), "task")
    source = data or bench.DATASET
    with _Run("longbench", model, options, data=source, max_length=max_length, chat=chat) as run:
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
        with run.progress(sum(map(len, data_rows.values()))) as advance:
            generation.evaluate(
                run.model, run.tokenizer, all_samples, run.caches, run.results, options.batch, advance=advance
            )
        run.report(generation.MEASURES)
