"""Selection by clusters of thread blocks (CUDA C++) against its definition: equal ids, ties included."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from inside import forget_kernels
from test_label_scores import Case
from test_topk_select import COUNTS, SCORES, row_lengths

from hf_sparsekv.ops.selection.token_score import token_score
from hf_sparsekv.ops.selection.topk_select import cluster
from hf_sparsekv.ops.selection.topk_select.config import Config
from hf_sparsekv.ops.selection.topk_select.reference import block_select as reference_block
from hf_sparsekv.ops.selection.topk_select.reference import token_select as reference_token
from hf_sparsekv.ops.selection.topk_select.triton import block_select, scratch_size, token_select

pytestmark = pytest.mark.gpu
CONFIGS = {blocks: Config(clusters=blocks) for blocks in (2, 4, 8)}
LONGEST = Config(clusters=8)
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture(autouse=True)
def has_clusters():
    """A test that took another kernel would show nothing."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no clusters")
    assert cluster.serves(torch.empty(1, 1, 9, device="cuda"), Config(clusters=8))


def selected(scores, k, config, **how):
    """Ids, written over memory that holds something else, and no scratch memory asked for.

    Of a row that is longer than these blocks hold, by eight of them.
    """
    config = config if cluster.serves(scores, config) else LONGEST
    assert scratch_size(scores, k, config) == 0
    out = torch.full((*scores.shape[:2], k), 12345, dtype=torch.int32, device=scores.device)
    return block_select(scores, k, out=out, config=config, **how).cpu()


