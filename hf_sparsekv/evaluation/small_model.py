"""The name that :mod:`hf_sparsekv.small_model` had: scripts that import from here go on running."""

from ..small_model import SMALL_MODEL_NAME, fetch_small_model, is_fetched, small_model_path

__all__ = ["SMALL_MODEL_NAME", "fetch_small_model", "is_fetched", "small_model_path"]
