"""Losslessness check of an accelerator on a model of images.

Greedy tokens must be those of plain decoding. Under sampling, rules that promise tokens are compared token
for token with the same seed; all others are tested against the target's distribution of every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.accelerators.accelerator import Call
from mmspec.decoding.interfaces import Round
from mmspec.decoding.random_stream import Purpose
from mmspec.decoding.row_settings import values_of
from mmspec.decoding.stats import merge_stats
from mmspec.evaluation.identity.comparison import Comparison, IdentityReport, compare
from mmspec.evaluation.identity.distribution import DistributionTest, check_distribution
from mmspec.evaluation.identity.text import IdentityCheck
from mmspec.evaluation.image_contender import ImageContender, prepare_images

__all__ = ["ImageCheck"]


@dataclass(frozen=True)
class ImageCheck(IdentityCheck):
    """Losslessness check on images, one comparison after another.

    Args:
        settings: of the calls (guidance_scale, top_k, ...), but for the temperature.
    """

    accelerated: ImageContender
    plain: ImageContender
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        """Number of calls of `on_output`."""
        batches = -(-len(self.examples) // self.batch_size)
        return len(self.examples) * (2 if self.is_token_exact else 1) + 2 * batches

    def comparisons(self) -> Iterator[Comparison]:
        """Compare greedy output; then sampled output, by tokens where the rule promises them."""
        yield self.greedy()
        yield self.sampled() if self.is_token_exact else self.distribution()

    def greedy(self) -> Comparison:
        """Compare greedy tokens with those of plain decoding."""
        return self._against_plain("greedy", "plain decoding", 0.0)

    def sampled(self) -> Comparison:
        """Compare sampled tokens with those of plain decoding with the same noise: Gumbel-exact identity."""
        return self._against_plain(
            "sampled", f"plain decoding, temperature {self.temperature:g}", self.temperature
        )

    def distribution(self) -> Comparison:
        """Test sampled tokens against the target's distribution of each, given those before it."""
        pipe, outputs, stats, requests = self.accelerated.enter(), [], [], []
        for batch, seeds in self._batches():
            call = prepare_images(pipe, batch, seeds=seeds, **self._settings(self.temperature))
            for _ in call.rounds():
                pass
            outputs += call.calls[-1].canvas.outputs()
            stats.append(call.calls[-1].stats)
            requests += call.requests
            self.on_output()
        test = check_distribution(pipe.target, call.calls[-1].sampler, requests, outputs, self.seed)
        reference = f"the target's distribution, temperature {self.temperature:g}"
        return Comparison("distribution", reference, len(outputs), test.places, [], merge_stats(stats), test)

    def report(self, comparisons: list[Comparison]) -> IdentityReport:
        """Summarise comparisons in a report."""
        report = super().report(comparisons)
        notes = [one for one in report.notes if "were not compared" not in one]
        for test in (one.distribution for one in comparisons):
            if not isinstance(test, DistributionTest):
                continue
            notes.append(
                "sampled tokens are not those of plain decoding, by design: the distribution of every token "
                f"given those before it was tested instead; at {test.places} places that finds biases of "
                f"{test.resolution:.0%} at best, and smaller ones with more samples"
            )
        return replace(report, notes=notes)

    def _against_plain(self, mode: str, reference: str, temperature: float) -> Comparison:
        pipe, references, gaps = self.plain.enter(), [], []
        for index, example in enumerate(self.examples):
            call = prepare_images(pipe, [example], seeds=[self.seed + index], **self._settings(temperature))
            gaps.append([top_two(step, call.calls[-1]) for step in call.rounds()])
            references += call.calls[-1].canvas.outputs()
            self.on_output()
        outputs, stats = self._decode(self._settings(temperature))
        return compare(mode, reference, references, outputs, gaps, pipe.dtype, stats)

    def _settings(self, temperature: float) -> dict[str, Any]:
        return {**self.settings, "temperature": temperature, "output_type": "latent"}


def top_two(step: Round, call: Call) -> tuple[float, float, float]:
    """The two best logits of a round of plain decoding, noise included, and the largest of the two without.

    As guided logits: noise is scaled by the temperature, and not the logits by its inverse.
    """
    logits = noisy = step.scores.logits[0, 0]
    if not step.scores.greedy:
        noise = call.random.gumbel(step.first[:1, None], Purpose.TARGET, len(logits), logits.dtype)
        noisy = logits + noise[0, 0]
    unit = values_of(call.sampler.temperature)[0] or 1.0
    values, tokens = noisy.topk(2)
    magnitude = logits[tokens].abs().nan_to_num(posinf=0.0).max()
    return (*(unit * values).tolist(), float(unit * magnitude))
