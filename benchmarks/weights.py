"""Models with quantised weights: whether they run, what they say, and whether and how fast their steps are captured.

    python -m benchmarks weights
    python -m benchmarks weights --formats bf16 bnb-nf4 torchao-int8 --shapes 1x32k --layers 4

For each format a model of a known shape with random weights is made and its linear layers are quantised, one format
after another in one process. What cannot run (no library, no kernel for this GPU) says why in one line.

Rows of a format: works (0 or 1), weights_gb (what a step reads, scales included); of 16 greedy tokens behind a prompt
of 600, each asked for behind those that the same quantised model says under transformers' sdpa: equal_tokens,
equal_share, and logits_diff (the largest difference of logits over the standard deviation of these), of the optimised
model over a cache whose budget covers all, and :eager of the model as it is. Weights are random, so likely tokens are
close to each other: the rows of bf16 say how many turn by rounding alone.

Rows of a format and a shape, over a cache filled with random keys and values: tpot_ms through generate() of the eager
model (+eager) and of the optimised one over the default cache, and captured dense attention; captured: whether steps
were replayed (the reason is printed if not); peak_gb while decoding.
"""

from __future__ import annotations

import warnings
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from hf_sparsekv import unoptimize
from hf_sparsekv.cache_name import generate_over
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.results import device_name, versions

from .arguments import new_parser, rows_file
from .baselines import VARIANTS, NotRun, Variant, make_cache, prepare
from .decoding import free, generate
from .filling import fill_cache
from .report import Report, is_memory
from .shapes import case_name, known_config, random_model, text_config
from .weight_formats import FORMATS, Format, convert, kept_bytes

PROMPT, ANSWER = 600, 16  # tokens
SPARSE, DENSE = VARIANTS["token_only"], VARIANTS["captured_dense"]
RUNS = ((SPARSE, False), (SPARSE, True), (DENSE, True))  # and whether captured
TOKENS = {False: 24, True: 64}  # new ones: eager steps take long and vary little
UNIT = "0 or 1"


class Said(LogitsProcessor):
    """Has ``generate()`` say ``answer [n]``, and keeps what the model would have said.

    Attributes:
        logits: of each token ``[1, vocabulary]``, float32.
    """

    def __init__(self, answer: Tensor) -> None:
        self.answer = answer
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of which one is finite."""
        token = self.answer[len(self.logits)]
        self.logits.append(scores.float().clone())
        return torch.full_like(scores, -torch.inf).index_fill(1, token[None], 0.0)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens ``[n]`` of one row, and their logits ``[n, vocabulary]``, float32."""

    tokens: Tensor
    logits: Tensor


def prompt(model: nn.Module) -> Tensor:
    """Token numbers ``[1, PROMPT]``."""
    generator = torch.Generator(model.device).manual_seed(0)
    return torch.randint(0, text_config(model).vocab_size, (1, PROMPT), device=model.device, generator=generator)


def answer(model: nn.Module, cache=None, said: Tensor | None = None) -> Answer:
    """What the model says behind :func:`prompt`, or what it would say behind each of the tokens ``said [n]``."""
    ids, forced = prompt(model), None if said is None else Said(said)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **generate_over(cache),
        max_new_tokens=ANSWER,
        do_sample=False,
        pad_token_id=0,
        disable_compile=True,
        logits_processor=None if forced is None else [forced],
        output_logits=forced is None,
        return_dict_in_generate=True,
    )
    logits = torch.cat([one.float() for one in (out.logits if forced is None else forced.logits)])
    return Answer(logits.argmax(-1), logits)


def made(form: Format, args: Namespace) -> nn.Module:
    """A new model, the same random weights each time, in this format."""
    torch.manual_seed(0)
    model = random_model(known_config(args.model, args.layers), getattr(torch, args.dtype), torch.device(args.device))
    convert(model, form)
    free()  # the weights as they were
    return model


def checked(form: Format, args: Namespace, report: Report) -> nn.Module:
    """The model of a format, which answers a prompt as it does under sdpa; rows say how nearly.

    Raises:
        NotRun: the format does not run here, and why.
    """
    try:
        model = made(form, args)
        model.set_attn_implementation("sdpa")
        expected = answer(model)
    except Exception as error:
        if is_memory(error):
            raise
        report.add("works", 0, UNIT)
        raise NotRun(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}") from error
    report.add("works", 1, UNIT)
    report.add("weights_gb", kept_bytes(model) / 1e9, "GB")
    for captured in (True, False):
        ready(model, DENSE, args, captured)
        found = answer(model, make_cache(model, DENSE, PROMPT + ANSWER), expected.tokens)
        how = "" if captured else ":eager"
        equal = int((found.tokens == expected.tokens).sum())
        apart = (found.logits - expected.logits).abs().max() / expected.logits.std()
        report.add(f"equal_tokens{how}", equal, "tokens")
        report.add(f"equal_share{how}", equal / ANSWER, "share")
        report.add(f"logits_diff{how}", float(apart), "std")
    return model


def ready(model: nn.Module, variant: Variant, args: Namespace, captured: bool) -> None:
    """Optimise the model anew, or take it out of that: a runner that has met an error does not capture again."""
    unoptimize(model)
    prepare(model, variant, args.fused and why_not(model) is None, capture=captured)


def measure(model: nn.Module, variant: Variant, captured: bool, shape: tuple[int, int], report: Report, args) -> None:
    """Times of one way to decode."""
    batch, context = shape
    ready(model, variant, args, captured)
    cache = make_cache(model, variant, context + 1 + TOKENS[captured])
    after = fill_cache(model, cache, batch, context)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = generate(model, cache, batch, TOKENS[captured], each=after)
    report.add("tpot_ms", found.tpot_ms)
    if captured:
        runner = runner_of(model)
        report.add("captured", int(runner is not None and runner.replays > 0), UNIT)
        reasons = {str(w.message) for w in seen if "eagerly" in str(w.message)}
        if runner is None:
            reasons.add("decode steps run eagerly: the model is not on a CUDA device")
        for reason in sorted(reasons):
            report.note(reason)
    if on_gpu:
        report.add("peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")


def label(form: Format, variant: Variant, captured: bool, fused: bool) -> str:
    """Name of the rows: ``bnb-nf4:token_only+fused``, ``bnb-nf4:token_only+eager``."""
    return f"{form.name}:" + (variant.label(fused) if captured else f"{variant.name}+eager")


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("weights", __doc__, "shapes", "model", "dtype", "device", "fused")
    parser.set_defaults(shapes=[(1, 32768), (8, 32768)], dtype="bfloat16")
    add = parser.add_argument
    add("--layers", type=int, help="the model's first layers only; its rows say so")
    add("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT", help=", ".join(FORMATS))
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed that was not said beforehand to be missing."""
    args = arguments().parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no CUDA device: --device cpu")
        return 1
    print(device_name(), versions())
    case = case_name(args.model) + ("" if args.dtype == "bfloat16" else f":{args.dtype}")
    case += "" if args.layers is None else f":layers={args.layers}"
    with Report("weights", case, rows_file(args), len(args.formats) * (1 + len(args.shapes) * len(RUNS))) as report:
        for name in args.formats:
            form, model = FORMATS[name], None
            with report.measuring(1, PROMPT, name):
                model = checked(form, args, report)
            if model is None:
                free()
                continue
            fused = args.fused and model.device.type == "cuda" and why_not(model) is None
            for shape in args.shapes:
                for variant, captured in RUNS:
                    with report.measuring(*shape, label(form, variant, captured, fused), model):
                        measure(model, variant, captured, shape, report, args)
                    free()
            unoptimize(model)
            del model
            free()
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
