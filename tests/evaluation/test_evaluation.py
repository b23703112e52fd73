"""Evaluation: caches by name, references, shared prefills, records."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from caches import SMALL
from models import build, model, prompt

from hf_sparsekv import SparseCache, StreamingConfig
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.policies.base import Policy
from hf_sparsekv.types import AttentionParams
from hf_sparsekv_eval import forced, generation
from hf_sparsekv_eval.cache_specs import CacheSpec, known, parse_cache, parse_caches
from hf_sparsekv_eval.measures import Measure, Record, bootstrap
from hf_sparsekv_eval.prefix import Prefix, attention, can_share, forced_steps, greedy_rows, prefill
from hf_sparsekv_eval.records import Results
from hf_sparsekv_eval.reference_policies import OracleConfig, OraclePolicy, PSAConfig, RandomConfig

SETTINGS = "block_size=16,window=16,max_draft=4,dense_layers=0,token_budget=32"
TIGHT = f"two_level:{SETTINGS},calibration_tokens=32,num_blocks=4"


# ---------------------------------------------------------------------- specs


def test_specs_make_what_they_say() -> None:
    params = parse_cache("two_level:token_budget=512,level=block,lag=false,num_blocks=none")
    cache = params.make()
    assert type(cache) is SparseCache and cache.offload_config is None
    config = cache.config
    assert (config.token_budget, config.level, config.lag, config.num_blocks) == (512, "block", False, None)
    assert config.dense_below is None  # at any length: quality is asked for
    assert parse_cache("two_level:dense_below=auto").make().config.dense_below == "auto"
    assert parse_cache("two_level:offload=true").make().offload_config is not None
    assert parse_cache("two_level:offload=true,kv_dtype=int8").make().offload_config.kv_dtype == "int8"
    assert parse_cache("block_only:token_budget=256").make().config.level == "block"
    oracle = parse_cache("oracle:token_budget=512,dense_layers=2").make()
    assert [type(oracle.shared.of_layer(i)) for i in (1, 2)] == [Policy, OraclePolicy]
    assert parse_cache("streaming:window=512").make().config == StreamingConfig(window=512, dense_below=None)
    assert parse_cache("full").make() is None
    same = parse_cache({"cache": "two_level", "token_budget": 64, "lag": True, "num_blocks": None})
    assert same == parse_cache("{cache: two_level, token_budget: 64, lag: true, num_blocks: null}")
    assert same.name == "two_level:token_budget=64,lag=true,num_blocks=none"
    assert parse_cache(same.name).options == same.options
    assert params.make() is not params.make()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("two_levels", "did you mean 'two_level'"),
        ("nothing", "unknown method 'nothing'; known: full, token, two_level"),
        ("two_level:budget=3", "no option 'budget'"),
        ("two_level:token_budgets=3", "did you mean 'token_budget'"),
        ("two_level:token_budget", "name=value"),
        ("two_level:token_budget=many", "positive integer"),
        ("two_level:token_budget=512,num_blocks=2", "raise num_blocks"),
        ("two_level:offload=3", "offload must be true or false"),
        ("two_level:kv_dtype=int8", "kv_dtype is of keys and values in host memory: add offload=true"),
        ("two_level:offload=true,kv_dtype=fp8", "kv_dtype must be 'int8' or None"),
        ("full:token_budget=3", "takes no options"),
        ("oracle:seed=3", "oracle has no option 'seed'"),
        ({"token_budget": 3}, "needs the key 'cache'"),
        ("{cache: [", "is not YAML"),
        (3, "text or a mapping"),
    ],
)
def test_wrong_specs_are_named(spec, says: str) -> None:
    with pytest.raises(ValueError, match=r"cache") as error:
        parse_cache(spec)
    assert says in str(error.value)


def test_files_hold_lists_of_specs(tmp_path) -> None:
    file = tmp_path / "caches.yaml"
    file.write_text("caches:\n- full\n- {name: ours, cache: two_level, token_budget: 64}\n")
    assert [s.name for s in parse_caches([str(file), "random"])] == ["full", "ours", "random"]
    with pytest.raises(ValueError, match="given twice"):
        parse_caches([str(file), "full"])
    with pytest.raises(ValueError, match="no cache"):
        parse_caches([])
    with pytest.raises(ValueError, match="cannot read"):
        parse_caches([str(tmp_path / "none.yaml")])
    file.write_text("a: b")
    with pytest.raises(ValueError, match="must hold a list"):
        parse_caches([str(file)])


# ---------------------------------------------------------------------- references


def reference(kind, **changes):
    settings = {k: v for k, v in SMALL.items() if k != "calibration_tokens"}
    return SparseCache(kind(**{**settings, **changes}))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "most"),
    [(OracleConfig, {"token_budget": 4096}), (RandomConfig, {"token_budget": 4096}), (PSAConfig, {"threshold": 1.0})],
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt-oss"])
def test_references_with_room_for_all_are_dense(kind, most, name: str) -> None:
    inputs, go = prompt(2, 90, (0, 7)), {"do_sample": False, "max_new_tokens": 12}
    sparse = model(name)
    with attention(build(name, "eager"), "eager") as dense:
        expected = dense.generate(**inputs, **go)
    cache = reference(kind, **most)
    assert torch.equal(sparse.generate(**inputs, past_key_values=cache, **go), expected)


def test_oracle_attends_to_the_best_tokens() -> None:
    """One layer's step, beside attention over the tokens that a sort of the true weights puts first."""
    torch.manual_seed(0)
    heads, group, dim, length, budget = 2, 2, 16, 120, 10
    q = torch.randn(1, heads * group, length + 1, dim) * 2
    k, v = torch.randn(2, 1, heads, length + 1, dim).unbind(0)
    cache = reference(OracleConfig, token_budget=budget)
    layer = SparseLayer.at(cache, 0)
    cache.layers = [layer]
    layer.fill(q[:, :, :length], k[:, :, :length], v[:, :, :length])
    layer.fill(q[:, :, length:], k[:, :, length:], v[:, :, length:])
    store = layer.store
    got = layer.policy.attend(q[:, :, -1], store, layer.policy.plan(store), AttentionParams(scale=dim**-0.5))
    logits = q[0, :, -1].view(heads, group, dim) @ k[0].mT * dim**-0.5
    share = logits.softmax(-1).amax(1)  # [heads, length + 1]
    edge = store.full_blocks * store.block_size
    for head in range(heads):
        middle = range(cache.config.sinks, edge)
        best = sorted(middle, key=lambda t: -share[head, t])[:budget]
        kept = sorted({*range(cache.config.sinks), *best, *range(edge, length + 1)})
        for g in range(group):
            expected = logits[head, g, kept].softmax(-1) @ v[0, head, kept]
            torch.testing.assert_close(got[0, head * group + g], expected, atol=1e-5, rtol=1e-5)
    assert store.counters.attended.sum() == heads * len(kept)


