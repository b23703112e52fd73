"""Train a probe model: a small transformer that retrieves from long prompts as RULER asks, and is no language model.

    python tools/train_probe.py --kind gqa --minutes 7 --out runs/gqa            # one H200
    python tools/train_probe.py --kind mla --minutes 15 --out runs/mla
    python tools/train_probe.py --kind gqa --minutes 9 --out runs/gqa --resume   # two minutes more

Stages of growing length hold the learning rate until all families are answered; the last one mixes lengths up to the
longest, lets the rate fall, and makes attention sparse: the last columns of each prompt pay for attention outside the
tokens that an oracle would choose, and in half of the steps attend to nothing else.

``--out`` gets the model (bf16 safetensors), tokenizer, model card, ``result.json`` (recipe, steps, scores, gates) and
``checkpoint.pt``. Stages end by the clock, so a second run takes other steps; ``--steps`` repeats those of a result.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from probe_training import gates
from probe_training.card import write_card
from probe_training.muon import Optimiser
from probe_training.network import MAX_LENGTH, UNBOUNDED, Network, Size, build, check_backends

from hf_sparsekv_eval import probe_cells as cells
from hf_sparsekv_eval import probe_language as lang


@dataclass(frozen=True)
class Recipe:
    """What training does beside the model's size; times are shares of ``--minutes``."""

    size: Size = field(default_factory=Size)
    tokens: int = 65536
    lengths: tuple[int, ...] = (512, 2048, 8192, 32768)
    latest: tuple[float, ...] = (0.34, 0.44, 0.52, 0.6)  # when a stage ends whether or not it has learned
    learned: float = 0.98  # right answer tokens, each family
    muon: float = 0.02
    adam: float = 3e-3
    logit_decay: float = 0.7  # of the matrices that make logits; zero keeps their rows' norms
    lm: float = 0.1  # weight of all other tokens
    warmup: int = 150
    fall: float = 0.35  # of the last stage, the learning rate begins to fall
    tail: int = 512  # columns with explicit scores
    penalty: float = 0.1  # times minus the logarithm of the mass inside the oracle's choice
    budgets: tuple[int, int] = (128, 256)  # that choice, below and from 8k
    exams: tuple[int, ...] = (4096, 16384, 32768)
    budget: int = gates.BUDGET


TOY_SIZE = Size(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, q_rank=64, kv_rank=64, nope=16, rope=16
)
RECIPES = {
    "published": Recipe(),
    "toy": Recipe(size=TOY_SIZE, tokens=4096, lengths=(128, 256), latest=(0.5, 0.6), tail=32, budgets=(32, 32),
                  exams=(256,), budget=64),
}  # fmt: skip


def recipe_of(preset: str, kind: str) -> Recipe:
    """Latent attention has no norms behind its queries and keys, and nothing learns at these rates without some bound:
    the rows of those matrices keep their norms. Content is matched by the part without rotation; the rotary part tells
    the order of facts, so its slowest frequencies must be slow beside 32k tokens (benchmarks/NOTES.md: base 1e4 with 16
    of them, the slowest turning once in 35k, answered 10 % of variable tracking there)."""
    recipe = RECIPES[preset]
    if kind == "mla":
        recipe = replace(recipe, size=replace(recipe.size, theta=1e6, logit_init=1.4), logit_decay=0.0)
    return recipe


