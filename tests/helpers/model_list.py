"""docs/models.md: transformers' own list of causal models, each built tiny and decoded sparsely.

    python tests/helpers/model_list.py                  # write the page (minutes on a CPU)
    python tests/helpers/model_list.py llama gemma3_text  # print the lines of some
    python tests/helpers/model_list.py --show llama     # with the whole error, where there is one

Each model type of ``MODEL_FOR_CAUSAL_LM_MAPPING`` gets a configuration of tiny sizes and random weights. Decoded are 12
tokens after a prompt of 150, greedily:

1. by transformers' own cache and attention;
2. by ``sparse(model)`` with a budget above the context: the same tokens, or it does not work;
3. by ``sparse(model)`` with a small budget, in which steps must be sparse;
4. the same by replayed steps: captured ones on a GPU, imitated ones without (tests/helpers/captured.py);
   A model with an indexer of its own chooses by it, in all of these.
5. by an engine: two requests together, and one that begins as an earlier one did. Each gets the tokens of generate()
   alone, or opening the engine says why not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from inside import attention_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from caches import SMALL
from captured import Imitation
from models import COMMON, MODELS, PAD, VOCAB
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_sparsekv import Engine, Sampling, ServingConfig, SparseCache, SparseConfig, TokenConfig, cache_source, sparse
from hf_sparsekv import transformers_compat as indexers
from hf_sparsekv.cuda_graph.runner import StepRunner

PAGE = Path(__file__).parents[2] / "docs/models.md"
WORKS, EAGER, WRONG, DENSE, REFUSED, FAILS, UNBUILT = (
    "works",
    "works, not captured",
    "works eagerly only",
    "nothing to make sparse",
    "refused",
    "does not work",
    "not built here",
)
SERVED, OTHER_TOKENS = "yes", "other tokens than alone"
# Why an engine serves a model not, by what its error says.
NOT_SERVED = {
    "attention and a state together": "layers of two kinds at once",
    "attend to their whole past": "nothing to make sparse",
    "keeps the positions of all tokens": "keeps positions of all rows",
    "is another one than alone": "masks its steps itself",
    "takes no position_ids": "counts positions by itself",
    "attend to later ones": "prompt tokens see later ones",
    "reads the keys and values itself": "reads the keys itself",
    "no list of": "layers of another structure",
    "counts its blocks from position 0": "counts blocks from position 0",
}
# Model types that are listed without a line of their own, by result and the engine's column.
LISTED = {
    (WORKS, SERVED): "**Work, and an engine serves them**:",
    (UNBUILT, ""): "**Not built here**:",
}
PROMPT, TOKENS = 150, 12
ASKED = (PROMPT, 8), (40, 8)  # tokens of prompts and answers that an engine has together
MOST = 50_000_000  # parameters
FULL = {**SMALL, "token_budget": 4096}
TIGHT = {**SMALL, "token_budget": 32, "tail": None}
BY_ITSELF = {name: value for name, value in SMALL.items() if name in SparseConfig.__dataclass_fields__}

# Sizes by the names that configurations give them; a configuration takes those that it has.
SIZES: dict[str, object] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "n_layer_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "swa_head_dim"), 16),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96
    ),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp", "n_inner", "mlp_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "num_mamba_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_dt_rank", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_expand", "mamba_ngroups"), 1),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "dim_head"), 16),
    **dict.fromkeys(("q_lora_rank",), 24),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size_per_layer_input", "lru_width", "attention_hidden_size"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "window_size"), 16),
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "is_decoder": True,
    "use_cache": True,
    "tie_word_embeddings": False,
}
TOWER = ("hidden_size", "embed_dim", "num_attention_heads", "intermediate_size", "num_hidden_layers", "depth")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers", "depth")


def _values(kind: type[PreTrainedConfig], layers: int, own: dict) -> dict:
    """Arguments for a tiny configuration of a kind, those of its parts within."""
    parts = {name: part for name, part in kind.sub_configs.items() if hasattr(part, "sub_configs")}
    known = {} if getattr(kind, "has_no_defaults_at_init", False) else kind().to_dict()
    wide = {**SIZES, **dict.fromkeys(LAYERS, layers)}
    found = {name: value for name, value in wide.items() if name in known or name in kind.attribute_map}
    for name in kind.attribute_map:  # two names of one value
        if kind.attribute_map[name] in found:
            found.pop(name, None)
    for name, part in parts.items():
        inner = _values(part, layers, {})
        if "vision" in name or "audio" in name:  # their geometry is their own
            inner = {key: value for key, value in inner.items() if key in TOWER}
        found[name] = inner
    return {**found, **own}


# Where sizes by name are not enough: what the configuration is made of in their place, beside them.
MIXED = ["linear_attention", "full_attention"] * 2
MIXED_BLOCKS = ["full_attention", "minimax_m3_sparse"] * 2  # as published ones
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
QWEN4 = {
    **{"layer_types": MIXED, "hc_count": 2, "hc_lowrank": 8, "num_experts": 4, "num_experts_per_tok": 2},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4},
        **{"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
}
OWN: dict[str, dict] = {
    # Published checkpoints have both: without a window all layers attend to their whole past.
    **{
        key: {"sliding_window": None}
        for key in ("mistral", "mixtral", "ministral3", "phimoe", "starcoder2", "doge", "phi4_multimodal")
    },
    **{key: {"num_key_value_heads": 4, "index_topk": 16} for key in indexers.LATENT},  # with an indexer of their own
    "qwen4_exp_text": QWEN4,
    "minimax_m3_vl_text": {
        **{"layer_types": MIXED_BLOCKS, "index_n_heads": 2, "index_head_dim": 16},
        **{"index_block_size": 8, "index_topk_blocks": 4},
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "intermediate_size": [96] * 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA, "layer_types": MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


DEPTH = {"gemma3": 6}  # layers, where the first one that attends to its whole past comes later


# Why tokens are others, where that is known.
_POSITIONS = ": the decoder counts positions on the host, and a captured step keeps those that it was captured with"
_CHUNKS = (
    ": the chunks of its attention become sliding windows (contexts of up to one `attention_chunk_size` are right)"
)
KNOWN = {
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"), _POSITIONS),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKS),
    "bigbird_pegasus": ": its attention modules say that they are not causal, and leave that to the mask",
}


def small_config(kind: str, layers: int = 4) -> PreTrainedConfig:
    """A tiny configuration of a model type of transformers.

    Raises:
        Exception: whatever the configuration has against these sizes.
    """
    known = {config.model_type: (config, own) for _, config, own in reversed(MODELS.values())}  # first ones count
    if kind in known and kind not in OWN:
        config, own = known[kind]
        return config(**{**COMMON, **own})
    config = CONFIG_MAPPING[kind]
    return config(**_values(config, DEPTH.get(kind, layers), OWN.get(kind, {})))


def build(kind: str, layers: int = 4) -> torch.nn.Module:
    """A tiny model with wide random weights, attention of transformers' own."""
    config = small_config(kind, layers)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"of {size / 1e6:.0f}M parameters even so")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.normal_(std=0.3, generator=generator)
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = PAD
    return made


