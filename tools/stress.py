"""Random conversations over random caches on a GPU, for minutes: every answer is compared, nothing may grow.

    python tools/stress.py --minutes 9 --seed 1

Tiny models in float32, decoded captured or eagerly; budgets that hold everything, so that each text must be the dense
one, and small ones, whose text must not depend on where blocks lie. Prompts in pieces, padding, turns, crops, copies,
files, beams, exceptions in the middle of an answer, caches dropped while blocks are on their way, copy streams that lag
behind. Ends with an error at the first difference that is more than rounding at a tie, or if memory has grown.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import psutil
import torch
from transformers import DynamicCache, StoppingCriteria

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))

from caches import FULL, TIGHT, two_level
from models import VOCAB, build, prompt, reference

from hf_sparsekv import OffloadConfig, SparseCache, optimize
from hf_sparsekv.cache_name import generate_over, over
from hf_sparsekv.offload.copy_streams import CopyStream

MODELS = ("llama", "llama-mqa", "qwen3", "gemma3")
TIE = 2e-3  # difference of log-probabilities that rounding may turn over
POOLS = (None, 0, 50_000, 400_000)


class Stop(StoppingCriteria):
    """Raises after a number of tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt("enough")
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


class Stress:
    """Models, and what is done with them."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.dice = torch.device(device), random.Random(seed)
        self.done: Counter[str] = Counter()
        self.dense = {name: build(name, reference(name).config._attn_implementation).to(device) for name in MODELS}
        self.eager = {name: build(name, "sparsekv").to(device) for name in MODELS}
        self.fast = {name: optimize(build(name, "sparsekv").to(device), fused=False) for name in MODELS}

    def cache(self, **settings) -> SparseCache:
        """A random cache."""
        dice = self.dice
        changes = {"block_size": dice.choice((16, 32)), "sinks": dice.choice((0, 4)), "window": dice.choice((16, 40))}
        if dice.random() < 0.3:
            changes["max_length"] = 700
        if dice.random() < 0.2:
            return two_level(False, **{**settings, **changes})
        offload = OffloadConfig(device_pool=dice.choice(POOLS), keep_dense=dice.random() < 0.5)
        return two_level(offload, **{**settings, **changes})

    def round(self) -> None:
        """One conversation."""
        dice = self.dice
        name, rows = dice.choice(MODELS), dice.choice((1, 2, 3))
        net = dice.choice((self.eager, self.fast))[name]
        length = dice.choice((40, 130, 257, 500))
        pads = None if dice.random() < 0.5 else tuple(dice.randrange(0, 30) for _ in range(rows))
        inputs = {k: v.to(self.device) for k, v in prompt(rows, length, pads, seed=dice.randrange(1 << 30)).items()}
        how = {"max_new_tokens": dice.choice((1, 20, 70)), "do_sample": False}
        if dice.random() < 0.4:
            how["prefill_chunk_size"] = dice.choice((64, 100))
        self.about = f"{name}, {'captured' if net is self.fast[name] else 'eager'}, {rows} x {length}, {pads}, {how}"
        act = dice.choice(("text", "text", "turns", "beams", "stop", "copy", "file", "drop", "crop", "places"))
        self.done[act] += 1
        self.about = f"{act}: {self.about}"
        getattr(self, act)(name, net, inputs, how)

    @torch.no_grad()
    def equal(self, name, inputs, found, want, beams: dict | None = None) -> None:
        """The same text; or where they part, a next token (of a beam search, a text) that is no less likely.

        Judged by the dense model over the whole text at once. Its own generate() is at times the worse one: sdpa with a
        padding mask and one KV head, at 257 tokens in float32, on an H200 with torch 2.11. A beam search that rounding
        has turned over may end anywhere, so transformers' eager attention is a second opinion.
        """
        assert found.shape == want.shape, (found.shape, want.shape)
        begin, second = inputs["input_ids"].shape[1], None
        if beams and not torch.equal(found, want):
            second = build(name, "eager").to(self.device).generate(**inputs, **beams)
        for row in (found != want).any(1).nonzero().flatten().tolist():
            mask = torch.ones_like(want)
            mask[:, :begin] = inputs["attention_mask"]
            both = torch.stack((found[row], want[row]))
            logits = self.dense[name](both, attention_mask=mask[[row, row]]).logits.log_softmax(-1)
            if beams:
                scores = logits[:, begin - 1 : -1].gather(-1, both[:, begin:, None]).sum((1, 2))
            else:
                at = int((both[0] != both[1]).nonzero()[0])
                scores = logits[1, at - 1, both[:, at]]
            if float(scores[0] - scores[1]) < -TIE and not (beams and torch.equal(both[0], second[row])):
                raise AssertionError(f"row {row}: log-probabilities {scores.tolist()} of {both[:, begin:].tolist()}")
            self.done["tie"] += 1

    def text(self, name, net, inputs, how) -> None:
        found = net.generate(**inputs, **how, **generate_over(self.cache(**FULL)))
        self.equal(name, inputs, found, self.dense[name].generate(**inputs, **how))

    def turns(self, name, net, inputs, how) -> None:
        cache, mask = self.cache(**FULL), inputs["attention_mask"]
        ids = inputs["input_ids"]
        for _ in range(3):
            given = {"input_ids": ids, "attention_mask": mask, **how}
            text = net.generate(**given, **generate_over(cache))
            want = self.dense[name].generate(**given)
            self.equal(name, given, text, want)
            if not torch.equal(text, want):
                return  # the cache holds the other text
            how.pop("prefill_chunk_size", None)  # transformers' chunks begin at the first token
            more = torch.randint(1, VOCAB, (len(ids), self.dice.choice((1, 9, 90))), device=self.device)
            ids = torch.cat((text, more), 1)
            mask = torch.cat((mask, torch.ones_like(ids[:, mask.shape[1] :])), 1)

    def beams(self, name, net, inputs, how) -> None:
        how = {**how, "num_beams": 3}
        how.pop("prefill_chunk_size", None)
        found = net.generate(**inputs, **how, **generate_over(self.cache(**FULL)))
        self.equal(name, inputs, found, self.dense[name].generate(**inputs, **how), beams=how)

    def stop(self, name, net, inputs, how) -> None:
        """An exception in mid-answer; then the same cache again."""
        cache = self.cache(**FULL)
        try:
            net.generate(**inputs, **how, **generate_over(cache), stopping_criteria=[Stop(self.dice.randrange(20))])
        except KeyboardInterrupt:
            cache.reset()
        else:
            cache.reset()
        found = net.generate(**inputs, **how, **generate_over(cache))
        self.equal(name, inputs, found, self.dense[name].generate(**inputs, **how))

    def _filled(self, net, inputs, **settings):
        cache = self.cache(**settings)
        with torch.no_grad():
            net(**inputs, **over(net, cache))
        return cache

    def _goes_on(self, net, caches, rows) -> None:
        """All caches give the same logits for the same tokens."""
        ids = torch.randint(1, VOCAB, (rows, 30), device=self.device)
        with torch.no_grad():
            logits = [torch.cat([net(t, **over(net, c)).logits.clone() for t in ids.split(1, 1)], 1) for c in caches]
        for other in logits[1:]:
            torch.testing.assert_close(other, logits[0], atol=2e-3, rtol=1e-3)

    def copy(self, name, net, inputs, how) -> None:
        inputs = {"input_ids": inputs["input_ids"]}
        cache = self._filled(net, inputs, **self.dice.choice((FULL, TIGHT)))
        copied = copy.deepcopy(cache)
        self._goes_on(net, (cache, copied), len(inputs["input_ids"]))

    def file(self, name, net, inputs, how) -> None:
        inputs = {"input_ids": inputs["input_ids"]}
        cache = self._filled(net, inputs, **FULL)
        with tempfile.TemporaryDirectory() as folder:
            cache.save(f"{folder}/cache")
            loaded = SparseCache.load(f"{folder}/cache", model_config=net.config, device=self.device)
        self._goes_on(net, (cache, loaded), len(inputs["input_ids"]))

    def drop(self, name, net, inputs, how) -> None:
        """Dropped at once, with blocks on their way; the next cache takes the memory."""
        for _ in range(3):
            self._filled(net, inputs, **TIGHT)
        self.text(name, net, inputs, how)

    def crop(self, name, net, inputs, how) -> None:
        if "gemma" in name:
            return  # its sliding layers forget
        ids = inputs["input_ids"]
        cache, stock = self._filled(net, {"input_ids": ids}, **FULL), DynamicCache()
        keep = self.dice.randrange(1, ids.shape[1])
        cache.crop(keep - ids.shape[1])
        more = torch.randint(1, VOCAB, (len(ids), 60), device=self.device)
        with torch.no_grad():
            self.dense[name](ids[:, :keep], **over(self.dense[name], stock))
            found, want = (n(more, **over(n, c)).logits for n, c in ((net, cache), (self.dense[name], stock)))
        torch.testing.assert_close(found, want, atol=2e-3, rtol=1e-3)

    def places(self, name, net, inputs, how) -> None:
        """Selections are the same wherever blocks lie."""
        texts = []
        for pool in self.dice.sample(POOLS, 2):
            cache = two_level(OffloadConfig(device_pool=pool), **TIGHT)
            texts.append(net.generate(**inputs, **how, **generate_over(cache)))
        assert torch.equal(*texts), "the text depends on where blocks lie"


def slow_copy_streams(cycles: int) -> None:
    """Whatever goes by a copy stream begins late."""
    run = CopyStream.run

    def late(self, work):
        def wait():
            torch.cuda._sleep(cycles)
            work()

        return run(self, wait)

    CopyStream.run = late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--slow", action="store_true", help="lanes lag behind by some milliseconds")
    args = parser.parse_args()
    if args.slow:
        slow_copy_streams(5_000_000)
    stress, process = Stress(args.device, args.seed), psutil.Process()
    cuda = torch.device(args.device).type == "cuda"
    begin, rounds, failed, base = time.monotonic(), 0, 0, None
    while time.monotonic() - begin < 60 * args.minutes:
        try:
            stress.round()
        except Exception as error:
            print(f"round {rounds} of seed {args.seed}, {stress.about}", flush=True)
            traceback.print_exception(error)
            failed += 1
            if failed == args.failures:
                break
        rounds += 1
        if rounds % 50 == 0:
            gc.collect()
            now = (torch.cuda.memory_allocated() if cuda else 0, process.memory_info().rss)
            base = base or now if rounds >= 200 else None
            print(
                f"{time.monotonic() - begin:6.0f} s, {rounds} conversations, {now[0] / 2**20:.1f} MiB on the GPU, "
                f"{now[1] / 2**20:.0f} MiB in the process",
                flush=True,
            )
            if base is not None:
                assert now[0] <= base[0] + (8 << 20), "device memory has grown"
                assert now[1] <= base[1] + (512 << 20), "host memory has grown"
    print(f"{failed} failures in {rounds} conversations: {dict(stress.done)}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
