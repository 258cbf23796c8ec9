"""Outputs of the pipelines: generated text, and generated images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmspec.decoding.stats import DecodingStats


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
            continuous tokens scaled latents [n, C, h, w], NaN there.
        tokens: the output tokens of each image: codes in raster order and, from the codebook's size on, the
            syntax between them; or vectors [N, d].
        stats: what happened, without the decoder from codes to pixels.
        finish_reasons: "length" (it is whole), "interrupted" or "error" for each image.
        drafted: for each output token of each image, whether it came from the draft.
        decode_seconds: wall-clock time from codes to pixels.
    """

    images: Any
    tokens: list[Any]
    stats: DecodingStats
    finish_reasons: list[str] = field(default_factory=list)
    drafted: list[list[bool]] = field(default_factory=list)
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        stats = self.stats
        images = "1 image" if len(self.tokens) == 1 else f"{len(self.tokens)} images"
        return (
            f"{images}, {stats.nfe_mean:.1f} target forwards each (at most {stats.nfe_max}), "
            f"{stats.step_compression:.2f} tokens per forward, {stats.seconds:.2f} s and "
            f"{self.decode_seconds:.2f} s for pixels, {stats.accelerator}: {stats.promise}"
        )
