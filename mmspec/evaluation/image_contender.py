"""Image pipelines under evaluation: one accelerator after another on the same model.

A pipeline is known by `DrawingPipeline` alone, so that evaluation stays on a floor below pipelines.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mmspec.acceleration import Accelerator
from mmspec.evaluation.examples import Example
from mmspec.evaluation.quality.image_methods import held_out_captions
from mmspec.evaluation.quality.variation import with_meter
from mmspec.evaluation.speed.timing import Decode, Decoded
from mmspec.evaluation.text_contender import Contender

__all__ = [
    "GENERATE",
    "DrawingPipeline",
    "ImageContender",
    "decode_images",
    "describe_accelerator",
    "image_contender",
    "image_examples",
]

GENERATE = "generate"


class DrawingPipeline(Protocol):
    """Interface of an image pipeline, as far as evaluation uses it."""

    model: Any
    target: Any
    accelerator: Any
    draft_processor: Any

    def __call__(self, prompt: Any = None, **settings: Any) -> Any:
        """Generate images."""
        ...

    def set_accelerator(self, accelerator: str, **options: Any) -> Any:
        """Swap the accelerator."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        ...


@dataclass(frozen=True)
class ImageContender(Contender):
    """An accelerator that was set up once on an image pipeline, and can be put back there at no cost."""

    pipe: Any

    def enter(self) -> Any:
        """Put this accelerator on the pipeline, and return the pipeline."""
        return super().enter()

    def decoder(self, seed: int = 0, **settings: Any) -> Decode:
        """Make a function that draws a batch with this accelerator; every example has its own noise."""

        def decode(batch: Sequence[Example]) -> Decoded:
            seeds = [seed ^ zlib.crc32(example.identifier.encode()) for example in batch]
            return decode_images(self.enter(), batch, seeds=seeds, **settings)

        return decode

    def measure_variation(
        self, batch: Sequence[Example], seed: int = 0, **settings: Any
    ) -> dict[str, float] | None:
        """Measure a fixed decoding order's total variation to the target, mean and maximum, on one batch.

        None for all others, see `with_meter`.
        """
        meter = with_meter(self.accelerator)
        if meter is self.accelerator:
            return None
        measured = ImageContender(self.pipe, meter, self.draft_processor)
        (stats,) = measured.decoder(seed, output_type="latent", **settings)(batch).stats
        return None if stats.tv_mean is None else {"mean": stats.tv_mean, "max": stats.tv_max}


def image_contender(pipe: DrawingPipeline, name: str, **options: Any) -> ImageContender:
    """Set an accelerator up on an image pipeline; what it loads is loaded here and only here."""
    pipe.set_accelerator(name, **options)
    return ImageContender(pipe, pipe.accelerator, pipe.draft_processor)


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
    labels = [example.label for example in batch]
    what: dict[str, Any] = {"prompt": [example.turns[0] for example in batch]}
    if None not in labels:
        what = {"class_labels": labels}
    output = pipe(**what, seed=list(seeds), batch_size=len(batch), **settings)
    return Decoded(output.tokens, [output.stats], output.decode_seconds)


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


def describe_accelerator(accelerator: Accelerator, columns: int) -> dict[str, Any]:
    """Describe an accelerator's window and promise, which a report states beside its figures.

    Args:
        accelerator: fitted.
        columns: of the image.

    Returns:
        `window`: of a drafter, nodes that one forward feeds at most; of a decoding order, columns between
            rows.
        `promise`: "exact", "tv<=x", or "lossy" with its bound in words or "no bound".
    """
    order, rule = accelerator.order, accelerator.rule
    bound = rule.bound if order is None else None
    promise = accelerator.exactness
    return {
        "window": accelerator.drafter.max_nodes if order is None else order.window(columns),
        "promise": f"lossy, {bound or 'no bound'}" if promise == "lossy" else promise,
    }
