"""Losslessness checks of an accelerator: on a text model, on image tokens, and on continuous tokens.

Greedy tokens must be those of plain decoding; for text the reference is `model.generate` of transformers.
Sampled tokens are compared with plain decoding under the same seed where the rule promises tokens, because
noise is keyed by output position. All other rules promise the distribution, which is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mmspec.accelerators.accelerator import Accelerator, Call
from mmspec.acceptance.denoising import SharedNoise
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.interfaces import Round
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.sampling import values_of
from mmspec.decoding.stats import DecodingStats, merge_stats
from mmspec.drafters.cell_order import CellModelDrafter
from mmspec.evaluation.contenders import (
    Contender,
    decode_conversations,
    prepare_images,
    reference_inputs,
)
from mmspec.evaluation.examples import OTHER_SEEDS, Example
from mmspec.evaluation.identity.comparison import Comparison, Difference, IdentityReport, compare
from mmspec.evaluation.identity.distribution import DistributionTest, check_distribution, energy_test
from mmspec.targets.mixers import find_mixers

__all__ = ["ContinuousCheck", "IdentityCheck", "ImageCheck", "TopTwo", "check_identity", "reference_of"]


def check_identity(
    accelerated: Contender, plain: Contender, examples: Sequence[Example], **settings: Any
) -> IdentityReport:
    """Compare an accelerator's tokens with those of plain decoding, greedy and sampled.

    Args:
        accelerated: the accelerator to check.
        plain: accelerator "none" on the same pipeline.
        examples: what to ask; the first turn of each, images loaded (`load_images`).
        settings: see `IdentityCheck`.
    """
    check = IdentityCheck(accelerated, plain, examples, **settings)
    return check.report(list(check.comparisons()))


@dataclass(frozen=True)
class IdentityCheck:
    """Losslessness check, one comparison after another.

    Args:
        accelerated, plain, examples: as for `check_identity`.
        max_new_tokens: of each output.
        temperature: of the sampled comparison.
        seed: example i samples with seed + i.
        batch_size: rows that the accelerator decodes at once; references are always taken one by one.
        on_output: called after every output of a reference or of the accelerator's batch.
    """

    accelerated: Contender
    plain: Contender
    examples: Sequence[Example]
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    batch_size: int = 1
    on_output: Callable[[], None] = lambda: None

    @property
    def is_token_exact(self) -> bool:
        """True if sampled tokens are promised to be those of plain decoding."""
        return isinstance(self.accelerated.accelerator.rule, SampleAndMatch)

    @property
    def is_recurrent(self) -> bool:
        """True if the model has recurrent layers, whose forms round apart."""
        return bool(find_mixers(self.accelerated.pipe.model))

    @property
    def outputs(self) -> int:
        """Number of calls of `on_output`."""
        batches = -(-len(self.examples) // self.batch_size)
        return (len(self.examples) + batches) * (2 if self.is_token_exact else 1)

    def comparisons(self) -> Iterator[Comparison]:
        """Compare greedy output, then sampled output where the rule promises tokens."""
        yield self.greedy()
        if self.is_token_exact:
            yield self.sampled()

    def greedy(self) -> Comparison:
        """Compare greedy tokens with those of `model.generate`."""
        pipe = self.accelerated.pipe
        references, gaps = [], []
        for example in self.examples:
            inputs, recorder = reference_inputs(pipe, example), TopTwo()
            with torch.inference_mode():
                output = pipe.model.generate(
                    **inputs,
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=self.max_new_tokens,
                    logits_processor=LogitsProcessorList([recorder]),
                )
            references.append(output[0, inputs["input_ids"].shape[1] :].tolist())
            gaps.append(recorder.best)
            self.on_output()
        outputs, stats = self._decode({"do_sample": False, "max_new_tokens": self.max_new_tokens})
        return compare(
            "greedy", "model.generate", references, outputs, gaps, pipe.dtype, stats, self.is_recurrent
        )

    def sampled(self) -> Comparison:
        """Compare sampled tokens with those of plain decoding with the same noise: Gumbel-exact identity."""
        settings = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        settings["max_new_tokens"] = self.max_new_tokens
        references, gaps = [], []
        for index, example in enumerate(self.examples):
            recorder = TopTwo(self.temperature, self.seed + index)
            decoded = decode_conversations(
                self.plain.enter(),
                [_first_turn(example)],
                seeds=[self.seed + index],
                logits_processor=LogitsProcessorList([recorder]),
                **settings,
            )
            references += decoded.tokens
            gaps.append(recorder.best)
            self.on_output()
        outputs, stats = self._decode(settings)
        reference = f"plain decoding, temperature {self.temperature:g}"
        dtype = self.accelerated.pipe.dtype
        return compare("sampled", reference, references, outputs, gaps, dtype, stats, self.is_recurrent)

    def report(self, comparisons: list[Comparison]) -> IdentityReport:
        """Summarise comparisons in a report."""
        pipe, accelerator = self.accelerated.pipe, self.accelerated.accelerator
        notes = []
        is_whole = accelerator.drafter.exactness == "exact"  # nodes see all that the model would
        rule = type(accelerator.rule if is_whole else accelerator.drafter).__name__
        if accelerator.exactness != "exact":
            bound = f" ({accelerator.rule.bound})" if is_whole and accelerator.rule.bound else ""
            notes.append(f"{rule} is {accelerator.exactness} by its own account{bound}: it cannot pass")
        elif not self.is_token_exact:
            notes.append(
                f"sampled tokens were not compared: {rule} promises the target's distribution, not its tokens"
            )
        if accelerator.keeps:
            notes.append(f"exact refers to {accelerator.keeps}")
        drafts = accelerator.name != "none" and is_whole
        if drafts and sum(sum(one.stats.accepted) for one in comparisons) == 0:
            notes.append("no draft token was accepted, so this says little: ask for more tokens")
        return IdentityReport(
            accelerator=accelerator.name,
            exactness=accelerator.exactness,
            dtype=str(pipe.dtype).removeprefix("torch."),
            device=str(pipe.device),
            comparisons=comparisons,
            notes=notes,
        )

    def _decode(self, settings: dict[str, Any]) -> tuple[list[list[int]], DecodingStats]:
        """Decode all examples with the accelerator, in batches."""
        outputs: list[list[int]] = []
        stats: list[DecodingStats] = []
        for batch, seeds in self._batches():
            decoded = self.accelerated.decode(batch, seeds=seeds, **settings)
            outputs += decoded.tokens
            stats += decoded.stats
            self.on_output()
        return outputs, merge_stats(stats)

    def _batches(self) -> Iterator[tuple[list[Example], list[int]]]:
        """Batches of examples with their seeds."""
        for start in range(0, len(self.examples), self.batch_size):
            batch = [_first_turn(example) for example in self.examples[start : start + self.batch_size]]
            yield batch, [self.seed + start + row for row in range(len(batch))]


class TopTwo(LogitsProcessor):
    """Logits processor that records the two best logits of every step and changes nothing.

    Args:
        temperature: None for greedy decoding; else the best are those with the noise that decides.
        seed: of that noise.

    Attributes:
        best: per step, (best, runner-up, largest magnitude of the two without noise), as logits.
    """

    def __init__(self, temperature: float | None = None, seed: int = 0) -> None:
        self.temperature, self.seed = temperature, seed
        self.best: list[tuple[float, float, float]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step; input_ids [1, L], scores [1, V]."""
        noisy = logits = scores[0].float()
        if self.temperature is not None:
            index = torch.tensor([[len(self.best)]], device=scores.device)
            stream = RandomStream.from_seed(self.seed, 1, scores.device)
            noise = stream.gumbel(index, Purpose.TARGET, logits.shape[-1], logits.dtype)[0, 0]
            noisy = logits + self.temperature * noise  # (logits / T + noise) T: the unit stays the logits'
        values, tokens = noisy.topk(2)
        self.best.append((*values.tolist(), logits[tokens].abs().max().item()))
        return scores


