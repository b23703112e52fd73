"""``model.generate(..., custom_generate="<this repository>", trust_remote_code=True)``: sparse decoding by hf-sparsekv.

Works on any model that hf-sparsekv serves, whatever its attention implementation: that is set for the call and put
back. Works as well in a model's own repository, as ``custom_generate/`` beside its weights.
"""

import hf_sparsekv


def generate(inputs=None, *, model, sparse_config=None, offload=None, optimize=None, **kwargs):
    """``model.generate()`` with a new sparse cache.

    Args:
        inputs, kwargs: what ``generate()`` takes: ``streamer``, ``assistant_model``, ``past_key_values``, ...
        model: handed over by transformers.
        sparse_config: a preset's name (``"fast"``, ``"accurate"``), a configuration, or ``None`` for the defaults.
        offload: ``True`` keeps keys and values in host memory.
        optimize: ``None`` captures decode steps if the model is on a GPU.
    """
    with hf_sparsekv.sparse(model, sparse_config, offload=offload, optimize=optimize):
        return type(model).generate(model, inputs, **kwargs)
