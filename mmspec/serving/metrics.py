"""Prometheus counters under vLLM's names, so that its dashboards show this server too."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mmspec.core.statistics import DecodingStats
from mmspec.open_types import Keywords

__all__ = ["REASONS", "Metrics", "ModelMetrics"]

#: Reasons of a pipeline for which OpenAI, and with it vLLM, has another word.
REASONS = {"eos": "stop"}
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """All metrics of a server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds in which a row was scored with a draft")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens proposed")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted as far as this position", "position"
        )
        self.tokens = self._counter("generation_tokens", "Tokens generated")
        self.forwards = self._counter(
            "target_forwards", "Target forwards that finished rows took", "", "mmspec"
        )
        self.finished = self._counter("request_success", "Rows that have ended", "finished_reason")
        self.failed = self._counter("rows_failed", "Rows that the server failed to finish", "", "mmspec")
        self.cancelled = self._counter(
            "rows_cancelled", "Rows that were taken out of the batch", "", "mmspec"
        )
        own: Keywords = {"labelnames": ["model_name"], "registry": self.registry}
        latency = "From a request's arrival to the end of a row"
        self.seconds = Histogram("vllm:e2e_request_latency_seconds", latency, buckets=SECONDS, **own)
        self.running = Gauge("vllm:num_requests_running", "Rows in the batch", **own)
        self.waiting = Gauge("vllm:num_requests_waiting", "Rows that wait", **own)

    def of_model(self, name: str) -> ModelMetrics:
        """The metrics of one model."""
        return ModelMetrics(self, name)

    def _counter(self, name: str, text: str, label: str = "", prefix: str = "vllm") -> Counter:
        labels = ["model_name", label] if label else ["model_name"]
        return Counter(f"{prefix}:{name}", text, labels, registry=self.registry)


class ModelMetrics:
    """The metrics of one model, whose counters stand at 0 from the start."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._of, self._name = metrics, name
        self.failed, self.cancelled = metrics.failed.labels(name), metrics.cancelled.labels(name)
        for counter in ("drafts", "draft_tokens", "accepted", "tokens", "forwards"):
            getattr(metrics, counter).labels(name)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Take the numbers of rows from these functions whenever they are asked for."""
        self._of.running.labels(self._name).set_function(running)
        self._of.waiting.labels(self._name).set_function(waiting)

    def count_finished(self, reason: str, stats: DecodingStats, began: float) -> None:
        """Count a row that has ended, by its own stats."""
        of, name = self._of, self._name
        if drafted := sum(stats.drafted):
            of.drafts.labels(name).inc(sum(stats.rounds))
            of.draft_tokens.labels(name).inc(drafted)
            of.accepted.labels(name).inc(sum(stats.accepted))
            for position in range(max(stats.accepted_histogram, default=0)):
                reached = sum(n for length, n in stats.accepted_histogram.items() if length > position)
                of.accepted_per_position.labels(name, str(position)).inc(reached)
        of.tokens.labels(name).inc(sum(stats.new_tokens))
        of.forwards.labels(name).inc(sum(stats.nfe))
        of.finished.labels(name, REASONS.get(reason, reason)).inc()
        of.seconds.labels(name).observe(perf_counter() - began)
