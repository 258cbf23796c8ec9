"""ImagePipeline: generates images with models that draw them token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.call_fields import SAMPLING
from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError, UnsupportedModelError
from mmspec.families.image_parts import (
    RAW_CODEBOOK_FILE,
    TEXT_ENCODER,
    TOKENIZER,
    VQ,
    ModelSource,
    load_whole,
)
from mmspec.families.images import image_target
from mmspec.models.checkpoint import check_vocabulary, load_processor
from mmspec.models.weights import execution_device
from mmspec.pipelines.drafter import DrafterSource
from mmspec.pipelines.image_generation import ImageGenerationPipeline
from mmspec.pipelines.image_settings import ImageSettings
from mmspec.pipelines.loading import Checkpoint
from mmspec.plugins import FAMILIES, family_of, load
from mmspec.targets import CausalTarget, ImageTokenTarget

UNDRAWN = -1


class ImagePipeline(ImageGenerationPipeline):
    """Generates images from prompts or class labels.

    `MMSpecPipeline.from_pretrained` returns one for LlamaGen. Models that also answer (Janus, Emu3,
    Chameleon) draw by `ImagePipeline.from_pretrained`.

    Args:
        model: the transformer, or the whole model where it holds its image tokenizer.
        processor: the tokenizer of the text encoder or of the model; None for models of classes.
        accelerator: a name from `mmspec.list_accelerators()`.
        vq: the image tokenizer of LlamaGen, Chameleon or Emu3.5, a diffusers `VQModel`; of VAR, its own.
        text_encoder: the T5 encoder of a LlamaGen of captions.
        codebook: [K, d] the code vectors as they were trained, where `vq` keeps them normalised.
        options: options of the accelerator.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("assets/scenes-llamagen")  # doctest: +SKIP
        >>> pipe("a red ring left of a small blue cross").images[0].save("image.png")  # doctest: +SKIP
    """

    default_accelerator = "sjd"
    settings = ImageSettings
    target: ImageTokenTarget

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Any = None,
        accelerator: str | None = None,
        *,
        vq: Any = None,
        text_encoder: PreTrainedModel | None = None,
        codebook: Tensor | None = None,
        **options: Any,
    ) -> None:
        self.vq = vq
        self.text_encoder = text_encoder
        self._codebook = codebook
        super().__init__(model, processor, accelerator, **options)

    @classmethod
    def _reader(cls, found: Checkpoint, **reading: Any) -> Any:
        family = family_of(found.model_config)
        if family is not None and not family.answers:
            return None
        source, where = found.reader
        return load_processor(source, found.model_config, words_only=True, **where, **reading)

    @classmethod
    def _load_parts(cls, found: Checkpoint, parts: dict[str, str | Path]) -> dict[str, Any]:
        config = found.model_config
        family = family_of(config)
        if family is None or family.draws != "tokens":
            raise no_images_error(f"model type {config.model_type!r}")
        opened = load_whole if family.load is None else load(family.load)
        read = partial(cls._reader, found, **found.reading)
        where = ModelSource(found.source, config, parts, found.where, found.how, read)
        loaded: dict[str, Any] = opened(where)
        for name in {VQ, TEXT_ENCODER} & loaded.keys():
            loaded[name].to(execution_device(loaded["model"]))
        return loaded

    def _adapt(self, model: PreTrainedModel) -> ImageTokenTarget:
        codebook = (
            None if self._codebook is None else self._codebook.to(execution_device(model), torch.float32)
        )
        target = image_target(model, self.vq, codebook=codebook)
        if target is None:
            raise no_images_error(type(model).__name__)
        return target

    def _load_draft_model(self, drafter: DrafterSource) -> tuple[CausalTarget, Any]:
        # a smaller model would have to read the condition again, of which tokens alone do not tell
        raise InputError("accelerator", "draft_model", "one for images: sjd, or a head that drafts (eagle)")

    def _check_parts(self) -> None:
        family = family_of(self.model.config)
        if self.vq is None and family is not None and family.vq is not None:
            raise CheckpointError(VQ, None, "the image tokenizer, which turns tokens into pixels")
        if self.processor is not None:
            reader = self.model if self.text_encoder is None else self.text_encoder
            check_vocabulary(self.tokenizer, reader)

    @property
    def stride(self) -> int:
        return self.target.stride

    @property
    def components(self) -> dict[str, Any]:
        """The parts, as diffusers names them."""
        parts = {"model": self.model, "vq": self.vq, "text_encoder": self.text_encoder}
        return {
            name: part for name, part in {**parts, "processor": self.processor}.items() if part is not None
        }

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        if self.vq is not None:
            self.vq.save_pretrained(folder / VQ)
        if self._codebook is not None:
            save_file({"codebook": self._codebook}, folder / VQ / RAW_CODEBOOK_FILE)
        if self.text_encoder is not None:
            self.text_encoder.save_pretrained(folder / TEXT_ENCODER)
        if self.processor is not None:
            self.processor.save_pretrained(folder / TOKENIZER if self.text_encoder is not None else folder)

    def _sampler(self, settings: ImageSettings, prompts: int, grid: ImageGrid) -> Sampler:
        return settings.sampler(self.target, prompts)

    def sampling(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The sampling settings of a call with these keywords, the model's defaults included."""
        sampler = ImageSettings.from_keywords(self.target, keywords).sampler(self.target)
        return {name: getattr(sampler, name) for name in SAMPLING}

    def latents(self, layout: Layout, rows: Sequence[Any]) -> Tensor:
        """Codes [n, rows, columns] of outputs, whole or cut short; -1 where there is none.

        [n, N] of outputs that are more than the grid of their image.
        """
        codes = [layout.codes(row) for row in rows]
        whole = [row + [UNDRAWN] * (layout.cells - len(row)) for row in codes]
        filled = torch.tensor(whole, device="cpu")
        if not isinstance(layout, ImageGrid):
            return filled.reshape(-1, layout.cells)
        return filled.reshape(-1, layout.rows, layout.columns)

    def _decode(self, grid: ImageGrid, latents: Tensor) -> tuple[Tensor, Tensor]:
        return self.target.decode_part(latents.flatten(1).to(self.target.device), grid)


def no_images_error(name: str) -> UnsupportedModelError:
    """Make the error for a model that draws no images."""
    drawing = ", ".join(name for name, each in FAMILIES.items() if each.draws == "tokens")
    vectors = " and ".join(name for name, each in FAMILIES.items() if each.draws == "vectors")
    return UnsupportedModelError(
        f"{name} draws no images of discrete tokens; families that do are {drawing}; "
        f"ContinuousImagePipeline draws with {vectors}"
    )