def outliers(place, n):
    """A few scores so large that mean and deviation of all say nothing about the others; the same below."""
    scores = place.randn(2, 2, n)
    scores[0, :, :: max(1, n // 3)] = 1e6
    scores[1, :, :: max(1, n // 3)] = -1e30
    return scores


def skewed(place, n):
    """Long tails on one side, and all below zero."""
    scores = place.randn(2, 2, n).exp()
    return torch.stack((scores[0], -scores[1] - 5))


def nearly_equal(place, n):
    """One bin of the first pass holds nearly all: distinct bits around one number, and one far above them."""
    bits = place.randint(0, 1 << 14, 2, 2, n, dtype=torch.int32) + 0x3F800000
    scores = bits.view(torch.float32).clone()
    scores[0, :, n // 2] = 1e9
    scores[1] *= -1
    return scores


def descending(place, n):
    """All that is taken lies in one block's part."""
    return place.randn(2, 2, n).sort(-1, descending=True).values


def misleading(place, n):
    """Entries that every block reads first, to guess a threshold, are unlike the rest: above it, or below."""
    scores, places = place.randn(2, 2, n), cluster.THREADS // 2
    first = torch.arange(places)[:, None] * n // places // 8 * 8
    seen = (first + torch.arange(8)).flatten().clamp(max=n - 1).to(scores.device)
    scores[..., seen] += torch.tensor([50.0, -50.0], device=scores.device)[:, None, None]
    return scores


ALL = {
    **SCORES,
    "outliers": outliers,
    "skewed": skewed,
    "nearly equal": nearly_equal,
    "descending": descending,
    "misleading": misleading,
}


@configs
@pytest.mark.parametrize("n", [1, 65, 1000, 4096, 33_001, 131_072])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("kind", ALL)
def test_against_reference(place32, kind, k, n, config):
    scores, k = ALL[kind](place32, n), COUNTS[k](n)
    assert torch.equal(selected(scores, k, config), reference_block(scores.cpu(), k))


@configs
@pytest.mark.parametrize("n", [32_768, 65_536, 100_000])
@pytest.mark.parametrize("k", [256, 1024, 2048])
def test_many_lists(place32, k, n, config):
    scores = place32.randn(8, 8, n) * (1 + torch.arange(8, device=place32.device)[:, None, None])
    scores[3] = scores[3].round()
    for how in (config, Config()):
        assert torch.equal(selected(scores, k, how), reference_block(scores.cpu(), k))


@configs
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("blocks", [1, 41, 3001])
@pytest.mark.parametrize("k", COUNTS)
def test_rows_of_their_own_length(place32, k, blocks, block_size, config):
    """Entries after a row's sealed tokens are not read, whatever they hold."""
    n, k = blocks * block_size, COUNTS[k](blocks * block_size)
    rows = row_lengths(n, block_size).to(place32.device)
    for tokens, width in ((1, n), (block_size, blocks)):
        clean = place32.randn(len(rows), 2, width)
        behind = (torch.arange(width, device=clean.device) * tokens >= rows[:, 1:])[:, None].expand_as(clean)
        expected = reference_block(clean.masked_fill(behind, -math.inf).cpu(), k)
        how = {} if tokens == 1 else {"block_size": block_size}
        for hole in (math.nan, math.inf):
            scores = clean.masked_fill(behind, hole)
            if tokens == 1:
                got = token_select(scores, None, k, block_size, rows=rows, config=config).cpu()
            else:
                got = selected(scores, k, config, rows=rows, **how)
            assert torch.equal(got, expected)


@configs
@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_of_given_blocks(place32, block_size, config):
    """Scores, block ids and result that are slices of larger buffers, and no multiple of four entries apart."""
    blocks = (torch.arange(600, dtype=torch.int32, device=place32.device) * 3).expand(2, 3, 600)
    n = 600 * block_size
    scores, out = place32.nan(2, 4, n + 3), place32.nan(2, 4, 340, dtype=torch.int32)
    scores[:, 1:, 1 : n + 1] = place32.randn(2, 3, n)
    token_select(scores[:, 1:, 1 : n + 1], blocks, 333, block_size, out=out[:, 1:, 4:337], config=config)
    expected = place32.nan(2, 4, 340, dtype=torch.int32).cpu()
    expected[:, 1:, 4:337] = reference_token(scores[:, 1:, 1 : n + 1].cpu(), blocks.cpu(), 333, block_size)
    assert torch.equal(out.cpu(), expected)


def test_where_it_serves(place32):
    """Not where one program is as quick, nor what is longer than the blocks hold: as on a GPU without clusters."""
    assert not cluster.serves(place32.randn(1, 8, 2048), Config())
    assert not cluster.serves(place32.randn(32, 8, 8192), Config())
    assert not cluster.serves(place32.randn(1, 8, 32_768), Config(clusters=False))
    scores = place32.randn(1, 1, 1 << 19)
    assert not cluster.serves(scores, Config()) and cluster.serves(scores[..., : 1 << 17], Config())
    assert torch.equal(block_select(scores, 1024).cpu(), reference_block(scores.cpu(), 1024))


@pytest.mark.parametrize("config", [Config(), LONGEST])
def test_lists_that_no_grid_has_room_for(place32, config):
    """None at all, or too many: other kernels take these."""
    none = place32.randn(0, 2, 20_000)
    assert not cluster.serves(none, config)
    assert block_select(none, 99, config=config).shape == (0, 2, 99)
    many = place32.randn(1, 1 << 16, 9)
    assert not cluster.serves(many, config)
    assert torch.equal(block_select(many, 3, config=config).cpu(), reference_block(many.cpu(), 3))


def test_first_launched_under_capture(place32):
    """Compiled and loaded while a step is captured."""
    scores = place32.randn(1, 2, 20_000)
    forget_kernels()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    out = torch.empty(1, 2, 99, dtype=torch.int32, device=place32.device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=side):
        block_select(scores, 99, out=out)
    scores.copy_(scores.roll(5, -1))
    graph.replay()
    assert torch.equal(out.cpu(), reference_block(scores.cpu(), 99))


def test_behind_scores_in_a_graph(place32):
    """Replayed for other queries and lengths: scores and selection overlap, and guesses are by what is there now."""
    given = Case(blocks=700, block_size=64, heads=8).make(place32)
    scores, out = torch.empty(3, 8, 700 * 64, device="cuda"), torch.empty(3, 8, 999, dtype=torch.int32, device="cuda")

    def step():
        token_score(**given, block_ids=None, out=scores, fill=False)
        token_select(scores, None, 999, 64, rows=given["rows"], out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for sealed in ([700, 350, 0], [1, 600, 20], [699, 30, 700]):
        given["q"].copy_(given["q"].roll(1, -1) * 3)
        given["rows"][:, 1] = 64 * torch.tensor(sealed, device="cuda")
        scores.fill_(math.nan)
        graph.replay()
        assert torch.equal(out.cpu(), reference_token(scores.cpu(), None, 999, 64, rows=given["rows"].cpu()))


def test_in_threads_that_are_new_to_the_gpu(place32):
    """They have no context yet. One compiles the kernel, the next one finds it."""
    scores, found = place32.randn(1, 2, 20_000), place32.nan(2, 1, 2, 99, dtype=torch.int32)
    forget_kernels()
    for out in found:
        thread = threading.Thread(target=block_select, args=(scores, 99), kwargs={"out": out})
        thread.start()
        thread.join()
    assert cluster.serves(scores, Config()), "it was loaded"
    expected = reference_block(scores.cpu(), 99)
    assert torch.equal(found.cpu(), torch.stack((expected, expected)))
