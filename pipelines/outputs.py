"""Outputs of the pipelines: generated text, and generated images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from einops import rearrange
from PIL import Image

from mmspec.core.canvas import RowOutput
from mmspec.core.statistics import DecodingStats

#: Images in the form of an `output_type`: a list of PIL images, an array or a tensor.
Images: TypeAlias = Any


@dataclass
class TextOutput:
    """Generated text.

    Attributes:
        text: one string per prompt, without the prompt.
        tokens: the output token ids of each prompt, end token included.
        finish_reasons: "eos", "length", "stop", "interrupted" or "error" for each prompt.
        stats: what happened.
        drafted: for each output token of each prompt, whether it came from the draft.
    """

    text: list[str]
    tokens: list[list[int]]
    stats: DecodingStats
    finish_reasons: list[str] = field(default_factory=list)
    drafted: list[list[bool]] = field(default_factory=list)

    def __str__(self) -> str:
        first = " ".join(self.text[0].split()) if self.text else ""
        more = f" (+{len(self.text) - 1} more)" if len(self.text) > 1 else ""
        return f"{first}{more} [{self.stats}]"


@dataclass
class ImageOutput:
    """Generated images.

    Attributes:
        images: in the form of `output_type`: PIL images ("pil"), [n, 3, H, W] in [0, 1] ("pt"), [n, H, W, 3]
            ("np"), or the tokens ("latent"): codes [n, rows, columns], -1 where an image was not finished; of
            continuous tokens scaled latents [n, C, h, w], NaN there. Clips are strips, their frames one below
            another.
        tokens: the output tokens of each image: codes in raster order and, from the codebook's size on, the
            syntax between them; or vectors [N, d].
        stats: what happened, without the decoder from codes to pixels.
        finish_reasons: "length" (it is whole), "interrupted" or "error" for each image.
        drafted: for each output token of each image, whether it came from the draft.
        decode_seconds: wall-clock time from codes to pixels.
        num_frames: T of a clip; 1 for images.
    """

    images: Images
    tokens: list[RowOutput]
    stats: DecodingStats
    finish_reasons: list[str] = field(default_factory=list)
    drafted: list[list[bool]] = field(default_factory=list)
    decode_seconds: float = 0.0
    num_frames: int = 1

    @property
    def frames(self) -> Images:
        """Frames of each clip, in the form of the images.

        Lists of T PIL images ("pil"), [n, T, 3, H, W] ("pt"), [n, T, H, W, 3] ("np"), or codes [n, T, rows,
        columns] ("latent"). An image is a clip of one frame.
        """
        if isinstance(self.images, list):
            return [
                [Image.fromarray(frame) for frame in np.split(np.asarray(image), self.num_frames)]
                for image in self.images
            ]
        if self.images.ndim == 3:
            pattern = "n (t y) x -> n t y x"
        elif isinstance(self.images, np.ndarray):
            pattern = "n (t y) x c -> n t y x c"
        else:
            pattern = "n c (t y) x -> n t c y x"
        return rearrange(self.images, pattern, t=self.num_frames)

    def __str__(self) -> str:
        stats = self.stats
        what = "image" if self.num_frames == 1 else "clip"
        images = f"1 {what}" if len(self.tokens) == 1 else f"{len(self.tokens)} {what}s"
        return (
            f"{images}, {stats.nfe_mean:.1f} target forwards each (at most {stats.nfe_max}), "
            f"{stats.step_compression:.2f} tokens per forward, {stats.seconds:.2f} s and "
            f"{self.decode_seconds:.2f} s for pixels, {stats.accelerator}: {stats.promise}"
        )


#: What a call of a pipeline gives.
CallOutput: TypeAlias = TextOutput | ImageOutput
