"""Every kernel against its operator's definition: in all shapes, over views, over tensors of 2 ** 31 elements.

What selects (``test_topk_select.py``), attends (``test_sparse_decode.py``) or keeps state between calls
(``test_residency.py``) has files of its own.
"""

from __future__ import annotations

from itertools import product

import pytest
from operator_calls import far, view
from operators import BY_NAME

CASES = [
    (operator.of, name, *options, *(None,) * (2 - len(operator.options)))
    for operator in BY_NAME.values()
    for name in operator.cases
    for options in product(*operator.options)
    # Minutes to compile for a GPU, and nothing uses it: whole keys of latents are scored a KV head at a time.
    if (operator.of, name, *options[:1]) != ("token_score", "latents' whole keys, 128 heads", "none")
]


@pytest.mark.pairwise(once=("case",))
@pytest.mark.parametrize(
    ("case", "first", "second"),
    [((of, case), (of, first), (of, second)) for of, case, first, second in CASES],
    ids=["-".join(str(part) for part in case if part is not None) for case in CASES],
)
def test_against_reference(place, case, first, second):
    operator = BY_NAME[case[0]]
    options = (first[1], second[1])[: len(operator.options)]
    given = operator.call(place, *operator.cases[case[1]], *options)
    operator.check(place, given, operator.expected(given), *options)


def small(operator, place) -> tuple[dict, tuple]:
    """Arguments of the small case, and its options."""
    n = len(operator.small) - len(operator.options)
    return operator.call(place, *operator.small), operator.small[n:]


@pytest.mark.parametrize("of", [name for name, operator in BY_NAME.items() if operator.views])
def test_views(place32, of):
    """Views of larger tensors, which hold what nobody may read."""
    operator = BY_NAME[of]
    given, options = small(operator, place32)
    given |= {name: view(given[name], kind) for name, kind in operator.views.items()}
    operator.check(place32, given, operator.expected(given), *options)


@pytest.mark.pairwise(once=("case",))
@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param((of, case), (of, options), id="-".join(map(str, (of, case, *options))))
        for of, case in (
            ("block_score", "six rows"),
            ("block_score", "no power of two"),
            ("block_score", "latents of 20 heads"),
            ("token_score", "six rows, all blocks"),
            ("token_score", "40 heads"),
            ("token_score", "small blocks, all"),
        )
        for options in product(*BY_NAME[of].options)
    ],
)
def test_scores_that_are_not_filled(place, case, options):
    """Entries after a row's sealed tokens stay as they are; all else is written."""
    operator, options = BY_NAME[case[0]], options[1]
    given = operator.call(place, *operator.cases[case[1]], *options) | {"fill": False}
    expected = operator.expected(given)
    operator.check(place, given, expected, *options)
    blocks, sealed = given["block_table"].shape[1], given["rows"][:, 1].cpu()
    ends = sealed * expected[0].shape[-1] // (blocks * (given.get("tokens") or given["codes"].shape[2]))
    for score, end in zip(expected[0], ends.tolist()):
        assert score[:, end:].isnan().all() and not score[:, :end].isnan().any()


def test_norms_that_do_not_fit(place32):
    operator = BY_NAME["token_score"]
    given = operator.call(place32, *operator.small)
    for norms in (given["norms"][..., :-2], given["norms"].double(), given["norms"].transpose(2, 3).contiguous().mT):
        with pytest.raises(ValueError, match=r"norms must be float32 \[2, 1, 2, 16\], contiguous"):
            operator.functions[0](**given | {"norms": norms})


def test_scores_of_chosen_blocks_are_filled(place32):
    operator = BY_NAME["token_score"]
    given = operator.call(place32, *operator.small) | {"fill": False}
    for function in operator.functions:
        with pytest.raises(ValueError, match="fill=False is for scores of all blocks"):
            function(**given)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(("of", "what"), [(name, what) for name, operator in BY_NAME.items() for what in operator.far])
def test_far_apart(place16, of, what):
    """Offsets into such a tensor need 64 bits."""
    operator = BY_NAME[of]
    given, options = small(operator, place16)
    expected = operator.expected(given)
    given[what] = far(given[what], operator.far[what])
    operator.check(place16, given, expected, *options)


def test_written_rows_lie_in_order(place32):
    """What follows a kernel takes its result as it is: in one piece, or as attention wants its heads."""
    operator = BY_NAME["add_norm"]
    for has_residual in (False, True):
        given = operator.call(place32, (2, 3, 64), has_residual)
        total, out = operator.functions[0](**given)
        assert out.is_contiguous() and (total is given["x"]) == (not has_residual)
    operator = BY_NAME["qk_rope"]
    for got in operator.functions[0](**operator.call(place32, *operator.small)):
        assert got.transpose(1, 2).is_contiguous()
