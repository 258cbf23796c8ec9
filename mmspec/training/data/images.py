"""Images as data for drafters of image models: of a file, with prompts or classes, and prompts alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError, MediaError
from mmspec.families.image_parts import load_vq
from mmspec.families.images import image_target
from mmspec.families.llamagen.modeling import caption_prompt, class_prompt, null_caption_prompt
from mmspec.families.llamagen.parts import load_reader
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.media import load_image
from mmspec.models.autoencoders import encode_image
from mmspec.models.checkpoint import load_config, load_model
from mmspec.open_types import Json, Processor
from mmspec.plugins import family_of, load
from mmspec.targets.causal import to_device
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.rows import DamagedFiles, check_columns, read_all
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

STAGE = 10
TRIAL_IMAGES = 2
DROPPED = 0.1  # of the images are shown without their prompts, for guidance
M = TypeVar("M", bound=nn.Module)
Inputs = dict[str, Tensor]


class LlamaGenImages(ABC):
    """Base of image data: prompts and images as tokens of a LlamaGen.

    Args:
        target: with its image tokenizer; its config says whether it draws from captions or classes.
        folder: of the model, with its text encoder in a subfolder.
        batch_size: images a step and process.
        seed: of what is drawn for each step.

    Raises:
        CheckpointError: the folder lacks a part.
    """

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int) -> None:
        self.target, self.batch_size, self.seed = target, batch_size, seed
        self.model = target.model
        self.vq = target.vq
        read = load_reader(folder, target)
        self.text_encoder: PreTrainedModel | None = read.get("text_encoder")
        self.tokenizer: Processor = read.get("tokenizer")

    def examples(
        self, asked: Sequence[Tensor | int], dropped: Sequence[bool], pixels: Tensor
    ) -> tuple[TrainingExample, ...]:
        """Training examples of images [B, 3, H, W] in [-1, 1], each after its prompt or the empty one."""
        codes = self.target.tokens_of(encode_image(self.vq, pixels.to(self.target.device)).flatten(1))
        examples = []
        for said, is_dropped, tokens in zip(asked, dropped, codes, strict=True):
            prompt = self.condition(said, dropped=is_dropped)
            _, offset = self.target.positions(prompt)  # of the prompt alone: it ends where the image begins
            ids = torch.cat([prompt["input_ids"], tokens[None]], 1)
            positions = torch.arange(ids.shape[1], device=ids.device)[None] + offset
            inputs = {**prompt, "input_ids": ids, "position_ids": positions}
            examples.append(TrainingExample(inputs, prompt["input_ids"].shape[1]))
        return tuple(examples)

    @abstractmethod
    def prompts(self, step: int, process: int) -> Trial:
        """Prompts of a step for images that the target is to draw itself."""

    def trial_of(self, held_out: Sequence[Tensor | int]) -> Trial:
        """A trial of whole images from held-out captions or labels, with the model's generation settings."""
        settings = self.model.generation_config
        scale = settings.guidance_scale or 1.0
        requests = []
        for asked in held_out:
            nothing = self.condition(asked, dropped=True) if scale != 1.0 else None
            requests.append(Request(self.condition(asked), negative_inputs=nothing, layout=self.target.grid))
        sampler = Sampler(settings.temperature or 1.0, top_k=settings.top_k, guidance_scale=scale)
        return Trial(requests, sampler, self.target.grid.length)

    @torch.no_grad()
    def condition(self, asked: Tensor | int, *, dropped: bool = False) -> Inputs:
        """Prompt inputs of a caption's words [n] or a class label; or the empty prompt of that length."""
        device = self.target.device
        if isinstance(asked, int):
            return to_device(class_prompt(self.model.config, [None if dropped else asked]), device)
        if dropped:
            return to_device(null_caption_prompt(self.model, len(asked)), device)
        if self.text_encoder is None:
            raise InputError("prompt", "a caption", "a class: the target is conditioned on classes")
        features = self.text_encoder(asked[None].to(device)).last_hidden_state
        return caption_prompt(self.model.config, features)


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
        self.asked = PromptedImages([row.asked for row in rows], self.trial_of, batch_size, seed)
        self.rows, self.damaged = rows[:-TRIAL_IMAGES], DamagedFiles(len(rows))

    @property
    def form(self) -> str:
        """Rows, as errors describe them."""
        return '{"image": path, ' + ('"class": number}' if self.text_encoder is None else '"prompt": text}')

    @property
    def left_out(self) -> Json:
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
        asked, dropped = [row.asked for row, _ in drawn], rng.random(self.batch_size) < DROPPED
        examples = self.examples(asked, dropped.tolist(), torch.stack([image for _, image in drawn]))
        return DrafterBatch(examples, int(rng.integers(2**62)))

    def prompts(self, step: int, process: int) -> Trial:
        return self.asked.prompts(step, process)

    def trial(self) -> Trial:
        return self.asked.trial()

    def opened(self, index: int) -> tuple[Row, Tensor]:
        """A row and its image; the next row, with a warning, where that cannot be read.

        Raises:
            MediaError: too many cannot be read.
        """
        for place in range(index, index + len(self.rows)):
            row = self.rows[place % len(self.rows)]
            pixels = self.damaged.opened(row.where, partial(self.pixels, row))
            if pixels is not None:
                return row, pixels
        raise MediaError("data", f"{len(self.rows)} rows", "a row with an image that can be read")

    def pixels(self, row: Row) -> Tensor:
        """Load an image [3, H, W] in [-1, 1], cut to the target's proportions and scaled to its size."""
        height, width = self.target.image_size
        image = load_image(row.image, argument=f"{row.where}: {row.image}")
        fitted = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        return rearrange(torch.from_numpy(np.array(fitted)), "h w c -> c h w").float() / 127.5 - 1


class PromptedImages:
    """Data of prompts alone. The last two are held out.

    Args:
        rows: prompts, as `ask` takes them.
        ask: makes requests of some of them, and says how they are sampled.
        batch_size: images a step and process.
        seed: of what is drawn for each step.

    Raises:
        InputError: too few prompts.
    """

    def __init__(
        self, rows: Sequence[Any], ask: Callable[[Sequence[Any]], Trial], batch_size: int, seed: int
    ) -> None:
        if len(rows) <= TRIAL_IMAGES:
            raise InputError("data", f"{len(rows)} rows", f"more than {TRIAL_IMAGES}, which are held out")
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
        """Refuse: there are no images to read.

        Raises:
            InputError: always.
        """
        raise InputError("data", "prompts", "images with prompts: the method learns from images")


def open_llamagen(folder: Path, device: torch.device) -> LlamaGenTarget:
    """Load the frozen target of a folder, in single precision, with its image tokenizer.

    Raises:
        CheckpointError: a part is missing or damaged, or it draws in another order than the raster's.
    """
    config = load_config(str(folder), argument="target")
    family = family_of(config)
    if family is not None and load(family.target).by_blocks:
        raise CheckpointError("target", config.model_type, "a model that draws token by token")
    model = load_model(str(folder), config, argument="target", dtype=torch.float32)
    vq = load_vq(str(folder)).requires_grad_(False)
    made = image_target(on_device(model.requires_grad_(False), device), on_device(vq, device))
    if not isinstance(made, LlamaGenTarget):
        raise CheckpointError("target", config.model_type, "a LlamaGen")
    return made


def on_device(module: M, device: torch.device) -> M:
    """Move a module in place and return it."""
    nn.Module.to(module, device)
    return module
