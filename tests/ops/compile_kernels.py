"""Compile every kernel for sm_90, without a GPU: the interpreter does not see what the compiler refuses.

``python tests/ops/compile_kernels.py`` calls the operators' kernels with tensors in host memory, of the shapes that a
model's step has, and lets Triton translate what they launch instead of launching it: to its GPU dialect, where types,
tuples and pipelines have been checked. With ``--stats`` it compiles them to the end (a minute) and prints each one's
registers, spilled bytes and shared memory: what a change of a kernel may not make worse. ``--arch 89`` does so for
another architecture, with the tiles that it gets there (80, 89, 90, 100, 120). ``--table docs/kernels.csv`` writes
these figures for all of them. ``--only small_layers`` makes some of the calls alone.

With ``--stats`` and ``--table`` kernels in CUDA C++ are compiled, too (``--only in_cuda``), for GPUs that have what
they need, by NVRTC (``nvidia-cuda-nvrtc``, ``cuda-bindings``). Where it is not installed, the table keeps their rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent / "selection"))  # whose cases are used here

import torch
import triton
from decode_cases import Case as Decode
from decode_cases import in_codes, in_pages
from operators import BY_NAME
from places import Place
from storage_operators import Seal, SealRange
from test_label_scores import Case as Labels
from test_mass_select import Case as Mass
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from hf_sparsekv import ops
from hf_sparsekv.ops import _cuda, _device, _overlap
from hf_sparsekv.ops._prompts import key_means
from hf_sparsekv.ops.attention.block_attention.config import Config as Blocks
from hf_sparsekv.ops.attention.block_attention.triton import block_attention
from hf_sparsekv.ops.attention.latent_rope.triton import latent_rope
from hf_sparsekv.ops.attention.new_tokens.triton import new_tokens
from hf_sparsekv.ops.attention.prompt_attention.triton import prompt_attention
from hf_sparsekv.ops.attention.qk_rope.triton import qk_rope
from hf_sparsekv.ops.attention.sparse_decode import cluster as decode
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.layers.add_norm.triton import add_norm
from hf_sparsekv.ops.layers.experts import Gate, Mxfp4
from hf_sparsekv.ops.layers.experts.prompts import between, unpack
from hf_sparsekv.ops.layers.experts.triton import experts
from hf_sparsekv.ops.layers.gated.triton import gated
from hf_sparsekv.ops.layers.gated_delta_step.triton import gated_delta_step
from hf_sparsekv.ops.layers.mamba2_step.triton import mamba2_step
from hf_sparsekv.ops.layers.quantised_linear import lookup
from hf_sparsekv.ops.layers.quantised_linear.reference import FP8, QuantisedWeight
from hf_sparsekv.ops.layers.quantised_linear.triton import quantised_linear
from hf_sparsekv.ops.layers.route.triton import route
from hf_sparsekv.ops.layers.small_linear.triton import small_linear
from hf_sparsekv.ops.selection.block_score.triton import block_score
from hf_sparsekv.ops.selection.mass_select import cluster as mass_clusters
from hf_sparsekv.ops.selection.mass_select.reference import LENGTHS, TOTALS
from hf_sparsekv.ops.selection.mass_select.triton import mass_select
from hf_sparsekv.ops.selection.partial_sums import PARTS, PartialSums
from hf_sparsekv.ops.selection.prompt_choice.triton import prompt_choice
from hf_sparsekv.ops.selection.prompt_mass.triton import prompt_mass
from hf_sparsekv.ops.selection.query_predict.triton import query_predict
from hf_sparsekv.ops.selection.query_ring.triton import push
from hf_sparsekv.ops.selection.token_score import labels
from hf_sparsekv.ops.selection.token_score.triton import token_score
from hf_sparsekv.ops.selection.topk_select import cluster
from hf_sparsekv.ops.selection.topk_select.config import Config
from hf_sparsekv.ops.selection.topk_select.triton import block_select, token_select
from hf_sparsekv.ops.storage.append.triton import append
from hf_sparsekv.ops.storage.begin_step.triton import begin_step
from hf_sparsekv.ops.storage.block_copy.triton import block_copy, gather_blocks
from hf_sparsekv.ops.storage.device_tokens import TokenSlots
from hf_sparsekv.ops.storage.device_tokens.triton import bring_tokens, locate_tokens, young_tokens
from hf_sparsekv.ops.storage.pack.triton import pack
from hf_sparsekv.ops.storage.place_tokens.triton import place_tokens
from hf_sparsekv.ops.storage.quantise.reference import quantise as quantised
from hf_sparsekv.ops.storage.quantise.triton import quantise
from hf_sparsekv.ops.storage.residency import PageState
from hf_sparsekv.ops.storage.residency.triton import residency
from hf_sparsekv.ops.storage.seal.triton import seal, seal_range

ARCHITECTURES = (80, 89, 90, 100, 120)
MISSING = "NVRTC is not installed (nvidia-cuda-nvrtc, cuda-bindings): kernels in CUDA C++"


class Chip:
    """Triton's questions to a driver before it launches."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def place() -> Place:
    return Place("cpu", torch.bfloat16)


