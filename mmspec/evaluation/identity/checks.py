"""Identity checks of an accelerator on text, on image tokens, and on continuous image tokens.

Greedy tokens must equal those of plain decoding; for text the reference is transformers' `model.generate`.
If the rule promises equal tokens, sampled tokens are compared with plain decoding under the same seed, since
noise is keyed by output position. All other exact rules promise the distribution, which is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mmspec.accelerator import Call
from mmspec.call_fields import NO_TRUNCATION
from mmspec.core.interfaces import Round, Rule
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import values_of
from mmspec.core.statistics import DecodingStats, merge_stats
from mmspec.evaluation.contenders import Contender, decode_conversations, prepare_images, reference_inputs
from mmspec.evaluation.examples import OTHER_SEEDS, Example, later_turns
from mmspec.evaluation.identity.comparison import Comparison, Difference, Gap, IdentityReport, compare
from mmspec.evaluation.identity.distribution import DistributionTest, check_distribution, energy_test
from mmspec.open_types import Keywords
from mmspec.targets.mixers import find_mixers

__all__ = ["ContinuousCheck", "IdentityCheck", "ImageCheck", "MaskedCheck", "TopTwo"]


@dataclass(frozen=True)
class IdentityCheck:
    """Identity check on text, one comparison after another.

    Args:
        accelerated: the accelerator to check.
        plain: accelerator "none" on the same pipeline.
        examples: prompts with loaded images (`load_images`); only the first turn of each is used.
        max_new_tokens: length limit of each output.
        temperature: temperature of the sampled comparison.
        seed: example i samples with seed + i.
        batch_size: rows that the accelerator decodes at once; references are decoded one by one.
        on_output: called after each output of the reference or the accelerator, `outputs` times in all.
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
        """True if the rule promises the same sampled tokens as plain decoding."""
        rule: Rule[Any] = self.accelerated.accelerator.rule
        return rule.is_plain_draw

    @property
    def modes(self) -> list[str]:
        return ["greedy", "sampled"] if self.is_token_exact else ["greedy"]

    @property
    def outputs(self) -> int:
        return 2 * len(self.examples) * len(self.modes)

    def comparisons(self) -> Iterator[Comparison]:
        """Run the comparisons of all modes."""
        for mode in self.modes:
            yield getattr(self, mode)()

    def greedy(self) -> Comparison:
        """Compare greedy tokens with those of `model.generate`."""
        pipe, found = self.accelerated.pipe, []
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
            found.append((output[0, inputs["input_ids"].shape[1] :].tolist(), recorder.best))
            self.on_output()
        settings = {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        return self._compared("greedy", "model.generate", found, settings)

    def sampled(self) -> Comparison:
        """Compare sampled tokens with those of plain decoding with the same noise: Gumbel-exact identity."""
        settings = {"temperature": self.temperature, **NO_TRUNCATION}
        settings["max_new_tokens"] = self.max_new_tokens
        found = []
        for batch, seeds in self._batches(1):
            recorder = TopTwo(self.temperature, seeds[0])
            processors = LogitsProcessorList([recorder])
            pipe = self.plain.enter()
            decoded = decode_conversations(pipe, batch, seeds=seeds, logits_processor=processors, **settings)
            found.append((decoded.tokens[0], recorder.best))
            self.on_output()
        return self._compared("sampled", f"plain decoding, temperature {self.temperature:g}", found, settings)

    def report(self, comparisons: list[Comparison]) -> IdentityReport:
        """Summarise comparisons in a report."""
        pipe, accelerator = self.accelerated.pipe, self.accelerated.accelerator
        tests = [one.distribution for one in comparisons if isinstance(one.distribution, DistributionTest)]
        notes = []
        is_whole = accelerator.drafter.exactness == "exact"  # nodes have the model's full context
        rule = type(accelerator.rule if is_whole else accelerator.drafter).__name__
        if accelerator.exactness != "exact":
            bound = f" ({accelerator.rule.bound})" if is_whole and accelerator.rule.bound else ""
            notes.append(f"{rule} is declared {accelerator.exactness}{bound}, so the check cannot pass")
        elif not self.is_token_exact and not tests:
            notes.append(
                f"sampled tokens were not compared: {rule} keeps the target's distribution, not its tokens"
            )
        if left_out := later_turns(self.examples):
            notes.append(
                f"{left_out} later turns of conversations were left out; only first turns are compared"
            )
        if accelerator.keeps:
            notes.append(f"exact refers to {accelerator.keeps}")
        drafts = accelerator.name != "none" and is_whole
        drafts = drafts and accelerator.drafter.max_nodes > 1  # others decide places without a draft
        if drafts and sum(sum(one.stats.accepted) for one in comparisons) == 0:
            notes.append("no draft token was accepted, so the check is weak; increase the number of tokens")
        notes += [
            "sampled tokens differ from those of plain decoding by design, so the conditional distribution "
            f"of every token was tested; with {test.places} tokens the test detects biases of "
            f"{test.resolution:.0%} at best, and smaller ones with more samples"
            for test in tests
        ]
        return IdentityReport(
            accelerator=accelerator.name,
            exactness=accelerator.exactness,
            dtype=str(pipe.dtype).removeprefix("torch."),
            device=str(pipe.device),
            comparisons=comparisons,
            notes=notes,
        )

    def _compared(
        self, mode: str, reference: str, found: list[tuple[list[int], list[Gap]]], settings: Keywords
    ) -> Comparison:
        """Decode all examples with the accelerator and compare them with the reference outputs."""
        outputs: list[list[int]] = []
        stats: list[DecodingStats] = []
        for batch, seeds in self._batches(self.batch_size):
            decoded = self.accelerated.decode(batch, seeds=seeds, **settings)
            outputs += decoded.tokens
            stats += decoded.stats
            self._count(batch)
        pipe = self.accelerated.pipe
        is_recurrent = bool(find_mixers(pipe.model))  # their two forms round differently
        return compare(mode, reference, found, outputs, pipe.dtype, merge_stats(stats), is_recurrent)

    def _batches(self, size: int) -> Iterator[tuple[list[Example], list[int]]]:
        """Batches of the examples' first turns, with their seeds."""
        for start in range(0, len(self.examples), size):
            chosen = self.examples[start : start + size]
            batch = [replace(example, turns=example.turns[:1]) for example in chosen]
            yield batch, [self.seed + start + row for row in range(len(batch))]

    def _count(self, batch: Sequence[Example]) -> None:
        for _ in batch:
            self.on_output()


@dataclass(frozen=True)
class MaskedCheck(IdentityCheck):
    """Identity check on a masked model; its reference decides one token per forward pass.

    The reference is mmspec's own plain decoding, as no other library uses this decoding order. Rounding never
    explains a difference: another token or place decided first changes the context of all later decisions.
    """

    @property
    def is_token_exact(self) -> bool:
        return True  # noise is keyed by the state of the canvas, with or without a draft

    def greedy(self) -> Comparison:
        return self._against_plain("greedy", "plain decoding", {"do_sample": False})

    def sampled(self) -> Comparison:
        settings = {"temperature": self.temperature, **NO_TRUNCATION}
        return self._against_plain("sampled", f"plain decoding, temperature {self.temperature:g}", settings)

    def _against_plain(self, mode: str, reference: str, settings: Keywords) -> Comparison:
        settings = {**settings, "max_new_tokens": self.max_new_tokens}
        found: list[tuple[list[int], list[Gap]]] = []
        for batch, seeds in self._batches(1):
            found.append((self.plain.decode(batch, seeds=seeds, **settings).tokens[0], []))
            self.on_output()
        return self._compared(mode, reference, found, settings)


class TopTwo(LogitsProcessor):
    """Logits processor that records the two largest logits of every step in `best`, and changes nothing.

    Args:
        temperature: None for greedy decoding; otherwise the logits include the sampling noise.
        seed: seed of that noise.
    """

    def __init__(self, temperature: float | None = None, seed: int = 0) -> None:
        self.temperature, self.seed = temperature, seed
        self.best: list[Gap] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a step; input_ids [1, L], scores [1, V]."""
        noisy = logits = scores[0].float()
        if self.temperature is not None:
            index = torch.tensor([[len(self.best)]], device=scores.device)
            stream = RandomStream.from_seed(self.seed, 1, scores.device)
            noise = stream.gumbel(index, Purpose.TARGET, logits.shape[-1], logits.dtype)[0, 0]
            noisy = logits + self.temperature * noise  # (logits / T + noise) T keeps the unit of the logits
        values, tokens = noisy.topk(2)
        self.best.append((*values.tolist(), logits[tokens].abs().max().item()))
        return scores


@dataclass(frozen=True)
class ImageCheck(IdentityCheck):
    """Identity check on images; `settings` are passed to the calls and exclude the temperature."""

    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def modes(self) -> list[str]:
        if self.is_token_exact:
            return ["greedy", "sampled"]
        # the test needs the distribution of the next token given the earlier ones
        return ["greedy"] if self.plain.pipe.target.by_blocks else ["greedy", "distribution"]

    def greedy(self) -> Comparison:
        return self._against_plain("greedy", "plain decoding", 0.0)

    def sampled(self) -> Comparison:
        reference = f"plain decoding, temperature {self.temperature:g}"
        return self._against_plain("sampled", reference, self.temperature)

    def distribution(self) -> Comparison:
        """Test each sampled token against the target's distribution given the earlier tokens."""
        pipe, outputs, stats, requests = self.accelerated.enter(), [], [], []
        for batch, seeds in self._batches(self.batch_size):
            call = drawn(pipe, batch, seeds, self._settings(self.temperature))
            outputs += call.calls[-1].canvas.outputs()
            stats.append(call.calls[-1].stats)
            requests += call.requests
            self._count(batch)
        test = check_distribution(pipe.target, call.calls[-1].sampler, requests, outputs, self.seed)
        self._count(self.examples)  # the test scores each output once more
        reference = f"the target's distribution, temperature {self.temperature:g}"
        return Comparison("distribution", reference, len(outputs), test.places, [], merge_stats(stats), test)

    def _against_plain(self, mode: str, reference: str, temperature: float) -> Comparison:
        pipe, found = self.plain.enter(), []
        for batch, seeds in self._batches(1):
            call = prepare_images(pipe, batch, seeds=seeds, **self._settings(temperature))
            by_blocks = pipe.target.by_blocks  # each round decides many tokens
            gaps = [top_two(step, call.calls[-1]) for step in call.rounds(is_watched=True) if not by_blocks]
            found.append((call.calls[-1].canvas.outputs()[0], gaps))
            self.on_output()
        return self._compared(mode, reference, found, self._settings(temperature))

    def _settings(self, temperature: float) -> Keywords:
        return {**self.settings, "temperature": temperature, "output_type": "latent"}


def drawn(
    pipe: object, batch: Sequence[Example], seeds: Sequence[int], settings: Mapping[str, object]
) -> Any:
    """A finished call of an image pipeline."""
    call = prepare_images(pipe, batch, seeds=seeds, **settings)
    for _ in call.rounds():
        pass
    return call


def top_two(step: Round, call: Call) -> Gap:
    """The two largest logits of a round of plain decoding with noise, and their magnitude without noise.

    The noise is scaled by the temperature, so that the unit is that of the guided logits.
    """
    logits = noisy = step.scores.logits[0, 0]
    if not step.scores.greedy:
        noise = call.random.gumbel(step.first[:1, None], Purpose.TARGET, len(logits), logits.dtype)
        noisy = logits + noise[0, 0]
    unit = values_of(call.sampler.temperature)[0] or 1.0
    values, tokens = noisy.topk(2)
    magnitude = logits[tokens].abs().nan_to_num(posinf=0.0).max()
    return (*(unit * values).tolist(), float(unit * magnitude))


SAME = 1e-2  # rms of a vector; accumulated rounding of differently shaped forward passes stays far below


@dataclass(frozen=True)
class ContinuousCheck(ImageCheck):
    """Identity check on images of continuous tokens: compares vectors or tests their distribution."""

    @property
    def modes(self) -> list[str]:
        return ["sampled" if self.is_token_exact else "distribution"]

    @property
    def reference(self) -> str:
        """Name of the reference."""
        return "plain decoding" if self.plain.accelerator.name == "none" else "one cell per forward pass"

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
        """Test whether images have the distribution of the reference."""
        plain, _ = self._draw(self.plain, OTHER_SEEDS)
        own, stats = self._draw(self.accelerated, 0)
        test = energy_test(own, plain, self.seed)
        return Comparison("distribution", self.reference, len(own), test.places, [], stats, test)

    def _draw(self, contender: Contender, shift: int) -> tuple[Tensor, DecodingStats]:
        """Vectors [n, N, d] of all examples, and the stats."""
        pipe, vectors, stats = contender.enter(), [], []
        for batch, seeds in self._batches(self.batch_size):
            call = drawn(
                pipe, batch, [seed + shift for seed in seeds], {**self.settings, "output_type": "latent"}
            )
            vectors += pipe.drawn(call.calls[-1].canvas)
            stats.append(call.calls[-1].stats)
            self._count(batch)
        return torch.stack(vectors).float().cpu(), merge_stats(stats)
