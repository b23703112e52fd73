"""Files of caches whose layers are of further kinds: states, and those of another package."""

from __future__ import annotations

import layer_kinds
import pytest
import torch
from caches import CACHES
from inside import own_methods
from models import model
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hf_sparsekv import SparseCache
from hf_sparsekv.layers import kinds
from hf_sparsekv.layers.kinds import LayerKind, layer_kind
from hf_sparsekv.layers.sparse_layer import SparseLayer

IDS = torch.arange(90)[None] * 7 % 50 + 3
GO = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    own_methods(monkeypatch)


def register(name: str = "sixteen", base: type = LayerKind):
    """A kind that keeps the second layer's keys and values as the model gives them; or one of our own."""

    @layer_kind(name)
    class Sixteen(base, *([DynamicLayer] if base is LayerKind else [])):
        @classmethod
        def of(cls, stock, place):
            if place.index != 1 or type(stock) is not DynamicLayer:
                return None
            return cls.over(stock) if base is LayerKind else cls.at(place.cache, place.index)

        def to_file(self) -> tuple[dict[str, Tensor], dict]:
            return {"keys": self.keys, "values": self.values}, {"tokens": self.get_seq_length()}

        def from_file(self, tensors, values) -> None:
            if tensors["keys"].shape[2] != values["tokens"]:
                raise ValueError("not so many tokens")
            self.update(tensors["keys"], tensors["values"])

    return Sixteen


def check_answers(net, *caches) -> None:
    """The caches give the same answers."""
    given = torch.cat((IDS, IDS[:, :5]), 1)
    one, other = (torch.stack(net.generate(given, past_key_values=cache, **GO).logits) for cache in caches)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["device-default", "host-default"])
@pytest.mark.parametrize("base", [LayerKind, SparseLayer])
@pytest.mark.parametrize("known", [False, True])
def test_a_kind_of_another_package(name, base, known, tmp_path):
    """In answers, copies, files and after ``reset()``, whether the cache is told the model or not."""
    kind, net = register(base=base), model("llama", "sparsekv")
    cache = CACHES[name](model_config=net.config if known else None)
    with torch.no_grad():
        net(IDS, past_key_values=cache)
    assert [type(layer) is kind for layer in cache.layers] == [i == 1 for i in range(len(cache.layers))]
    cache.save(tmp_path / "file")
    loaded = SparseCache.load(tmp_path / "file", model_config=net.config)
    assert type(loaded.layers[1]) is kind
    check_answers(net, cache, loaded)
    cache.reset()
    with torch.no_grad():
        net(IDS, past_key_values=cache)
    assert type(cache.layers[1]) is kind
    check_answers(net, cache, SparseCache.load(tmp_path / "file", model_config=net.config))


def test_a_file_names_the_kind_and_what_registers_it(tmp_path):
    net = model("llama", "sparsekv")
    before = [*kinds._KINDS]
    register("sixteen")
    cache = CACHES["device-default"]()
    with torch.no_grad():
        net(IDS, past_key_values=cache)
    cache.save(tmp_path / "file")
    with pytest.raises(
        ValueError, match=r"of the kind 'sixteen', which only the model's configuration describes: pass"
    ):
        SparseCache.load(tmp_path / "file")
    kinds._KINDS[:] = before
    with pytest.raises(
        ValueError, match=rf"layer 1 in .* is of the kind 'sixteen', which {__name__} registers: import"
    ):
        SparseCache.load(tmp_path / "file", model_config=net.config)
    register("other")
    register("sixteen").of = classmethod(lambda cls, stock, place: None)
    with pytest.raises(
        ValueError, match=r"the kinds and windows of its layers are .*'sixteen'.*those of model_config .*'other'"
    ):
        SparseCache.load(tmp_path / "file", model_config=net.config)


def test_a_kind_that_says_nothing_of_files(tmp_path):
    kind, net = register(), model("llama", "sparsekv")
    del kind.to_file
    cache = CACHES["device-default"]()
    with torch.no_grad():
        net(IDS, past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"layer 1 is a Sixteen, which cannot be saved: its kind says nothing of files"
    ):
        cache.save(tmp_path / "file")


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "lfm2", "llama4_text"])
def test_states_and_chunks(name, tmp_path):
    net = layer_kinds.eager(name)
    cache = SparseCache(CACHES["device-default"]().config, model_config=net.config)
    with torch.no_grad():
        net(IDS, past_key_values=cache)
    cache.save(tmp_path / "file")
    with pytest.raises(ValueError, match=r"only the model's configuration describes: pass model_config=model\.config"):
        SparseCache.load(tmp_path / "file")
    loaded = SparseCache.load(tmp_path / "file", model_config=net.config)
    check_answers(net, cache, loaded)