def sparse_decodes() -> None:
    usual = Decode(batch=1, group=4, dk=128, dv=128, block_size=64, cap=3, chosen=2)
    latents = Decode(batch=1, heads=1, group=20, dk=576, dv=512, block_size=64, cap=3, chosen=2, latents=True)
    for granularity in ("token", "block", "all"):
        made = usual.make(place(), granularity)
        for args, named in (made,) if granularity == "all" else (made, in_pages(place(), *made)):
            args, named = in_codes(args, named)
            sparse_decode(*args, **named, from_host=torch.zeros(1, usual.heads, dtype=torch.int64))
    args, named = replace(usual, batch=20).make(place(), "all")  # few parts each
    sparse_decode(*args, **named)
    for case in (usual, latents):
        for batch in (1, 3):
            args, named = replace(case, batch=batch, span=4, cap=9).make(place(), "token")
            sparse_decode(*args, **named)
        for granularity in ("token", "all"):
            args, named = replace(case, batch=3).make(place(), granularity)
            sparse_decode(*args, **named)
        for granularity in ("token", "block", "all"):
            args, named = case.make(place(), granularity)
            sparse_decode(*args, **named)
            if granularity != "all":
                args, named = in_pages(place(), args, named)
                counts = torch.zeros(2, 1, case.heads, dtype=torch.int64)
                sparse_decode(
                    *args, **named, attended=counts[0], from_host=counts[1], lse=torch.empty(args[0].shape[:2])
                )


def recent_tokens() -> None:
    """A new token, a full block of the ring, a query."""
    latents = {"batch": 1, "heads": 1, "sealed": (1,), "dk": 576, "dv": 0, "channels": 128, "block_size": 64}
    usual = Seal(batch=1, sealed=(3,), dk=128, dv=128, channels=32, block_size=64)
    for span in (None, 4):
        seal(**BY_NAME["seal"].call(place(), replace(usual, span=span)))
        of_prompt = SealRange(8200, 127, 160, heads=8, dk=128, dv=128, channels=32, block_size=64, sinks=16, span=span)
        seal_range(**BY_NAME["seal.seal_range"].call(place(), of_prompt))
    seal(**BY_NAME["seal"].call(place(), replace(usual, coded=True)))
    quantise(place().randn(3, 8, 64, 256), 128)
    seal(**BY_NAME["seal"].call(place(), Seal(**latents)))
    seal(**BY_NAME["seal"].call(place(), Seal(**latents, span=2)))
    k, near, valid = place().randn(1, 8, 1, 128), place().nan(1, 8, 72, 256), torch.ones(1, 1, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.int32)
    past = torch.ones(1, 2, dtype=torch.int32)[:, 0]
    append(k, k, None, near, past, 4)
    append(k, k, valid, near, past, 4)
    q, ring = place().randn(1, 32, 1, 128), place().randn(1, 32, 17, 128)
    push(q, None, past, ring, one, one.clone(), one.clone())
    push(q, valid, past, ring, one, one.clone(), one.clone())
    rows = torch.zeros(2, 1, 2, dtype=torch.int32)
    for some in (None, valid):
        for skip in (False, True):
            begin_step(rows[0], one, rows[1], some, block_size=64, recent=72, skip=skip)