def psa_blocks(q, keys, first, blocks, threshold) -> list[int]:
    """PSA's Algorithm 1, a block at a time: ``q [group, D]``, ``keys [n, D]``, tokens of near ones and of blocks."""
    mass = (q @ keys.T * q.shape[1] ** -0.5).exp()  # [group, n]
    scores = {}
    for block, inside in blocks.items():
        high, low = keys[inside].amax(0), keys[inside].amin(0)
        away = (keys[inside] - (high + low) / 2).abs().mean(0)
        scores[block] = float((q @ (high + low) / 2 + q.abs() @ away).max())
    acc, left = mass[:, first].sum(1), sum(map(len, blocks.values()))
    least, taken = torch.full_like(acc, torch.inf), []
    for block in sorted(blocks, key=lambda one: -scores[one]):
        held = mass[:, blocks[block]].sum(1)
        acc, left = acc + held, left - len(blocks[block])
        least = torch.minimum(least, held / len(blocks[block]))
        taken.append(block)
        if float((acc / (acc + least * left)).min()) > threshold:
            break
    return taken


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.98, 1.0])
def test_psa_stops_where_its_paper_does(threshold) -> None:
    torch.manual_seed(0)
    heads, group, dim, length = 2, 2, 16, 150
    q, k, v = (torch.randn(2, n, length, dim, dtype=torch.float64) for n in (heads * group, heads, heads))
    cache = reference(PSAConfig, threshold=threshold, dense_layers=0)
    layer = SparseLayer.at(cache, 0)
    cache.layers, valid = [layer], torch.ones(2, length, dtype=torch.bool)
    valid[1, :37] = False
    layer.fill(q, k, v, valid)
    store = layer.store
    params = AttentionParams(scale=dim**-0.5)
    layer.policy.attend(q[:, :, -1], store, layer.policy.plan(store), params)
    found = layer.policy.select(q[:, :, -1], store, params)
    attended = 0
    for row in range(2):
        keys, sealed = k[row][:, valid[row]], store.held.sealed[row] * store.block_size
        near = [*range(cache.config.sinks), *range(sealed, keys.shape[1])]
        blocks = {b: [*range(max(16 * b, cache.config.sinks), 16 * b + 16)] for b in range(sealed // 16)}
        for head in range(heads):
            mine = q[row, head * group : (head + 1) * group, -1]
            right = psa_blocks(mine, keys[head], near, blocks, threshold)
            assert [one for one in found[row, head].tolist() if one >= 0] == right
            attended += len(near) + sum(len(blocks[b]) for b in right)
    assert store.counters.attended.sum() == attended


# ---------------------------------------------------------------------- shared prefills


@pytest.mark.quick
@pytest.mark.few
@pytest.mark.parametrize("params", ["full", TIGHT, TIGHT + ",lag=true"])
@pytest.mark.parametrize("pads", [None, (0, 11)])
@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "gemma3"])
def test_answers_are_those_of_generate(name: str, pads, params: str) -> None:
    """Batched, padded or not, from one prefill or from one a cache (gemma3 has sliding layers)."""
    net = model(name)
    assert can_share(net) == (name != "gemma3")
    inputs, cache = prompt(2, 100, pads), parse_cache(params).make(net.config)
    with attention(net, "sdpa" if cache is None else "sparsekv"):
        expected = net.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=10)[:, 100:]
    prefix = prefill(net, inputs["input_ids"], mask=inputs["attention_mask"])
    filled, logits = prefix.start(net, parse_cache(params).make(net.config))
    assert greedy_rows(net, prefix, filled, logits, 10, set()) == expected.tolist()


