"""What short passes cost: prompts of some hundred tokens, and short questions about a long text that is cached.

    python -m benchmarks.probes.short_prompts [--contexts 32k 128k] [--parts prompts questions engine] [--profile]

Medians in milliseconds, each until the GPU is done; before them the host's part, until the call returns. `pass` is one
call of the model, `generate` a call of generate() for one token, `engine` a request for one token. transformers' dense
cache (sdpa) is beside them. Random weights, no other request. Prints only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from hf_sparsekv import (
    Engine,
    OffloadConfig,
    OffloadedSparseCache,
    Sampling,
    ServingConfig,
    TokenConfig,
    optimize,
    unoptimize,
)
from hf_sparsekv.cache_name import generate_over, over
from hf_sparsekv.results import device_name, versions

from ..shapes import known_config, parse_model, parse_tokens, random_model

WHOLE = 64, 512, 1024, 2048
QUESTION = 64
CHUNK = 16 * 1024  # of a long text
WARM_UP, TIMES = 4, 9
PACKAGES = "hf_sparsekv", "transformers", "triton", "torch"

PARTS = "prompts", "questions", "engine"

Make = Callable[[], object]


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ids_of(model, tokens: int) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, (1, tokens), device=model.device)


@torch.no_grad()
def one_pass(model, cache, ids: torch.Tensor) -> None:
    """Like the one of generate(): the logits of the last token."""
    past = cache.get_seq_length()
    where = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
    mask = torch.ones(1, past + ids.shape[1], dtype=torch.long, device=ids.device)
    model(ids, attention_mask=mask, position_ids=where, **over(model, cache), use_cache=True, logits_to_keep=1)


def one_token(model, cache, ids: torch.Tensor) -> None:
    model.generate(ids, **generate_over(cache), attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)


def timed(run: Callable[[object], None], begin: Make, end: Callable[[object], None] = lambda cache: None) -> str:
    """Medians of ``run(begin())``: the host's, and the whole."""
    hosts, both = [], []
    for _ in range(WARM_UP + TIMES):
        cache = begin()
        synchronise()
        start = time.perf_counter()
        run(cache)
        hosts.append(time.perf_counter() - start)
        synchronise()
        both.append(time.perf_counter() - start)
        end(cache)
    return " ".join(f"{1e3 * statistics.median(found[WARM_UP:]):8.1f}" for found in (hosts, both))


def report(what: str, found: str) -> None:
    print(f"{what:62} {found}", flush=True)


def prompts(name: str, model, make: Make) -> None:
    """Prompts in new caches and, of ours, in one that is used again."""
    used = make()

    def again() -> object:
        used.reset()
        return used

    for tokens in WHOLE:
        ids = ids_of(model, tokens)
        report(f"{name}, {tokens} tokens, new cache, pass", timed(lambda c, ids=ids: one_pass(model, c, ids), make))
        report(
            f"{name}, {tokens} tokens, new cache, generate", timed(lambda c, ids=ids: one_token(model, c, ids), make)
        )
        if not isinstance(used, DynamicCache):
            report(
                f"{name}, {tokens} tokens, used cache, pass", timed(lambda c, ids=ids: one_pass(model, c, ids), again)
            )


def questions(name: str, model, make: Make, context: int) -> None:
    """A short pass over a long text, which is cropped again."""
    text, more = ids_of(model, context), ids_of(model, QUESTION)
    cache = make()
    for part in text.split(CHUNK, dim=1):
        one_pass(model, cache, part)
    whole = torch.cat((text, more), dim=1)
    for how, run in (("pass", lambda c: one_pass(model, c, more)), ("generate", lambda c: one_token(model, c, whole))):
        what = f"{name}, {QUESTION} tokens over {context}, {how}"
        report(what, timed(run, lambda: cache, lambda c: c.crop(-QUESTION)))


def served(name: str, model, offload: OffloadConfig | None, context: int) -> None:
    """Requests of an engine for one token: a new question about a text whose blocks are kept."""
    text = ids_of(model, context)[0].tolist()
    serving = ServingConfig(max_rows=4, max_length=context + 4 * QUESTION, max_tokens=2 * context)
    with Engine(model, None, TokenConfig(), offload=offload, serving=serving) as engine:

        def ask(question: list[int]) -> float:
            start = time.perf_counter()
            engine.submit(text + question, Sampling(max_tokens=1, temperature=0.0)).result()
            return 1e3 * (time.perf_counter() - start)

        found = [ask(ids_of(model, QUESTION)[0].tolist()) for _ in range(WARM_UP + TIMES)]
        report(f"{name}, {QUESTION} tokens over {context}, engine", f"{'':8} {statistics.median(found[WARM_UP:]):8.1f}")
        short = [ids_of(model, 512)[0].tolist() for _ in range(WARM_UP + TIMES)]
        text = []
        found = [ask(ids) for ids in short]
        report(f"{name}, 512 tokens, engine", f"{'':8} {statistics.median(found[WARM_UP:]):8.1f}")


def profiled(what: str, run: Callable[[object], None], begin: Make) -> None:
    """Python calls of one run, the operators that take the host longest, and the kernels that take the GPU longest."""
    for _ in range(WARM_UP):
        run(begin())
    cache, calls = begin(), Counter()

    def count(frame, event, arg) -> None:
        if event == "call":
            parts = frame.f_code.co_filename.split("/")
            calls[next((part for part in parts if part in PACKAGES), "other")] += 1

    sys.setprofile(count)
    try:
        run(cache)
    finally:
        sys.setprofile(None)
    cache = begin()
    synchronise()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(cache)
        synchronise()
    print(f"{what}: {calls.total()} Python calls: {dict(calls.most_common(6))}")
    host, device, counts = Counter(), Counter(), Counter()
    for event in found.events():
        mine = device if event.device_type == DeviceType.CUDA else host
        mine[event.name] += event.time_range.elapsed_us() if mine is device else event.self_cpu_time_total
        counts[event.name] += 1
    for where, times in (("host", host), ("device", device)):
        print(f"  {where}: {times.total() / 1e3:.1f} ms")
        for op, us in times.most_common(16):
            print(f"    {us / 1e3:8.3f} ms {counts[op]:6} x {op[:100]}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=parse_model, default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--contexts", type=parse_tokens, nargs="*", default=[32 * 1024, 128 * 1024], metavar="TOKENS")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--profile", action="store_true", help="of ours: where host and device spend a prompt of 512")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(known_config(args.model, args.layers), dtype, device)
    print(device_name(), versions())
    print(f"{'':62} {'host, ms':>8} {'all, ms':>8}")
    places = {"resident": None, "offloaded": OffloadConfig()}
    makes: dict[str, Make] = {
        name: lambda offload=offload: OffloadedSparseCache(TokenConfig(), offload) for name, offload in places.items()
    }

    def measure(name: str, make: Make) -> None:
        if "prompts" in args.parts:
            prompts(name, model, make)
        for context in args.contexts if "questions" in args.parts else ():
            questions(name, model, make, context)

    model.set_attn_implementation("sdpa")
    measure("transformers", DynamicCache)
    model.set_attn_implementation("sparsekv")
    optimize(model)
    for name, make in makes.items():
        measure(name, make)
    if args.profile:
        ids = ids_of(model, 512)
        profiled("512 tokens, new cache", lambda cache: one_pass(model, cache, ids), makes["resident"])
    unoptimize(model)
    if "engine" in args.parts:
        for name, offload in places.items():
            for context in args.contexts:
                served(name, model, offload, context)


if __name__ == "__main__":
    main()
