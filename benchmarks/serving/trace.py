"""A client's requests and their times: one file for all systems.

    python -m benchmarks serving trace --rate 0.5 --seconds 120 --clip 32k --seed 1 --out FILE

Requests arrive as a Poisson process. Prompt lengths are lognormal and clipped, as SparseServe (section 4.1) limits them
to 32k and 128k. Median and spread are near its workload, ten sets of LongBench in one trace. LongBench's Table 1 gives
their average lengths (words, or characters of Chinese; NarrativeQA 18,409, Qasper 3,619, MultiFieldQA 4,559, DuReader
15,768, GovReport 8,734, QMSum 10,614, MultiNews 2,113, VCSUM 15,380, LCC 1,235, RepoBench-P 4,206). Their geometric
mean is 6,130, at some 1.35 tokens each 8k, and their logarithms have a deviation of 0.9. Within a set lengths differ,
too, so 1.0 here. 8 % of such prompts are longer than 32k, 0.3 % than 128k.

The paper does not say how long its answers are. LongBench's limits for these sets are 64 to 512 tokens. Here they are
drawn, lognormal around 256; long answers are another workload (``--output``).

Shared documents (``--documents 8 --shared 0.8``, for routing): that share of the requests asks about one of so many
documents. A document's length is drawn as a prompt's. Its requests share all of its tokens and have 64 of their own
after them.

A file is JSON lines: what the trace was made with, then one request a line.
"""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..shapes import parse_tokens

PROMPT_MEDIAN, PROMPT_SIGMA = 8192, 1.0
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_MOST = 256, 0.7, 8192
SHORTEST_PROMPT, SHORTEST_OUTPUT = 64, 4
QUESTION = 64  # tokens of a prompt after the document that it shares with others
FIRST_ID = 8  # ids below are mostly special tokens


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Args:
        arrival: seconds from the trace's beginning.
        prompt_tokens, output_tokens: of its prompt and its answer, which ends there and not before.
        seed: of its prompt's tokens.
        shared_tokens: how many of these, at the beginning, are a document's that others ask about, too.
        document: the seed of that document's tokens.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    seed: int
    shared_tokens: int = 0
    document: int = 0

    def ids(self, vocabulary: int) -> list[int]:
        """Its prompt: the same tokens in every system; no beginning in common with others but a shared document."""
        low = min(FIRST_ID, vocabulary - 1)

        def drawn(seed: int, tokens: int) -> list[int]:
            return np.random.default_rng(seed).integers(low, vocabulary, tokens).tolist() if tokens else []

        return drawn(self.document, self.shared_tokens) + drawn(self.seed, self.prompt_tokens - self.shared_tokens)


@dataclass(frozen=True)
class TraceConfig:
    """How a trace is made.

    Args:
        rate: requests a second.
        seconds: within which they arrive.
        clip: tokens that a prompt has at most.
        seed: another one, another trace; the same with another rate: requests of the same lengths, sooner or later.
        prompt_median, prompt_sigma, output_median, output_sigma, output_most: of the lognormal lengths; sigma is the
            deviation of their logarithms.
        documents, shared: that share of the requests asks about one of so many documents.
    """

    rate: float
    seconds: float
    clip: int = 32768
    seed: int = 0
    prompt_median: int = PROMPT_MEDIAN
    prompt_sigma: float = PROMPT_SIGMA
    output_median: int = OUTPUT_MEDIAN
    output_sigma: float = OUTPUT_SIGMA
    output_most: int = OUTPUT_MOST
    documents: int = 0
    shared: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", "clip", "prompt_median", "output_median", "output_most"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("prompt_sigma", "output_sigma"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.shared <= 1 or self.documents < 0 or (self.shared > 0) != (self.documents > 0):
            raise ValueError(
                f"documents and shared go together, as 8 and 0.8; got {self.documents} and {self.shared}: give both"
            )
        if self.documents and self.clip < SHORTEST_PROMPT + QUESTION:
            raise ValueError(f"shared documents need a clip of {SHORTEST_PROMPT + QUESTION} tokens, got {self.clip}")

    @property
    def answers(self) -> tuple[str, ...]:
        """Parts of a row's name: how long its answers are."""
        most = (f"most={self.output_most}",) if self.output_most != OUTPUT_MOST else ()
        return f"out={self.output_median}", *most


