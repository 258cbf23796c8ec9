"""Reader of image files with prompts or classes, as data for drafters of image models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor

from mmspec.errors import InputError
from mmspec.media import DEFAULT_LIMITS
from mmspec.media.images import load_image
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.data.llamagen_images import DROPPED, STAGE, TRIAL_IMAGES, LlamaGenImages
from mmspec.training.data.sequences import DrafterBatch, Trial

__all__ = ["ImageFile"]


@dataclass(frozen=True)
class Row:
    """An image, and the prompt or class that asks for it."""

    image: Path
    asked: Tensor | int


class ImageFile(LlamaGenImages):
    """Rows of a JSONL file: `{"image": path, "prompt": text}`, or `"class": number` in place of the prompt.

    Paths are relative to the file. Images are scaled and cut to the target's size. The last two rows are
    held out; a tenth of the others is shown without its prompt.

    Args:
        target, folder, batch_size, seed: see `LlamaGenImages`.
        file: of rows.

    Raises:
        InputError: a row cannot be used, or there are too few.
        CheckpointError: the folder lacks a part.
    """

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int, file: Path) -> None:
        super().__init__(target, folder, batch_size, seed)
        rows = [self.row(file, number, line) for number, line in enumerate(read_lines(file), 1)]
        if len(rows) <= TRIAL_IMAGES:
            raise InputError("data", f"{len(rows)} rows", f"more than {TRIAL_IMAGES}, which are held out")
        self.rows, self.held_out = rows[:-TRIAL_IMAGES], rows[-TRIAL_IMAGES:]

    def row(self, file: Path, number: int, line: str) -> Row:
        """Read one line of the file."""
        wanted = "prompt" if self.text_encoder is not None else "class"
        kind = str if wanted == "prompt" else int
        allowed = f'{{"image": path, "{wanted}": {"text" if kind is str else "number"}}}'
        try:
            table = json.loads(line)
            image, asked = file.parent / table["image"], table[wanted]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"data, line {number}", line[:100], allowed) from error
        if not isinstance(asked, kind) or isinstance(asked, bool) or not image.is_file():
            raise InputError(f"data, line {number}", line[:100], f"{allowed}, of an image that is there")
        if isinstance(asked, int):
            self.condition(asked)  # a label that there is
            return Row(image, asked)
        words = self.tokenizer(asked, truncation=True, max_length=self.target.config.caption_length)
        return Row(image, torch.tensor(words["input_ids"]))

    def batch(self, step: int, process: int) -> DrafterBatch:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        rows = [self.rows[index] for index in rng.integers(len(self.rows), size=self.batch_size)]
        dropped = rng.random(self.batch_size) < DROPPED
        prompts = [
            self.condition(row.asked, dropped=bool(drop)) for row, drop in zip(rows, dropped, strict=True)
        ]
        pixels = torch.stack([self.pixels(row.image) for row in rows])
        return DrafterBatch(self.examples(prompts, pixels), int(rng.integers(2**62)))

    def prompts(self, step: int, process: int) -> Trial:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        return self.trial_of([self.rows[n].asked for n in rng.integers(len(self.rows), size=self.batch_size)])

    def trial(self) -> Trial:
        return self.trial_of([row.asked for row in self.held_out])

    def pixels(self, path: Path) -> Tensor:
        """Load an image [3, H, W] in [-1, 1], cut to the target's proportions and scaled to its size."""
        height, width = self.target.image_size
        image = load_image(path, limits=DEFAULT_LIMITS)
        fitted = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        return rearrange(torch.from_numpy(np.array(fitted)), "h w c -> c h w").float() / 127.5 - 1


def read_lines(file: Path) -> list[str]:
    """Read the lines of a file that are not empty.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("data", str(file), "a JSONL file") from error