@pytest.mark.parametrize("method", [name for name in known() if name != "random"])
def test_latents_are_filled_as_by_a_prefill(method: str) -> None:
    """In two pieces, from more tokens than label channels are made from: each method's state is that of a prefill."""
    net, inputs = model("deepseek-v3"), prompt(2, 1100, (0, 150))
    tight = {"token_budget": 32, "min_tokens": 8, "threshold": 0.6, "calibration_tokens": 512}
    budget = {name: value for name, value in tight.items() if name in known()[method][0].config.__dataclass_fields__}
    options = {"block_size": 16, "window": 16, "dense_layers": 0, **budget}
    caches = [CacheSpec(method, method, options).make() for _ in range(2)]
    prefix = prefill(net, inputs["input_ids"], mask=inputs["attention_mask"])
    assert prefix.cache is not None
    own = Prefix(prefix.ids, [], None, None, prefix.mask)
    got, expected = (
        list(forced_steps(net, way.start(net, cache)[0], torch.tensor([[5, 6, 7, 8]] * 2), way))
        for way, cache in zip((prefix, own), caches)
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    shares = [cache.stats().attended_share for cache in caches]
    assert shares[0] == shares[1] < 1


def test_a_question_in_steps_is_answered_from_the_sparse_cache() -> None:
    net, inputs = model("llama"), prompt(2, 100, (0, 11))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    whole = prefill(net, ids, mask=mask)
    full = greedy_rows(net, whole, *whole.start(net, None), 8, set())
    short = prefill(net, ids[:, :94], mask=mask[:, :94])
    assert generation.answer(net, short, None, ids[:, 94:], 8, set()) == full
    cache = parse_cache(TIGHT).make()
    generation.answer(net, short, cache, ids[:, 94:], 8, set())
    assert cache.stats().decode_steps == 6 + 7


@pytest.mark.quick
def test_forced_steps_tell_chance_from_full_attention(tmp_path) -> None:
    net = model("llama")
    words = prompt(1, 600)["input_ids"][0]
    specs = parse_caches(["full", TIGHT, f"random:{SETTINGS}"])
    results = Results(tmp_path, {})
    starts = forced.passages(words, 200, 10, 3)
    for _ in range(2):  # nothing is measured twice
        forced.evaluate(net, words, starts, 200, 10, specs, results, "agreement", batch=2)
    assert len(results.records) == 9
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 9
    kl = {f.cache: f.value for f in results.figures(forced.MEASURES["agreement"]) if f.measure == "KL"}
    assert kl["full"] == 0 and kl[specs[1].name] > 0 and kl[specs[2].name] > 0
    with pytest.raises(ValueError, match="longer text"):
        forced.passages(words, 600, 10, 1)
    with pytest.raises(ValueError, match="room for"):
        forced.passages(words, 200, 10, 99, stride=10)
    assert forced.passages(words, 200, 10, 3, stride=10) == [0, 10, 20]


# ---------------------------------------------------------------------- records

SCORE = Measure("score", "score", percent=True)


def test_runs_go_on_where_they_stopped(tmp_path) -> None:
    results = Results(tmp_path, {"seed": 0})
    results.add(Record("a", 10, 0, "full", {"score": 1.0}))
    results.close()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"task": "a", "length": 10, "ind')  # cut off
    with pytest.warns(UserWarning, match="line 2 is not JSON, or cut off"):
        again = Results(tmp_path, {"seed": 0})
    assert again.has("a", 10, 0, "full") and not again.has("a", 10, 1, "full")
    again.add(Record("a", 10, 1, "full", {"score": 0.0}))
    again.add(Record("b", 10, 0, "full", {"score": 1.0}))
    text = again.write([SCORE], "title")
    assert "| full | 50.0 (0.0-100.0) | 100.0 | 75.0 (50.0-100.0) |" in text
    whole = json.loads((tmp_path / "results.json").read_text())
    assert {f["task"]: f["samples"] for f in whole["figures"]} == {"a": 2, "b": 1, "average": 3}
    assert (tmp_path / "results.csv").read_text().splitlines()[0].startswith("task,length,cache,measure,value,low")


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"seed": 0}, {"seed": 1}, "then --seed 0, now --seed 1"),
        (
            {"question_steps": 3, "chat": False},
            {"question_steps": 0},
            "then --no-chat, now no --chat; then --question-steps 3",
        ),
        ({"task": "agreement", "samples": 1}, {"task": "ruler", "seed": 0}, r"then task agreement, now task ruler\)"),
    ],
)
def test_other_settings_are_told_as_the_command_line_has_them(before, now, told, tmp_path) -> None:
    results = Results(tmp_path, before)
    results.add(Record("a", 10, 0, "full", {"score": 1.0}))
    results.close()
    with pytest.raises(ValueError, match=rf"another run \({told}.*: choose another directory with --out"):
        Results(tmp_path, now)


