"""ContinuousImagePipeline: image generation with continuous tokens (NextStep-1, MAR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, RowOutput
from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.errors import CheckpointError, InputError, UnsupportedModelError
from mmspec.families.image_parts import ModelSource, check_parts
from mmspec.families.images import check_same_latents, continuous_target
from mmspec.models.checkpoint import check_source, load_config
from mmspec.models.weights import execution_device, is_offloaded
from mmspec.open_types import Keywords, Processor
from mmspec.pipelines.drafter import DrafterSource
from mmspec.pipelines.image_generation import ImageGenerationPipeline
from mmspec.pipelines.image_settings import ContinuousSettings
from mmspec.pipelines.loading import Checkpoint
from mmspec.plugins import family_of, load
from mmspec.validation import is_integer
from mmspec.vectors.sampling import DenoisingSampler

VAE = "vae"
GENERATION_CONFIG = "generation_config.json"
NEEDED_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "vae/*")
FROM_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")

#: An image tokenizer, diffusers' `AutoencoderKL`, or None.
Autoencoder: TypeAlias = Any


class ContinuousImagePipeline(ImageGenerationPipeline):
    """Image generation with continuous tokens, from prompts (NextStep-1) or class labels (MAR).

    `MMSpecPipeline.from_pretrained` returns this pipeline for their checkpoints.

    Args:
        model: the transformer with its denoising head.
        processor: the tokenizer of prompts; None for class-conditional models.
        accelerator: a name from `mmspec.list_accelerators()`. The default is plain decoding; for MAR, that is
            the published decoding order in 64 forward passes.
        vae: the image tokenizer, a diffusers `AutoencoderKL`.
        options: options of the accelerator.

    Example:
        >>> pipe = MMSpecPipeline.from_pretrained("assets/scenes-nextstep")  # doctest: +SKIP
        >>> pipe("a red ring left of a small blue cross").images[0].save("image.png")  # doctest: +SKIP
    """

    default_accelerator = "none"
    settings = ContinuousSettings
    parts = (VAE,)
    target: Any
    model: Any

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Processor = None,
        accelerator: str | None = None,
        *,
        vae: Autoencoder = None,
        **options: object,
    ) -> None:
        self.vae = vae
        super().__init__(model, processor, accelerator, **options)

    @classmethod
    def _reader(cls, found: Checkpoint, **reading: object) -> Processor:
        return None

    @classmethod
    def _load_parts(cls, found: Checkpoint, parts: dict[str, str | Path]) -> Keywords:
        config, how = found.model_config, found.how
        if found.adapter is not None:
            rule = f"must not be an adapter; {config.model_type} models have none"
            raise InputError("model", str(found.adapter.folder), rule)
        loaded = load_continuous(found.source, config, found.where, how, parts)
        if is_offloaded(loaded["model"]):
            rule = "must keep the whole model in memory; weights are also read between forward passes"
            raise InputError("device_map", how["device_map"], rule)
        if loaded[VAE] is not None:
            loaded[VAE].to(execution_device(loaded["model"]))
        return loaded

    def _adapt(self, model: PreTrainedModel) -> Any:
        target = continuous_target(model)
        if target is None:
            raise no_vectors_error(type(model).__name__)
        return target

    def _build_accelerator(
        self, name: str, drafter: DrafterSource | None, options: Keywords
    ) -> tuple[Accelerator, Processor]:
        if drafter is None and (preset := self._preset(self.model.config, name)) != name:
            return replace(build_accelerator(preset, **options), name=name), None
        return super()._build_accelerator(name, drafter, options)

    def _load_draft_model(self, drafter: DrafterSource) -> tuple[Any, Processor]:
        model: Any = drafter
        vae: Autoencoder = None
        rule = f"must be a draft model for {type(self.model).__name__}"
        if not isinstance(drafter, PreTrainedModel):
            source = check_source(drafter, "drafter")
            config = load_config(source, argument="drafter")
            if getattr(family_of(config), "draws", "") != "vectors":
                raise InputError("drafter", f"model type {config.model_type!r}", rule)
            how = {"dtype": self.dtype, "device_map": {"": self.device}}
            loaded = load_continuous(source, config, {}, how, {})
            model, vae = loaded["model"], loaded[VAE]
        draft = continuous_target(model)
        if draft is None:
            raise InputError("drafter", type(model).__name__, rule)
        check_same_latents(self.target, draft, (scaling(self.model, self.vae), scaling(model, vae)))
        return draft, None

    def _check_parts(self) -> None:
        if self.vae is None:
            raise CheckpointError(VAE, None, "must be the image tokenizer, which decodes tokens to pixels")
        channels = self.target.vector_size // self.patch**2
        if self.vae.config.latent_channels != channels:
            rule = f"must have {channels} latent channels, like the model's tokens"
            raise CheckpointError(VAE, f"{self.vae.config.latent_channels} channels", rule)
        if self.processor is None and not self.target.any_order:
            raise CheckpointError("tokenizer", None, "must be the tokenizer of the prompts")

    @property
    def patch(self) -> int:
        """Side of a token in latents."""
        return int(getattr(self.model.config, "latent_patch_size", 1))

    @property
    def stride(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1)) * self.patch

    def _write(self, folder: Path) -> None:
        super()._write(folder)
        stored = getattr(self.model, "generation_config", None)
        if stored is not None:
            stored.save_pretrained(folder)

    def _sampler(self, settings: ContinuousSettings, prompts: int, grid: ImageGrid) -> DenoisingSampler:
        normalize = bool(self.vae.config.get("encoder_norm"))
        return settings.sampler(self.target, prompts, grid.length, normalize)

    def sampling(self, keywords: Keywords) -> Keywords:
        """Return the sampling settings of a call with these keywords, including the model's defaults."""
        settings = ContinuousSettings.from_keywords(self.target, keywords)
        sampler = settings.sampler(self.target, 1, self.target.grid.length)
        names = ("guidance_scale", "guidance_schedule", "temperature")
        described = {name: getattr(sampler, name) for name in names}
        return {**described, "num_inference_steps": sampler.schedule.steps}

    def _find_grid(self, height: int | None, width: int | None) -> ImageGrid:
        own: ImageGrid = self.target.grid
        sides: list[int] = []
        for name, value, cells in (("height", height, own.rows), ("width", width, own.columns)):
            pixels = cells * self.stride if value is None else value
            if not is_integer(pixels) or pixels < 1 or pixels % self.stride:
                raise InputError(name, value, f"must be a multiple of {self.stride} pixels")
            sides.append(pixels // self.stride)
        grid = ImageGrid(sides[0], sides[1], 1)
        places = self.target.largest_image
        if grid.cells > places or (self.target.any_order and sides != [own.rows, own.columns]):
            wanted = f"{own.rows * self.stride} x {own.columns * self.stride} pixels"
            most = f"have at most {places} tokens of {self.stride} x {self.stride} pixels"
            rule = f"must be {wanted}" if self.target.any_order else f"must {most}"
            raise InputError("height, width", (height, width), rule)
        return grid

    def drawn(self, canvas: Canvas) -> list[RowOutput]:
        """Return the vectors [N, d] of every row, NaN where a place is undecided."""
        count = canvas.stopping[0].max_new_tokens
        values, decided = canvas.tokens[:, :-1][:, :count], canvas.decided[:, :-1][:, :count]
        return list(values.masked_fill(~decided[..., None], torch.nan))

    def latents(self, layout: Layout, rows: Sequence[RowOutput]) -> Tensor:
        """Return the scaled latents [n, C, h, w] of image vectors, NaN where a place is undecided."""
        grid = layout.image
        shape = len(rows), grid.cells, self.target.vector_size
        tokens = torch.full(shape, torch.nan, dtype=torch.float32, device=self.device)
        for image, row in zip(tokens, rows, strict=True):
            if len(row):
                image[: len(row)] = row
        latents: Tensor = self.model.unpatchify(tokens, grid.rows, grid.columns)
        return latents

    def _decode(self, grid: ImageGrid, latents: Tensor) -> tuple[Tensor, Tensor]:
        config, patch = self.vae.config, self.patch
        is_drawn = ~latents[:, 0, ::patch, ::patch].isnan()
        scaled = latents.nan_to_num(0.0) / config.scaling_factor + (config.get("shift_factor") or 0.0)
        return self.vae.decode(scaled.to(self.vae.dtype)).sample, is_drawn


def load_continuous(
    source: str,
    config: PreTrainedConfig,
    where: Keywords,
    how: Keywords,
    parts: dict[str, str | Path],
) -> Keywords:
    """Load the parts of a pipeline for continuous tokens; `vae` is None if the checkpoint has none."""
    family = family_of(config)
    if family is None or family.draws != "vectors" or family.load is None:
        raise no_vectors_error(f"model type {config.model_type!r}")
    check_parts(ModelSource(source, config, parts), VAE)
    for name in where.keys() - {"trust_remote_code", *FROM_HUB}:
        raise InputError(name, where[name], f"is not supported for {config.model_type} checkpoints")
    if not how.get("use_safetensors", True):
        rule = f"must be True; {config.model_type} checkpoints are loaded from safetensors only"
        raise InputError("use_safetensors", False, rule)
    how = {name: value for name, value in how.items() if name != "use_safetensors"}
    where = {name: value for name, value in where.items() if name != "trust_remote_code"}
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=list(NEEDED_FILES), **where))
    loaded: Keywords = load(family.load)(ModelSource(str(folder), config, parts, {}, how))
    if (folder / GENERATION_CONFIG).is_file():
        loaded["model"].generation_config = GenerationConfig.from_pretrained(str(folder))
    return loaded


def scaling(model: PreTrainedModel, vae: Autoencoder) -> tuple[float, float] | None:
    """Return factor and shift of a model's latents; None if neither autoencoder nor config has them."""
    config = model.config if vae is None else vae.config
    factor = getattr(config, "scaling_factor", None)
    return None if factor is None else (float(factor), float(getattr(config, "shift_factor", None) or 0.0))


def no_vectors_error(name: str) -> UnsupportedModelError:
    """Make the error for a model that generates no continuous tokens."""
    return UnsupportedModelError(f"{name} generates no continuous image tokens; use NextStep-1 or MAR")
