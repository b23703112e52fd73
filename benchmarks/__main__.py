"""The benchmarks' command line: ``python -m benchmarks step --shapes 1x32k``, from a checkout."""

from __future__ import annotations

import importlib
import sys

import torch

from hf_sparsekv.cli.output import CommandError
from hf_sparsekv_config.options import guess

# name -> module, whether it needs a GPU, what it measures
BENCHMARKS = {
    "operator": ("operators.run", True, "ways to run the operators of one layer"),
    "step": ("step", True, "whole decode steps, alone and through generate(), beside their baselines"),
    "exact": ("exact", False, "a token in exact mode, by the share of drafts that are accepted"),
    "audit": ("audit", False, "a token whose distance from full attention is audited, and without"),
    "prompt": ("prompt", False, "seconds of a prompt: exact, and sparse at given densities"),
    "serving": ("serving.run", False, "requests that come and go: whole systems, goodput, a fixed number of rows"),
    "parallel": ("parallel", False, "a model spread over several GPUs: tensor parallel, layers over devices"),
    "generate": ("generate", False, "a model and a cache as people use them, also on a CPU"),
}
HELP = f"""usage: python -m benchmarks {{{",".join(BENCHMARKS)}}} [options]

{chr(10).join(f"  {name:10} {about}" for name, (*_, about) in BENCHMARKS.items())}

  --help after a name shows its options; --list shows the known model shapes and variants.
  Rows are appended to benchmarks/results."""


def show_list() -> None:
    """Print shapes with their sizes, and variants."""
    from hf_sparsekv.tuning.shapes import SHAPES

    from .baselines import VARIANTS
    from .shapes import head_dim, latent_dims, windows

    print("model shapes (random weights); any other model by its name or path")
    for name, make in SHAPES.items():
        config = make()
        kinds = windows(config)
        sliding = sum(window is not None for window in kinds)
        text = f"{len(kinds)} layers, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads"
        text += f" of {head_dim(config)}"
        if latent := latent_dims(config):
            text = f"{len(kinds)} layers, {config.num_attention_heads} query heads over latents of {latent[0]}"
            text += f" + {latent[1]} (MLA)"
        if sliding:
            text += f", {sliding} layers slide over {config.sliding_window} tokens"
        print(f"  {name:18} {text}")
    print("variants of step; caches of generate (all but sdpa_best); ours also with +offload in generate")
    for variant in VARIANTS.values():
        print(f"  {variant.name:18} {variant.about}")


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark; the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("--help", "-h"):
        print(HELP)
        return 0
    if name == "--list":
        show_list()
        return 0
    if name not in BENCHMARKS:
        hint = guess(name, BENCHMARKS)
        print(f"error: there is no benchmark {name!r}{hint}\n\n{HELP}" if name else HELP, file=sys.stderr)
        return 2
    module, needs_gpu, _ = BENCHMARKS[name]
    asks_help = not {"--help", "-h"}.isdisjoint(rest)
    if needs_gpu and not (torch.cuda.is_available() or asks_help):
        print(f"error: {name} needs a CUDA device; `hf-sparsekv doctor` shows what there is", file=sys.stderr)
        return 1
    try:
        return importlib.import_module(f".{module}", __package__).main(rest)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
