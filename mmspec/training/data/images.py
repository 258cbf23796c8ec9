"""Training data for heads of image models: images of a file with prompts or classes, or prompts alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor, nn
from transformers import PreTrainedConfig

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError, MediaError
from mmspec.families.image_parts import load_vq
from mmspec.media import load_image
from mmspec.models.autoencoders import encode_image
from mmspec.models.checkpoint import load_config, load_model
from mmspec.open_types import Json
from mmspec.plugins import Family, family_of, load
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.rows import DamagedFiles, check_columns, check_count, read_all
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial

__all__ = [
    "DROPPED",
    "STAGE",
    "TRIAL_IMAGES",
    "ImageFile",
    "LlamaGenImages",
    "PromptedImages",
    "open_llamagen",
]

if TYPE_CHECKING:  # `Family.reader` locates the class
    from mmspec.families.llamagen.parts import PromptReader

STAGE = 10
TRIAL_IMAGES = 2
DROPPED = 0.1  # share of the images that are shown without their prompts, for guidance
M = TypeVar("M", bound=nn.Module)


class LlamaGenImages(ABC):
    """Base of image data: prompts and images as tokens of a LlamaGen-like model.

    Args:
        target: target with its image tokenizer; it is conditioned on captions or classes.
        folder: folder of the model, with its text encoder in a subfolder.
        batch_size: images per step and process.
        seed: seed of the random choices of each step.

    Raises:
        CheckpointError: the folder lacks a part, or the family has no `reader`.
    """

    def __init__(self, target: ImageTokenTarget, folder: Path, batch_size: int, seed: int) -> None:
        self.target, self.batch_size, self.seed = target, batch_size, seed
        _, reader = family_and_reader(target.config)
        self.reader = reader(folder, target)

    def examples(
        self, asked: Sequence[Tensor | int], dropped: Sequence[bool], pixels: Tensor
    ) -> tuple[TrainingExample, ...]:
        """Training examples of images [B, 3, H, W] in [-1, 1], each after its prompt or the null prompt."""
        codes = encode_image(self.target.vq, pixels.to(self.target.device)).flatten(1)
        examples = []
        for said, is_dropped, tokens in zip(asked, dropped, self.target.tokens_of(codes), strict=True):
            prompt = self.reader.inputs(said, dropped=is_dropped)
            _, offset = self.target.positions(prompt)  # the prompt ends where the image begins
            ids = torch.cat([prompt["input_ids"], tokens[None]], 1)
            positions = torch.arange(ids.shape[1], device=ids.device)[None] + offset
            inputs = {**prompt, "input_ids": ids, "position_ids": positions}
            examples.append(TrainingExample(inputs, prompt["input_ids"].shape[1]))
        return tuple(examples)

    @abstractmethod
    def prompts(self, step: int, process: int) -> Trial:
        """Prompts of a step, for images that the target draws itself."""

    def trial_of(self, held_out: Sequence[Tensor | int]) -> Trial:
        """A trial of whole images from held-out captions or labels, with the model's generation settings."""
        settings, inputs = self.target.model.generation_config, self.reader.inputs
        scale = settings.guidance_scale or 1.0
        requests = []
        for asked in held_out:
            nothing = inputs(asked, dropped=True) if scale != 1.0 else None
            requests.append(Request(inputs(asked), negative_inputs=nothing, layout=self.target.grid))
        sampler = Sampler(settings.temperature or 1.0, top_k=settings.top_k, guidance_scale=scale)
        return Trial(requests, sampler, self.target.grid.length)


@dataclass(frozen=True)
class Row:
    """An image, its prompt or class, and the row's name in messages."""

    where: str
    image: Path
    asked: Tensor | int


