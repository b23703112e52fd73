"""The arguments of ``hf-sparsekv eval``: ruler, needle, tasks, perplexity, agreement, output, longbench, and all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from . import checks
from .command import command
from .options import Device, DType, DTypeOption, Model
from .values import defaults_from_file, parse_lengths, parse_samples, parse_tokens

app = typer.Typer(
    name="eval",
    help="How close caches come to full attention on a task; several caches in one run.",
    no_args_is_help=True,
)

Lengths = Annotated[str, typer.Option("--lengths", help="Tokens, as 4k,16k,32k.")]
Samples = Annotated[
    str,
    typer.Option(
        "--samples",
        help="How many of each task and length, or FIRST:LAST, as 25:50 for those with the numbers 25 to 49.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts.")]
Chat = Annotated[
    bool | None, typer.Option("--chat/--no-chat", help="Chat template; default: if there is one.", show_default=False)
]
QuestionSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Answer each prompt twice: prefilled, and with so many tokens at its end, the question, fed as sparse "
        "decode steps; default: 32, probe models 3.",
        show_default=False,
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text-file", help="UTF-8 text; default: Python's language reference.", show_default=False),
]


@dataclass(frozen=True)
class TextOptions:
    """Texts that are read: one, or several documents."""

    text_file: TextFile = None
    documents: Annotated[
        Path | None,
        typer.Option(
            "--documents",
            help="Instead of one text: a directory with .txt files, a text file, or a .csv file. The first tokens of "
            "each document are read.",
            show_default=False,
        ),
    ] = None
    column: Annotated[
        str | None,
        typer.Option(
            "--column", help="Column of a .csv file; default: the one with the longest texts.", show_default=False
        ),
    ] = None
    join: Annotated[bool, typer.Option("--join", help="Let documents that are too short go on with the next ones.")] = (
        False
    )


@dataclass(frozen=True)
class PromptOptions:
    """Made-up prompts, and how their questions are answered."""

    question_steps: QuestionSteps = None
    chat: Chat = None
    seed: Seed = 0


@dataclass(frozen=True)
class RunOptions:
    """Options of every task."""

    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=defaults_from_file, help="YAML file with options, and `caches`.", show_default=False
        ),
    ] = None
    cache: Annotated[
        list[str],
        typer.Option(
            help="full, token:token_budget=512,lag=true, block_only, token_only, progressive, predictive, oracle, "
            "random, or a YAML file with a list of them; may be repeated.",
        ),
    ] = ("full", "token")
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            help="Directory of results; default: eval-results/TASK-MODEL. An interrupted run goes on there.",
        ),
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


def _lengths_and_samples(lengths: str, samples: str) -> None:
    parse_lengths(lengths)
    parse_samples(samples)


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:ruler")
def ruler(
    model: Model,
    lengths: Lengths = "4k",
    families: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default: all that the model's language has.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with RULER's own PaulGrahamEssays.json, squad.json and hotpotqa.json: all 13 tasks with the "
            "paper's prompts. Default: 11 tasks from invented text, offline.",
            show_default=False,
        ),
    ] = None,
    samples: Samples = "50",
    *,
    prompts: PromptOptions,
    options: RunOptions,
) -> None:
    """RULER's tasks: needles, variable tracking, word counts, question answering; their own for probe models."""
    _lengths_and_samples(lengths, samples)
    checks.paper_tasks(families, data)


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:tasks")
def tasks(
    model: Model,
    lengths: Lengths = "4k",
    families: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: chain_2, chain_3, chain_4, code_constant, code_call, dialogue, extract.",
            show_default="all",
        ),
    ] = None,
    samples: Samples = "20",
    *,
    prompts: PromptOptions,
    options: RunOptions,
) -> None:
    """Chains of facts, code, a dialogue, JSON from a long text: invented texts; against what full attention finds."""
    _lengths_and_samples(lengths, samples)


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:needle")
def needle(
    model: Model,
    lengths: Lengths = "1k,2k,4k",
    depths: Annotated[int, typer.Option(min=2, help="Depths, from the first to the last token.")] = 5,
    samples: Samples = "1",
    question_steps: QuestionSteps = None,
    seed: Seed = 0,
    *,
    options: RunOptions,
) -> None:
    """One fact, by depth and length of the prompt: a heat map (heatmap.png), one panel a cache."""
    _lengths_and_samples(lengths, samples)


