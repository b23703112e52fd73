"""An engine's statistics for Prometheus: created at each scrape, without global state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_sparsekv.serving.stats import EngineStats, Samples
from hf_sparsekv.telemetry.prompt_stats import PromptStats

PREFIX = "hf_sparsekv_"

# name -> (field of EngineStats, what it is)
NOW = {
    "requests_running": ("running", "Requests that decode."),
    "requests_waiting": ("waiting", "Requests that have not begun."),
    "requests_held": ("held", "Requests held back: their working set does not fit beside the others'."),
    "requests_prefilling": ("prefilling", "Requests whose prompts are being read."),
    "device_slots": ("device_tokens", "Slots for copies of tokens on the device."),
    "device_slots_used": ("device_tokens_used", "Slots for copies of tokens on the device that are in use."),
    "host_bytes": ("host_bytes", "Keys and values in host memory, bytes."),
}
COUNTS = {
    "requests": ("requests", "Requests accepted."),
    "requests_finished": ("finished", "Requests that came to their end."),
    "requests_cancelled": ("cancelled", "Requests cancelled."),
    "requests_failed": ("failed", "Requests that ended with an error."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read."),
    "cached_prompt_tokens": ("cached_tokens", "Tokens of prompts that were in the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens generated."),
    "decode_steps": ("steps", "Decode steps."),
    "decode_seconds": ("step_s", "Seconds in decode steps."),
    "prefill_seconds": ("prefill_s", "Seconds in prompts."),
    "drafted_tokens": ("drafted", "Drafts of exact requests."),
    "accepted_tokens": ("accepted", "Drafts of exact requests that full attention chose too."),
    "graph_captures": ("captures", "CUDA graphs captured."),
    "link_bytes": ("link_bytes", "Keys and values that crossed between host and device, bytes, as of the time before."),
}
# name -> (its value for a layer, what it is)
PROMPTS: dict[str, tuple[Callable[[PromptStats], float], str]] = {
    "prompt_blocks": (lambda p: p.visible, "Blocks of keys that sparse prompts could see, over tiles and query heads."),
    "prompt_blocks_attended": (lambda p: round(p.density * p.visible), "Those of them that were attended to."),
    "prompt_audited_rows": (lambda p: p.audited, "Rows of sparse prompts whose covered mass is known."),
    "prompt_covered_rows": (lambda p: (p.covered or 0.0) * p.audited, "Their covered shares of the mass, added up."),
    "prompt_choices": (lambda p: p.choices * len(p.again), "Choices of blocks by the query heads of sparse prompts."),
    "prompt_choices_again": (lambda p: sum(p.again), "Choices that covered too little, so that more was chosen."),
}
TIMES = {
    "queue_seconds": ("queue_s", "Seconds from a request's arrival to the beginning of its prompt."),
    "time_to_first_token_seconds": ("ttft_s", "Seconds from a request's arrival to its first token."),
    "time_between_tokens_seconds": ("between_s", "Seconds between two tokens of a request."),
    "request_seconds": ("total_s", "Seconds from a request's arrival to its end."),
}


class EngineCollector(Collector):
    """Creates metrics from a snapshot at each scrape.

    Args:
        stats: returns the snapshot.
        ready: returns whether the engine takes requests.
    """

    def __init__(self, stats: Callable[[], EngineStats], ready: Callable[[], bool]) -> None:
        self._stats = stats
        self._ready = ready

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        stats = self._stats()
        yield GaugeMetricFamily(PREFIX + "ready", "1 if the engine takes requests.", value=float(self._ready()))
        for name, (field, about) in NOW.items():
            yield GaugeMetricFamily(PREFIX + name, about, value=getattr(stats, field))
        if stats.host_limit is not None:
            about = "Keys and values that host memory may hold, bytes."
            yield GaugeMetricFamily(PREFIX + "host_limit_bytes", about, value=stats.host_limit)
        for name, (field, about) in COUNTS.items():
            yield CounterMetricFamily(PREFIX + name, about, value=getattr(stats, field))
        refused = CounterMetricFamily(PREFIX + "requests_refused", "Requests not accepted.", labels=["reason"])
        for reason, count in sorted(stats.refused.items()):
            refused.add_metric([reason], count)
        yield refused
        yield from _prompts(stats.prompts)
        for name, (field, about) in TIMES.items():
            yield histogram(PREFIX + name, about, getattr(stats, field))


def _prompts(layers: Sequence[PromptStats]) -> Iterator[Metric]:
    """Coverage of sparse prompts, by layer; by head where it is the least, or where heads became dense."""
    for name, (value, about) in PROMPTS.items():
        counter = CounterMetricFamily(PREFIX + name, about, labels=["layer"])
        for layer in layers:
            counter.add_metric([str(layer.layer)], value(layer))
        yield counter
    about = "Choices that covered too little twice, so that the head attended to everything."
    dense = CounterMetricFamily(PREFIX + "prompt_choices_dense", about, labels=["layer", "head"])
    about = "Covered share of the mass, of the head of a layer that is covered least."
    least = GaugeMetricFamily(PREFIX + "prompt_least_covered_ratio", about, labels=["layer", "head"])
    for layer in layers:
        for head in layer.dense_heads:
            dense.add_metric([str(layer.layer), str(head)], layer.dense[head])
        if layer.lowest is not None:
            head, share = layer.lowest
            least.add_metric([str(layer.layer), str(head)], share)
    yield from (dense, least)


def histogram(name: str, about: str, samples: Samples) -> HistogramMetricFamily:
    """A Prometheus histogram, whose buckets are cumulative, from counts of single buckets."""
    buckets, total = [], 0
    for bound, count in zip((*map(str, samples.bounds), "+Inf"), samples.counts):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=samples.sum)


def registry(stats: Callable[[], EngineStats], ready: Callable[[], bool]) -> CollectorRegistry:
    """A registry of its own for one engine."""
    made = CollectorRegistry()  # without `auto_describe`: adding the collector does not ask the engine
    made.register(EngineCollector(stats, ready))
    return made
