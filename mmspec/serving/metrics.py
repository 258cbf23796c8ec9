"""Prometheus metrics under vLLM's names, so that its dashboards work with this server."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mmspec.core.statistics import DecodingStats
from mmspec.open_types import Keywords

__all__ = ["REASONS", "Metrics", "ModelMetrics"]

#: Finish reasons of a pipeline that have another name in OpenAI's API and vLLM.
REASONS = {"eos": "stop"}
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


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
        own: Keywords = {"labelnames": ["model_name"], "registry": self.registry}
        latency = "Seconds from the arrival of a request to the end of a row"
        self.seconds = Histogram("vllm:e2e_request_latency_seconds", latency, buckets=SECONDS, **own)
        self.running = Gauge("vllm:num_requests_running", "Rows in the batch", **own)
        self.waiting = Gauge("vllm:num_requests_waiting", "Rows waiting for the batch", **own)

    def of_model(self, name: str) -> ModelMetrics:
        """Return the metrics of one model."""
        return ModelMetrics(self, name)

    def _counter(self, name: str, text: str, label: str = "", prefix: str = "vllm") -> Counter:
        labels = ["model_name", label] if label else ["model_name"]
        return Counter(f"{prefix}:{name}", text, labels, registry=self.registry)


class ModelMetrics:
    """Metrics of one model; its counters start at 0."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._of, self._name = metrics, name
        self.failed, self.cancelled = metrics.failed.labels(name), metrics.cancelled.labels(name)
        for counter in ("drafts", "draft_tokens", "accepted", "rounds", "tokens", "forwards"):
            getattr(metrics, counter).labels(name)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read the numbers of running and waiting rows from these functions."""
        self._of.running.labels(self._name).set_function(running)
        self._of.waiting.labels(self._name).set_function(waiting)

    def count_finished(self, reason: str, stats: DecodingStats, began: float) -> None:
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
        of.forwards.labels(name).inc(sum(stats.nfe))
        of.finished.labels(name, REASONS.get(reason, reason)).inc()
        of.seconds.labels(name).observe(perf_counter() - began)
