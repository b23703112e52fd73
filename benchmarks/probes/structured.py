"""What a schema costs a token: the engine's steps with JSON mode in some rows and without, on this GPU.

    python -m benchmarks.probes.structured [--model small] [--rows 1 8 32]

Milliseconds from one token of a row to its next, median and 95th percentile, over captured steps. Schemas: an array of
strings, and one of strings of 5 to 40 characters, whose masks take longer. Needs the extra ``structured``.
"""

from __future__ import annotations

import argparse
import statistics

from hf_sparsekv import Engine, Sampling, ServingConfig
from hf_sparsekv.cli import loading
from hf_sparsekv.results import device_name, versions

TOKENS = 200
# Unbounded, so that no answer ends before the others.
STRINGS = {"any": {"type": "string"}, "5 to 40": {"type": "string", "minLength": 5, "maxLength": 40}}
FREE = Sampling(max_tokens=TOKENS, temperature=1.0, seed=1, ignore_eos=True)


def held(strings: str) -> Sampling:
    """Of answers that follow the schema."""
    schema = {"type": "array", "items": STRINGS[strings], "minItems": 400}
    return Sampling(max_tokens=TOKENS, temperature=1.0, seed=1, json_schema=schema)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    tokenizer, model = loading.load(args.model, None, loading.pick_device("auto"))
    print(device_name(), versions())
    for rows in args.rows:
        asked = {"none held": [FREE] * rows}
        for strings in STRINGS:
            asked[f"one held, strings of {strings}"] = [held(strings)] + [FREE] * (rows - 1)
            asked[f"all held, strings of {strings}"] = [held(strings)] * rows
        serving = ServingConfig(max_rows=rows, max_length=2048, prefix_cache=False)
        with Engine(model, tokenizer, serving=serving) as engine:
            prompts = ["Write a list of words as JSON: "] * rows
            engine.generate_batch(prompts, [held("any")] * rows)  # captures
            for name, sampling in asked.items():
                # The last half: all rows decode.
                between = [
                    1e3 * (after - before)
                    for output in engine.generate_batch(prompts, sampling)
                    for before, after in zip(output.token_times[TOKENS // 2 :], output.token_times[TOKENS // 2 + 1 :])
                ]
                high = statistics.quantiles(between, n=20)[-1]
                print(f"{rows:3} rows, {name:28}: {statistics.median(between):.3f} ms, 95 % {high:.3f} ms")


if __name__ == "__main__":
    main()