def make_trace(config: TraceConfig) -> list[Request]:
    """The requests, in the order of their arrival."""
    gaps, prompts, outputs, choices, lengths = (np.random.default_rng([config.seed, what]) for what in range(5))

    def length(random: np.random.Generator, median: int, sigma: float, least: int, most: int) -> int:
        drawn = median * math.exp(sigma * random.standard_normal())
        return round(min(max(drawn, min(least, most)), most))

    # Token ids unique to this trace: systems keep what they have read, also from traces of other rates or lengths.
    own = np.random.SeedSequence([config.seed, round(1e6 * config.rate), config.clip])
    first = int(own.generate_state(1, np.uint64)[0])
    most = config.clip - QUESTION
    documents = [
        length(lengths, config.prompt_median, config.prompt_sigma, SHORTEST_PROMPT, most)
        for _ in range(config.documents)
    ]
    found, at = [], 0.0
    while True:
        at += gaps.exponential() / config.rate
        if at >= config.seconds:
            return found
        prompt = length(prompts, config.prompt_median, config.prompt_sigma, SHORTEST_PROMPT, config.clip)
        output = length(outputs, config.output_median, config.output_sigma, SHORTEST_OUTPUT, config.output_most)
        seed, about = first + len(found), {}
        if documents and choices.random() < config.shared:
            which = int(choices.integers(len(documents)))
            prompt = documents[which] + QUESTION
            about = {"shared_tokens": documents[which], "document": first + 500_000 + which}
        found.append(Request(at, prompt, output, seed, **about))


def request_record(request: Request) -> dict:
    """A request as a file has it: without a document if there is none."""
    found = asdict(request)
    if not request.shared_tokens:
        del found["shared_tokens"], found["document"]
    return found


def write_trace(path: Path, config: TraceConfig, requests: list[Request]) -> None:
    """Write a trace's file."""
    made = asdict(config)
    if not config.documents:  # as files were before there were any
        del made["documents"], made["shared"]
    lines = [{"trace": made}, *map(request_record, requests)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_trace(path: Path) -> tuple[TraceConfig, list[Request]]:
    """A trace's file.

    Raises:
        ValueError: it is none; says which line.
    """
    made, requests = None, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found = json.loads(line)
            if number == 1:
                made = TraceConfig(**found["trace"])
            else:
                requests.append(Request(**found))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: no trace's line ({error}): make it with `trace`") from None
    if made is None:
        raise ValueError(f"{path} is empty: make a trace with `trace`")
    return made, requests


def describe(requests: list[Request]) -> str:
    """One line about a trace."""
    if not requests:
        return "no requests"
    prompts, outputs = (np.array([getattr(r, name) for r in requests]) for name in ("prompt_tokens", "output_tokens"))
    return (
        f"{len(requests)} requests; prompts median {np.median(prompts):.0f}, mean {prompts.mean():.0f}, longest "
        f"{prompts.max()} tokens; answers median {np.median(outputs):.0f}, mean {outputs.mean():.0f}, longest "
        f"{outputs.max()}"
    )


def add_options(parser: ArgumentParser) -> None:
    """The options of a trace, but its rate."""
    add = parser.add_argument
    add("--seconds", type=float, default=120.0, help="within which requests arrive (default: 120)")
    add("--clip", type=parse_tokens, default=32768, metavar="TOKENS", help="of a prompt at most: 32k (default), 128k")
    add("--seed", type=int, default=0)
    add("--prompt", type=parse_tokens, default=PROMPT_MEDIAN, metavar="TOKENS", help="median (default: 8k)")
    add("--output", type=parse_tokens, default=OUTPUT_MEDIAN, metavar="TOKENS", help="median (default: 256)")
    add("--output-most", type=parse_tokens, default=OUTPUT_MOST, metavar="TOKENS", help="at most (default: 8k)")


def config_of(args: Namespace, rate: float) -> TraceConfig:
    """The configuration that these options ask for."""
    more = {"documents": getattr(args, "documents", 0), "shared": getattr(args, "shared", 0.0)}
    lengths = {"prompt_median": args.prompt, "output_median": args.output, "output_most": args.output_most}
    return TraceConfig(rate, args.seconds, args.clip, args.seed, **lengths, **more)


def main(argv: list[str]) -> int:
    """Make a trace's file."""
    parser = ArgumentParser(prog="python -m benchmarks serving trace", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--out", type=Path, required=True)
    add_options(parser)
    parser.add_argument("--documents", type=int, default=0, help="that requests share (default: none)")
    parser.add_argument("--shared", type=float, default=0.0, help="of the requests that ask about one: 0.8")
    args = parser.parse_args(argv)
    config = config_of(args, args.rate)
    requests = make_trace(config)
    write_trace(args.out, config, requests)
    print(f"{args.out}: {describe(requests)}")
    return 0
