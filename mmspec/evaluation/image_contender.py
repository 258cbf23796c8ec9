"""Image pipelines under evaluation: one accelerator after another on the same model.

A pipeline is known by `DrawingPipeline` alone, so that evaluation stays on a floor below pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mmspec.acceleration import Accelerator
from mmspec.evaluation.examples import Example
from mmspec.evaluation.quality.image_methods import held_out_captions
from mmspec.evaluation.quality.variation import VariationMeter, needs_meter
from mmspec.evaluation.speed.timing import Decoded
from mmspec.evaluation.text_contender import AnyPipeline, Contender, seeds_of
from mmspec.scenes import COLOURS, SHAPES

__all__ = [
    "GENERATE",
    "DrawingPipeline",
    "ImageContender",
    "decode_images",
    "describe_accelerator",
    "image_contender",
    "image_examples",
    "image_subjects",
]

GENERATE = "generate"


class DrawingPipeline(AnyPipeline, Protocol):
    """Interface of an image pipeline, as far as evaluation uses it."""

    target: Any

    def __call__(self, prompt: Any = None, **settings: Any) -> Any:
        """Generate images."""
        ...

    def prepare(self, prompt: Any, keywords: dict[str, Any], **what: Any) -> Any:
        """Set up a call, whose rounds can be watched."""
        ...

    def latents(self, grid: Any, rows: Sequence[Any]) -> Tensor:
        """Tokens of images in their places."""
        ...

    def pixels(self, grid: Any, latents: Tensor) -> Tensor:
        """Images of tokens in their places."""
        ...


@dataclass(frozen=True)
class ImageContender(Contender):
    """An accelerator that was set up once on an image pipeline, and can be put back there at no cost."""

    def decode(self, batch: Sequence[Example], *, seeds: Sequence[int], **settings: Any) -> Decoded:
        """Draw a batch with this accelerator."""
        return decode_images(self.enter(), batch, seeds=seeds, **settings)

    def measure_variation(
        self, batch: Sequence[Example], seed: int = 0, **settings: Any
    ) -> dict[str, float] | None:
        """Measure the total variation of a staircase of cells to the target, mean and maximum, on one batch.

        None for all others: what they promise is exact, or their rules measure it themselves.
        """
        if not needs_meter(self.accelerator):
            return None
        meter = VariationMeter()
        call = prepare_images(self.enter(), batch, seeds=seeds_of(batch, seed), **settings)
        for step in call.rounds():
            meter.watch(step)
        meter.finish(call.calls[-1])
        stats = call.calls[-1].stats
        return None if stats.tv_mean is None else {"mean": stats.tv_mean, "max": stats.tv_max}


def image_contender(pipe: DrawingPipeline, name: str, **options: Any) -> ImageContender:
    """Set an accelerator up on an image pipeline; what it loads is loaded here and only here."""
    pipe.set_accelerator(name, **options)
    return ImageContender.of(pipe)


def decode_images(
    pipe: DrawingPipeline, batch: Sequence[Example], *, seeds: Sequence[int], **settings: Any
) -> Decoded:
    """Draw all examples of a batch together.

    Args:
        pipe: the pipeline.
        batch: prompts; or classes, all of them.
        seeds: one for each.
        settings: of the call.
    """
    prompt, what = subject_of(batch)
    output = pipe(prompt, **what, seed=list(seeds), batch_size=len(batch), **settings)
    return Decoded(list(map(as_list, output.tokens)), [output.stats], output.decode_seconds)


def as_list(row: Any) -> list[Any]:
    """Tokens of an image as a list, of ids or of vectors."""
    values: list[Any] = row.tolist() if isinstance(row, Tensor) else row
    return values


def prepare_images(
    pipe: DrawingPipeline, batch: Sequence[Example], *, seeds: Sequence[int], **settings: Any
) -> Any:
    """Set up what `decode_images` decodes: the call, whose rounds can be watched."""
    prompt, what = subject_of(batch)
    return pipe.prepare(prompt, {"seed": list(seeds), "batch_size": len(batch), **settings}, **what)


def subject_of(batch: Sequence[Example]) -> tuple[list[str] | None, dict[str, Any]]:
    """Prompts of a batch, or None and the classes where it has some."""
    labels = [example.label for example in batch]
    if None in labels:
        return [example.turns[0] for example in batch], {}
    return None, {"class_labels": labels}


def image_examples(pipe: DrawingPipeline, count: int, seed: int = 0) -> list[Example]:
    """Make the default prompts: captions of held-out scenes; or classes in turn, from `seed` on.

    Raises:
        InputError: more captions than there are.
    """
    config = pipe.model.config
    if getattr(config, "condition_type", None) == "class":
        labels = [(seed + index) % config.num_classes for index in range(count)]
        return [
            Example((f"class {label}",), category=GENERATE, identifier=f"class {label}, {index}", label=label)
            for index, label in enumerate(labels)
        ]
    captions = held_out_captions(count, seed)
    return [Example((text,), category=GENERATE, identifier=text) for text in captions]


def image_subjects(pipe: DrawingPipeline, count: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Captions that a reader of attributes can judge, and what a pipeline is asked for each.

    Held-out captions; or, of a model of scenes by class, the classes in turn from `seed` on: as often as the
    count asks for, told apart by spaces at the end, which mean nothing.

    Raises:
        InputError: more than there are.
    """
    config = pipe.model.config
    if getattr(config, "condition_type", None) != "class":
        return {text: {"prompt": text} for text in held_out_captions(count, seed)}
    labels = [(seed + index) % config.num_classes for index in range(count)]
    return {
        f"a {COLOURS[label // len(SHAPES)]} {SHAPES[label % len(SHAPES)]}{' ' * index}": {
            "class_labels": label
        }
        for index, label in enumerate(labels)
    }


def describe_accelerator(accelerator: Accelerator) -> dict[str, Any]:
    """Describe an accelerator's window and promise, which a report states beside its figures.

    Args:
        accelerator: fitted.

    Returns:
        `window`: nodes that one forward feeds at most.
        `promise`: "exact", "tv<=x", "approximate", or "lossy" with its bound in words or "no bound".
        `keeps`: what "exact" refers to, where that has to be said.
    """
    drafter, promise = accelerator.drafter, accelerator.exactness
    bound = accelerator.rule.bound if drafter.exactness == "exact" else None
    kept = {"keeps": accelerator.keeps} if accelerator.keeps else {}
    return kept | {
        "window": drafter.max_nodes,
        "promise": f"lossy, {bound or 'no bound'}" if promise == "lossy" else promise,
    }
