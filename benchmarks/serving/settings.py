"""Settings that all systems of a comparison share: the model, the bytes for keys and values, the rows."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from hf_sparsekv_config.serving import ServingConfig

from ..shapes import kv_bytes


@dataclass(frozen=True)
class Settings:
    """How a system is set up.

    Args:
        model: a known shape, or a model's name or path (its configuration only: weights are random).
        config: of its decoder.
        dtype: ``bfloat16`` ...
        kv_gpu: bytes of GPU memory for keys and values, and what is kept to choose among them.
        kv_host: bytes of host memory for those that do not stay there; systems that offload only.
        max_rows: requests that decode together at most.
        max_length: tokens of a prompt and its answer at most.
        chunk: tokens of a prompt in one forward pass (SparseServe's baselines: 2,048).
        prefill_ms: of prompts between two steps, where they are read in layer segments (``ServingConfig``).
        kv: ``random``: keys and queries are the model's own; ``replayed``: they imitate recorded ones (sparse systems).
    """

    model: str
    config: PreTrainedConfig
    dtype: str
    kv_gpu: int
    kv_host: int
    max_rows: int
    max_length: int
    chunk: int = 2048
    prefill_ms: float = ServingConfig.prefill_ms
    kv: str = "random"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return kv_bytes(self.config, 1, 1, 4 if self.dtype == "float32" else 2)

    @property
    def gpu_tokens(self) -> int:
        """Tokens whose keys and values fit the GPU.

        Raises:
            ValueError: not even one request of :attr:`max_length`.
        """
        tokens = self.kv_gpu // self.token_bytes
        if tokens < self.max_length:
            raise ValueError(
                f"{self.kv_gpu / 1e9:.1f} GB hold {tokens} tokens of keys and values, a request may have "
                f"{self.max_length}: give more with --kv-gb, or clip shorter"
            )
        return tokens