class ImageFile(LlamaGenImages):
    """Rows of a JSONL file: `{"image": path, "prompt": text}`, or `"class": number` in place of the prompt.

    Paths are relative to the file. Images are scaled and cropped to the target's size. The last two rows are
    held out; a tenth of the others is shown without its prompt. A row whose image cannot be read is replaced
    by the next one; see `DamagedFiles`.

    Args:
        target, folder, batch_size, seed: see `LlamaGenImages`.
        file: JSONL file of the rows.

    Raises:
        InputError: a row cannot be used, or there are too few.
        CheckpointError: the folder lacks a part.
    """

    def __init__(
        self, target: ImageTokenTarget, folder: Path, batch_size: int, seed: int, file: Path
    ) -> None:
        super().__init__(target, folder, batch_size, seed)
        text = read_text(file, "data", "must be a JSONL file")
        rows = read_all(
            json_lines(text, "data, line {}".format, f"must be {self.form}"),
            lambda row, where: self.row(file, row, where),
        )
        self.asked = PromptedImages([row.asked for row in rows], self.trial_of, batch_size, seed)
        self.rows, self.damaged = rows[:-TRIAL_IMAGES], DamagedFiles(len(rows))

    @property
    def form(self) -> str:
        """Format of a row, for error messages."""
        return '{"image": path, ' + ('"prompt": text}' if self.target.classes is None else '"class": number}')

    @property
    def left_out(self) -> Json:
        """Rows that were drawn but skipped, for the record of the training."""
        return {"damaged": sorted(self.damaged.found.values())} if self.damaged.found else {}

    def row(self, file: Path, row: Any, where: str) -> Row:
        """Read a row of the file."""
        key, kind = ("prompt", str) if self.target.classes is None else ("class", int)
        try:
            image, asked = file.parent / row["image"], row[key]
        except (KeyError, TypeError) as error:
            raise InputError(where, row, f"must be {self.form}") from error
        check_columns(row, ("image", "prompt", "class"), where, f"must be {self.form}")
        if not isinstance(asked, kind) or isinstance(asked, bool) or not image.is_file():
            raise InputError(where, row, f"must be {self.form}, with an image that exists")
        if isinstance(asked, int):
            try:
                self.reader.inputs(asked)  # checks the label
            except InputError as error:
                raise InputError(where, row, f"has an unknown class: {error}") from error
            return Row(where, image, asked)
        words = self.reader.tokenizer(asked, truncation=True, max_length=self.target.config.caption_length)
        return Row(where, image, torch.tensor(words["input_ids"]))

    def batch(self, step: int, process: int) -> DrafterBatch:
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        drawn = [self.opened(index) for index in rng.integers(len(self.rows), size=self.batch_size)]
        asked, dropped = [row.asked for row, _ in drawn], rng.random(self.batch_size) < DROPPED
        examples = self.examples(asked, dropped.tolist(), torch.stack([image for _, image in drawn]))
        return DrafterBatch(examples, int(rng.integers(2**62)))

    def prompts(self, step: int, process: int) -> Trial:
        return self.asked.prompts(step, process)

    def trial(self) -> Trial:
        return self.asked.trial()

    def opened(self, index: int) -> tuple[Row, Tensor]:
        """A row and its image; the next row, with a warning, if the image cannot be read.

        Raises:
            MediaError: too many images cannot be read.
        """
        for place in range(index, index + len(self.rows)):
            row = self.rows[place % len(self.rows)]
            pixels = self.damaged.opened(row.where, partial(self.pixels, row))
            if pixels is not None:
                return row, pixels
        rule = "must have a row with an image that can be read"
        raise MediaError("data", f"{len(self.rows)} rows", rule)

    def pixels(self, row: Row) -> Tensor:
        """Load an image [3, H, W] in [-1, 1], cropped to the target's aspect ratio and scaled to its size."""
        height, width = self.target.image_size
        image = load_image(row.image, argument=f"{row.where}: {row.image}")
        fitted = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        return rearrange(torch.from_numpy(np.array(fitted)), "h w c -> c h w").float() / 127.5 - 1


class PromptedImages:
    """Data of prompts without images. The last two prompts are held out.

    Args:
        rows: prompts, as `ask` takes them.
        ask: returns requests of some prompts, with their sampler.
        batch_size: images per step and process.
        seed: seed of the random choices of each step.

    Raises:
        InputError: too few prompts.
    """

    def __init__(
        self, rows: Sequence[Any], ask: Callable[[Sequence[Any]], Trial], batch_size: int, seed: int
    ) -> None:
        check_count(rows, TRIAL_IMAGES)
        self.rows, self.held_out = rows[:-TRIAL_IMAGES], rows[-TRIAL_IMAGES:]
        self.ask, self.batch_size, self.seed = ask, batch_size, seed

    def prompts(self, step: int, process: int) -> Trial:
        """Prompts of a step."""
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        return self.ask([self.rows[row] for row in rng.integers(len(self.rows), size=self.batch_size)])

    def trial(self) -> Trial:
        """Held-out prompts."""
        return self.ask(self.held_out)

    def batch(self, step: int, process: int) -> DrafterBatch:
        """Raise InputError: there are no images.

        Raises:
            InputError: always.
        """
        raise InputError("data", "prompts", "must be images with prompts: the method learns from images")


def open_llamagen(folder: Path, device: torch.device) -> ImageTokenTarget:
    """Load the frozen target of a folder, in single precision, with its image tokenizer.

    Raises:
        CheckpointError: a part is missing or damaged, or the model does not draw token by token.
    """
    config = load_config(str(folder), argument="target")
    family, _ = family_and_reader(config)
    if load(family.target).by_blocks:
        raise CheckpointError("target", config.model_type, "must be a model that draws token by token")
    model = load_model(str(folder), config, argument="target", dtype=torch.float32)
    vq = load_vq(str(folder)).requires_grad_(False)
    made: ImageTokenTarget = load(family.target)(
        on_device(model.requires_grad_(False), device), on_device(vq, device)
    )
    return made


def family_and_reader(config: PreTrainedConfig) -> tuple[Family, Callable[..., PromptReader]]:
    """Return the family of a config and its `reader`.

    Raises:
        CheckpointError: the family has none, so that heads of its models do not learn from images.
    """
    family = family_of(config)
    if family is None or family.reader is None:
        raise CheckpointError("target", config.model_type, "must be a LlamaGen")
    return family, load(family.reader)


def on_device(module: M, device: torch.device) -> M:
    """Move a module in place and return it."""
    nn.Module.to(module, device)
    return module