def choices() -> None:
    """Scores of blocks and tokens, and the best of them."""
    for heads, group, dk in ((8, 4, 128), (1, 128, 576)):
        q, bounds, rows, block_table = list(BY_NAME["block_score"].call(place(), 1, heads, group, dk, 64).values())[:4]
        live = {"tokens": 64, "sinks": 4}
        for reduce in ("mean", "max"):
            block_score(q, bounds, rows, block_table, reduce, **live)
        block_score(q, bounds, rows, block_table, "mean", **live, fill=False)
    for n in (512, 20_000):
        block_select(torch.randn(1, 8, n), 64)
    blocks = torch.arange(1024, dtype=torch.int32).expand(1, 8, 1024)
    for n in (512, 1024):
        token_select(torch.randn(1, 8, n * 32), blocks[..., :n], 2048, 32)
    token_select(torch.randn(1, 1, 40_000), None, 17_000, 32)  # the most that the last step holds
    rows = torch.zeros(1, 2, dtype=torch.int32)
    block_select(torch.randn(1, 8, 512), 64, rows=rows, block_size=64)
    for n, k in ((512 * 32, 2048), (1024 * 32, 2048), (20_032, 10_000)):
        token_select(torch.randn(1, 8, n), None, k, 32, rows=rows)
    for group, width in ((4, 32), (20, 128)):
        given = BY_NAME["token_score"].call(place(), 1, 1, group, 128, width, 64, 6, 4, "mean")
        args, named = list(given.values())[:7], {"sinks": 4, "norms": given["norms"]}
        for reduce in ("mean", "max", "none"):
            token_score(*args, reduce, **named)
            token_score(*args[:6], None, reduce, **named)
            token_score(*args[:6], None, reduce, **named, fill=False)
            if reduce == "mean":
                token_score(args[0].float(), *args[1:], reduce, **named)


def masses() -> None:
    """Tokens up to a share of the mass, for attention that takes as many as there are."""
    latents = {"heads": 1, "group": 20, "dk": 576, "channels": 128}
    for shape in ({"group": 4, "dk": 128, "channels": 32}, latents, {"group_reduce": "sum"}):
        for more in ({}, {"softcap": 30.0, "learned_sink": True}):
            args, named = Mass(batch=1, n=9000, **shape, **more).make(place())
            totals = torch.zeros(len(TOTALS) + LENGTHS, dtype=torch.int64)
            mass_select(*args, **named, totals=totals)
            mass_select(*args, **named)
    usual = Decode(batch=1, group=4, dk=128, dv=128, block_size=64, cap=3, chosen=2)
    latent = Decode(batch=1, heads=1, group=20, dk=576, dv=512, block_size=64, cap=3, chosen=2, latents=True)
    for case in (usual, latent):
        args, named = case.make(place(), "token")
        sparse_decode(*args, **named, used=torch.ones(1, case.heads, dtype=torch.int32))


