"""Scores of a reference model of continuous image tokens on held-out scenes.

Images are drawn by plain decoding through the ordinary loop; a reader that has seen only real scenes says
what they show.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mmspec.accelerators import masked, none
from mmspec.accelerators.accelerator import Accelerator
from mmspec.decoding.canvas import Stopping
from mmspec.decoding.interfaces import Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.vector_sampling import DenoisingSampler
from mmspec.errors import CheckpointError, InputError
from mmspec.evaluation.quality.attributes import AttributeJudge
from mmspec.evaluation.quality.set_distances import kernel_distance
from mmspec.models.denoising import DDPMSchedule, FlowSchedule
from mmspec.models.mar import load_mar
from mmspec.models.nextstep import load_nextstep, load_nextstep_tokenizer, load_nextstep_vae, prompt_ids
from mmspec.models.official_files import read_config
from mmspec.scenes import (
    COLOURS,
    HELD_OUT_SEEDS,
    IMAGE_TOKENS,
    SHAPES,
    Scene,
    caption,
    sample_scene,
)
from mmspec.targets.image_families import continuous_target
from mmspec.training.data.scenes import image_pixels
from reference.image_data import IMAGE_SIZE

__all__ = ["LatentModel", "score_latent_model"]

FIRST_SEED = 20_000
GUIDANCE_SCALES = (1.0, 2.0, 3.0)
MAR = "mar"


@dataclass(frozen=True)
class LatentModel:
    """A loaded folder of `train_latent_model`.

    Args:
        target: the model behind the Target interface.
        vae: its autoencoder.
        tokenizer: of prompts; None for a model of classes.
        judge: its reader of attributes.
        accelerator: how it is decoded.
        settings: of generation, from the folder.
    """

    target: Any
    vae: AutoencoderKL
    tokenizer: PreTrainedTokenizerBase | None
    judge: AttributeJudge
    accelerator: Accelerator
    settings: GenerationConfig

    @classmethod
    def from_folder(cls, folder: str | Path, device: str | torch.device = "cpu") -> LatentModel:
        """Load all parts.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        folder = Path(folder)
        judge = AttributeJudge.of_model(folder)
        tokenizer = None
        model: Any
        if read_config(folder).get("model_type") == MAR:
            model, vae = load_mar(folder, dtype=torch.float32)
        else:
            model, vae = load_nextstep(folder, dtype=torch.float32), load_nextstep_vae(folder)
            tokenizer = load_nextstep_tokenizer(folder)
        if vae is None:
            raise CheckpointError("vae", str(folder), "a folder with its autoencoder")
        parts: Any = (model, vae, judge.reader)
        for part in parts:
            part.to(device).eval()
        target: Any = continuous_target(model)
        plain = none() if tokenizer is not None else masked()
        settings = GenerationConfig.from_pretrained(str(folder))
        return cls(target, vae, tokenizer, judge, plain.fit(target), settings)

    def request(self, asked: str | int) -> Request:
        """The request of a caption or a class label, with its unconditional twin."""
        grid = self.target.grid
        if isinstance(asked, int):
            ids = torch.tensor([[asked]]), torch.tensor([[self.target.model.config.num_classes]])
        else:
            ids = self._ids(asked), self._ids("")
        own, negative = ({"input_ids": each} for each in ids)
        return Request(own, negative_inputs=negative, grid=grid)

    def _ids(self, text: str) -> Tensor:
        if self.tokenizer is None:
            raise TypeError("a model of classes reads no text")
        grid = self.target.grid
        return prompt_ids(self.tokenizer, self.target.model.config, text, grid.rows, grid.columns)

    def sampler(self, scale: float) -> DenoisingSampler:
        """Sampler with the published schedules of the head and of the guidance."""
        is_mar = self.tokenizer is None
        clip = getattr(self.settings, "clip_sample_range", None)
        return DenoisingSampler(
            source=self.target.denoiser,
            schedule=DDPMSchedule(clip_sample_range=clip) if is_mar else FlowSchedule(),
            guidance_scale=scale,
            guidance_schedule="rising" if is_mar else "constant",
            length=self.target.grid.cells,
        )

    def draw(
        self, asked: Sequence[str | int], sampler: DenoisingSampler, seeds: Sequence[int], batch_size: int
    ) -> Tensor:
        """Images [n, 3, H, W] in [0, 1], one for each caption or class."""
        images, cells = [], self.target.grid.cells
        for start in range(0, len(asked), batch_size):
            requests = [self.request(one) for one in asked[start : start + batch_size]]
            random = RandomStream.from_seed(
                list(seeds[start : start + batch_size]), len(requests), self.target.device
            )
            call = self.accelerator.call(self.target, sampler, requests, Stopping(cells), random)
            for _ in call.rounds():
                pass
            images.append(self.pixels(torch.stack(call.canvas.outputs())))
        return torch.cat(images)

    @torch.inference_mode()
    def pixels(self, tokens: Tensor) -> Tensor:
        """Images [n, 3, H, W] in [0, 1] of vectors [n, N, d]."""
        config: Any = self.vae.config
        latents = self.target.model.unpatchify(tokens) / config.scaling_factor + (config.shift_factor or 0.0)
        decoded: Tensor = self.vae.decode(latents).sample
        return ((decoded + 1) / 2).clamp(0, 1)


