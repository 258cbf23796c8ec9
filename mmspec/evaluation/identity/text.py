"""Losslessness check of an accelerator on a text model.

Two comparisons: greedy decoding with `model.generate` of plain transformers, and sampling with the same seed
with and without the accelerator, which must be bitwise equal because noise is keyed by output position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.stats import DecodingStats
from mmspec.evaluation.examples import Example
from mmspec.evaluation.identity.comparison import Comparison, IdentityReport, compare
from mmspec.evaluation.speed.bench_record import merge_stats
from mmspec.evaluation.text_contender import Contender, decode_conversations, reference_inputs
from mmspec.targets.mixers import find_mixers

__all__ = ["IdentityCheck", "TopTwo", "check_identity"]


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
