"""The model card of a probe model."""

from __future__ import annotations

from pathlib import Path

from hf_sparsekv_eval.probe_cells import EXAMS

NAMES = {"gqa": "grouped-query attention (Qwen3)", "mla": "multi-head latent attention (DeepSeek-V3, dense MLP)"}

TEXT = """---
license: apache-2.0
library_name: transformers
tags: [long-context, retrieval, test]
---
# Probe model, {name}

A small transformer that finds facts in long prompts of an artificial language of 912 words. **It is
no language model**: it reads no text. It is for tests, demonstrations and continuous integration of
sparse KV caches, where a model is needed that retrieves from 32k tokens and fits into a repository.

```python
AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
```

## Data

Prompts of {lengths} tokens, and lengths between, made while training: filler (a Markov chain over
words of Zipf frequencies), facts (`fact k03 k17 v100 v021 <end>`), chains of variables (`var n01
n44 = v005 v090 <end>`), and questions at the end: the value of a key among others (`ask`), all
values of a key (`list`), the values of four keys (`each`), all variables of a value (`trace`):
RULER's needle families and variable tracking (Hsieh et al. 2024, arXiv 2404.06654).
`hf_sparsekv_eval.probe_language` defines the language. Counting words is not among the tasks:
an answer from counts needs attention to everything, which no sparse method has.

## Recipe

`tools/train_probe.py --kind {kind} --seed {seed} --steps {steps}` ({tokens:.0f}M tokens,
{minutes:.1f} minutes on one {device}, torch {torch}). Muon {muon} on matrices, Adam {adam} on
embeddings and norms, {bound}loss on answers plus {lm} of that on all other tokens. **Attention was made
sparse on purpose**, so that the model tests how tokens are selected and not whether attention is
sparse: in the last stage the final {tail} columns of each prompt of 2k or more pay, in layers from
2 on, {penalty} times minus the logarithm of the attention inside the best {budgets} tokens (below
and from 8k) of each KV head, sinks and recent tokens, and in half of the steps attend to nothing
else.

## Scores

% of {prompts} prompts whose whole answer is right (each token the most probable one after the right
ones before it), full attention / an oracle that attends to the best {budget} tokens of each KV head
beside 4 sinks and 64 recent tokens, first two layers dense:

| | {heads} |
|---|{dashes}|
{rows}

{verdict}
"""


def write_card(path: Path, result: dict) -> None:
    """Write the card of a ``result.json``."""
    recipe = result["recipe"]
    rows = [
        f"| {length} | " + " | ".join(f"{100 * s[n]['full']:.1f} / {100 * s[n]['oracle']:.1f}" for n in EXAMS) + " |"
        for length, s in result["scores"].items()
    ]
    failed = result["gates_failed"]
    text = TEXT.format(
        name=NAMES[result["kind"]],
        kind=result["kind"],
        seed=result["seed"],
        steps=",".join(map(str, result["steps"])),
        tokens=result["tokens"] / 1e6,
        minutes=result["seconds"] / 60,
        device=result["device"],
        torch=result["torch"],
        lengths=", ".join(map(str, recipe["lengths"])),
        prompts=result["prompts_per_score"],
        budget=result["oracle_budget"],
        heads=" | ".join(EXAMS),
        dashes="---|" * (len(EXAMS) - 1) + "---",
        rows="\n".join(rows),
        budgets=" or ".join(map(str, recipe["budgets"])),
        verdict="Gates that are not passed: " + "; ".join(failed) + "." if failed else "All gates are passed.",
        bound="" if recipe["logit_decay"] else "rows of q_b, kv_a and kv_b kept at their first norm,\n",
        **{key: recipe[key] for key in ("muon", "adam", "lm", "tail", "penalty")},
    )
    path.write_text(text)
