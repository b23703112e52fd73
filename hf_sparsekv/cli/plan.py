"""``hf-sparsekv plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from rich.table import Table

from hf_sparsekv_cli.options import CacheKind, CacheOptions, DType
from hf_sparsekv_config.labels import reads
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..offload.host_limit import host_memory_limit
from ..tuning.plan import MemoryPlan, ModelShape, model_shape, plan_memory
from ..tuning.proposal import PIECE, Proposal, Shortage, in_pieces, propose, shortage
from ..tuning.serving_plan import RowsThatFit, Spreading, rows_that_fit, spreadings
from .loading import load_config, placed, random_shape, torch_dtype
from .output import CommandError, note, results, size

HERE = "80 % of this machine's or container's"
_LESS = "take fewer rows or tokens (--serve shows how many), or quantised weights"


def plan(
    *,
    model: str,
    context: int,
    batch: int,
    dtype: DType,
    gpu_memory: int | None,
    host_memory: int | None,
    cache: CacheKind,
    serve: bool,
    gpus: int,
    options: CacheOptions,
) -> None:
    """Will it fit, and with which preset? GPU and host memory, from the model's configuration alone.

    The exit status is 1 if nothing fits.
    """
    config = options.config(cache)
    gpu = detected_gpu() if gpu_memory is None else gpu_memory
    host = int(0.8 * host_memory_limit()) if host_memory is None else host_memory
    owners = Owners(
        _this_gpu() if gpu_memory is None else "as given",
        "80 % of this machine's or container's" if host_memory is None else "as given",
    )
    model_config = _config(model)
    shape = model_shape(model_config, torch_dtype(dtype))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    options = placed(config, options)
    if serve:
        if gpu is None:
            raise typer.BadParameter("there is no GPU here: give --gpu-memory, as 24GiB", param_hint="--serve")
        if gpus > 1:
            _show_spreadings(shape, model_config, config, options.offload_config(), context, gpus, gpu, host, owners)
            return
        found = _show_rows(shape, config, options.offload_config(), context, gpu, host, owners)
        if not max(found.dense, found.sparse, found.offloaded):
            more = f", or {_more_host(host_memory)}" if found.bound_by == "host" else ""
            raise CommandError(f"nothing fits: not a single row of {context:,} tokens. Take fewer tokens{more}")
        return
    planned = plan_memory(shape, config, options.offload_config(), context=context, batch=batch, device=device)
    fits = show(planned, gpu, host, owners)
    most = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most and context > most:
        note(f"{context:,} tokens are more than the {most:,} that the model was made for")
    if gpu is None or not any(layer.kind == "full" for layer in shape.layers):
        if not fits:
            raise CommandError(f"nothing fits: {_LESS if planned.cache_host <= host else _more_host(host_memory)}")
        return
    found = propose(shape, context=context, batch=batch, gpu=gpu, host=host, device=device)
    _show_proposal(found, context, fits)
    if found is None and not fits:
        lacks = shortage(shape, context=context, batch=batch, gpu=gpu, host=host)
        raise CommandError(f"nothing fits: {_shortage(lacks, gpu, host, host_memory)}")


def _more_host(given: int | None) -> str:
    """Advice if host memory does not suffice."""
    if given is not None:
        return f"give a --host-memory of more than {size(given)}"
    return "give --host-memory, as 256GiB, if it is for another machine (default: 80 % of this one's memory)"


def _shortage(lacks: Shortage, gpu: int, host: int, given: int | None) -> str:
    """Which memory is too small, by how much, and what to do."""
    if lacks.offloaded:
        text = (
            f"GPU memory of {size(gpu)} is {size(lacks.offloaded)} too small, even with keys and values in host memory"
        )
        more = f"; host memory of {size(host)} is {size(lacks.host)} too small, too" if lacks.host else ""
        return f"{text}{more}: {_LESS}"
    return (
        f"host memory of {size(host)} is {size(lacks.host)} too small, and with keys and values on the GPU its "
        f"{size(gpu)} are {size(lacks.on_gpu)} too small: {_more_host(given)}; or {_LESS}"
    )


def _config(model: str):
    """Configuration of a known shape by its name, in any spelling and without files; otherwise :func:`load_config`."""
    from ..tuning.shapes import SHAPES, known_shape

    if (config := random_shape(model)) is not None:
        return config
    shape = None if Path(model).expanduser().exists() else known_shape(model)
    if shape is None:
        return load_config(model, SHAPES)
    if shape != model:
        note(f"{model}: the shape of {shape} that this package knows; the hub is not asked")
    return SHAPES[shape]()


def detected_gpu() -> int | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory


def _this_gpu() -> str:
    """The owner of the memory if the command does not name one."""
    return f"this machine's {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""


@dataclass(frozen=True)
class Owners:
    """The machine that a plan is made for: as the command gives it, or this one."""

    gpu: str
    host: str


def show(p: MemoryPlan, gpu: int | None, host: int, owners: Owners) -> bool:
    """The table and what fits; whether the sparse or the dense cache does, as far as memory is known."""
    layers = p.model.layers
    kinds = [(kind, sum(layer.kind == kind for layer in layers)) for kind in ("full", "sliding", "other")]
    counted = ", ".join(f"{n} {kind}" for kind, n in kinds if n)
    dtype = str(p.model.dtype).removeprefix("torch.")
    results.print(f"{p.model.model_type}, {dtype}, layers: {counted}; {p.batch} x {p.context:,} tokens")

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in ("sparse: GPU", "sparse: host", "dense: GPU"):
        table.add_column(title, justify="right")

    def row(name: str, device: int, in_host: int, dense: int | None, style: str | None = None) -> None:
        cells = [size(n) if n else "-" for n in (device, in_host, dense or 0)]
        table.add_row(name, *cells, style=style)

    row("weights", p.weights, 0, p.weights)
    row("KV blocks", p.kept if p.offloaded else p.blocks, p.cache_host, p.dense_kv - p.stock)
    if p.device_pages:
        row("device copies of what is chosen", p.device_pages, 0, 0)
    row("block bounds", p.bounds, 0, 0)
    row("token labels", p.labels, 0, 0)
    if p.index_keys:
        row("keys of the indexer", p.index_keys, 0, 0)
    if p.means:
        row("means of blocks", p.means, 0, 0)
    if p.scales:
        row("scales of 8-bit KV", p.scales, 0, 0)
    row("sinks and recent tokens", p.recent, 0, 0)
    row("tables", p.tables, 0, 0)
    row("sliding and other layers", p.stock, 0, p.stock)
    row("prefill (estimate)", p.prefill, 0, p.prefill)
    row("total", p.device_total, p.cache_host, p.dense_total, style="bold")
    results.print(table)

    in_host, second = p.cache_host <= host, gpu is None or p.second <= gpu
    if gpu is None:
        results.print("GPU: this machine has none; give --gpu-memory to check a size")
        fits = in_host
    else:
        sparse, dense = (_with_prompt(p, name, gpu) for name in ("device_total", "dense_total"))
        if not in_host:
            sparse = f"does not fit (host memory {size(p.cache_host - host)} too small)" if _ok(sparse) else sparse
        elif not second:
            sparse = f"does not fit (second GPU {size(p.second - gpu)} too small)" if _ok(sparse) else sparse
        results.print(f"GPU {size(gpu)} ({owners.gpu}): sparse {sparse}, dense {dense}")
        fits = _ok(sparse) or _ok(dense)
    if p.second:
        beside = "" if gpu is None else f": {_fits(p.second, gpu)}"
        results.print(f"second GPU, which chooses and keeps the blocks: {size(p.second)}{beside}")
    if p.cache_host:
        results.print(f"host {size(host)} ({owners.host}): {_fits(p.cache_host, host)}")
    if p.working_set:
        note(
            f"blocks chosen within 12 steps: about {size(p.working_set)} (what the device copies should hold at least)"
        )
    note("prefill: the prompt read in one piece; generate(..., prefill_chunk_size=...) bounds it")
    if not any(layer.kind == "full" for layer in layers):
        note("no layer of this model attends to its whole past: a sparse cache has nothing to do")
    if p.context <= p.dense_tokens:
        note(
            f"decode steps attend densely up to {p.dense_tokens:,} tokens a row here: as quick as selecting, and exact "
            "(dense_below in the configuration)"
        )
    for line in p.model.notes:
        note(line)
    return fits


def _show_proposal(found: Proposal | None, context: int, fits: bool) -> None:
    """The preset that is proposed, whatever cache the command line names; ``fits``: something without a preset does."""
    if found is None:
        results.print(f"proposed: no preset fits{'; what does is said above' if fits else ''}")
        return
    place = "in host memory" if found.offloaded else "on the GPU"
    need = f"keys and values {place}, {size(found.plan.device_total)} of GPU memory"
    if found.every:
        results.print(
            f"proposed: full attention, which {found.call} does by itself at this length; {need}", markup=False
        )
    elif topk := found.plan.model.topk:
        results.print(
            f"proposed: {found.call}: the {topk:,} tokens that the model chooses a step; {need}", markup=False
        )
    else:
        budget = (
            f"{found.config.threshold:.0%} of each head's attention mass, some {reads(found.config, context):,} of "
        )
        budget += f"{context:,} tokens a step"
        results.print(f"proposed: {found.call}: {budget}; {need}", markup=False)
        more = f"{found.more:.0%}"
        if more != "0%":
            note(f'its steps read some {more} more than those of "fast"; what each finds: docs/accuracy.md')
    if found.pieces < context:
        note(f"proposed with generate(..., prefill_chunk_size={found.pieces}): the prompt in one piece does not fit")


def _show_rows(
    shape: ModelShape,
    config: SparseConfig,
    offload: OffloadConfig | None,
    context: int,
    gpu: int,
    host: int,
    owners: Owners,
) -> RowsThatFit:
    """A line for each length; returns that of ``context``, which is the longest."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens a row")
    for title in ("dense", "sparse", "sparse, offloaded"):
        table.add_column(title, justify="right")
    lengths = [n for n in (4096, 16_384, 32_768, 65_536, 131_072) if n < context]
    for length in [*lengths, context]:
        found = rows_that_fit(shape, config, offload, context=length, gpu=gpu, host=host)
        by = f" (by the {found.bound_by})" if found.offloaded else ""
        table.add_row(f"{length:,}", f"{found.dense:,}", f"{found.sparse:,}", f"{found.offloaded:,}{by}")
    results.print(
        f"rows at a time: GPU {size(gpu)} ({owners.gpu}), host {size(host)} ({owners.host}), weights "
        f"{size(shape.weights)}"
    )
    results.print(table)
    note("an estimate: keys and values, what selection needs, one prompt that is read; not what else is on the GPU")
    note("offloaded: with the tokens that 12 steps choose on the GPU; more rows read over the link in every step")
    return found


