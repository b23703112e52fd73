"""Which models an engine serves: each request gets the tokens of ``generate()`` alone, or opening says why not."""

from __future__ import annotations

from contextlib import contextmanager

import model_list
import pytest
import torch
import transformers as tf
from engines import WHOLE, greedy, ids_of
from inside import attention_of
from models import COMMON
from rotary_models import KINDS, SWITCH, phi3, phimoe, rotary_llama, wide
from transformers import DynamicCache

from hf_sparsekv import Engine, ServingConfig, TokenConfig, fixed_rotary

LENGTH = 400
ROTARY = {kind: (lambda kind=kind: rotary_llama(kind)) for kind in KINDS} | {"phi3": phi3, "phimoe": phimoe}
SWITCHING = ("longrope", "phi3", "phimoe")
# (tokens of the prompt, of the answer): short; short, and past the switch in its answer; long, in several chunks.
SHORT, GROWS, LONG = (20, 10), (57, 12), (100, 8)
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def opened(net, max_length: int = LENGTH, **how):
    serving = ServingConfig(max_length=max_length, max_rows=4, chunk=32, prefill_ms=0.5, **how)
    with Engine(net, None, TokenConfig(**WHOLE), serving=serving) as engine:
        yield engine


def prompt(n: int) -> list[int]:
    """Those of any length begin alike."""
    return ids_of(300, seed=1)[:n]


def answers(engine, *asked: tuple[int, int]) -> list[list[int]]:
    """Requests that are there together."""
    handles = [engine.submit(prompt(n), greedy(tokens)) for n, tokens in asked]
    return [list(handle.result(60).token_ids) for handle in handles]


@torch.no_grad()
def alone(net, n: int, tokens: int) -> list[int]:
    """Tokens of generate(). Those of Phi-3 and PhiMoE lose their cache at the switch: what they would decode."""
    ids = torch.tensor([prompt(n)], device=net.device)
    if hasattr(net.config, "original_max_position_embeddings") and n <= SWITCH < n + tokens:
        return loop(net, ids, tokens)
    found = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return found[0, n:].tolist()


def loop(net, ids: torch.Tensor, tokens: int) -> list[int]:
    """Greedy decoding over transformers' own cache."""
    cache, found = DynamicCache(), []
    while len(found) < tokens:
        ids = net(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        found.append(int(ids))
    return found


@pytest.mark.few
@pytest.mark.filterwarnings("ignore:the rotary factors of")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_kinds(name, place):
    """Together, after a shared prefix, in chunks, and past the switch: as alone, with the factors of max_length."""
    net = ROTARY[name]().to(place)
    with fixed_rotary(net, LENGTH):
        expected = [alone(net, *one) for one in (SHORT, GROWS, LONG)]
    with opened(net) as engine:
        first = answers(engine, SHORT)
        assert [*first, *answers(engine, GROWS, LONG)] == expected
        again = engine.submit(prompt(LONG[0]), greedy(LONG[1])).result(60)
        assert again.cached_tokens > SWITCH
        assert list(again.token_ids) == expected[2]
    if name not in SWITCHING:  # no factors have changed
        assert expected == [alone(net, *one) for one in (SHORT, GROWS, LONG)]
    else:  # nor past the switch
        assert expected[2] == alone(net, *LONG)
        assert expected[0] != alone(net, *SHORT)


@pytest.mark.few(name=("phi3",))
@pytest.mark.filterwarnings("ignore:the rotary factors of")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SWITCHING)
def test_nothing_beside_a_request_changes_it(name, place):
    found = []
    for beside in ([], [LONG], [LONG, GROWS, (200, 30)]):
        with opened(ROTARY[name]().to(place), prefix_cache=False) as engine:
            found.append(answers(engine, *beside, SHORT)[-1])
    assert found[0] == found[1] == found[2]


@pytest.mark.few(name=("longrope",))
@pytest.mark.parametrize("name", SWITCHING)
def test_up_to_the_switch_an_engine_is_generate(name, recwarn):
    net = ROTARY[name]()
    asked = [(20, 20), (40, SWITCH - 40), (33, 5)]
    expected = [alone(net, *one) for one in asked]
    with opened(net, SWITCH) as engine:
        assert answers(engine, *asked) == expected
    assert not [one for one in recwarn if "rotary factors" in str(one.message)]


def test_past_the_switch_it_says_so():
    net = phi3()
    says = r"generate\(\) uses others up to 64 tokens: give ServingConfig\(max_length=64"
    with pytest.warns(UserWarning, match=says), opened(net):
        pass
    assert alone(net, *SHORT) == alone(phi3(), *SHORT)  # it is as it was


def test_dynamic_factors_of_an_earlier_context():
    """A longer context than the model's, before the engine: nothing of it is left."""
    expected = alone(rotary_llama("dynamic"), *LONG)
    net = rotary_llama("dynamic")
    net(torch.tensor([ids_of(600, 3)]))
    with opened(net) as engine:
        assert answers(engine, SHORT, LONG)[1] == expected


# ---------------------------------------------------------------------- positions

COUNTS = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "whisper")
OFFSETS = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
OTHERS = ("gpt2", "opt", "deepseek_v3")


@pytest.mark.parametrize("kind", COUNTS)
def test_models_that_count_positions_are_refused(kind):
    net = model_list.build(kind)
    says = r"takes no position_ids: it counts positions by itself.*Use generate"
    with pytest.raises(ValueError, match=says), opened(net):
        pass
    assert attention_of(net) != "sparsekv"  # it is as it was


def test_paligemma_is_refused():
    """Tokens of its prompts attend to later ones, where nobody gives generate()'s mask: no chunks, no prefixes."""
    text = {**COMMON, "model_type": "gemma"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.PaliGemmaConfig(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    net = wide(tf.PaliGemmaForConditionalGeneration(config))
    says = "tried on made-up input, tokens of a prompt attend to later ones.*use generate"
    with pytest.raises(ValueError, match=says), opened(net):
        pass


@pytest.mark.few(kind=("roberta", "opt", "deepseek_v3"))
@pytest.mark.parametrize("kind", [*OFFSETS, *OTHERS])
def test_positions_are_those_of_generate(kind):
    net = model_list.build(kind)
    expected = [alone(net, *one) for one in (SHORT, GROWS, LONG)]
    with opened(net, 200) as engine:
        assert answers(engine, SHORT, GROWS, LONG) == expected
        assert answers(engine, LONG) == expected[2:]  # behind what is cached of it
