"""The sparse decode kernel against its definition: over keys and values, and over latents, whose values are the
beginning of their keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from decode_cases import RATIO, Case, check, config_of, expect, in_codes, in_pages, on_cpu, poisoned, valid_entries
from operator_calls import view

from hf_sparsekv.ops._recent import recent_valid
from hf_sparsekv.ops.attention.sparse_decode import sparse_decode as public
from hf_sparsekv.ops.attention.sparse_decode.reference import sparse_decode as reference
from hf_sparsekv.ops.attention.sparse_decode.share import Kinds, Share, batch_constant, find_part, programs
from hf_sparsekv.ops.attention.sparse_decode.split import Means, Recent
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.storage.quantise.reference import dequantise

ALL_WAYS = pytest.mark.parametrize("granularity", ["token", "block", "all"])
LATENTS = Case(heads=1, group=4, dk=48, dv=32, latents=True)
DEEPSEEK = Case(batch=1, heads=1, group=128, dk=576, dv=512, block_size=64, cap=2, chosen=1, ring=3, latents=True)

SHAPES = {
    "group 1": Case(group=1),
    "group 2, blocks of 32": Case(group=2, block_size=32, dk=80, dv=80, cap=5),
    "group 3, blocks of 64": Case(group=3, block_size=64, dk=96, dv=64, cap=3, chosen=2),
    "group 4, blocks of 128": Case(batch=1, group=4, block_size=128, dk=128, dv=128, cap=3, chosen=2),
    "group 7": Case(batch=1, heads=1, group=7, dk=128, dv=96),
    "group 16": Case(batch=1, group=16, dk=64, dv=128),
    "group 128": Case(batch=1, heads=1, group=128, block_size=64, dk=128, dv=128, cap=3, chosen=2),
    "wide heads": Case(batch=1, heads=1, group=4, dk=256, dv=256),
    "wider than a power of two": Case(batch=1, heads=1, group=4, dk=192, dv=128),
    "many rows": Case(batch=5, heads=1, group=2, cap=3, chosen=2),
    "no sinks": Case(sinks=0, ring=40),
    "softcap": Case(softcap=1.5),
    "sink logits": Case(learned_sink=True, group=3),
    "softcap and sink logits": Case(softcap=2.0, learned_sink=True, batch=1),
    "nothing chosen": Case(chosen=0, cap=0),
    "one split": Case(splits=1),
    "many splits": Case(splits=50, batch=1, heads=1, cap=19, chosen=11, dk=256, dv=256, ring=70),
    "latents": LATENTS,
    "latents, 20 heads": replace(LATENTS, group=20, block_size=32),
    "latents, 24 heads": replace(LATENTS, group=24, dk=80, dv=64, cap=9),
    "latents, 40 heads": replace(LATENTS, group=40, batch=1, block_size=64, cap=3, chosen=2),
    "latents, 128 heads": replace(LATENTS, group=128, batch=1, block_size=64, cap=3, chosen=2),
    "latents, 16 heads, two KV heads": replace(LATENTS, group=16, heads=2),
    "latents, no powers of two": replace(LATENTS, group=5, dk=57, dv=40, ring=30),
    "latents, almost all value": replace(LATENTS, dk=33, dv=32),
    "latents, all value": replace(LATENTS, dk=32),
    "latents, a sliding window of Dots 3 Note's": replace(
        LATENTS, group=20, dk=1088, dv=1024, block_size=64, cap=0, chosen=0, ring=17, sinks=0, batch=1
    ),
    "latents, GLM-4.7-Flash": replace(LATENTS, group=20, dk=576, dv=512, block_size=64, cap=3, chosen=2, batch=1),
    "latents, many rows": replace(LATENTS, batch=5, cap=3, chosen=2),
    "latents, no sinks": replace(LATENTS, sinks=0, ring=40),
    "latents, softcap and sink logits": replace(LATENTS, softcap=2.0, learned_sink=True),
    "latents, nothing chosen": replace(LATENTS, chosen=0, cap=0),
    "latents, one split": replace(LATENTS, splits=1, cap=11, ring=70),
    "latents, many splits": replace(LATENTS, splits=50, batch=1, cap=19, chosen=11, ring=70, group=20),
    "latents, blocks of 128": replace(LATENTS, block_size=128, cap=3, chosen=2, splits=2, batch=1),
}

MEANS_ARGUMENTS = ("means", "mean_tokens")

CODED = {
    "usual": Case(),
    "group 3, blocks of 64": SHAPES["group 3, blocks of 64"],
    "one head, wide": SHAPES["wide heads"],
    "no powers of two": Case(dk=56, dv=40, group=5, block_size=32, cap=5),
    "softcap and sink logits": SHAPES["softcap and sink logits"],
    "many splits": SHAPES["many splits"],
    "means": Case(span=2),
    "nothing chosen": SHAPES["nothing chosen"],
}

# Chosen tokens alone.
MEANS = {
    "a block": Case(span=1),
    "two blocks, sinks": Case(span=2, learned_sink=True, group=3, dk=80, dv=64),
    "four blocks, softcap": Case(span=4, softcap=2.0, cap=19, chosen=4, batch=3, heads=1),
    "more than there are": Case(span=8, cap=5, dk=48, dv=96),
    "many splits": Case(span=2, splits=50, cap=80, chosen=30, batch=1, heads=1, dk=256, dv=256),
    "one split": Case(span=1, splits=1, cap=70, chosen=40, batch=1, heads=1),
    "nothing chosen": Case(span=1, chosen=0),
    "nothing cached": Case(span=2, chosen=0, cap=0),
    "latents": replace(LATENTS, span=1),
    "latents, 40 heads": replace(LATENTS, span=2, group=40, batch=1, block_size=64, cap=7, chosen=2),
    "latents, many splits": replace(LATENTS, span=1, splits=50, batch=1, cap=75, chosen=11, ring=70),
    "latents, softcap and sink logits": replace(LATENTS, span=4, softcap=2.0, learned_sink=True, cap=9),
    "latents, nothing cached": replace(LATENTS, span=2, chosen=0, cap=0),
}


@pytest.mark.pairwise(once=("case",))
@ALL_WAYS
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(place, case, granularity):
    check(place, case, granularity)


@pytest.mark.pairwise(once=("case",))
@pytest.mark.parametrize("case", MEANS.values(), ids=MEANS.keys())
def test_means(place, case):
    check(place, case, "token")


@pytest.mark.pairwise(once=("case",))
@ALL_WAYS
@pytest.mark.parametrize("case", CODED.values(), ids=CODED.keys())
def test_codes(place, case, granularity):
    """Values in host memory; the definition is that of the numbers that the codes stand for."""
    check(place, case, granularity, coded=True)
    args, named = in_codes(*case.make(place, granularity))
    plain = dequantise(args[1], named["scales"], case.dk, place.dtype)
    want = reference(*on_cpu([args[0], plain, *args[2:]]), **on_cpu({**named, "scales": None}))
    assert torch.equal(reference(*on_cpu(args), **on_cpu(named)), want)


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_codes_beside_pages(place, granularity):
    """Pages hold what codes became; both kinds in one tile."""
    for case in (Case(span=2), Case(group=3, dk=80, dv=48, block_size=32, cap=5)):
        args, named = in_codes(*in_pages(place, *case.make(place, granularity)))
        want_host, from_host = (
            torch.zeros(args[5].shape[:2], dtype=torch.int64, device=at) for at in ("cpu", place.device)
        )
        want = reference(*on_cpu(args), **on_cpu(named), from_host=want_host)
        place.close(sparse_decode(*args, **named, from_host=from_host), want, ratio=RATIO.get(place.dtype))
        assert torch.equal(from_host.cpu(), want_host) and want_host.sum() > 0


def test_codes_that_cannot_be(place32):
    args, named = in_codes(*Case().make(place32, "all"))
    latents, of_latents = LATENTS.make(place32, "all")
    wrong = named["scales"][..., :1]
    calls = (
        ([args[0], args[1].float(), *args[2:]], named, "int8 has scales, and nothing else"),
        (args, {**named, "scales": None}, "int8 has scales, and nothing else"),
        (args, {**named, "scales": wrong}, "scales must be float16"),
        (*in_codes(latents, of_latents), "no latents"),
    )
    for given, options, message in calls:
        for function in (reference, sparse_decode):
            with pytest.raises(ValueError, match=message):
                function(*given, **options)


@pytest.mark.parametrize("latents", [False, True])
def test_means_of_unselected_tokens(place32, latents):
    """A span stands in for its tokens that are not chosen, and for none if all are: then its mean is not read."""
    case = replace(LATENTS, batch=1, span=2) if latents else Case(batch=1, heads=1, span=2)
    args, named = case.make(place32, "token")
    args[3] = torch.arange(7, dtype=torch.int32, device=place32.device)[None]
    args[1] = torch.randn_like(args[1])
    named["means"] = torch.randn_like(named["means"])
    named["means"][3] = torch.nan  # of tokens 32 to 63
    ids = [*range(4, 32, 7), *range(32, 64), 111]
    args[4] = torch.tensor([[[*ids, -1, -1]]], dtype=torch.int32, device=place32.device)
    got = sparse_decode(*args, **named)
    # The same attention to as many copies of each mean.
    kv = args[1][:, 0].flatten(0, 1)[ids]
    copies = [named["means"][last, 0].expand(n, -1) for last, n in ((1, 24), (5, 32), (6, 15))]
    kv = torch.cat((kv, args[5][0, 0][valid_entries(args[2], 4, 13)[0]], *copies))
    logits = args[0][0] @ kv[:, : case.dk].T * named["scale"]
    first = 0 if latents else case.dk
    place32.close(got[0], (logits.softmax(-1) @ kv[:, first : first + case.dv]).cpu())


def test_means_with_all_chosen_change_nothing(place32):
    args, named = Case(batch=2, span=2, cap=5).make(place32, "token")
    each = torch.arange(80, dtype=torch.int32, device=place32.device)
    selectable = (each >= 4) & (each < args[2][:, 1:])
    args[4] = torch.where(selectable, each, 1000).sort(-1).values[:, None].repeat(1, 2, 1)
    args[4] = torch.where(args[4] == 1000, -1, args[4]).int()
    with_means = sparse_decode(*args, **{**named, "means": torch.full_like(named["means"], torch.nan)})
    without = sparse_decode(*args, **{name: held for name, held in named.items() if name not in MEANS_ARGUMENTS})
    place32.close(with_means, without.cpu())


def test_lists_of_different_lengths_leave_the_rest_to_means(place):
    args, named = Case(span=2, heads=2, rows=((120, 112), (70, 64))).make(place, "token")
    named["used"] = torch.tensor([[3, 0], [5, 2]], dtype=torch.int32, device=place.device)
    args[4] = args[4].abs()
    place.close(sparse_decode(*args, **named), expect(args, named)[0], ratio=RATIO.get(place.dtype))


def test_means_of_paged_tokens(place):
    for case in (Case(span=2), replace(LATENTS, span=2)):
        args, named = in_pages(place, *case.make(place, "token"))
        expected = expect(args, named)[0]
        place.close(sparse_decode(*args, **named), expected, ratio=RATIO.get(place.dtype))


@ALL_WAYS
def test_means_that_do_not_fit_are_refused(place32, granularity):
    for function in (sparse_decode, reference):
        args, named = Case(span=2).make(place32, "token")
        for mean_tokens in (None, 8, 24):
            with pytest.raises(ValueError, match="mean_tokens must be a multiple of block_size=16"):
                function(*args, **{**named, "mean_tokens": mean_tokens})
        if granularity != "token":
            with pytest.raises(ValueError, match=f"means go with granularity='token', not '{granularity}'"):
                function(*args, **{**named, "granularity": granularity})
        args, named = in_pages(place32, args, named)
        with pytest.raises(ValueError, match="means need their columns"):
            function(*args, **{**named, "columns": None})


@pytest.mark.gpu
@ALL_WAYS
def test_deepseek(place16, granularity):
    """All heads of its width at once: slow in the interpreter, where GLM's has the width and others have the heads."""
    check(place16, DEEPSEEK, granularity)


