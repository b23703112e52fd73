"""Options that are gone: refused by name, with what to do instead; files that had their defaults still load."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from caches import CACHES
from saved_files import IDS, feed, rewrite, same, state
from test_cli import TEXT, flat, run, tiny

from hf_sparsekv import ProgressiveConfig, SparseCache
from hf_sparsekv.evaluation.cache_specs import parse_cache
from hf_sparsekv.removed import REMOVED

__all__ = ["tiny"]  # a fixture

# class, option, the value that files have by default (None: no such file loads), another one, what its message says
OPTIONS = [
    ("progressive", "execution", "auto", "host", "The GPU ends each walk by itself"),
    ("progressive", "micro_batch", 16, None, "Only execution='host' had it"),
    ("progressive", "metadata", None, "cuboid_mean", "'bound' has Quest's"),
    ("progressive", "bound_tokens", None, 16, "labels tell every token apart"),
    ("progressive", "block_reduce", None, "max", "group_reduce says how query heads share a selection"),
    ("progressive", "min_blocks", None, 8, "give min_tokens"),
    ("progressive", "max_blocks", None, 30, "give max_tokens"),
    ("predictive", "scoring", "labels", "keys", "Tokens are scored by their labels"),
]
EACH = pytest.mark.parametrize(("method", "name", "default", "other", "says"), OPTIONS, ids=[o[1] for o in OPTIONS])


@dataclass(frozen=True, kw_only=True)
class Mine(ProgressiveConfig):
    """A configuration made from one of ours."""

    extra: int = 0


def test_all_of_them_are_tried():
    assert {name for _, name, *_ in OPTIONS} == {name for options in REMOVED.values() for name in options}


@EACH
def test_constructors(method, name, default, other, says):
    kind = type(CACHES[method]().config)
    for value in (default, other):
        with pytest.raises(ValueError, match=rf"^{kind.__name__} no longer has {name}: .*{says}"):
            kind(**{name: value})
        with pytest.raises(ValueError, match=f"{kind.__name__} no longer has {name}"):
            replace(kind(), **{name: value})


def test_configurations_made_from_ours():
    assert Mine(extra=2, threshold=0.5).extra == 2
    with pytest.raises(ValueError, match="Mine no longer has execution"):
        Mine(execution="device")
    with pytest.raises(TypeError, match="unexpected keyword argument 'never_was'"):
        ProgressiveConfig(never_was=1)


@EACH
def test_cache_specifications(method, name, default, other, says):
    with pytest.raises(ValueError, match=rf"cache '{method}:{name}={default}': .* no longer has {name}: .*{says}"):
        parse_cache(f"{method}:{name}={default}")


@EACH
def test_command_line(tiny, method, name, default, other, says):
    option = "--" + name.replace("_", "-")
    for command in (("generate", tiny, "--prompt", TEXT), ("plan", tiny, "--context", 100)):
        message = flat(run(*command, "--cache", method, option, default, status=2).stderr)
        assert f"{option} is gone: " in message and says in message
    assert option not in run("generate", "--help").stdout


@pytest.fixture(params=OPTIONS, ids=[o[1] for o in OPTIONS])
def old(request, tmp_path):
    """A function that makes a file as it was saved with the option, and what it must give."""
    method, name, *_ = request.param
    cache = CACHES[method]()
    feed(cache, IDS)
    cache.save(tmp_path / "new")

    def make(value):
        return rewrite(tmp_path / "new", tmp_path / "old", state=lambda held: held["config"].update({name: value}))

    return make, cache, request.param


def test_files_with_the_default_load(old):
    make, cache, (_, name, default, *_) = old
    if default is None:
        with pytest.raises(ValueError, match=f"was saved with {name}=None, which is gone: .*does not hold"):
            SparseCache.load(make(None))
        return
    loaded = SparseCache.load(make(default), offload=cache.offload_config)
    assert loaded.config == cache.config
    same(state(loaded), state(cache))
    assert torch.equal(feed(loaded, IDS[:, :1]), feed(cache, IDS[:, :1]))


def test_files_with_another_value(old):
    make, cache, (_, name, _, other, says) = old
    if other is None:  # any value will do
        assert SparseCache.load(make(3)).config == cache.config
        return
    path = make(other)
    with pytest.raises(ValueError, match=rf"old was saved with {name}={other!r}, which is gone: .*{says}") as raised:
        SparseCache.load(path)
    stored = next(options[name].stored for options in REMOVED.values() if name in options)
    assert ("(prefill again)" in str(raised.value)) == stored
    if stored:
        with pytest.raises(ValueError, match="which is gone"):
            SparseCache.load(path, config=cache.config)
    else:
        same(state(SparseCache.load(path, config=cache.config, offload=cache.offload_config)), state(cache))