def _show_spreadings(
    shape: ModelShape,
    model_config,
    config: SparseConfig,
    offload: OffloadConfig | None,
    context: int,
    gpus: int,
    gpu: int,
    host: int,
    owners: Owners,
) -> None:
    """A line for each way to use the GPUs, and which one to take.

    Raises:
        CommandError: none holds a row.
    """
    text = model_config.get_text_config(decoder=True)
    table_bytes = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size * shape.dtype.itemsize
    places = {"gpus": gpus, "gpu": gpu, "host": host, "table": table_bytes, "vocabulary": text.vocab_size}
    found = spreadings(shape, config, offload, context=context, **places)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{gpus} GPUs")
    for title in ("dense", "sparse", "sparse, offloaded"):
        table.add_column(title, justify="right")
    for way in found:
        replicas = f"{way.replicas} replica{'s' * (way.replicas > 1)}"
        how = f"{replicas} of {way.ranks} GPU{'s' * (way.ranks > 1)}"
        table.add_row(how, f"{way.fit.dense:,}", f"{way.fit.sparse:,}", f"{way.fit.offloaded:,}")
    results.print(
        f"rows of {context:,} tokens at a time: {gpus} GPUs of {size(gpu)} ({owners.gpu}), host {size(host)} for all "
        f"({owners.host}), weights {size(shape.weights)}"
    )
    results.print(table)
    holding = [way for way in found if max(way.fit.dense, way.fit.sparse, way.fit.offloaded)]
    if not holding:
        raise CommandError(f"nothing fits: not a single row of {context:,} tokens. Take fewer tokens, or more GPUs")
    first, last = holding[0], holding[-1]
    results.print(f"most tokens a second: {_spread_as(first)}; requests need nothing of each other")
    if last.ranks > first.ranks:
        results.print(f"soonest first token and answer of one request: {_spread_as(last)}")
    note("how many GPUs a load needs: docs/serving-scale.md")


def _spread_as(way: Spreading) -> str:
    """A way to use several GPUs, in words."""
    replicas = f"{way.replicas} replicas" if way.replicas > 1 else "one replica"
    return f"{replicas}, each on {way.ranks} GPUs (tensor parallel)" if way.ranks > 1 else f"{replicas} of one GPU each"


def _with_prompt(p: MemoryPlan, total: str, gpu: int) -> str:
    """Whether ``p``'s total of that name fits the GPU, perhaps with the prompt read in pieces."""
    if (need := getattr(p, total)) > gpu and getattr(in_pieces(p, min(PIECE, p.context)), total) <= gpu:
        return f"fits with prefill_chunk_size={PIECE} (in one piece {size(need - gpu)} too much)"
    return _fits(need, gpu)


def _ok(verdict: str) -> bool:
    return verdict.startswith("fits")


def _fits(need: int, have: int) -> str:
    return "fits" if need <= have else f"does not fit ({size(need - have)} too much)"
