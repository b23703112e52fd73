"""Queries, latents and rotary parts of MLA, ready for the cache."""

from __future__ import annotations

from ..._dispatch import operator
from . import reference

__all__ = ["latent_rope"]

latent_rope = operator(reference.latent_rope, on="q")
