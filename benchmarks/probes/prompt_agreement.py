"""How far are sparse prompts from exact ones on a real model, how many blocks do they take, and is the audit right?

    python -m benchmarks.probes.prompt_agreement MODEL [--ruler DIRECTORY] [--documents DIRECTORY]
        [--lengths 8k 16k 30k] [--prefill 0.95 0.98]

For each length and share: density, KL and top tokens at 192 positions of a prompt's second half, and what a token of
RULER's right answers loses of its log-probability (with the standard error). Then the covered mass, by the audit and in
truth, of every 61st row: the mean, the worst 2 % of the rows, and how many miss more than .3. Density by layer comes
last. Prints only.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch
from torch import Tensor

from hf_sparsekv import OffloadedSparseCache, TokenConfig
from hf_sparsekv.attention import sparse_prompt
from hf_sparsekv.attention.sparse_prompt import LAST
from hf_sparsekv.cache_name import over
from hf_sparsekv.cli import loading
from hf_sparsekv.ops._prompts import BLOCK, TILE, blocks_of, seen_blocks
from hf_sparsekv.ops.attention.block_attention import block_attention
from hf_sparsekv.results import versions
from hf_sparsekv.telemetry.prompt_stats import mean_covered, mean_density
from hf_sparsekv_eval import ruler, ruler_data, ruler_paper
from hf_sparsekv_eval.text import python_reference

from ..shapes import parse_tokens

POSITIONS = 192  # whose next tokens are compared
EVERY = 61  # of so many rows one's whole mass is computed
FAMILIES = ("niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "qa_1")


def prompts(tokenizer, args: argparse.Namespace, length: int) -> list[tuple[list[int], list[int]]]:
    """Token ids of RULER's prompts with their right answers, and of documents without one."""
    chat = getattr(tokenizer, "chat_template", None) is not None
    data = None if args.ruler is None else ruler_data.read(args.ruler, args.families)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    found = []
    for i in range(args.samples):
        for family in args.families:
            if data is not None:
                sample = ruler_paper.make_sample(tokenizer, data, family, length, i, chat=chat)
            elif family in ruler.FAMILIES:
                sample = ruler.make_sample(tokenizer, family, length, i, chat=chat)
            else:
                continue
            right = sample.references[:1] if family.startswith("qa") else sample.references  # any of them, or all
            found.append((list(sample.ids), encode(" " + ", ".join(right))))
    files = sorted(args.documents.glob("*.txt"))[: args.texts] if args.documents else []
    for text in [path.read_text() for path in files] or [python_reference()]:
        found.append((encode(text[: 8 * length])[:length], []))
    return found


