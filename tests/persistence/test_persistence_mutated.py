"""Files of caches with random damage: a load gives what was saved, or one ValueError, and never anything else."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from caches import CACHES, TIGHT, predictive, progressive, two_level
from models import build, model, prompt
from safetensors.torch import load, save
from saved_files import feed, same, state, steps

from hf_sparsekv import SparseCache
from hf_sparsekv.tuning.channels import calibrate

TIMES = 100  # for each kind of file: 500 in all

# Any JSON value where another belongs; DEEP becomes lists in lists when the text is made.
DEEP = "<deep>"
VALUES = [None, True, False, 0, -1, 1, 2, 7, 1 << 27, 1 << 31, 1 << 40, 10**30, -(10**30), 10**400, 0.0, 1.0, 2.5, -1.5]
VALUES += [math.nan, math.inf, "", "x", "auto", "cuda:0", "meta", "int32", "a" * 5000]
VALUES += [[], [1], [[]], [0, 0], {}, {"a": 1}, {"a": [{}]}, DEEP]

# Fields that say what the user chose, or what no other field or tensor repeats: another valid value is another valid
# file. It has to load and to go on without an error; what comes out may differ.
OPEN = {"config", "stats_tokens", "record_past"}


def _two_level(tmp_path):
    cache = CACHES["host"](**TIGHT)
    feed(cache, *prompt(2, 100, (0, 30)).values())
    steps(cache, 3)
    return cache, "llama"


def _calibrating(tmp_path):
    cache = two_level(False, **{**TIGHT, "window": 1})
    feed(cache, prompt(1, 25)["input_ids"])
    return cache, "llama"


def _sliding(tmp_path):
    """With label channels from a file."""
    path = tmp_path / "channels"
    calibrate(build("gemma3", "sparsekv"), [prompt(1, 40)["input_ids"]]).save(path)
    cache = two_level(channel_file=path, **TIGHT)
    cache.activate_past_recording()
    feed(cache, prompt(1, 80)["input_ids"], name="gemma3")
    return cache, "gemma3"


def _progressive(tmp_path):
    cache = progressive(True, dense_layers=1)
    feed(cache, prompt(1, 90)["input_ids"])
    return cache, "llama"


def _predictive(tmp_path):
    cache = predictive(False, **TIGHT)
    feed(cache, prompt(1, 90)["input_ids"], name="deepseek-v3")
    steps(cache, 3, "deepseek-v3")
    return cache, "deepseek-v3"


def step(cache, name):
    """Logits of one step; of a cache that records its past, after the crop that belongs to it."""
    if cache.record_past:
        cache.crop(-3)
    return steps(cache, 1, name)


@dataclass
class File:
    """Parts of a safetensors file: its header, with the ``state`` that is text in it as an object, and its data."""

    header: dict
    state: dict
    data: bytes

    @classmethod
    def of(cls, raw: bytes) -> File:
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        return cls(header, json.loads(header["__metadata__"]["state"]), raw[8 + size :])

    def raw(self) -> bytes:
        deep = "[" * 100_000 + "]" * 100_000
        self.header["__metadata__"]["state"] = json.dumps(self.state).replace(json.dumps(DEEP), deep)
        text = json.dumps(self.header).encode()
        return len(text).to_bytes(8, "little") + text + self.data


def _places(held, path=()):
    """All values in nested objects and lists, as paths."""
    for key, value in held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ():
        yield (*path, key)
        yield from _places(value, (*path, key))


def _change_value(held, rng: random.Random) -> tuple:
    """Replace, remove or add one value; its path."""
    path = rng.choice(list(_places(held)))
    for key in path[:-1]:
        held = held[key]
    key, what = path[-1], rng.random()
    if what < 0.05:
        del held[key]
    elif what < 0.1 and isinstance(held, dict):
        held[rng.choice(["", "more", "x" * 3000])] = copy.deepcopy(rng.choice(VALUES))
    elif what < 0.4 and isinstance(held[key], int):
        held[key] = rng.choice([held[key] + 1, held[key] - 1, held[key] * 2, -held[key], float(held[key])])
    else:
        held[key] = copy.deepcopy(rng.choice(VALUES))
    return path


def change_state(file: File, rng: random.Random) -> tuple[bytes, bool]:
    paths = [_change_value(file.state, rng) for _ in range(rng.choice([1, 1, 2]))]
    return file.raw(), any(OPEN & set(path) for path in paths)


def change_header(file: File, rng: random.Random) -> tuple[bytes, bool]:
    """Names, dtypes, shapes and offsets of tensors; versions."""
    about, free = file.header.pop("__metadata__"), False
    if rng.random() < 0.3:
        a, b = rng.sample(sorted(file.header), 2)
        file.header[a], file.header[b] = file.header[b], file.header[a]
        one, other = ((file.header[name]["dtype"], file.header[name]["shape"]) for name in (a, b))
        free = one == other  # keys and values of another layer are as good as any
    elif rng.random() < 0.3:
        about[rng.choice(["format", "version", "more"])] = rng.choice(["", "1", "2", "x" * 3000])
    else:
        _change_value(file.header, rng)
    file.header["__metadata__"] = about
    return file.raw(), free


# Tensors any change of which something else contradicts; and those whose values must lie in a range and be distinct.
DETERMINED = ("table", "valid", "channel_file")
RANGED = ("channels", "previous", "chosen", "queries_from")


def change_tensor(file: File, rng: random.Random) -> tuple[bytes, bool]:
    """One entry of a tensor that says where something is."""
    raw = file.raw()
    held = load(raw)
    name = rng.choice([name for name in sorted(held) if name.split(".")[-1] in DETERMINED + RANGED])
    kind, tensor = name.split(".")[-1], held[name]
    at = rng.randrange(tensor.numel())
    before = int(tensor.flatten()[at])
    if tensor.dtype == torch.bool:  # a byte that is no bool counts as damage, too
        tensor = tensor.view(torch.uint8)
    choices = [0, 1, 2, before ^ 1, 255] if tensor.dtype == torch.uint8 else [-2, 1 << 20, -(1 << 31), (1 << 31) - 1]
    row = tensor.view(-1, tensor.shape[-1])[at // tensor.shape[-1]].tolist()
    if kind in ("channels", "previous", "chosen"):
        choices += [x for x in row if x >= 0 and x != before][:1]
    if kind in DETERMINED and tensor.dtype != torch.uint8:
        choices += [-1, 0, before - 1, before + 1]
    tensor.view(-1)[at] = rng.choice(choices)
    return save(held, file.header["__metadata__"]), False


def change_bytes(file: File, rng: random.Random) -> tuple[bytes, bool]:
    """A few bytes of the header; the file's end."""
    raw = bytearray(file.raw())
    if rng.random() < 0.5:
        cut = rng.randrange(len(raw))
        return bytes(raw[:cut] if rng.random() < 0.8 else raw + raw[cut:]), False
    for _ in range(rng.choice([1, 1, 1, 4])):
        raw[rng.randrange(len(raw) - len(file.data))] = rng.randrange(256)
    return bytes(raw), _opens(file, bytes(raw))


