"""``sparsekv``, a model type of lm-evaluation-harness: any of its tasks with any of our caches.

    hf-sparsekv lm-eval --model sparsekv --model_args "pretrained=NAME,cache=token:token_budget=512" --tasks ...

lm-eval knows no plug-ins: importing this module registers the type; ``hf-sparsekv lm-eval`` is ``lm_eval`` after it.
"""

from __future__ import annotations

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from hf_sparsekv.attention.tap import QueryTap
from hf_sparsekv.cache_name import generate_over

from .cache_specs import parse_cache
from .prefix import Prefix, attention, forced_steps, full_attention, pass_columns, prefill


@register_model("sparsekv")
class SparseKVLM(HFLM):
    """lm-eval's transformers model with a sparse cache.

    Prefill is exact, so caches differ only after it. Contexts are prefilled; continuations whose likelihood is asked
    for are fed token by token. Decoding them is slower than lm-eval's own single pass over both.

    Args:
        pretrained: a model's name, path or object.
        cache: a spec (see :mod:`.cache_specs`) with ``;`` between options, because lm-eval splits at commas.
        capture: replay captured decode steps (GPU).
        kwargs: those of lm-eval's ``hf``.

    Raises:
        ValueError: a wrong spec, or an encoder-decoder model.
    """

    def __init__(self, pretrained, cache: str = "token", capture: bool = False, **kwargs) -> None:
        self.spec = parse_cache(str(cache).replace(";", ","))
        if isinstance(pretrained, str):
            kwargs.setdefault("attn_implementation", "sparsekv")
        super().__init__(pretrained=pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError("sparse caches serve decoder-only models")
        QueryTap(self.model).install()  # as long as there is the model
        if capture:
            from hf_sparsekv.cuda_graph.optimize import optimize

            optimize(self.model)

    def _model_generate(self, context, max_length: int, stop: list[str], **generation_kwargs) -> torch.Tensor:
        cache = self.spec.make(self.model.config)
        if cache is not None:
            generation_kwargs |= generate_over(cache)
        name = full_attention(self.model) if cache is None else "sparsekv"
        mask = generation_kwargs.get("attention_mask")
        columns = pass_columns(self.model, Prefix(context, [], None, None, None if mask is None else mask.bool()), name)
        if (n := context.shape[1]) > columns:
            generation_kwargs["prefill_chunk_size"] = -(-n // -(-n // columns))  # no last pass of a single column
        with attention(self.model, name):
            return super()._model_generate(context, max_length, stop, **generation_kwargs)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
        if self.spec.full:
            with attention(self.model, full_attention(self.model)):
                return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        by_context: dict[tuple[int, ...], list[int]] = {}
        parts = []
        for index, (_, context, continuation) in enumerate(requests):
            whole = (context + continuation)[-(self.max_length + 1) :]
            cut = max(1, len(whole) - len(continuation))
            parts.append(whole[cut:])
            by_context.setdefault(tuple(whole[:cut]), []).append(index)
        answers: list[tuple[float, bool] | None] = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="loglikelihood, sparse steps")
        for context, indices in by_context.items():
            prefix = prefill(self.model, torch.tensor([context], device=self.device))
            for index in indices:
                answers[index] = self._score(prefix, parts[index])
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                bar.update()
        bar.close()
        return answers

    def _score(self, prefix, continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether it is the greedy one."""
        target = torch.tensor([continuation], device=self.device)
        cache, logits = prefix.start(self.model, self.spec.make(self.model.config))
        rows = [logits.float(), *forced_steps(self.model, cache, target[:, :-1])]
        logp = torch.stack(rows, 1).log_softmax(-1)  # [1, n, vocab]
        found = logp.gather(-1, target[..., None]).sum()
        return float(found), bool((logp.argmax(-1) == target).all())