def pages() -> None:
    """Device pages, packed tokens, predicted queries."""
    for batch in (1, 2):
        state = PageState.empty(300, "cpu")
        state.set_table(0, torch.full((12, 2), -1, dtype=torch.int32))
        ids = torch.arange(3, dtype=torch.int32).expand(batch, 2, 3).contiguous()
        block_table = torch.arange(batch * 5, dtype=torch.int32).view(batch, 5)
        residency(ids, block_table, state, 0, 1)
    kv, ids = place().randn(10, 2, 16, 128), torch.arange(40, dtype=torch.int32).expand(2, 2, 40).contiguous()
    lists = [ids.clone(), ids.clone(), place().nan(2, 2, 40, 128), ids.clone()]
    pack(ids, kv, block_table, *lists)
    pack(ids, kv, block_table, *lists, enabled=state.enabled, counters=state.counters[:2])
    lanes = torch.tensor([[0, 16], [16, 64]], dtype=torch.int32)
    held = ids[0].clone(), ids[0].clone(), ids.clone(), ids[..., 0].clone(), lanes
    slots = TokenSlots(place().nan(2, 40, 128), *held)
    for used in (None, ids[..., 0].clone()):
        bring_tokens(ids, kv, block_table, slots, used=used)
        bring_tokens(ids, kv, block_table, slots, used=used, enabled=state.enabled, counters=state.counters[:2])
        locate_tokens(ids, slots.slots, lanes, block_table, 40, 16, used=used)
    one = slots._replace(slots=slots.slots[:1], now=slots.now[:1].contiguous(), lanes=lanes[:1].contiguous())
    for used in (None, ids[..., 0].clone()):
        bring_tokens(ids, kv, block_table[:1], one, used=used)
    young_tokens(slots.stamps[None], slots.now[None], lanes, 12)
    place_tokens(ids, ids, ids, 64)
    pairs = torch.zeros(4, 2, dtype=torch.int32)
    block_copy(kv, place().nan(4, 16, 128), pairs, torch.ones(1, dtype=torch.int32))
    codes, scales = quantised(kv, 64)
    block_copy(codes, place().nan(4, 16, 128), pairs, torch.ones(1, dtype=torch.int32), scales=scales, split=64)
    table = torch.zeros(1, 3, dtype=torch.int32)
    gather_blocks(kv, table, place().nan(1, kv.shape[1], 4, 16, 128))
    gather_blocks(codes, table, place().nan(1, kv.shape[1], 4, 16, 128), scales=scales, split=64)
    bring_tokens(ids, codes, block_table, slots, scales=scales, split=64)
    query_predict(**BY_NAME["query_predict"].call(place(), 1, 8, 17, 128, 16, 5))


def small_layers() -> None:
    """Norms, positions, linear layers and experts of a step."""
    x, weight = place().randn(1, 1, 2048), place().randn(2048)
    for norm in ((None, weight, 1e-6), (x, weight, 1e-6), (x, weight, 1e-6, True, weight, 1e-6)):
        add_norm(x, *norm)
    q, k, cos = place().randn(1, 1, 32, 128), place().randn(1, 1, 8, 128), place().randn(1, 1, 128)
    qk_rope(q, k, cos, cos)
    qk_rope(q, k, cos, cos, weight[:128], weight[:128], 1e-6, 1e-6)
    compressed, turns = place().randn(1, 1, 576), place().randn(1, 1, 64)
    for interleaved in (False, True):
        latent_rope(place().randn(1, 1, 20, 192 + 64), compressed, turns, turns, weight[:512], 1e-6, interleaved)
    for activation in ("silu", "gelu_tanh"):
        gated(x, x, activation)
    up = place().randn(3072, 2048)
    for rows in (1, 8):
        for bias in (None, place().randn(3072)):
            for activation in (None, "silu", "gelu_tanh"):
                small_linear(place().randn(rows, 2048), up, bias, activation)
    for dtype in (torch.int8, FP8)[: 1 + (triton.runtime.driver.active.get_current_target().arch >= 89)]:
        codes = torch.empty(3072, 2048, dtype=dtype)
        for scales in ((3072, 1), (24, 16)):
            weight = QuantisedWeight(codes, torch.empty(scales))
            quantised_linear(place().randn(1, 2048), weight, up[:, 0].contiguous())
    down = place().randn(1, 2048, 1536)  # of GLM-4.7-Flash
    for n in (1, 64):
        chosen = torch.zeros(n, 4, dtype=torch.int64), torch.rand(n, 4)
        experts(place().randn(n, 2048), *chosen, up[None], down, Gate())
        of_gpt_oss = Gate("silu", True, True, 1.702, 7.0, 1.0), torch.empty(1, 5760), torch.empty(1, 2880)
        turned = [torch.empty(1, 2880, rows, dtype=torch.bfloat16).transpose(1, 2) for rows in (5760, 2880)]
        codes = [torch.empty(1, rows, 1440, dtype=torch.uint8) for rows in (5760, 2880)]
        coded = [Mxfp4(one, torch.empty(*one.shape[:2], 90, dtype=torch.uint8)) for one in codes]
        for weights in (turned, coded):
            experts(place().randn(n, 2880), *chosen, *weights, *of_gpt_oss)
    unpack(coded[1], x)
    between(place().randn(4, 5760), torch.zeros(4, dtype=torch.int64), of_gpt_oss[1], of_gpt_oss[0])
    tokens = place().randn(2, 512)
    named = {"groups": 4, "top_groups": 2, "normalise": True, "scale": 1.0}
    route(tokens, place().randn(64, 512), place().randn(64), 4, **named)
    for some in (False, True):
        gated_delta_step(**BY_NAME["gated_delta_step"].call(place(), 1, 16, 2, 128, 128, 4, some))
        mamba2_step(**BY_NAME["mamba2_step"].call(place(), 1, 128, 8, 64, 128, 4, 8, some, some))