def _opens(file: File, raw: bytes) -> bool:
    """Some byte happened to change a field of those that may change."""
    try:
        now = File.of(raw)
    except (ValueError, KeyError, TypeError):
        return False
    mine, theirs = (dict(zip(map(str, _places(s)), _places(s))) for s in (file.state, now.state))
    if mine.keys() != theirs.keys():
        return any(OPEN & set(path) for name, path in {**mine, **theirs}.items() if (name in mine) != (name in theirs))
    return any(OPEN & set(path) for path in mine.values() if _at(file.state, path) != _at(now.state, path))


def _at(held, path):
    for key in path:
        held = held[key]
    return held


CHANGES: list[Callable[[File, random.Random], tuple[bytes, bool]]] = [change_state] * 5 + [change_header, change_tensor]
CHANGES += [change_tensor, change_bytes]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [_two_level, _calibrating, _sliding, _progressive, _predictive])
def test_random_damage(make, tmp_path):
    rng = random.Random(make.__name__)
    cache, name = make(tmp_path)
    path, given = tmp_path / "good", {"model_config": model(name).config}
    cache.save(path)
    good = path.read_bytes()
    want = state(SparseCache.load(path, **given))
    logits = step(SparseCache.load(path, **given), name)
    same(want, state(cache))
    path = tmp_path / "mutated"
    refused = 0
    for number in range(TIMES):
        change = rng.choice(CHANGES)
        raw, free = change(File.of(good), rng)
        path.write_bytes(raw)
        config = cache.config if rng.random() < 0.5 else None
        try:
            try:
                loaded = SparseCache.load(path, config=config, **given)
            except ValueError as error:
                assert str(path) in str(error) or "channel file" in str(error)
                refused += 1
                continue
            found = step(loaded, name)
            if not free:
                same(state(SparseCache.load(path, config=config, **given)), want)
                assert torch.equal(found, logits)
        except BaseException:
            print(f"{make.__name__}, number {number}: {change.__name__}")  # the file is in tmp_path
            raise
    assert TIMES / 2 < refused < TIMES
