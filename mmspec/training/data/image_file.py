"""Reader of image files with prompts or classes, as data for drafters of image models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor

from mmspec.errors import InputError, MediaError
from mmspec.media import load_image
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.llamagen_images import DROPPED, STAGE, TRIAL_IMAGES, LlamaGenImages
from mmspec.training.data.rows import DamagedFiles, check_columns, read_all
from mmspec.training.data.sequences import DrafterBatch, Trial

__all__ = ["ImageFile"]


@dataclass(frozen=True)
class Row:
    """An image, the prompt or class that asks for it, and the row's name in messages."""

    where: str
    image: Path
    asked: Tensor | int


class ImageFile(LlamaGenImages):
    """Rows of a JSONL file: `{"image": path, "prompt": text}`, or `"class": number` in place of the prompt.

    Paths are relative to the file. Images are scaled and cut to the target's size. The last two rows are
    held out; a tenth of the others is shown without its prompt. In place of a row whose image cannot be read
    comes the next one; see `DamagedFiles`.

    Args:
        target, folder, batch_size, seed: see `LlamaGenImages`.
        file: of rows.

    Raises:
        InputError: a row cannot be used, or there are too few.
        CheckpointError: the folder lacks a part.
    """

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int, file: Path) -> None:
        super().__init__(target, folder, batch_size, seed)
        text = read_text(file, "data", "a JSONL file")
        rows = read_all(
            json_lines(text, "data, line {}".format, self.form), lambda row, where: self.row(file, row, where)
        )
        if len(rows) <= TRIAL_IMAGES:
            raise InputError("data", f"{len(rows)} rows", f"more than {TRIAL_IMAGES}, which are held out")
        self.rows, self.held_out = rows[:-TRIAL_IMAGES], rows[-TRIAL_IMAGES:]
        self.damaged = DamagedFiles(len(rows))

    @property
    def form(self) -> str:
        """Rows, as errors describe them."""
        return '{"image": path, ' + ('"class": number}' if self.text_encoder is None else '"prompt": text}')

    @property
    def left_out(self) -> dict[str, Any]:
        """Rows that were drawn and skipped, for the record of the training."""
        return {"damaged": sorted(self.damaged.found.values())} if self.damaged.found else {}

    def row(self, file: Path, row: Any, where: str) -> Row:
        """Read a row of the file."""
        try:
            image = file.parent / row["image"]
            asked = row["class" if self.text_encoder is None else "prompt"]
        except (KeyError, TypeError) as error:
            raise InputError(where, row, self.form) from error
        check_columns(row, ("image", "prompt", "class"), where, f"rows {self.form}")
        kind = int if self.text_encoder is None else str
        if not isinstance(asked, kind) or isinstance(asked, bool) or not image.is_file():
            raise InputError(where, row, f"{self.form}, of an image that is there")
        if isinstance(asked, int):
            try:
                self.condition(asked)  # a label that there is
            except InputError as error:
                raise InputError(where, row, str(error)) from error
            return Row(where, image, asked)
        words = self.tokenizer(asked, truncation=True, max_length=self.target.config.caption_length)
        return Row(where, image, torch.tensor(words["input_ids"]))

    def batch(self, step: int, process: int) -> DrafterBatch:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        drawn = [self.opened(index) for index in rng.integers(len(self.rows), size=self.batch_size)]
        rows = [row for row, _ in drawn]
        dropped = rng.random(self.batch_size) < DROPPED
        prompts = [
            self.condition(row.asked, dropped=bool(drop)) for row, drop in zip(rows, dropped, strict=True)
        ]
        pixels = torch.stack([image for _, image in drawn])
        return DrafterBatch(self.examples(prompts, pixels), int(rng.integers(2**62)))

    def prompts(self, step: int, process: int) -> Trial:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        return self.trial_of([self.rows[n].asked for n in rng.integers(len(self.rows), size=self.batch_size)])

    def trial(self) -> Trial:
        return self.trial_of([row.asked for row in self.held_out])

    def opened(self, index: int) -> tuple[Row, Tensor]:
        """A row and its image; the next row, with a warning, where that cannot be read.

        Raises:
            MediaError: too many cannot be read.
        """
        for place in range(index, index + len(self.rows)):
            row = self.rows[place % len(self.rows)]
            if row.where in self.damaged.found:
                continue
            try:
                return row, self.pixels(row)
            except MediaError as error:
                self.damaged.add(row.where, error)
        raise MediaError("data", f"{len(self.rows)} rows", "a row with an image that can be read")

    def pixels(self, row: Row) -> Tensor:
        """Load an image [3, H, W] in [-1, 1], cut to the target's proportions and scaled to its size."""
        height, width = self.target.image_size
        image = load_image(row.image, argument=f"{row.where}: {row.image}")
        fitted = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        return rearrange(torch.from_numpy(np.array(fitted)), "h w c -> c h w").float() / 127.5 - 1
