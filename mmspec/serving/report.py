"""Report of a server: what the drafts of each model gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmspec.serving.metrics import Metrics

__all__ = ["ModelReport", "report_of", "report_text"]

MOST_POSITIONS = 8  # in the text


@dataclass(frozen=True)
class ModelReport:
    """Counts of the finished rows of a model.

    Attributes:
        model: name of the model.
        rows: finished rows, by finish reason.
        new_tokens: generated tokens.
        forwards: forward passes of the target, summed over rows, prefills included.
        rounds: rounds, summed over rows.
        drafted_rounds: rounds that scored a draft.
        drafted, accepted: draft tokens, and how many of them were accepted.
        per_position: rounds that accepted a draft token at the first, second, ... position.
        failed, cancelled: rows that did not finish.
    """

    model: str
    rows: dict[str, int]
    new_tokens: int
    forwards: int
    rounds: int
    drafted_rounds: int
    drafted: int
    accepted: int
    per_position: list[int] = field(default_factory=list)
    failed: int = 0
    cancelled: int = 0

    @property
    def tokens_per_forward_pass(self) -> float:
        """Tokens per forward pass, bonus tokens included, prefills and their tokens excluded."""
        from_prefills = self.forwards - self.rounds
        return (self.new_tokens - from_prefills) / self.rounds if self.rounds else 1.0

    @property
    def drafted_share(self) -> float:
        """Share of the rounds that scored a draft."""
        return self.drafted_rounds / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {reason}" for reason, count in sorted(self.rows.items()))
        lines = [
            f"{self.model}: {sum(self.rows.values())} rows finished"
            + (f" ({ended})" if ended else "")
            + f", {self.failed} failed, {self.cancelled} cancelled",
            f"  {self.new_tokens} tokens, {self.tokens_per_forward_pass:.2f} per forward pass; "
            f"{self.drafted_share:.0%} of {self.rounds} rounds drafted",
        ]
        if self.drafted:
            shares = [f"{count / self.drafted_rounds:.0%}" for count in self.per_position[:MOST_POSITIONS]]
            lines.append(
                f"  {self.accepted} of {self.drafted} draft tokens accepted; by position: {' '.join(shares)}"
            )
        return "\n".join(lines)


def report_of(metrics: Metrics, model: str) -> ModelReport:
    """Read the report of a model from the metrics of a server."""
    samples = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("model_name") == model
    ]

    def count(name: str) -> int:
        return int(sum(sample.value for sample in samples if sample.name == f"{name}_total"))

    def by(name: str, label: str) -> dict[str, int]:
        return {one.labels[label]: int(one.value) for one in samples if one.name == f"{name}_total"}

    positions = by("vllm:spec_decode_num_accepted_tokens_per_pos", "position")
    return ModelReport(
        model,
        by("vllm:request_success", "finished_reason"),
        count("vllm:generation_tokens"),
        count("mmspec:target_forwards"),
        count("mmspec:rounds"),
        count("vllm:spec_decode_num_drafts"),
        count("vllm:spec_decode_num_draft_tokens"),
        count("vllm:spec_decode_num_accepted_tokens"),
        [positions[str(position)] for position in range(len(positions))],
        count("mmspec:rows_failed"),
        count("mmspec:rows_cancelled"),
    )


def report_text(metrics: Metrics, models: Sequence[str]) -> str:
    """Write the reports of all models."""
    return "\n".join(str(report_of(metrics, model)) for model in models)