@dataclass(frozen=True)
class Line:
    """Findings about one model type."""

    kind: str
    name: str
    result: str
    why: str = ""
    engine: str = ""


def _first(error: BaseException | str, most: int = 220) -> str:
    """The first sentence of a message, in one line that a table can hold."""
    text = " ".join(str(error).split()).replace("|", "\\|") or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _ours(error: BaseException) -> bool:
    """An error that this package raises on purpose."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, ValueError | TypeError) and "hf_sparsekv" in Path(last).parts


@contextlib.contextmanager
def made_caches() -> Iterator[list[SparseCache]]:
    """The caches that ``sparse()`` makes meanwhile."""
    found, original = [], cache_source.new_cache
    cache_source.new_cache = lambda *given: found.append(original(*given)) or found[-1]
    try:
        yield found
    finally:
        cache_source.new_cache = original


def _text(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids = torch.randint(3, VOCAB, (1, PROMPT), generator=generator).to(device)
    torch.manual_seed(0)
    given = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, PROMPT:]


def _replayed(model: torch.nn.Module) -> tuple[torch.Tensor, int]:
    """Tokens of replayed steps, and how many were replayed."""
    runner = (StepRunner if next(model.parameters()).is_cuda else Imitation)(model)
    runner.install()
    try:
        return _text(model), runner.replays
    finally:
        runner.remove()


def survey(kind: str, show: bool = False) -> Line:
    """Build one model type, decode, compare."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        line = _survey(kind, said, show)
        if line.result != UNBUILT:
            line = replace(line, engine="refused" if line.result == REFUSED else _engine(kind, show))
    gc.collect()
    return line


