"""Answer the prompts by caches of this package, Quest's blocks among them; on a GPU by captured steps.

    python -m benchmarks.peers.run_ours --model DIR --prompts FILE --systems default offloaded quest:1024

A system is one of the names below, or ``NAME=SPEC`` with a cache as ``hf-sparsekv eval --cache`` takes it.
The question after the context is read token by token, as decode steps: a pass over several tokens attends to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from hf_sparsekv import sparse
from hf_sparsekv.cache import SparseCache
from hf_sparsekv_eval.cache_specs import parse_cache

from .answering import STEPS, Sizes, System
from .measuring import parser, run
from .row_file import versions

# Quest: pages of 16 tokens scored by the bounds of their keys' least and largest channels, two dense layers, no sinks.
# One choice for all query heads of a KV head (the best bound of them), and the 16 newest tokens are attended, too.
QUEST = "block_only:block_size=16,sinks=0,window=16,dense_layers=2,token_budget="
SYSTEMS = {
    "default": "token",
    "accurate": "token:preset=accurate",
    "progressive": "progressive",
    "predictive": "predictive",
    "offloaded": "token:offload=true",
    "quest:1024": f"{QUEST}1024",
    "quest:4096": f"{QUEST}4096",
}


def sizes(cache: SparseCache | DynamicCache) -> Sizes:
    """The cache's own counts; transformers' cache reads all that it holds."""
    if not isinstance(cache, SparseCache):
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return Sizes(held, 0, held)
    stats = cache.stats()
    read = (stats.kv_bytes_read + stats.index_bytes_read) / max(1, stats.decode_steps)
    return Sizes(stats.device_bytes, stats.host_bytes, read)


@contextmanager
def make(name: str, model) -> Iterator[System]:
    """A system by its name, with the model set up for it."""
    if name == "full":
        model.set_attn_implementation("sdpa")
        yield System("transformers:full", DynamicCache, sizes)
        return
    label, _, spec = name.partition("=")
    if not spec and name not in SYSTEMS:
        raise SystemExit(f"error: system {name!r}: write full, NAME=SPEC, or one of {', '.join(SYSTEMS)}")
    try:
        parsed = parse_cache(spec or SYSTEMS[name])
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    sample = parsed.make(model.config)
    with sparse(model, sample.config, offload=sample.offload_config):
        yield System(f"hf-sparsekv:{label}", lambda: parsed.make(model.config), sizes, after=STEPS)


def load(args):
    """Model and tokenizer."""
    disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    return model.to(args.device).eval(), AutoTokenizer.from_pretrained(args.model)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    args = parser(__doc__, SYSTEMS).parse_args(argv)
    return run(args, load, make, versions())


if __name__ == "__main__":
    raise SystemExit(main())
