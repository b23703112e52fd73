"""How many drafts does full attention accept on a real model, and where does exact mode differ from dense decoding?

    python -m benchmarks.probes.exact_real MODEL [--ruler DIRECTORY] [--length 30k] [--prompts 4] [--new-tokens 128]

Greedy answers to documents (essays of RULER's data, or Python's reference), to code (this package's own) and to RULER's
questions, with ``drafts=4`` and by what drafts attend to. The first table has tokens a round (5 at most), and the share
of drafts that full attention chose too among those that came after right ones. The second one has the answers that
differ from dense steps, with the margin of the two best logits at the first difference; and as many of a batch of two
equal prompts, which differ by rounding alone. Prints only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest.mock import patch

import torch

import hf_sparsekv
from hf_sparsekv import TokenConfig
from hf_sparsekv.cli import loading
from hf_sparsekv.exact_mode import install
from hf_sparsekv.exact_mode.pace import Pace
from hf_sparsekv.results import versions
from hf_sparsekv_eval import ruler, ruler_data, ruler_paper
from hf_sparsekv_eval.text import python_reference

from ..shapes import parse_tokens

DRAFTS = 4
SETTINGS = {
    **{f"mass {mass}": {"mass": mass} for mass in (0.75, 0.85, 0.9, 0.95)},
    **{f"{budget} tokens": {"token_budget": budget} for budget in (512, 1024, 2048)},
}
QUESTIONS = ("niah_multikey_1", "niah_multivalue", "niah_multiquery", "fwe", "cwe")


def prompts(tokenizer, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Token ids by kind."""
    data = None if args.ruler is None else ruler_data.read(args.ruler, QUESTIONS)
    text = python_reference() if data is None else " ".join(data.sentences)
    code = "\n\n".join(path.read_text() for path in sorted(Path(hf_sparsekv.__file__).parent.rglob("*.py")))
    found: dict[str, list[list[int]]] = {}
    for kind, whole, question in (
        ("documents", text, "\n\nA long summary of all the essays above, one after the other:\n"),
        ("code", code, "\n\n# Tests of the functions above, with pytest:\n\nimport pytest\n"),
    ):
        end = tokenizer(question, add_special_tokens=False)["input_ids"]
        n = args.length - len(end) - args.new_tokens
        ids = tokenizer(whole[: 8 * args.prompts * args.length], add_special_tokens=False, verbose=False)["input_ids"]
        step = max(1, min(n, (len(ids) - n) // max(1, args.prompts - 1)))
        found[kind] = [ids[i * step : i * step + n] + end for i in range(args.prompts)]
    found["RULER"] = []
    for i in range(args.prompts):
        family, chat = QUESTIONS[i % len(QUESTIONS)], getattr(tokenizer, "chat_template", None) is not None
        if data is None:
            sample = ruler.make_sample(tokenizer, family, args.length, i, chat=chat)
        else:
            sample = ruler_paper.make_sample(tokenizer, data, family, args.length, i, chat=chat)
        found["RULER"].append(list(sample.ids))
    return found


def answer(model, ids: list[int], args: argparse.Namespace, drafts: int | None, rows: int = 1, **settings):
    """What ``generate()`` returns; without ``drafts`` by dense steps. And by how many drafts rounds were tried."""
    given, tried = torch.tensor([ids] * rows, device=model.device), [0, 0]
    drafted = Pace.drafted

    def counted(self, drafts, added, *more) -> None:
        tried[0] += added.accepted
        tried[1] += added.accepted + added.rejected
        drafted(self, drafts, added, *more)

    config = TokenConfig(dense_below=0, **settings)
    with (
        hf_sparsekv.sparse(model, config, exact=True, drafts=drafts, optimize=False),
        patch.object(install, "_can_draft", (lambda *_: False) if drafts is None else install._can_draft),
        patch.object(Pace, "drafted", counted),
    ):
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=args.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=drafts is None,
        )
    return out, tried


def first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Of two texts ``[n]``; None: the shorter one is the beginning of the other."""
    n = min(len(one), len(other))
    apart = (one[:n] != other[:n]).nonzero()
    return int(apart[0]) if len(apart) else None


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--ruler", type=Path, help="folder with RULER's data")
    parser.add_argument("--length", type=parse_tokens, default=30_000, help="of a prompt and its answer")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    args = parser.parse_args(argv)
    device = loading.pick_device("auto")
    tokenizer, model = loading.load(args.model, getattr(torch, args.dtype), device)
    if device.type == "cuda":
        hf_sparsekv.optimize(model)
    print(versions(), args.dtype)
    asked = prompts(tokenizer, args)
    dense: dict[str, list] = {}
    margins: dict[tuple[str, str], list[float]] = {}

    def compare(name: str, kind: str, whole, tokens: torch.Tensor, n: int) -> None:
        at = first_difference(whole.sequences[0, n:], tokens[n:])
        if at is not None:
            best = whole.logits[at][0].float().topk(2).values
            margins.setdefault((name, kind), []).append(float(best[0] - best[1]))

    for kind, texts in asked.items():
        dense[kind] = [answer(model, ids, args, None)[0] for ids in texts]
        for ids, whole in zip(texts, dense[kind]):
            compare("dense, batch of 2", kind, whole, answer(model, ids, args, None, 2)[0].sequences[0], len(ids))
    print(f"tokens of prompts: {', '.join(f'{kind} {len(texts[0]):,}' for kind, texts in asked.items())}")
    print(f"\n| drafts attend to | {' | '.join(asked)} |\n|---|{'---|' * len(asked)}")
    for name in args.settings:
        cells = []
        for kind, texts in asked.items():
            right = tried = drafted = accepted = 0
            for ids, whole in zip(texts, dense[kind]):
                out, counts = answer(model, ids, args, DRAFTS, **SETTINGS[name])
                stats = out.past_key_values.stats()
                right, tried = right + counts[0], tried + counts[1]
                drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
                compare(name, kind, whole, out.sequences[0], len(ids))
            rounds = max(1, drafted // DRAFTS)
            cells.append(f"{1 + accepted / rounds:.2f}, {right / max(1, tried):.1%}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\n| answers that differ from dense steps | of | margins of the two best logits there |\n|---|---|---|")
    for name in ("dense, batch of 2", *args.settings):
        found = [f"{kind}: {gap:.3g}" for kind in asked for gap in margins.get((name, kind), [])]
        total = sum(map(len, asked.values()))
        print(f"| {name}: {len(found)} | {total} | {', '.join(found)} |")
    print(f"spread of the logits (standard deviation): {float(dense['documents'][0].logits[0].float().std()):.2f}")


if __name__ == "__main__":
    main()
