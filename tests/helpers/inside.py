"""Limits that tests make small, and parts that they replace: names that modules keep to themselves.

One place for all tests, so that a module may name its own things otherwise and one line here follows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest import MonkeyPatch

from hf_sparsekv.attention import flash_4, indexer, indices, mla, parts, pooled_indexer, sparse_prompt
from hf_sparsekv.cuda_graph import late_stop
from hf_sparsekv.kv import sealing
from hf_sparsekv.kv.pool import BlockPool
from hf_sparsekv.offload import host_limit, host_pages, host_pool
from hf_sparsekv.ops import _device
from hf_sparsekv.policies import registry
from hf_sparsekv_eval import prefix, ruler

LATENT_BYTES = mla._PIECE  # of keys and values that are expanded at once


def latent_pieces(patch: MonkeyPatch, size: int, mask: int | None = None) -> None:
    """So many bytes of keys and values are expanded from latents at once, and so many of a mask made."""
    patch.setattr(mla, "_PIECE", size)
    if mask is not None:
        patch.setattr(mla, "_MASK_BYTES", mask)


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
    """Methods that are registered from now on are gone after the test; all that are known."""
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