def _first_turn(example: Example) -> Example:
    return replace(example, turns=example.turns[:1])


@dataclass(frozen=True)
class ImageCheck(IdentityCheck):
    """Losslessness check on images, one comparison after another.

    Args:
        settings: of the calls (guidance_scale, top_k, ...), but for the temperature.
    """

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


SAME = 1e-2  # rms of a vector; rounding of forwards with other shapes, grown over an image, stays far below


def reference_of(accelerator: Accelerator, cells: int) -> str:
    """The accelerator whose distribution another one keeps, as the command line writes it.

    Plain decoding of a MAR draws several cells in a forward, a draft of cells is judged one by one.

    Args:
        accelerator: that is checked.
        cells: of an image.
    """
    drafter = accelerator.drafter
    if isinstance(drafter, CellModelDrafter):
        return f"masked:iterations={cells}:order={drafter.order}"
    return "none"


@dataclass(frozen=True)
class ContinuousCheck(IdentityCheck):
    """Losslessness check on images of continuous tokens, one comparison.

    Args:
        settings: of the calls.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_token_exact(self) -> bool:
        """True if vectors are those of plain decoding, up to rounding or a tolerance."""
        return isinstance(self.accelerated.accelerator.rule, SampleAndMatch | SharedNoise)

    @property
    def reference(self) -> str:
        """Name of what the accelerator is compared with."""
        return "plain decoding" if self.plain.accelerator.name == "none" else "one cell a forward"

    @property
    def outputs(self) -> int:
        """Number of calls of `on_output`."""
        return len(self.examples) * 2

    def comparisons(self) -> Iterator[Comparison]:
        """Compare vectors, or their distribution."""
        yield self.sampled() if self.is_token_exact else self.distribution()

    def sampled(self) -> Comparison:
        """Compare vectors with those of plain decoding with the same noise."""
        plain, _ = self._draw(self.plain, 0)
        own, stats = self._draw(self.accelerated, 0)
        apart = (own - plain).square().mean(-1).sqrt()  # [n, N]
        differences = [
            Difference(index, int(far[0]), None, None, float(row.max()), 0.0, False)
            for index, row in enumerate(apart)
            if len(far := (~(row <= SAME)).nonzero()[:, 0])
        ]
        return Comparison("same noise", self.reference, len(own), apart.numel(), differences, stats)

    def distribution(self) -> Comparison:
        """Test whether images are drawn from the distribution of the reference."""
        plain, _ = self._draw(self.plain, OTHER_SEEDS)
        own, stats = self._draw(self.accelerated, 0)
        test = energy_test(own, plain, self.seed)
        return Comparison("distribution", self.reference, len(own), test.places, [], stats, test)

    def _draw(self, contender: Contender, shift: int) -> tuple[Tensor, Any]:
        """Vectors [n, N, d] of all examples, and the stats."""
        pipe, drawn, stats = contender.enter(), [], []
        for batch, seeds in self._batches():
            shifted = [seed + shift for seed in seeds]
            call = prepare_images(pipe, batch, seeds=shifted, **self.settings, output_type="latent")
            for _ in call.rounds():
                pass
            drawn += pipe.drawn(call.calls[-1].canvas)
            stats.append(call.calls[-1].stats)
            for _ in batch:
                self.on_output()
        return torch.stack(drawn).float().cpu(), merge_stats(stats)
