"""Outputs of the pipelines: generated text, transcripts and generated images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from einops import rearrange
from PIL import Image

from mmspec.core.canvas import RowOutput
from mmspec.core.logprobs import TokenLogprob
from mmspec.core.statistics import DecodingStats
from mmspec.transcripts import Segment

#: Images in the format of an `output_type`: a list of PIL images, an array or a tensor.
Images: TypeAlias = Any


@dataclass
class TextOutput:
    """Generated text, with token ids, finish reasons and decoding statistics.

    `print(output)` shows the first text and a line of statistics.

    Attributes:
        text: generated text of each prompt, without the prompt.
        tokens: output token ids of each prompt, including the end token.
        stats: decoding statistics of the call, such as `stats.acceptance_length`.
        finish_reasons: "eos", "length", "stop", "interrupted" or "error" for each prompt.
        drafted: for each output token of each prompt, whether it was an accepted draft token.
        logprobs: for each output token of each prompt, a `TokenLogprob(token, logprob, top)`, if the call has
            `logprobs=`; else empty lists.
    """

    text: list[str]
    tokens: list[list[int]]
    stats: DecodingStats
    finish_reasons: list[str] = field(default_factory=list)
    drafted: list[list[bool]] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)

    def __str__(self) -> str:
        first = " ".join(self.text[0].split()) if self.text else ""
        more = f" (+{len(self.text) - 1} more)" if len(self.text) > 1 else ""
        return f"{first}{more} [{self.stats}]"


@dataclass
class SpeechOutput:
    """Transcripts, with decoding statistics.

    `print(output)` shows the first transcript and a line of statistics.

    Attributes:
        text: transcript of each recording.
        segments: of each recording, in order of time; empty without `return_timestamps`.
        stats: decoding statistics of all windows.
        tokens: output token ids of each recording, without end tokens.
        seconds: length of each recording.
    """

    text: list[str]
    segments: list[list[Segment]]
    stats: DecodingStats
    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        more = f" (+{len(self.text) - 1} more)" if len(self.text) > 1 else ""
        return f"{self.text[0].strip()}{more} [{self.stats}]"


@dataclass
class ImageOutput:
    """Generated images, with image tokens, finish reasons and decoding statistics.

    `print(output)` shows the number and size of the images and a line of statistics.

    Attributes:
        images: images in the format of `output_type`: a list of PIL images ("pil"), a tensor [n, 3, H, W] in
            [0, 1] ("pt"), an array [n, H, W, 3] ("np"), or image tokens ("latent"). Latents of discrete
            tokens are codes [n, rows, columns], -1 where an image is unfinished; those of continuous tokens
            are scaled latents [n, C, h, w], NaN where unfinished. A clip is one tall image with its frames
            from top to bottom.
        tokens: output tokens of each image: codes in raster order, with syntax tokens numbered from the
            codebook size on; or vectors [N, d].
        stats: decoding statistics of the call. They do not include decoding to pixels.
        finish_reasons: "length" (complete), "interrupted" or "error" for each image.
        drafted: for each output token of each image, whether it was an accepted draft token.
        decode_seconds: wall-clock time of decoding to pixels, in seconds.
        num_frames: number of frames T of a clip; 1 for images.
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
        """Frames of each clip, in the format of `images`. An image is a clip of one frame.

        Lists of T PIL images ("pil"), a tensor [n, T, 3, H, W] ("pt"), an array [n, T, H, W, 3] ("np"), or
        codes [n, T, rows, columns] ("latent").
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
            f"{images}{self._size()}, {stats.nfe_mean:.1f} forward passes each (at most {stats.nfe_max}), "
            f"{stats.step_compression:.2f} tokens per forward pass, {stats.seconds:.2f} s and "
            f"{self.decode_seconds:.2f} s for pixels, {stats.accelerator}: {stats.promise}"
        )

    def _size(self) -> str:
        """Describe the width and height of a frame in pixels; empty for latents."""
        if isinstance(self.images, list):
            width, height = self.images[0].size if self.images else (0, 0)
        elif getattr(self.images, "ndim", 0) == 4 and 3 in (self.images.shape[1], self.images.shape[-1]):
            last = isinstance(self.images, np.ndarray)
            height, width = self.images.shape[1:3] if last else self.images.shape[2:]
        else:
            return ""
        return f" of {width}x{height // self.num_frames} pixels" if width else ""


#: Output of a pipeline call.
CallOutput: TypeAlias = TextOutput | ImageOutput
