"""ImagePipeline: image generation with discrete image tokens."""

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
    """Image generation with discrete image tokens, from prompts or class labels.

    `MMSpecPipeline.from_pretrained` returns this pipeline for LlamaGen. For models that generate both text
    and images (Janus, Emu3, Chameleon), call `ImagePipeline.from_pretrained`.

    Args:
        model: the transformer, or the whole model if it contains its image tokenizer.
        processor: the tokenizer of the text encoder or of the model; None for class-conditional models.
        accelerator: a name from `mmspec.list_accelerators()`.
        vq: the image tokenizer: a diffusers `VQModel` for LlamaGen, Chameleon and Emu3.5; VAR has its own.
        text_encoder: the T5 encoder of a text-conditional LlamaGen.
        codebook: code vectors [K, d] as trained, if `vq` stores them normalised.
        options: options of the accelerator.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("assets/scenes-llamagen")  # doctest: +SKIP
        >>> pipe("a red ring left of a small blue cross").images[0].save("image.png")  # doctest: +SKIP
    """

    default_accelerator = "sjd"
    settings = ImageSettings
    parts = (VQ, TEXT_ENCODER)
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
        # a draft model would have to read the condition, which the tokens alone do not contain
        rule = "must support images; use sjd, or a head such as eagle"
        raise InputError("accelerator", "draft_model", rule)

    def _check_parts(self) -> None:
        family = family_of(self.model.config)
        if self.vq is None and family is not None and family.vq is not None:
            raise CheckpointError(VQ, None, "must be the image tokenizer, which decodes tokens to pixels")
        if self.processor is not None:
            reader = self.model if self.text_encoder is None else self.text_encoder
            check_vocabulary(self.tokenizer, reader)

    @property
    def stride(self) -> int:
        return self.target.stride

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        if self._codebook is not None:
            save_file({"codebook": self._codebook}, folder / VQ / RAW_CODEBOOK_FILE)

    def _sampler(self, settings: ImageSettings, prompts: int, grid: ImageGrid) -> Sampler:
        return settings.sampler(self.target, prompts)

    def sampling(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling settings of a call with these keywords, including the model's defaults."""
        sampler = ImageSettings.from_keywords(self.target, keywords).sampler(self.target)
        return {name: getattr(sampler, name) for name in SAMPLING}

    def latents(self, layout: Layout, rows: Sequence[Any]) -> Tensor:
        """Return the codes [n, rows, columns] of outputs, -1 where a token is missing.

        The shape is [n, N] for layouts with more tokens than the grid of the image.
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
    """Make the error for a model that generates no images."""
    drawing = ", ".join(name for name, each in FAMILIES.items() if each.draws == "tokens")
    vectors = " and ".join(name for name, each in FAMILIES.items() if each.draws == "vectors")
    return UnsupportedModelError(
        f"{name} generates no discrete image tokens; ImagePipeline supports the families {drawing}, "
        f"ContinuousImagePipeline {vectors}"
    )