class Truth:
    """Attention to chosen blocks that also computes which share of some rows' mass they cover.

    As the audit, of rows in tiles that leave something out.
    """

    def __init__(self) -> None:
        self.covered: list[Tensor] = []

    def __call__(self, query, key, value, ids, counts, scale, past, start=None, out=None) -> Tensor:
        n = past + query.shape[2]
        rows = torch.arange(EVERY - 1, query.shape[2], EVERY, device=query.device)
        if len(rows):
            chosen = torch.zeros(*ids.shape[:3], blocks_of(n) + 1, dtype=torch.bool, device=query.device)
            chosen.scatter_(3, ids.long().remainder(blocks_of(n) + 1), True)  # -1: one more, which nobody reads
            seen = torch.arange(n, device=query.device) <= past + rows[:, None]
            partly = (counts[0] < seen_blocks(past, query.shape[2], start, query.device))[:, rows // TILE]
            for head in range(query.shape[1]):
                keys = key[0, head * key.shape[1] // query.shape[1], :n].float()
                share = (query[0, head, rows].float() @ keys.T * scale).masked_fill(~seen, float("-inf")).softmax(-1)
                taken = chosen[0, head, rows // TILE].repeat_interleave(BLOCK, 1)[:, :n]
                self.covered.append((share * taken).sum(-1)[partly[head]].cpu())
        return block_attention(query, key, value, ids, counts, scale, past, start, out=out)


@torch.no_grad()
def read(model, ids: list[int], answer: list[int], share: float | None, truth: Truth) -> tuple[Tensor, float, tuple]:
    """A prompt read with ``prefill=share``.

    Returns:
        log-probabilities after some of its positions, the mean one of the tokens of the right answer, and the audit.
    """
    n = len(ids)
    at = torch.linspace(n // 2, n - LAST - 1, POSITIONS, device=model.device).long()
    cache = OffloadedSparseCache(TokenConfig(prefill=share, prefill_below=0, dense_below=1 << 30), offload=None)
    with patch.object(sparse_prompt, "block_attention", truth):
        hidden = model.model(torch.tensor([ids], device=model.device), **over(model, cache), use_cache=True)[0][0]
    found, right = model.lm_head(hidden[at]).float().log_softmax(-1), 0.0
    if answer:
        given = torch.tensor([answer], device=model.device)
        after = model.model(given, **over(model, cache), use_cache=True)[0][0]
        logits = model.lm_head(torch.cat((hidden[-1:], after[:-1]))).float().log_softmax(-1)
        right = float(logits.gather(1, given[0, :, None]).mean())
    return found, right, cache.stats().prompts


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--ruler", type=Path, help="folder with RULER's data; without it, our own prompts")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--samples", type=int, default=1, help="prompts of each family")
    parser.add_argument("--documents", type=Path, help="folder of texts; without it, Python's reference")
    parser.add_argument("--texts", type=int, default=3, help="documents of the folder")
    parser.add_argument("--lengths", nargs="+", type=parse_tokens, default=[8192, 16384, 30000])
    parser.add_argument("--prefill", nargs="+", type=float, default=[0.95, 0.98])
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    args = parser.parse_args(argv)
    device = loading.pick_device("auto")
    tokenizer, model = loading.load(args.model, getattr(torch, args.dtype), device)
    print(versions(), args.dtype)
    print("| tokens | prefill | density | KL | same top token | answer | audit | truth | worst 2 % | miss .3 |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    layers = []
    for length in args.lengths:
        asked = prompts(tokenizer, args, length)
        truths = {share: Truth() for share in args.prefill}
        found: dict[float, dict[str, list]] = {share: defaultdict(list) for share in args.prefill}
        for ids, answer in asked:
            exact, exact_answer, _ = read(model, ids, answer, None, Truth())
            for share, seen in found.items():
                ours, our_answer, stats = read(model, ids, answer, share, truths[share])
                seen["kl"].append(float((exact.exp() * (exact - ours)).sum(-1).mean()))
                seen["top"].append(float((exact.argmax(-1) == ours.argmax(-1)).float().mean()))
                if answer:
                    seen["answer"].append(exact_answer - our_answer)
                seen["density"].append(mean_density(stats))
                seen["audit"].append(mean_covered(stats))
                seen["layers"].append([layer.density for layer in stats])
        for share, seen in found.items():
            rows = torch.cat([torch.ones(1), *truths[share].covered]).sort().values
            lost = torch.tensor(seen["answer"])
            audit = [covered for covered in seen["audit"] if covered is not None]
            print(
                f"| {length:,} | {share} | {mean(seen['density']):.1%} | {mean(seen['kl']):.4f}"
                f" | {mean(seen['top']):.1%} | {lost.mean():.4f} ({lost.std() / len(lost) ** 0.5:.4f})"
                f" | {mean(audit) if audit else 1:.2%} | {rows.mean():.2%}"
                f" | {rows[len(rows) // 50]:.1%} | {(rows < 0.7).float().mean():.3%} |",
                flush=True,
            )
            by_layer = " ".join(f"{100 * mean(layer):.0f}" for layer in zip(*seen["layers"]))
            layers.append(f"{length:,} tokens, {share}, % of the blocks by layer: {by_layer}")
    print("\n".join(layers))


if __name__ == "__main__":
    main()