@pytest.mark.pairwise(once=("tile", "heads"))
@ALL_WAYS
@pytest.mark.parametrize(("tile", "heads"), [(64, 32), (32, 16), (16, 32), (64, 64)])
def test_tiles_do_not_matter(place, granularity, tile, heads):
    case = replace(LATENTS, group=40, block_size=64, cap=5, splits=2, batch=1, ring=100)
    check(place, case, granularity, tile=tile, heads=heads, stages=1)


@ALL_WAYS
def test_splits_do_not_matter(place32, granularity):
    case = Case(batch=1, heads=2, dk=256, dv=64, cap=23, chosen=19, ring=90, softcap=3.0, learned_sink=True)
    args, named = case.make(place32, granularity)
    first = sparse_decode(*args, **named, config=config_of(args, named, splits=1))
    for splits in (3, 40):
        config = config_of(args, named, splits=splits)
        place32.close(sparse_decode(*args, **named, config=config), first.cpu(), ratio=5e-7)


@ALL_WAYS
def test_reference_is_that_of_keys_and_values(place32, granularity):
    """Rows with their beginning written behind them once more give the same."""
    args, named = LATENTS.make(place32, granularity)
    args = on_cpu(args)
    twice = list(args)
    for i in (1, 5):
        twice[i] = torch.cat((args[i], args[i][..., : LATENTS.dv]), dim=-1)
    counts = [torch.zeros(2, 1, dtype=torch.int64) for _ in range(2)]
    assert torch.equal(reference(*args, **named, attended=counts[0]), reference(*twice, **named, attended=counts[1]))
    assert torch.equal(*counts)


