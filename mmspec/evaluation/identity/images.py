"""Losslessness check of an accelerator on a model of images.

Greedy tokens must be those of plain decoding. Under sampling, rules that promise tokens are compared token
for token with the same seed; all others are tested against the target's distribution of every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mmspec.acceleration import Accelerator
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.draft import Draft
from mmspec.decoding.interfaces import Request
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.sampling import Sampler, Scores
from mmspec.decoding.sequences import Emission, Sequences
from mmspec.decoding.stats import DecodingStats, merge_stats
from mmspec.decoding.verdict import Verdict
from mmspec.drafters.none import NoDrafter
from mmspec.evaluation.identity.comparison import Comparison, IdentityReport, compare
from mmspec.evaluation.identity.distribution import check_distribution
from mmspec.evaluation.identity.text import IdentityCheck
from mmspec.evaluation.image_contender import ImageContender, decode_images

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
        pipe = self.accelerated.enter()
        recording = RecordingAccelerator(**vars(pipe.accelerator))
        pipe.accelerator = recording
        outputs, stats = self._draw(pipe, self.temperature)
        pipe.accelerator = self.accelerated.accelerator
        if recording.sampler is None:
            raise RuntimeError("nothing was drawn")
        test = check_distribution(pipe.target, recording.sampler, recording.requests, outputs, self.seed)
        reference = f"the target's distribution, temperature {self.temperature:g}"
        return Comparison("distribution", reference, len(outputs), test.places, [], stats, test)

    def report(self, comparisons: list[Comparison]) -> IdentityReport:
        """Summarise comparisons in a report."""
        report = super().report(comparisons)
        notes = [one for one in report.notes if "were not compared" not in one]
        for test in (one.distribution for one in comparisons if one.distribution is not None):
            notes.append(
                "sampled tokens are not those of plain decoding, by design: the distribution of every token "
                f"given those before it was tested instead; at {test.places} places that finds biases of "
                f"{test.resolution:.0%} at best, and smaller ones with more samples"
            )
        return replace(report, notes=notes)

    def _against_plain(self, mode: str, reference: str, temperature: float) -> Comparison:
        plain, references, gaps = self.plain.pipe, [], []
        for index, example in enumerate(self.examples):
            recorder = TopTwoRule(temperature)
            plain.accelerator = Accelerator("none", NoDrafter(), recorder)
            decoded = decode_images(
                plain,
                [example],
                seeds=[self.seed + index],
                output_type="latent",
                **{**self.settings, "temperature": temperature},
            )
            references += decoded.tokens
            gaps.append(recorder.best)
            self.on_output()
        outputs, stats = self._draw(self.accelerated.enter(), temperature)
        return compare(mode, reference, references, outputs, gaps, plain.dtype, stats)

    def _draw(self, pipe: Any, temperature: float) -> tuple[list[list[int]], DecodingStats]:
        """Decode all examples with the accelerator, in batches."""
        outputs: list[list[int]] = []
        stats: list[DecodingStats] = []
        for start in range(0, len(self.examples), self.batch_size):
            batch = self.examples[start : start + self.batch_size]
            seeds = [self.seed + start + row for row in range(len(batch))]
            settings = {**self.settings, "temperature": temperature}
            decoded = decode_images(pipe, batch, seeds=seeds, output_type="latent", **settings)
            outputs += decoded.tokens
            stats += decoded.stats
            self.on_output()
        return outputs, merge_stats(stats)


@dataclass(frozen=True)
class TopTwoRule(SampleAndMatch):
    """Acceptance rule of plain decoding that records the two best logits, noise included, of every step.

    Args:
        temperature: of the sampler, which has divided the logits by it.

    Attributes:
        best: per token, (best, runner-up, largest magnitude of the two without noise), as guided logits. The
            first token, of the prompt's own forward, is never undecided.
    """

    temperature: float
    best: list[tuple[float, float, float]] = field(
        default_factory=lambda: [(float("inf"), 0.0, 1.0)], compare=False
    )

    def verify(self, draft: Draft, scores: Scores, random: RandomStream, emitted: Tensor) -> Verdict:
        logits = noisy = scores.logits[0, 0]
        if not scores.greedy:
            noise = random.gumbel(emitted[:1, None], Purpose.TARGET, len(logits), logits.dtype)
            noisy = logits + noise[0, 0]
        unit = self.temperature or 1.0
        values, tokens = noisy.topk(2)
        magnitude = logits[tokens].abs().nan_to_num(posinf=0.0).max()
        self.best.append((*(unit * values).tolist(), float(unit * magnitude)))
        return super().verify(draft, scores, random, emitted)


@dataclass(frozen=True)
class RecordingAccelerator(Accelerator):
    """An accelerator that records the requests and the sampler of every decoding call.

    Attributes:
        calls: sampler and requests of each batch.
    """

    calls: list[tuple[Sampler, Sequence[Request]]] = field(default_factory=list)

    @property
    def sampler(self) -> Sampler | None:
        return self.calls[0][0] if self.calls else None

    @property
    def requests(self) -> list[Request]:
        return [request for _, batch in self.calls for request in batch]

    def decode(
        self,
        target: Any,
        sampler: Sampler,
        requests: Sequence[Request],
        sequences: Sequences,
        random: RandomStream,
    ) -> Iterator[Emission]:
        self.calls.append((sampler, requests))
        return super().decode(target, sampler, requests, sequences, random)