def _engine(kind: str, show: bool) -> str:
    """Whether an engine serves a new model of the kind, and why not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(kind).to(device)
    try:
        expected = [_answer(model, *asked) for asked in ASKED]
        serving = ServingConfig(max_rows=2, max_length=PROMPT + TOKENS, chunk=64)
        with Engine(model, None, _config(kind, FULL), serving=serving) as engine:
            greedy = [Sampling(max_tokens=tokens, temperature=0) for _, tokens in ASKED]
            handles = [engine.submit(_prompt(n)[0], how) for (n, _), how in zip(ASKED, greedy)]
            found = [list(handle.result(60).token_ids) for handle in handles]
            again = engine.submit(_prompt(PROMPT)[0], greedy[0]).result(60)
    except Exception as error:
        if show:
            traceback.print_exc()
        if not _ours(error):
            return _first(f"fails: {type(error).__name__}: {error}")
        return next((why for says, why in NOT_SERVED.items() if says in str(error)), _first(f"refused: {error}", 100))
    if found != expected:  # sdpa leaves out some models' soft caps
        model = build(kind).to(device)
        model.set_attn_implementation("eager")
        expected = [_answer(model, *asked) for asked in ASKED]
    return SERVED if found == expected and list(again.token_ids) == expected[0] else OTHER_TOKENS


def _prompt(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))


def _answer(model: torch.nn.Module, prompt: int, tokens: int) -> list[int]:
    """What generate() decodes over transformers' own cache, and as the model's attention function does it."""
    ids = _prompt(prompt).to(model.device)
    given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, prompt:].tolist()


def _config(kind: str, settings: dict) -> TokenConfig:
    """``settings``; those that choose nothing for a model that does."""
    return TokenConfig(**(BY_ITSELF if kind in indexers.SERVED else settings))


def _survey(kind: str, said: list, show: bool) -> Line:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = build(kind).to(device)
        expected = {attention_of(model): _text(model)}
        original = attention_of(model)
    except Exception as error:
        if show:
            traceback.print_exc()
        return Line(kind, name, UNBUILT, _first(f"{type(error).__name__}: {error}"))
    try:
        with made_caches() as caches, sparse(model, _config(kind, FULL), optimize=False):
            found = _text(model)
        if not caches or not caches[0].get_seq_length():
            return Line(kind, name, REFUSED, "generate() of this model does not use the cache that it is given")
        note = ""
        if not torch.equal(found, expected[original]) and original != "eager":
            model.set_attn_implementation("eager")
            expected["eager"] = _text(model)
            note = f"as with eager attention; {original} gives other tokens"
            model.set_attn_implementation(original)
        if not any(torch.equal(found, text) for text in expected.values()):
            why = f"other tokens than with transformers' own cache{KNOWN.get(kind, '')}"
            return Line(kind, name, FAILS, why)
        if not caches[0].sparse_layers:
            why = next((str(w.message) for w in said if "nothing to make sparse" in str(w.message)), "")
            return Line(kind, name, DENSE, _first(why.rpartition(": ")[0]))
        with made_caches() as caches, sparse(model, _config(kind, TIGHT), optimize=False):
            eager = _text(model)
            stats = caches[0].stats()
            if not stats.sparse_calls:
                why = "reads the keys and values itself" if stats.materialised else "masks its steps itself"
                return Line(kind, name, DENSE, f"the model {why}: right, but dense")
            tokens, replays = _replayed(model)
        if not replays:
            why = [str(w.message) for w in said if "decode steps run eagerly" in str(w.message)]
            return Line(kind, name, EAGER, _first(why[-1].partition("eagerly: ")[2]) if why else "")
        if not torch.equal(tokens, eager):
            return Line(kind, name, WRONG, f"replayed steps give other tokens{KNOWN.get(kind, '')}")
        return Line(kind, name, WORKS, note)
    except Exception as error:
        if show:
            traceback.print_exc()
        if _ours(error):
            return Line(kind, name, REFUSED, _first(error))
        return Line(kind, name, FAILS, _first(f"{type(error).__name__}: {error}"))


def lines_of(page: str) -> dict[str, Line]:
    """The page's lists and table, by model type. A list leaves the class to transformers' mapping."""
    found = {}
    for (result, engine), about in LISTED.items():
        for kind in re.findall(r"`(\w[\w.-]*)`", page.partition(about)[2].partition("\n\n")[0]):
            found[kind] = Line(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], result, "", engine)
    for row in page.splitlines():
        if row.startswith("| `"):
            kind, name, result, why, engine = (cell.strip() for cell in row.replace("\\|", "\0").strip("|").split("|"))
            kind, why, engine = kind.strip("`"), why.replace("\0", "\\|"), engine.replace("\0", "\\|")
            found[kind] = Line(kind, name.strip("`"), result, why, engine)
    return dict(sorted(found.items()))


def _listed(line: Line) -> tuple[str, str] | None:
    """The list that a line is in. None: its remark has a row of the table."""
    group = line.result, line.engine
    return group if group in LISTED and (not line.why or line.result == UNBUILT) else None


def page(lines: list[Line]) -> str:
    """docs/models.md."""
    counts = Counter(line.result for line in lines)
    replays = "captured on a GPU" if torch.cuda.is_available() else "imitated on a CPU"
    about = {
        WORKS: "greedy tokens are those of transformers' own cache while the budget covers the context; steps of a "
        f"small budget are sparse; replayed steps ({replays}) give the same tokens",
        EAGER: "the same, but `optimize()` leaves its steps eager, and says why",
        WRONG: "eager steps are right; say `sparse(model, optimize=False)` on a GPU",
        DENSE: "right, but no step is sparse",
        REFUSED: "an error says why",
        FAILS: "a fault, here or there",
        UNBUILT: "these tiny sizes do not suit it, so nothing is known",
    }
    head = [
        "# Models",
        "",
        f"All {len(lines)} model types of transformers {transformers.__version__}'s `MODEL_FOR_CAUSAL_LM_MAPPING`,",
        "each built with tiny random weights and decoded greedily inside `sparse(model)`. Written by",
        "",
        "    python tests/helpers/model_list.py",
        "",
        "A tiny model shows that the code of its architecture goes together with sparse caches. It says nothing of",
        "speed, nor of how well a trained model bears a selection: for that, [evaluation](evaluation.md). Latents:",
        "[mla.md](mla.md).",
        "",
        f"A trained indexer chooses the tokens of {', '.join(f'`{kind}`' for kind in indexers.SERVED)}:",
        "see [models with an indexer](mla.md#models-with-an-indexer-dsa).",
        "",
        "| | model types | |",
        "|---|---|---|",
        *(f"| {result} | {counts[result]} | {text} |" for result, text in about.items() if counts[result]),
        "",
        f"An [engine](serving.md) serves {sum(line.engine == SERVED for line in lines)} of them: together, in",
        "chunks and after a shared prefix requests get the tokens of `generate()` alone. The others are refused when",
        "the engine opens; the last column has the reason.",
        "",
    ]
    for group, about in LISTED.items():
        kinds = ", ".join(f"`{line.kind}`" for line in lines if _listed(line) == group)
        if kinds:
            head += [*textwrap.wrap(f"{about} {kinds}", 118, break_on_hyphens=False), ""]
    head += [
        "| model type | class | | | engine |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| `{line.kind}` | `{line.name}` | {line.result} | {line.why} | {line.engine} |"
        for line in lines
        if not _listed(line)
    ]
    return "\n".join([*head, *rows]) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="*", help="model types; none: all, and write the page")
    parser.add_argument("--show", action="store_true", help="print errors whole")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    lines = []
    for kind in args.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        lines.append(survey(kind, args.show))
        line = lines[-1]
        print(*(part for part in (kind, line.result, line.why, line.engine) if part), sep=" | ", flush=True)
    if not args.kinds:
        PAGE.write_text(page(lines))


if __name__ == "__main__":
    sys.exit(main())