def in_cuda() -> None:
    """Operators that ask for kernels in CUDA C++, and go on without."""
    for batch, n in ((1, 32_768), (4, 32_768), (8, 32_768), (8, 65_536)):  # clusters of 8, 4, 2 and 2 blocks
        cluster.serves(SimpleNamespace(shape=(batch, 8, n), dtype=torch.float32, is_cuda=True), Config())
    usual = [(block_size, group, 32, "max") for block_size in (64, 16) for group in (1, 4, 8)]
    wide = [(64, 2, 64, "max"), (16, 2, 64, "max"), (16, 16, 64, "max"), (64, 20, 128, "max"), (16, 20, 128, "mean")]
    for block_size, group, width, reduce in (*usual, *wide, (64, 16, 32, "max"), (64, 4, 32, "mean")):
        given = BY_NAME["token_score"].call(place(), 1, 1, group, 128, width, block_size, 6, None, reduce)
        del given["block_ids"]
        labels.score_all(**given, fill=True)
    for width, group, block_size in (
        *((16, 4, 64), (16, 4, 16), (16, 7, 64), (32, 4, 64), (32, 8, 64)),
        *((64, 1, 64), (64, 4, 64), (64, 8, 64)),  # heads of 256
    ):
        shape = {"width": width, "group": group, "block_size": block_size}
        given = Labels(**shape, reduce="none", norms=True, batch=1).make(place())
        near = torch.zeros(1, 2, 80, 2 * given["q"].shape[2], dtype=given["q"].dtype)
        out = torch.empty(1, 2 * group, block_size * given["block_table"].shape[1])
        for sums in (None, PartialSums(near, None, 0.1)):
            labels.score_all(**given, out=out, fill=False, sums=sums)
    for batch, group, sink in (
        (1, 4, False),
        (4, 4, False),
        (8, 4, False),
        (32, 4, False),
        (1, 8, False),
        (1, 7, True),
    ):
        shape = {"batch": batch, "heads": 8, "group": group, "n": 800, "learned_sink": sink}
        args, named = Mass(**shape, rows=((830, 800),) * batch).make(place())
        sums = PartialSums(args[3], None, 0.1, torch.empty(8 * batch, 9, group, PARTS, 2))
        named = {name: named[name] for name in ("sinks", "sink_logits", "threshold", "min_tokens", "max_tokens")}
        one = torch.empty(batch, 8, dtype=torch.int32)
        written = {"ids": torch.empty(batch, 8, 800, dtype=torch.int32), "count": one, "mass": one.float(), "cut": one}
        mass_clusters.select_clusters(args[0], sums, args[4], **named, **written, totals=None)
    usual = [(batch, 4, 128, "") for batch in (1, 4, 8, 32)]  # clusters of 8, 4, 2 and 1 blocks
    usual += [(1, 4, 128, "paged"), (1, 8, 128, ""), (1, 8, 64, "")]
    usual += [(batch, 4, 128, "coded") for batch in (1, 4, 8, 32)]
    usual += [(1, 4, 128, "paged coded"), (1, 8, 128, "coded"), (1, 8, 64, "coded"), (1, 4, 128, "coded half")]
    for batch, group, dim, kind in usual:
        where = Place("cpu", torch.float16 if "half" in kind else torch.bfloat16)
        case = Decode(batch=batch, heads=8, group=group, dk=dim, dv=dim, block_size=64, span=4)
        args, named = case.make(where, "token")
        if "paged" in kind:
            args, named = in_pages(where, args, named)
        if "coded" in kind:
            args, named = in_codes(args, named)
        names = ("sinks", "scale", "sink_logits", "pages", "means", "mean_tokens", "columns", "scales")
        about = {name: named.get(name) for name in names}
        none = dict.fromkeys(("attended", "from_host", "lse"))
        decode.attend_clusters(*args, **about, **none, clusters=None, out=torch.empty_like(args[0]))
    for outputs, inputs in ((12_288, 4096), (4096, 12_288)):  # inputs of one unit for each warp, or of several
        codes, scales = torch.empty(outputs, inputs // 2, dtype=torch.uint8), torch.empty(outputs, inputs // 64)
        weight = QuantisedWeight(codes, scales, torch.empty(16))
        for rows in (1, 4, 8, 16):
            x, out = place().randn(rows, inputs), place().nan(rows, outputs)
            lookup.multiply(x, weight, None, out)
        for kind in (torch.int8, FP8):
            eight = QuantisedWeight(torch.empty(outputs, inputs).to(kind), torch.empty(outputs, 1))
            for rows in (8, 16):
                x, out = place().randn(rows, inputs), place().nan(rows, outputs)
                lookup.multiply(x, eight, None, out)


def prompts() -> None:
    """Sparse prompts: estimates, choice and attention; some tokens' attention to each other."""
    for heads, dim in ((8, 128), (1, 256)):
        q, k = (place().randn(1, 256, n * heads, dim).transpose(1, 2) for n in (4, 1))
        for start in (None, torch.ones(1, dtype=torch.int32)):
            pooled, exact = prompt_mass(q, k, key_means(k), 0.1, 0, start)
            lists = prompt_choice(pooled, exact, torch.ones(1, 4 * heads), 0, 256, 256, start)
            block_attention(q, k, k, *lists[:2], 0.1, 0, start)
        if triton.runtime.driver.active.get_current_target().arch == 90:  # tensor descriptors: elsewhere it aborts
            block_attention(q, k, k, *lists[:2], 0.1, 0, config=Blocks(descriptors=True) if dim == 128 else None)
        some, new = q[:, :, :4], k[:, :, :4]
        block_attention(q, k, k, *lists[:2], 0.1, 0, softcap=30.0, sinks=torch.zeros(4 * heads))
        prompt_attention(q, k, k, 0.1)
        columns = torch.ones(1, 256, dtype=torch.bool)
        prompt_attention(q, k, k, 0.1, columns, window=99, softcap=30.0, sinks=torch.zeros(4 * heads))
        prompt_attention(q, k, k, 0.1, columns, chunk=99, origin=torch.zeros(1, dtype=torch.int32))
        for softcap in (None, 30.0):
            new_tokens(some, new, new, some.float(), some[..., 0].float(), 0.1, softcap)


CASES = (sparse_decodes, recent_tokens, choices, masses, pages, small_layers, prompts)


@cache
def nvrtc():
    """NVIDIA's compiler of CUDA C++; ``None`` where it is not installed."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the bindings may be there without it
    except (ImportError, RuntimeError):
        return None
    return nvrtc


def cuda_kernels() -> set[str]:
    """Names of the kernels in CUDA C++."""
    sources = Path(ops.__path__[0]).rglob("*.cu")
    return {name for path in sources for name in re.findall(r"(\w+_kernel)\(", path.read_text())}


def ptxas_usage(log: str) -> dict[str, int]:
    """The output of ``ptxas -v`` for a kernel, in bytes but for registers. It omits memory of which there is none.

    Raises:
        ValueError: it says nothing.
    """
    says = {
        "REG": r"Used (\d+) registers",
        "STACK": r"(\d+) bytes stack frame",
        "SPILL": r"(\d+) bytes spill stores",
        "LOCAL": r"(\d+) bytes lmem",
        "shared": r"(\d+) bytes smem",
    }
    found = {name: max(map(int, re.findall(words, log)), default=0) for name, words in says.items()}
    if not found["REG"]:
        raise ValueError(f"nothing of ptxas -v in {log!r}")
    return found


def compile_in_cuda(arch: int) -> None:
    """Compile what :func:`in_cuda` asks for, and print what each kernel takes and its macros."""

    def load(where, package: str, file: str, name: str, least: int = _cuda.CLUSTERS, **defined: float) -> None:
        if arch < 10 * least:
            return
        _, log = _cuda.compile_file(nvrtc(), arch, package, file, defined, "--ptxas-options=-v")
        print(json.dumps({"kernel": name, **ptxas_usage(log), "macros": defined}))

    with mock.patch.object(_cuda, "load", load):
        in_cuda()


def usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"{os.getpid()}.cubin"
    path.write_bytes(cubin)
    told = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    path.unlink()
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


def translate(src, target, options, **_) -> object:
    """The part of ``triton.compile`` before LLVM."""
    backend = make_backend(target)
    options = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages, metadata = {}, dict(options.__dict__, target=target)
    backend.add_stages(stages, options, src.language)
    module = src.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return module


def write_table(path: Path) -> None:
    """One line a launch and architecture: its kernel and which of that kernel's launches it is, from 0."""
    columns = {"registers": "REG", "stack_bytes": "STACK", "local_bytes": "LOCAL", "shared_bytes": "shared"}
    cases, kept, rows = [case.__name__ for case in CASES], [], []
    if nvrtc() is not None:
        cases.append(in_cuda.__name__)
    else:
        print(f"{MISSING} keep their rows", file=sys.stderr)
        if path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if row[1] in cuda_kernels()]
    for arch in sorted(ARCHITECTURES):
        command = [sys.executable, __file__, "--stats", "--arch", str(arch), "--only", *cases]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        launches: Counter[str] = Counter()
        for line in map(json.loads, told.splitlines()):
            name = line["kernel"]
            rows.append([arch, name, launches[name], *(line[key] for key in columns.values())])
            launches[name] += 1
        rows += [row for row in kept if row[0] == str(arch)]
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["sm", "kernel", "launch", *columns])
        out.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stats", action="store_true")
    parser.add_argument("--arch", type=int, default=90, choices=ARCHITECTURES)
    names = [case.__name__ for case in (*CASES, in_cuda)]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="these calls instead of all")
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        write_table(given.table)
        return
    stats = given.stats
    triton.runtime.driver.set_active(Chip(given.arch))
    _device.gpu_of = lambda t: replace(_device.H200, shared_bytes=_device.SHARED[given.arch])
    if given.arch >= 90:  # as there
        _overlap.overlap = lambda t: {"PDL": True, "launch_pdl": True}
    run, names = JITFunction.run, set()

    def compile_only(self, *args, grid, warmup, **named):
        if not stats:
            self.device_caches[0]  # makes the binder, which sets what compiles
            self.compile = translate
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        names.add(self.fn.__name__)
        if stats:
            told = {**usage(kernel.asm["cubin"]), "shared": kernel.metadata.shared}
            print(json.dumps({"kernel": self.fn.__name__, **told}))

    JITFunction.run = compile_only
    for case in CASES:
        if case.__name__ in given.only:
            case()
    if stats and in_cuda.__name__ in given.only:
        if nvrtc() is None:
            print(f"{MISSING} are left out", file=sys.stderr)
        else:
            compile_in_cuda(given.arch)
    if not stats:
        print(*sorted(names), sep="\n")


if __name__ == "__main__":
    main()