def score_latent_model(
    folder: str | Path,
    scenes: int = 200,
    seed: int = FIRST_SEED,
    *,
    guidance_scales: Sequence[float] = GUIDANCE_SCALES,
    batch_size: int = 16,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Draw held-out scenes at several guidance scales, by plain decoding with the published settings.

    A NextStep is asked for captions of scenes with one or two objects; a MAR for the colour and shape of the
    one object of a scene.

    Args:
        folder: that `train_latent_model` wrote.
        scenes: held-out scenes, with the seeds `seed`, `seed + 1`, ...
        seed: first seed, within `HELD_OUT_SEEDS`.
        guidance_scales: to be tried.
        batch_size: images at once.
        device: a GPU where there is one by default, else the CPU.

    Returns:
        `guidance`: for each scale the shares of `AttributeScores`, and the kernel distance of the reader's
        features to real images with its margin; `real`: what the reader finds in real images; `condition`,
        `scenes`, `seed`, `device`, `seconds`.

    Raises:
        InputError: the scenes are not held-out ones.
        CheckpointError: the folder lacks a part.
    """
    if scenes < 3 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        allowed = f"at least 3 scenes within the held-out seeds 0 to {HELD_OUT_SEEDS.stop - 1}"
        raise InputError("seed", (seed, scenes), allowed)
    started = time.monotonic()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = LatentModel.from_folder(folder, device)
    by_class = model.tokenizer is None
    drawn = [
        sample_scene(seed + index, objects=1 if by_class else None, profile=IMAGE_TOKENS)
        for index in range(scenes)
    ]
    asked: list[str | int] = [one.class_label if by_class else caption(one) for one in drawn]
    texts = [class_words(one) if by_class else caption(one) for one in drawn]
    real = (image_pixels(drawn, IMAGE_SIZE).to(device) + 1) / 2
    features = model.judge.features(real)
    guidance = {}
    for scale in tqdm(sorted(set(guidance_scales)), desc="guidance scales"):
        images = model.draw(asked, model.sampler(scale), [one.seed for one in drawn], batch_size)
        distance, margin = kernel_distance(model.judge.features(images), features)
        scores = asdict(model.judge.score(images, texts))
        guidance[f"{scale:g}"] = {**scores, "kernel_distance": distance, "margin": margin}
    return {
        "guidance": guidance,
        "real": asdict(model.judge.score(real, texts)),
        "condition": "class" if by_class else "caption",
        "scenes": scenes,
        "seed": seed,
        "device": str(device),
        "seconds": round(time.monotonic() - started, 1),
    }


def class_words(scene: Scene) -> str:
    """A prompt in words for the class of a scene."""
    colour, shape = divmod(scene.class_label, len(SHAPES))
    return f"a {COLOURS[colour]} {SHAPES[shape]}"