ROWS = {
    "all empty": ((0, 0), (0, 0)),
    "nothing, and no block": ((0, 0), (9, 0), (13, 0)),
    "a ring of each fill": ((16, 16), (49, 48), (61, 48), (125, 112)),
    "one long among short ones": ((300, 288), (3, 0), (20, 16), (0, 0), (1, 0)),
}


@pytest.mark.pairwise(once=("rows", "granularity"))
@ALL_WAYS
@pytest.mark.parametrize("shape", [Case(), LATENTS, replace(LATENTS, group=20, splits=3)], ids=range(3))
@pytest.mark.parametrize(("sinks", "span"), [(4, 2), (20, 4), (40, None)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows_of_any_length(place, rows, sinks, span, shape, granularity):
    """Empty rows, all of whose tokens are sinks or in the ring, and full rings, among tables with room for the longest;
    blocks that are ready but not sealed hold NaN."""
    case = replace(shape, batch=len(rows), rows=rows, sinks=sinks, span=span, cap=18, chosen=9)
    check(place, case, granularity)


RAGGED = {
    "one long among short ones": ((300, 288), (20, 16), (37, 32), (52, 48), (19, 16), (33, 32)),
    "one among empty ones": ((0, 0), (0, 0), (0, 0), (299, 288), (0, 0), (0, 0)),
    "a table far wider than all": ((29, 16), (21, 16), (3, 0)),
}


@pytest.mark.pairwise(once=("rows", "granularity", "splits"))
@ALL_WAYS
@pytest.mark.parametrize("shape", [Case(heads=1), replace(LATENTS, group=20)], ids=["keys and values", "latents"])
@pytest.mark.parametrize("splits", [1, 2, 40])
@pytest.mark.parametrize("rows", RAGGED.values(), ids=RAGGED.keys())
def test_parts_of_rows_of_different_lengths(place, rows, splits, shape, granularity):
    """Few programs for all rows and more than there are tiles, whoever has the tokens."""
    case = replace(shape, batch=len(rows), rows=rows, span=1, cap=18, chosen=9, splits=splits)
    check(place, case, granularity, tile=16)


@pytest.mark.few(splits=(30, 200))
@pytest.mark.parametrize("splits", [30, 60, 100, 200])
def test_many_parts(place, splits):
    """The only row, and a long one beside an empty one: some at a time, or all that there are meant to be."""
    one = Case(batch=1, heads=1, group=3, dv=48, cap=150, splits=splits, learned_sink=True, rows=((2410, 2400),))
    check(place, one, "all", tile=16)
    check(place, replace(one, batch=2, cap=75, rows=((1210, 1200), (0, 0))), "all", tile=16)


def test_lists_and_rows_of_different_lengths(place32):
    """Counts of chosen tokens say nothing of a row's share of the programs, but all of how much its parts have."""
    rows = RAGGED["one long among short ones"]
    for shape in (Case(heads=1), LATENTS):
        args, named = replace(shape, batch=len(rows), rows=rows, span=1, cap=18, chosen=9).make(place32, "token")
        named["used"] = torch.tensor([[1], [0], [9], [2], [9999], [3]], dtype=torch.int32, device=place32.device)
        expected = expect(args, named)[0]
        for splits in (1, 5):
            config = config_of(args, named, splits=splits, tile=16)
            place32.close(sparse_decode(*args, **named, config=config), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("coded", [False, True], ids=["", "codes"])
@pytest.mark.parametrize("paged", [False, True], ids=["", "pages"])
@pytest.mark.parametrize("splits", [1, 5])
def test_heads_that_need_different_numbers(place, splits, paged, coded):
    """Each KV head has as many parts as its list needs; sums and counts are those of each."""
    rows = RAGGED["one long among short ones"]
    case = Case(batch=len(rows), heads=3, group=2, rows=rows, span=1, cap=18, chosen=9, learned_sink=True)
    args, named = case.make(place, "token")
    if paged:
        args, named = in_pages(place, args, named)
    if coded:
        args, named = in_codes(args, named)
    n = args[4].shape[-1]
    some = [[1, 0, 9], [0, 0, 0], [9, 9999, n], [2, 1, 0], [n, 7, n // 2], [3, n, 1]]
    named["used"] = torch.tensor(some, dtype=torch.int32, device=place.device)
    args[4] = args[4].clone()
    want, want_lse = {"attended": torch.zeros(len(rows), 3).long()}, torch.full(args[0].shape[:2], torch.nan)
    expected = reference(*on_cpu(args), **on_cpu(named), **want, lse=want_lse)
    args[4][torch.arange(n, device=place.device) >= named["used"][..., None]] = 1 << 20  # as nothing was written there
    attended, lse = torch.zeros(len(rows), 3, dtype=torch.int64, device=place.device), want_lse.to(place.device)
    config = config_of(args, named, splits=splits, tile=16)
    with poisoned():
        out = sparse_decode(*args, **named, attended=attended, lse=lse, config=config)
    place.close(out, expected, ratio=RATIO.get(place.dtype))
    place.close(lse, want_lse)
    assert torch.equal(attended.cpu(), want["attended"])


@triton.jit
def _parts_kernel(rows, share, recent, means, out, BATCH: tl.constexpr):
    i = tl.program_id(0)
    there, i_batch, i_part, kinds, n_parts = find_part(i, rows, share, recent, means, True, 16, 16, BATCH)
    if not there:
        return
    o_n = tl.arange(0, 8)
    b_out = tl.where(o_n == 0, i_batch, tl.where(o_n == 1, i_part, tl.where(o_n == 2, n_parts, kinds.stored)))
    b_out = tl.where(o_n == 4, kinds.recent, tl.where(o_n == 5, kinds.means, b_out))
    tl.store(out + 8 * i + o_n, b_out)


BATCHES = {
    "alone": [130_000],
    "uniform": [38_000] * 8,
    "from short to long": [4_000 << i for i in range(6)],
    "one long": [130_000, *[4_000] * 31],
    "the last is long": [*[100] * 36, 130_000],
    "one among empty ones": [*[0] * 9, 32_000, *[0] * 22],
    "all empty": [0] * 5,
    "no full block": [9] * 3,
}


@pytest.mark.few
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("aim", [1, 132])
def test_no_part_is_longer_than_an_equal_share(place32, lengths, aim):
    """Each row's parts follow each other, have all of its tiles, and stay within an equal share and the launch."""
    tile, block_size, sinks, ring, cap = 16, 16, 4, 40, 8_320
    rows = torch.tensor([(n, max(0, n - 20) // block_size * block_size) for n in lengths], dtype=torch.int32)
    rows = rows.to(place32.device)
    # What these point to is not read; Triton 3.6 takes no None in a tuple.
    recent, means = Recent(rows, 0, 0, 0, sinks, 0, sinks + ring), Means(rows, 0, 0, rows, 0, 0, 4)
    most = Kinds(cap, -(-(sinks + ring) // tile), -(-cap // 4 // tile))
    aim, n_most = programs(aim, len(lengths), most)
    out = torch.full((n_most, 8), -1, dtype=torch.int32, device=place32.device)
    share = Share(len(lengths), aim, n_most, cap * block_size)
    _parts_kernel[(n_most,)](rows, share, recent, means, out, BATCH=batch_constant(len(lengths)))
    out = out[out[:, 0] >= 0].tolist()

    tiles = []
    for length, sealed in rows.tolist():
        near = sinks + length - sealed if length else 0
        tiles.append([-(-n // tile) for n in (sealed, near, -(-sealed // (4 * block_size)))])
    expected, longest = [], 0
    for row, (i, have) in enumerate(zip([row for row, part, *_ in out if part == 0], tiles)):
        assert i == row
        n_parts, *kinds = next(entry[2:6] for entry in out if entry[0] == row)
        assert n_parts == max(1, sum(kinds))
        assert [bool(n) for n in kinds] == [bool(n) for n in have]
        expected += [[row, part, n_parts, *kinds] for part in range(n_parts)]
        longest = max(longest, *(-(-n // parts) for n, parts in zip(have, kinds) if parts), 0)
    assert [entry[:6] for entry in out] == expected
    assert len(tiles) == len({row for row, *_ in out})
    total, kinds = sum(map(sum, tiles)), 3
    assert longest <= 1.02 * total / max(1, min(aim, n_most - kinds * len(lengths))) + 2  # each row may round up


@pytest.mark.parametrize("latents", [False, True])
def test_tokens_that_are_not_sealed_are_not_attended(place32, latents):
    """Nor do they count as chosen ones of the last span; ids behind the table are not looked up there."""
    args, named = replace(LATENTS if latents else Case(heads=1), span=4, rows=((120, 112), (43, 32))).make(
        place32, "token"
    )
    want = sparse_decode(*args, **named)
    more = torch.tensor([[[112, 1 << 20]], [[32, 42]]], dtype=torch.int32, device=place32.device)
    args[4] = torch.cat((args[4], more), -1)
    place32.close(sparse_decode(*args, **named), want.cpu())
    place32.close(reference(*on_cpu(args), **on_cpu(named)), want.cpu())


def test_recent_entries_by_row():
    """What the kernels compute from two numbers of a row is what its tokens say one by one."""
    for sinks, ring in ((0, 1), (4, 13), (20, 16), (3, 32)):
        rows = [(sealed + n, sealed) for sealed in range(0, 97, 16) for n in range(ring + 1)]
        rows = torch.tensor(rows, dtype=torch.int32)
        assert torch.equal(recent_valid(rows, sinks, sinks + ring), valid_entries(rows, sinks, ring))


@pytest.mark.pairwise
@ALL_WAYS
@pytest.mark.parametrize(
    "case", [Case(heads=1), Case(heads=1, learned_sink=True), LATENTS], ids=["", "sink", "latents"]
)
def test_nothing_to_attend_to(place, case, granularity):
    """Zeros and no mass, with and without a learned sink; the other row is not touched by it."""
    args, named = case.make(place, granularity)
    args[2][0] = 0
    args[5][0] = torch.nan
    expected, want_attended = expect(args, named)
    lse, attended = place.nan(2, 4, dtype=torch.float32), torch.full_like(want_attended, 1000, device=place.device)
    got = sparse_decode(*args, **named, lse=lse, attended=attended)
    assert (got[0] == 0).all()
    assert case.learned_sink or (lse[0] == float("-inf")).all()
    assert lse[1].isfinite().all()
    place.close(got, expected, ratio=RATIO.get(place.dtype))
    assert attended.tolist() == want_attended.tolist()
    assert attended[0].tolist() == [1000]


def test_large_logits(place32):
    """Logits of some thousands, far apart between the parts, neither overflow nor vanish."""
    args, named = Case(batch=1, cap=9, splits=4, dk=256, dv=64).make(place32, "all")
    named["scale"] = 100.0
    config = config_of(args, named, splits=4)
    place32.close(sparse_decode(*args, **named, config=config), expect(args, named)[0], ratio=1e-4)


def test_one_slot_holds_all_weight(place32):
    """Attention that follows one key gives that key's value: columns, physical blocks and heads are not mixed up."""
    case = Case(batch=2, heads=2, group=2, cap=6, block_size=16)
    block_table = torch.stack([place32.randperm(8)[:6] for _ in range(2)])
    kv = place32.randn(8, 2, 16, 128)
    recent_kv = place32.nan(2, 2, 17, 128)
    rows = torch.full((2, 2), 96, dtype=torch.int32, device=place32.device)
    column = torch.tensor([[5, 37], [64, 95]])
    q, value = torch.empty(2, 4, 64), torch.empty(2, 4, 64)
    for i in range(2):
        for j in range(2):
            token = kv[block_table[i, column[i, j] // 16].long(), j, column[i, j] % 16].cpu()
            q[i, 2 * j : 2 * j + 2], value[i, 2 * j : 2 * j + 2] = 50 * token[:64], token[64:]
    ids = torch.arange(96, dtype=torch.int32, device=place32.device).expand(2, 2, 96)
    blocks = torch.arange(6, dtype=torch.int32, device=place32.device).expand(2, 2, 6)
    for granularity, chosen in (("token", ids), ("block", blocks), ("all", None)):
        about = {"granularity": granularity, "value_dim": case.dv, "sinks": 0, "scale": 1.0}
        got = sparse_decode(q.to(place32.device), kv, rows, block_table, chosen, recent_kv, **about)
        torch.testing.assert_close(got.cpu(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.pairwise
@ALL_WAYS
@pytest.mark.parametrize("case", [Case(dk=80, dv=96), replace(LATENTS, group=20)], ids=["keys and values", "latents"])
def test_views_and_mixed_dtypes(place32, case, granularity):
    """A transposed query, buffers that are parts of larger ones, storage in a smaller dtype than the query."""
    args, named = case.make(place32, granularity)
    args[1], args[5] = args[1].half(), args[5].half()
    expected, want_attended = expect(args, named)
    attended = view(torch.full_like(want_attended, 1000, device=place32.device), "inside")
    out = view(place32.nan(2, case.heads * case.group, case.dv), "inside")
    views = [view(args[0], "turned"), view(args[1], "inside"), args[2]]
    views += [None if t is None else view(t, "inside") for t in args[3:]]
    assert sparse_decode(*views, **named, attended=attended, out=out) is out
    place32.close(out, expected)
    assert torch.equal(attended.cpu(), want_attended)


@pytest.mark.pairwise
@pytest.mark.parametrize("paged", [False, True], ids=["in blocks", "in frames"])
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("latents", [False, True], ids=["keys and values", "latents"])
def test_lists_of_different_lengths(place, latents, splits, paged):
    """As many tokens of each row's list as the device says: none, some, all, more than there are."""
    case = Case(chosen=6, cap=9, splits=splits)
    if latents:
        case = replace(LATENTS, batch=4, group=20, chosen=6, cap=9, splits=splits)
    args, named = case.make(place, "token")
    n = args[4].shape[-1]
    used = torch.tensor([11, 0, n, 9999], dtype=torch.int32, device=place.device)
    named["used"] = used.view(case.batch, case.heads)
    expected, want_attended = expect(args, named)
    if paged:
        args, named = in_pages(place, args, named)
    lists = args[4].view(4, n)
    lists[0, 11:], lists[1] = (1 << 29, 1 << 29) if paged else (lists[0, 0].clone(), lists[0, 0].clone())  # not read
    attended = torch.full_like(want_attended, 1000, device=place.device)
    got = sparse_decode(*args, **named, attended=attended, config=config_of(args, named, splits=splits))
    place.close(got, expected, ratio=RATIO.get(place.dtype) if latents else None)
    assert torch.equal(attended.cpu(), want_attended)


def test_refuses(place32):
    args, named = Case().make(place32, "all")
    with pytest.raises(ValueError, match="granularity"):
        sparse_decode(*args, **{**named, "granularity": "page"})
    args[1] = view(args[1].transpose(1, 2).contiguous().transpose(1, 2), "turned")
    with pytest.raises(ValueError, match="kv must be contiguous"):
        sparse_decode(*args, **named)
    args, named = Case().make(place32, "block")
    for wrong in (args[2].long(), args[2][:1], view(args[2], "inside")):
        with pytest.raises(ValueError, match="rows must be contiguous int32"):
            sparse_decode(args[0], args[1], wrong, *args[3:], **named)
    with pytest.raises(ValueError, match="granularity='token', not 'block'"):
        sparse_decode(*args, **named, used=torch.ones(2, 2, dtype=torch.int32, device=place32.device))
    args, named = in_pages(place32, *Case().make(place32, "token"))
    with pytest.raises(ValueError, match="page ids are for granularity"):
        sparse_decode(*args, **dict(named, granularity="all"))


@pytest.mark.pairwise
@pytest.mark.gpu
@ALL_WAYS
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(
    "case",
    [Case(cap=9), *(replace(DEEPSEEK, batch=2, group=n, cap=40, chosen=9, ring=150) for n in (20, 128))],
    ids=["keys and values", "20 heads", "128 heads"],
)
def test_captured_and_pinned(place, granularity, pinned, case):
    """One graph serves other contents of the same buffers; stored blocks are read from the host in place."""
    args, named = case.make(place, granularity)
    if pinned:
        args[1] = args[1].cpu().pin_memory()
    public(*args, **named)  # compiles
    attended = torch.zeros(2, case.heads, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = public(*args, **named, attended=attended)
    for seed in range(3):
        place.generator.manual_seed(seed + 1)
        fresh, _ = case.make(place, granularity)
        for t, new in zip(args, fresh):
            if t is not None:
                t.copy_(new)
        attended.fill_(1000)
        graph.replay()
        torch.cuda.synchronize()
        expected, want_attended = expect(args, named)
        place.close(out, expected, ratio=RATIO.get(place.dtype))
        assert torch.equal(attended.cpu(), want_attended)


FRAMED = [
    Case(),
    Case(dk=48, dv=80, group=3, block_size=32, batch=3, splits=2),
    LATENTS,
    replace(LATENTS, group=20, block_size=32, batch=3, splits=2),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("case", FRAMED, ids=range(len(FRAMED)))
def test_frames(place, case, granularity):
    """Blocks by place: the reference equals itself without pages, the kernel the reference."""
    args, named = case.make(place, granularity)
    expected, want_attended = expect(args, named)
    args, named = in_pages(place, args, named)
    assert (args[4] < -1).any() or (named.get("page_ids", args[4]) < -1).any()
    found, attended = expect(args, named)
    assert torch.equal(found, expected)
    assert torch.equal(attended, want_attended)
    attended = torch.full_like(want_attended, 1000, device=place.device)
    want_host, from_host = torch.full_like(want_attended, 50), torch.full_like(attended, 50)
    size = case.block_size
    page_id_of = named["page_ids"].cpu() if granularity == "block" else args[4].cpu() // size
    if granularity == "token":
        want_host += (page_id_of < -1).sum(-1)
    else:  # the tokens of a block that can be selected
        token = args[4].cpu()[..., None] * size + torch.arange(size)
        readable = (token >= case.sinks) & (token < args[2].cpu()[:, 1, None, None, None])
        want_host += (readable & (page_id_of < -1)[..., None]).sum((-1, -2))
        physical_id = args[3].cpu()[:, None].expand(-1, case.heads, -1).gather(-1, args[4].cpu().clamp_min(0).long())
        hidden = (page_id_of < -1) & (physical_id < 0)  # a block of no physical block is none, whatever its place says
        want_host -= (readable & hidden[..., None]).sum((-1, -2))
    counted = torch.full_like(want_attended, 50)
    reference(*on_cpu(args), **on_cpu(named), from_host=counted)
    assert torch.equal(counted, want_host)
    config = config_of(args, named, splits=case.splits)
    got = sparse_decode(*args, **named, attended=attended, from_host=from_host, config=config)
    assert torch.equal(from_host.cpu(), want_host)
    place.close(got, expected, ratio=RATIO.get(place.dtype))
    assert torch.equal(attended.cpu(), want_attended)


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("latents", [False, True], ids=["keys and values", "latents"])
def test_frames_of_other_strides(place32, latents, granularity):
    """Pages, stored blocks and the recent buffer are slices of wider rows, each of another width."""
    case = Case(heads=1, dk=48, dv=32, latents=latents)
    args, named = in_pages(place32, *case.make(place32, granularity))
    expected, _ = expect(args, named)

    def wider(t, more):
        return torch.cat((t, torch.full_like(t[..., :more], torch.nan)), -1)[..., : t.shape[-1]]

    args[1], args[5], named["pages"] = wider(args[1], 8), wider(args[5], 16), wider(named["pages"], 24)
    place32.close(sparse_decode(*args, **named), expected)