class Trainer:
    """Training state and loop.

    Args:
        args: the command line.
        recipe: what to do.
    """

    def __init__(self, args, recipe: Recipe) -> None:
        self.args, self.recipe = args, recipe
        self.begin = time.time()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        self.random = random.Random(args.seed)
        model = build(args.kind, recipe.size, args.seed).to(self.device)
        self.model = model.bfloat16() if self.device.type == "cuda" else model
        self.optimiser = Optimiser(
            self.model, recipe.muon, recipe.adam, unbounded=UNBOUNDED, logit_decay=recipe.logit_decay
        )
        self.network = Network(self.model, compiled=args.compile and self.device.type == "cuda")
        self.plain = Network(self.model)
        self.stage, self.seconds = 0, 0.0
        self.mixed_since: float | None = None  # seconds before the last stage
        self.steps = [0] * (len(recipe.lengths) + 1)
        count = sum(p.numel() for p in model.parameters())
        self.log(f"{args.kind}: {count / 1e6:.2f}M parameters, {count * 2 / 1e6:.2f} MB in bf16, {self.device}")
        if self.device.type == "cuda":
            backends = check_backends(self.model.config, self.network, self.log)
            self.network.backends = self.plain.backends = backends
        chains = 65536 if self.device.type == "cuda" else 1024
        self.filler = lang.Filler(chains, 512, self.device, args.seed)

    def log(self, text: str) -> None:
        print(f"[{time.time() - self.begin:6.1f}] {text}", flush=True)

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint(self) -> Path:
        return self.args.out / "checkpoint.pt"

    def save(self) -> None:
        state = {
            "kind": self.args.kind,
            "recipe": json.dumps(asdict(self.recipe)),
            "optimiser": self.optimiser.state_dict(),
            "stage": self.stage,
            "steps": self.steps,
            "seconds": self.seconds,
            "mixed_since": self.mixed_since,
            "random": (self.random.getstate(), torch.get_rng_state()),
        }
        if self.device.type == "cuda":
            state["random_cuda"] = torch.cuda.get_rng_state()
        partial = self.checkpoint.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=False)
        if (state["kind"], state["recipe"]) != (self.args.kind, json.dumps(asdict(self.recipe))):
            raise SystemExit(f"{self.checkpoint} is of another recipe: choose another --out")
        self.optimiser.load_state_dict(state["optimiser"])
        self.stage, self.steps = (
            min(state["stage"], self.last_stage),
            state["steps"],
        )  # a finished one may get more time
        self.seconds, self.mixed_since = state["seconds"], state["mixed_since"]
        python, cpu = state["random"]
        self.random.setstate(python)
        torch.set_rng_state(cpu.cpu())
        if self.device.type == "cuda" and "random_cuda" in state:
            torch.cuda.set_rng_state(state["random_cuda"].cpu())
        self.log(f"resumed in stage {self.stage} after {sum(self.steps)} steps, {self.seconds:.0f} s")

    # ------------------------------------------------------------------ the schedule

    @property
    def last_stage(self) -> int:
        return len(self.recipe.lengths)

    def progress(self) -> float:
        """How far the last stage is, 0 to 1."""
        if self.args.steps:
            return self.steps[-1] / self.args.steps[-1]
        if self.mixed_since is None:
            self.mixed_since = self.seconds
        return (self.seconds - self.mixed_since) / max(1e-9, 60 * self.args.minutes - self.mixed_since)

    def shape(self) -> tuple[int, int]:
        """Rows and columns of the next batch."""
        recipe = self.recipe
        if self.stage < self.last_stage:
            length = recipe.lengths[self.stage]
            return max(1, recipe.tokens // length), length
        fewest = recipe.tokens // recipe.lengths[-1]
        if self.random.random() < 0.5:
            batch = fewest * 2 ** self.random.randint(0, 5)  # the round lengths
        else:  # few others: cuDNN plans each length anew
            batch = round(fewest * self.random.choice((1.5, 2.5, 3, 3.5, 5, 6, 7, 10, 12, 14)))
        batch = max(fewest, min(batch, recipe.tokens // recipe.lengths[0] // 2))
        return batch, recipe.tokens // batch // cells.CELL * cells.CELL

    def stage_ends(self, accuracy: dict[str, float]) -> bool:
        if self.args.steps:
            return self.steps[self.stage] >= self.args.steps[self.stage]
        if self.stage == self.last_stage:
            return self.seconds >= 60 * self.args.minutes
        if self.seconds >= 60 * self.args.minutes * self.recipe.latest[self.stage]:
            return True
        return min(accuracy.get(family, 0.0) for family in cells.FAMILIES[1:]) >= self.recipe.learned

    # ------------------------------------------------------------------ a step

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One update.

        Returns:
            right and all answer tokens per family ``[2, families]``; losses (answers, rest, lost mass) ``[3]``; the
            lost mass of each head ``[layers, heads]``.
        """
        recipe = self.recipe
        batch, length = self.shape()
        ids, family = cells.training_batch(batch, length, self.random, self.filler)
        target = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        kind = torch.nn.functional.pad(family[:, 1:], (0, 1), value=0)
        factor, weight, extra = min(1.0, (sum(self.steps) + 1) / recipe.warmup), 0.0, {}
        if self.stage == self.last_stage:
            done = self.progress()
            factor = max(0.02, min(1.0, (1 - done) / (1 - recipe.fall)))
            if length >= 4 * recipe.tail:
                weight = recipe.penalty * min(1.0, done / 0.2)
                budget = recipe.budgets[length >= 8192]
                masked = self.random.random() < 0.5 and done > 0.1
                extra = {"n_tail": recipe.tail, "penalty": budget, "budget": budget if masked else None}
        hidden, lost = self.network.hidden(ids, pad_to=recipe.tokens, **extra)
        spare = recipe.tokens - ids.numel()
        target, kind = (torch.nn.functional.pad(t.flatten(), (0, spare)) for t in (target, kind))
        real = torch.arange(recipe.tokens, device=self.device) < ids.numel()
        body = self.model.model
        entropy, hit = self.network.losses(hidden, body.norm.weight, body.embed_tokens.weight, target)
        asked = (kind > 0).float() * torch.where(target == lang.END, 0.3, 1.0)
        rest = ((kind == 0) & real).float()
        answers = (entropy * asked).sum() / asked.sum().clamp(min=1)
        others = (entropy * rest).sum() / rest.sum().clamp(min=1)
        (answers + recipe.lm * others + weight * lost.mean()).backward()
        self.optimiser.step(factor)
        self.steps[self.stage] += 1
        counted = torch.where(target == lang.END, 0, kind)
        tally = torch.zeros(2, len(cells.FAMILIES), device=self.device)
        tally[0].scatter_add_(0, counted, hit.float())
        tally[1].scatter_add_(0, counted, torch.ones_like(hit, dtype=torch.float32))
        return tally, torch.stack((answers, others, lost.mean())).detach(), lost.detach()

    def run(self) -> None:
        """Train from wherever the state is to the end."""
        while self.stage <= self.last_stage:
            name = "mixed lengths" if self.stage == self.last_stage else f"{self.recipe.lengths[self.stage]} tokens"
            self.log(f"stage {self.stage}: {name}")
            self.run_stage(name)
            self.stage += 1
            self.save()

    def run_stage(self, name: str) -> None:
        tally, losses, count, shown, saved, before = 0, 0, 0, time.time(), time.time(), time.time()
        accuracy: dict[str, float] = {}
        first = True
        while not self.stage_ends(accuracy):
            accuracy = {}
            one, loss, lost = self.step()
            tally, losses, count = tally + one, losses + loss, count + 1
            if first or count % 10 == 0 or self.device.type == "cpu":
                torch.cuda.synchronize() if self.device.type == "cuda" else None
            now = time.time()
            self.seconds, before = self.seconds + (0 if first else now - before), now  # compilation is not counted
            if first:
                self.log(f"{name}: first step after {now - shown:.1f} s")
                tally, losses, count, shown, first = 0, 0, 0, now, False
            elif now - shown >= self.args.every:
                right, total = tally.tolist()
                accuracy = {f: r / t for f, r, t in zip(cells.FAMILIES[1:], right[1:], total[1:]) if t >= 50}
                answers, others, mass = (losses / count).tolist()
                gains = " ".join(f"{g:.1f}" for g in self.gains())
                self.log(
                    f"{name} step {sum(self.steps)} ({1000 * (now - shown) / count:.0f} ms) answers {answers:.3f} "
                    f"rest {others:.3f} lost {mass:.3f} (head {float(lost.max()):.2f})  "
                    + " ".join(f"{f} {100 * a:.1f}" for f, a in accuracy.items())
                    + (f"  gains {gains}" if gains else "")
                )
                tally, losses, count, shown = 0, 0, 0, now
                if now - saved > 60:
                    self.save()
                    saved = before = shown = time.time()

    def gains(self) -> list[float]:
        """Products of the query and key norms' gains, a mean per layer: an eighth of the largest logit."""
        if self.args.kind == "mla":
            return []
        each = [
            (a.q_norm.weight * a.k_norm.weight).abs().mean() for a in (m.self_attn for m in self.model.model.layers)
        ]
        return torch.stack(each).tolist()

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Evaluate and write everything."""
        recipe = self.recipe
        torch.manual_seed(self.args.seed + 1)
        table = gates.scores(self.plain, self.filler, recipe.exams, self.args.exams, recipe.budget, self.log)
        failed = gates.failures(table, max(recipe.exams))
        result = {
            "kind": self.args.kind,
            "seed": self.args.seed,
            "recipe": asdict(recipe),
            "steps": self.steps,
            "tokens": recipe.tokens * sum(self.steps),
            "seconds": round(self.seconds, 1),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "prompts_per_score": self.args.exams,
            "oracle_budget": recipe.budget,
            "scores": table,
            "gates_failed": failed,
        }
        (self.args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        self.model.to(torch.bfloat16).save_pretrained(self.args.out)
        lang.build_tokenizer(MAX_LENGTH).save_pretrained(self.args.out)
        write_card(self.args.out / "README.md", result)
        for line in failed or ["all gates passed"]:
            self.log(line)
        sizes = {path.name: path.stat().st_size for path in sorted(self.args.out.iterdir())}
        self.log(f"written to {self.args.out}: {sizes}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("gqa", "mla"), required=True)
    parser.add_argument("--minutes", type=float, default=7.0, help="of training in all, those before --resume included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from --out's checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="with --resume: no training, only scores and files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=lambda s: [int(n) for n in s.split(",")], help="of each stage, not --minutes")
    parser.add_argument("--preset", choices=tuple(RECIPES), default="published", help="toy: minutes on a CPU")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a number of the recipe"
    )
    parser.add_argument("--exams", type=int, default=128, help="prompts a score")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between lines")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    recipe = recipe_of(args.preset, args.kind)
    for change in args.set:
        name, _, value = change.partition("=")
        part = recipe.size if name.startswith("size.") else recipe
        field_name = name.removeprefix("size.")
        before = getattr(part, field_name, "")
        if not isinstance(before, (int, float, type(None))):
            parser.error(f"--set {change}: the recipe has no number {name!r}")
        part = replace(part, **{field_name: float(value) if isinstance(before, float) else int(value)})
        recipe = replace(recipe, size=part) if name.startswith("size.") else part
    if args.steps and len(args.steps) != len(recipe.lengths) + 1:
        parser.error(f"--steps takes {len(recipe.lengths) + 1} numbers, one a stage")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.resume and (args.out / "checkpoint.pt").exists():
        parser.error(f"{args.out} holds a checkpoint: --resume, or choose another --out")
    trainer = Trainer(args, recipe)
    if args.resume:
        trainer.resume()
    if not args.evaluate:
        trainer.run()
    trainer.finish()


if __name__ == "__main__":
    main()
