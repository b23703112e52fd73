"""What a layer knows of its cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cache import SparseCache


class Owned:
    """A layer that belongs to a cache, known weakly: without a cycle its memory is free as soon as nobody uses it."""

    @property
    def owner(self) -> SparseCache:
        """The cache."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the cache that this layer belongs to does not exist any more")
        return owner

    @owner.setter
    def owner(self, cache: SparseCache) -> None:
        self._owner = weakref.ref(cache)

    def __reduce__(self):
        raise TypeError(
            "sparse caches cannot be pickled: write one to a file with cache.save(path), or copy it with "
            "copy.deepcopy(cache)"
        )
