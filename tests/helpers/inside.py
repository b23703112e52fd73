"""Limits that tests make small, and parts that they replace: names that modules keep to themselves.

One place for all tests, so that a module may name its own things otherwise and one line here follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import nn

from hf_sparsekv.attention import flash_4, indexer, indices, mla, parts, pooled_indexer, sparse_prompt
from hf_sparsekv.cuda_graph import late_stop
from hf_sparsekv.kv import sealing
from hf_sparsekv.kv.block_ids import BlockIds
from hf_sparsekv.kv.pool import BlockPool
from hf_sparsekv.layers import kinds
from hf_sparsekv.offload import host_limit, host_pages, host_pool
from hf_sparsekv.ops import _cuda, _device
from hf_sparsekv.policies import registry
from hf_sparsekv.serving.grammar import Constraint, Grammars
from hf_sparsekv_eval import prefix, ruler


def attention_of(model: Any) -> str:
    """The attention implementation of a model, or of its configuration."""
    return getattr(model, "config", model)._attn_implementation


def hooks_of(module: nn.Module) -> dict:
    """Hooks that run before a module's forward; a dict that can be changed."""
    return module._forward_pre_hooks


def later_hooks_of(module: nn.Module) -> dict:
    """Hooks that run after a module's forward."""
    return module._forward_hooks


def keep_busy(cycles: int) -> None:
    """The GPU's current stream has so many cycles to wait."""
    torch.cuda._sleep(cycles)


def of_config(kind: type, config: Any, attention: str) -> nn.Module:
    """A model of random weights."""
    return kind._from_config(config, attn_implementation=attention)


LATENT_BYTES = mla._PIECE  # of keys and values that are expanded at once


def latent_pieces(patch: MonkeyPatch, size: int, mask: int | None = None) -> None:
    """So many bytes of keys and values are expanded from latents at once, and so many of a mask made."""
    patch.setattr(mla, "_PIECE", size)
    if mask is not None:
        patch.setattr(mla, "PIECE_BYTES", mask)


def score_pieces(patch: MonkeyPatch, size: int) -> None:
    """So many bytes of an indexer's scores at once."""
    patch.setattr(indexer, "_BYTES", size)
    patch.setattr(pooled_indexer, "_BYTES", size)


def score_calls(patch: MonkeyPatch) -> list[tuple]:
    """Pieces that an indexer scores from now on."""
    found, piece = [], indexer._piece
    patch.setattr(indexer, "_piece", lambda *given: found.append(given) or piece(*given))
    return found


def chosen_pieces(patch: MonkeyPatch, size: int) -> None:
    """So many bytes of the keys and values that an indexer has chosen at once."""
    patch.setattr(indices, "_BYTES", size)


def sparse_slabs(patch: MonkeyPatch, size: int) -> None:
    """So many bytes of a sparse prompt's scores at once."""
    patch.setattr(sparse_prompt, "_BYTES", size)


def sealed_pieces(patch: MonkeyPatch, size: int) -> None:
    """So many bytes of a prompt are sealed at once."""
    patch.setattr(sealing, "_SEAL_BYTES", size)


def no_plans_yet(patch: MonkeyPatch) -> None:
    """No plan of cuDNN's has been made, and none has nearly paid."""
    patch.setattr(parts, "_work", parts._Work())


def users_of_flash_4() -> int:
    """Contexts that are open."""
    return flash_4._uses.now


def runs_ahead(patch: MonkeyPatch) -> None:
    """Loops run a step ahead of the device, as they do on a GPU."""
    patch.setattr(late_stop, "_runs_ahead", lambda device: True)


def own_methods(patch: MonkeyPatch) -> dict[str, Any]:
    """Methods and kinds of layers that are registered from now on are gone after the test; all methods there are."""
    patch.setattr(kinds, "_KINDS", [*kinds._KINDS])
    patch.setattr(registry, "_METHODS", dict(registry._METHODS))
    return registry._METHODS


def grow(pool: BlockPool, blocks: int) -> None:
    """Room for so many."""
    pool._grow(blocks)


def grow_of_pools() -> Callable:
    """How pools grow."""
    return BlockPool._grow


def grows_by(patch: MonkeyPatch, how: Callable) -> None:
    """Pools grow by ``how(pool, blocks)``."""
    patch.setattr(BlockPool, "_grow", how)


def kernel_is(patch: MonkeyPatch, module: ModuleType, made: Any) -> None:
    """A module's kernel in CUDA C++ is what ``made`` gives."""
    patch.setattr(module, "_kernel", made)


def machine_of(patch: MonkeyPatch, root: Path) -> None:
    """Files below ``root`` say what memory there is, and other tests' caches take none."""
    patch.setattr(host_limit, "_ROOT", root)
    patch.setattr(host_limit, "_budgets", weakref.WeakSet())


def cpus_are(patch: MonkeyPatch, count: int, piece: int | None = None) -> None:
    """This process may run on so many, each of which touches ``piece`` bytes at a time."""
    patch.setattr(host_pages, "_own_cpus", lambda: set(range(count)))
    if piece is not None:
        patch.setattr(host_pages, "_TOUCH_PIECE", piece)


def small_reservations(patch: MonkeyPatch) -> None:
    """Host memory is reserved for twice what is asked for, no more."""
    patch.setattr(host_pool, "_MIN_RESERVE", 0)
    patch.setattr(host_pool, "_RESERVE_AHEAD", 2)


def forget_method(name: str) -> None:
    """A method that was registered is unknown again."""
    del registry._METHODS[name]


def facts_are_asked_again() -> None:
    """Nothing that a driver has told is remembered."""
    _device._told.cache_clear()


SHORTEST = prefix._LEAST  # tokens of a piece of a prompt in evaluations


def short_pieces(patch: MonkeyPatch, tokens: int) -> None:
    """Evaluations read prompts in pieces of so many tokens at least."""
    patch.setattr(prefix, "_LEAST", tokens)


def other_texts() -> None:
    """RULER's sentences and words are read again."""
    ruler._sentences.cache_clear()
    ruler._words.cache_clear()


def program_of(grammars: Grammars) -> Any:
    """The process that compiles grammars; None: there is none."""
    return grammars._program


def compiled_by(one: Grammars | Constraint) -> Any:
    """Grammars that are kept, by their text; the one that a constraint follows."""
    return one._compiled


def compiling(grammars: Grammars) -> dict:
    """Grammars that are being compiled, by their text."""
    return grammars._compiling


def no_words(constraint: Constraint) -> torch.Tensor:
    """Room for the bits of the allowed tokens."""
    return torch.zeros_like(constraint._end)


def compiles_by(patch: MonkeyPatch, grammars: Grammars, how: Callable) -> None:
    """Grammars are compiled by ``how(plain, *asked)``."""
    patch.setattr(grammars, "_made", partial(how, grammars._made))


def forget_kernels() -> None:
    """Kernels in CUDA C++ are loaded again."""
    _cuda._load.cache_clear()


def kernels_loaded() -> int:
    """Kernels in CUDA C++ that were loaded so far."""
    return _cuda._load.cache_info().misses


def references_of(ids: BlockIds) -> Any:
    """How many own each block."""
    return ids._references


def free_of(ids: BlockIds) -> list[int]:
    """Blocks that nobody owns."""
    return ids._free