def test_figures_are_rows_of_the_benchmarks_tables() -> None:
    results = Results(None, {"task": "ruler"})
    for task, score in (("single", 1.0), ("vt", 0.5)):
        results.add(Record(task, 4096, 0, "two_level:lag=true", {"score": score, "attended": 0.25}))
    rows = {(row.variant, row.metric): row for row in results.rows(generation.MEASURES, "probe")}
    assert len(rows) == 6
    row = rows["ruler:vt:two_level:lag=true", "score"]
    assert (row.case, row.context, row.value, row.unit) == ("probe", 4096, 0.5, "share")
    assert rows["ruler:average:two_level:lag=true", "attended"].value == 0.25
    forced_run = Results(None, {"task": "agreement"})
    forced_run.add(Record("agreement", 2048, 0, "full", {"same": 3, "tokens": 4, "kl": 2.0, "nll": 4.0, "attended": 1}))
    named = {row.metric: row for row in forced_run.rows(forced.MEASURES["agreement"], "probe")}
    assert named["top1_agreement"].value == 0.75
    assert (named["kl"].variant, named["kl"].value, named["kl"].unit) == ("agreement:full", 0.5, "nats")
    assert set(named) == {"top1_agreement", "kl", "perplexity", "attended"}


def test_bootstrap_covers_the_mean() -> None:
    rng = np.random.default_rng(0)
    hit = 0
    for _ in range(100):
        values = (rng.random(200) < 0.3).astype(float)
        _, drawn = bootstrap(values, np.ones(200), SCORE)
        low, high = np.percentile(drawn, (2.5, 97.5))
        hit += low <= 0.3 <= high
    assert 88 <= hit <= 100
    perplexity = Measure("perplexity", "nll", "tokens", exponential=True)
    value, drawn = bootstrap(np.array([2.0, 6.0]), np.array([2.0, 2.0]), perplexity)
    assert value == pytest.approx(np.exp(2)) and drawn.min() == pytest.approx(np.exp(1))
