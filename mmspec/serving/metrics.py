"""Prometheus metrics under vLLM's names, so that its dashboards work with this server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmspec.core.statistics import DecodingStats
from mmspec.open_types import Keywords
from mmspec.targets.prefix import PrefixCache

__all__ = ["REASONS", "Metrics", "ModelMetrics", "RowTimes"]

#: Finish reasons of a pipeline that have another name in OpenAI's API and vLLM.
REASONS = {"eos": "stop"}
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
#: Bounds for the time of single rounds.
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass
class RowTimes:
    """When a row arrived, and when it got its first and its last of so many tokens, by `perf_counter`."""

    began: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


class Memory(Collector):
    """Collects the counts of prefix caches when metrics are read.

    Attributes:
        caches: model name -> function that returns its prefix cache, or None.
    """

    def __init__(self) -> None:
        self.caches: dict[str, Callable[[], PrefixCache | None]] = {}

    def collect(self) -> Iterator[Metric]:
        found = {name: cache() for name, cache in self.caches.items()}
        counts: dict[str, tuple[str, Callable[[PrefixCache], float]]] = {
            "vllm:prefix_cache_queries": ("Prompt tokens that were looked up", lambda one: one.queries),
            "vllm:prefix_cache_hits": ("Prompt tokens that were cached", lambda one: one.hits),
            "mmspec:image_cache_queries": ("Images that prefills needed", lambda one: one.images.queries),
            "mmspec:image_cache_hits": ("Images that were cached encoded", lambda one: one.images.hits),
        }
        for name, (text, count) in counts.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            for model, cache in found.items():
                counter.add_metric([model], 0 if cache is None else count(cache))
            yield counter
        text = "Share of the prefix cache's blocks that hold keys, from 0 to 1"
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", text, labels=["model_name"])
        for model, cache in found.items():
            usage.add_metric([model], 0 if cache is None else cache.usage)
        yield usage


class Metrics:
    """All metrics of a server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds in which a row was scored with a draft")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens proposed")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at this position", "position"
        )
        self.rounds = self._counter("rounds", "Rounds of finished rows", "", "mmspec")
        self.tokens = self._counter("generation_tokens", "Tokens generated")
        self.forwards = self._counter("target_forwards", "Forward passes of finished rows", "", "mmspec")
        self.finished = self._counter("request_success", "Finished rows", "finished_reason")
        self.failed = self._counter("rows_failed", "Rows that failed with a server error", "", "mmspec")
        self.cancelled = self._counter("rows_cancelled", "Cancelled rows", "", "mmspec")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of rows that entered the batch")
        self.memory = Memory()
        self.registry.register(self.memory)
        own: Keywords = {"labelnames": ["model_name"], "registry": self.registry}
        self.seconds = self._seconds(
            "e2e_request_latency", "Seconds from the arrival of a request to the end of a row"
        )
        self.queued = self._seconds(
            "request_queue_time", "Seconds from the arrival of a request to the prefill of a row"
        )
        self.to_first_token = self._seconds(
            "time_to_first_token", "Seconds from the arrival of a request to the first tokens of a row"
        )
        self.between_tokens = self._seconds(
            "inter_token_latency", "Seconds between two rounds that give a row tokens", SHORT_SECONDS
        )
        self.per_token = self._seconds(
            "request_time_per_output_token", "Mean seconds per token of a row after its first", SHORT_SECONDS
        )
        self.running = Gauge("vllm:num_requests_running", "Rows in the batch", **own)
        self.waiting = Gauge("vllm:num_requests_waiting", "Rows waiting for the batch", **own)

    def of_model(self, name: str) -> ModelMetrics:
        """Return the metrics of one model."""
        return ModelMetrics(self, name)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(
            f"vllm:{name}_seconds", text, ["model_name"], buckets=buckets, registry=self.registry
        )

    def _counter(self, name: str, text: str, label: str = "", prefix: str = "vllm") -> Counter:
        labels = ["model_name", label] if label else ["model_name"]
        return Counter(f"{prefix}:{name}", text, labels, registry=self.registry)


class ModelMetrics:
    """Metrics of one model; its counters start at 0."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._of, self._name = metrics, name
        self.failed, self.cancelled = metrics.failed.labels(name), metrics.cancelled.labels(name)
        counters = "drafts", "draft_tokens", "accepted", "rounds", "tokens", "forwards", "prompt_tokens"
        for each in (*counters, "seconds", "queued", "to_first_token", "between_tokens", "per_token"):
            getattr(metrics, each).labels(name)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read the numbers of running and waiting rows from these functions."""
        self._of.running.labels(self._name).set_function(running)
        self._of.waiting.labels(self._name).set_function(waiting)

    def watch_memory(self, cache: Callable[[], PrefixCache | None]) -> None:
        """Read the counts of a prefix cache from what this function returns."""
        self._of.memory.caches[self._name] = cache

    def count_entered(self, times: RowTimes, prefilled: float, prompt_tokens: int) -> None:
        """Count a row that has entered the batch, whose prefill began at a time of `perf_counter`."""
        self._of.prompt_tokens.labels(self._name).inc(prompt_tokens)
        self._of.queued.labels(self._name).observe(prefilled - times.began)

    def count_tokens(self, times: RowTimes, tokens: int) -> None:
        """Count new tokens of a row, and note the time."""
        if not tokens:
            return
        now = perf_counter()
        times.tokens += tokens
        if times.first is None:
            times.first = now
            self._of.to_first_token.labels(self._name).observe(now - times.began)
        else:
            self._of.between_tokens.labels(self._name).observe(now - times.last)
        times.last = now

    def count_finished(self, reason: str, stats: DecodingStats, times: RowTimes) -> None:
        """Count a finished row with its statistics."""
        of, name = self._of, self._name
        if drafted := sum(stats.drafted):
            of.drafts.labels(name).inc(sum(stats.drafted_rounds))
            of.draft_tokens.labels(name).inc(drafted)
            of.accepted.labels(name).inc(sum(stats.accepted))
            for position in range(max(stats.accepted_histogram, default=0)):
                reached = sum(n for length, n in stats.accepted_histogram.items() if length > position)
                of.accepted_per_position.labels(name, str(position)).inc(reached)
        of.rounds.labels(name).inc(sum(stats.rounds))
        of.tokens.labels(name).inc(sum(stats.new_tokens))
        if times.first is not None and sum(stats.new_tokens) > 1:
            seconds = (times.last - times.first) / (sum(stats.new_tokens) - 1)
            of.per_token.labels(name).observe(seconds)
        of.forwards.labels(name).inc(sum(stats.nfe))
        of.finished.labels(name, REASONS.get(reason, reason)).inc()
        of.seconds.labels(name).observe(perf_counter() - times.began)