Held = Annotated[int, typer.Option("--tokens", min=1, help="Held-out tokens of a passage, fed one by one.")]
Passages = Annotated[int, typer.Option("--samples", min=1, help="Passages of each length.")]


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:perplexity")
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
    """Perplexity of held-out text after a context, through decode steps (prompts are exact unless asked)."""
    parse_lengths(lengths)


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:agreement")
def agreement(
    model: Model,
    lengths: Lengths = "4k",
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            help="Held-out tokens of a passage, fed one by one.",
            show_default="64; 200 of documents",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Passages of each length, or documents that are long enough.")
    ] = 4,
    *,
    text: TextOptions,
    options: RunOptions,
) -> None:
    """Top-1 agreement and KL divergence against full attention at each step over held-out text (teacher-forced)."""
    parse_lengths(lengths)
    checks.documents(text.documents, text.column, text.join, text.text_file)


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:output")
def output(
    model: Model,
    lengths: Lengths = "4k",
    tokens: Annotated[str, typer.Option(help="Tokens of the answer, as 4k.")] = "4k",
    window: Annotated[
        int, typer.Option(min=1, help="Tokens of each part of the answer that has its own figures.")
    ] = 256,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers for each length.")] = 1,
    chat: Chat = None,
    *,
    text: TextOptions,
    options: RunOptions,
) -> None:
    """Long own output: agreement and KL along full attention's greedy answer, and where a cache first differs."""
    parse_lengths(lengths)
    parse_tokens(tokens)
    checks.documents(text.documents, text.column, text.join, text.text_file)


@app.command()
@command("hf_sparsekv_eval.cli.evaluate:longbench")
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


# Option: (its default, with --quick).
DEFAULTS = {
    "lengths": ("4k", "2k"),
    "samples": (10, 1),
    "depths": (5, 3),
    "passages": (4, 1),
    "tokens": (64, 32),
    "answers": (1, 1),
    "answer_tokens": ("4k", "96"),
    "window": (256, 32),
}


def _option(name: str, help: str, **kwargs) -> typer.models.OptionInfo:
    usual, quick = DEFAULTS[name]
    return typer.Option(help=help, show_default=f"{usual}; --quick: {quick}", **kwargs)


@dataclass(frozen=True)
class AllOptions(RunOptions):
    """As every task's, but the default caches are those of every method."""

    cache: Annotated[
        list[str],
        typer.Option(
            help="As in the other commands, may be repeated; full attention is always among them. Default: the default "
            "configuration of each method.",
            show_default=False,
        ),
    ] = ()


@dataclass(frozen=True)
class TableOptions(PromptOptions):
    """Contents of the whole table. None: the default, see :attr:`chosen`."""

    lengths: Annotated[str | None, _option("lengths", "Tokens of prompts, as 4k,16k,32k.")] = None
    samples: Annotated[int | None, _option("samples", "Prompts of each family and task, for each length.", min=1)] = (
        None
    )
    families: Annotated[
        str | None,
        typer.Option(help="Tasks of RULER, comma-separated; default: all (--quick: three).", show_default=False),
    ] = None
    depths: Annotated[
        int | None, _option("depths", "Depths of the needle, from the first to the last token.", min=2)
    ] = None
    passages: Annotated[int | None, _option("passages", "Passages of held-out text, for each length.", min=1)] = None
    tokens: Annotated[int | None, _option("tokens", "Held-out tokens of a passage.", min=1)] = None
    answers: Annotated[int | None, _option("answers", "Long answers for each length.", min=1)] = None
    answer_tokens: Annotated[str | None, _option("answer_tokens", "Tokens of a long answer.")] = None
    window: Annotated[int | None, _option("window", "Tokens of each part of a long answer.", min=1)] = None
    only: Annotated[
        str | None,
        typer.Option(help="Comma-separated: ruler, needle, tasks, text, output, longbench.", show_default="all"),
    ] = None
    longbench: Annotated[
        str | None,
        typer.Option(
            help="LongBench, too: its dataset on the hub, or a directory with TASK.jsonl. Longer prompts than the "
            "longest of --lengths lose their middle.",
            show_default=False,
        ),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Few and short samples: minutes on a CPU.")] = False
    text_file: TextFile = None

    @property
    def chosen(self) -> dict[str, Any]:
        """The options of :data:`DEFAULTS`, as given or by default."""
        given = {name: getattr(self, name) for name in DEFAULTS}
        return {name: pair[self.quick] if given[name] is None else given[name] for name, pair in DEFAULTS.items()}


@app.command("all")
@command("hf_sparsekv_eval.cli.evaluate_all:everything")
def everything(model: Model, *, table: TableOptions, options: AllOptions) -> None:
    """The whole table: RULER, needles, tasks, held-out text, long output, LongBench if asked; report.html and .md."""
    parse_lengths(table.chosen["lengths"])
    parse_tokens(table.chosen["answer_tokens"])
