"""Scores of a reference image model on held-out prompts: attribute accuracy, and entropy of its tokens.

Images are drawn by plain decoding through the ordinary loop; a reader that has seen only real scenes says
what they show. Entropy, and how much a conditional distribution depends on the token before it, tell how
much speculative decoding can save; they are measured on real held-out images.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from einops import rearrange
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, T5EncoderModel

from mmspec.accelerators import none
from mmspec.decoding.canvas import Stopping
from mmspec.decoding.interfaces import Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.evaluation.quality.attributes import AttributeJudge, AttributeScores
from mmspec.models.autoencoders import encode_image
from mmspec.models.llamagen import LlamaGenForCausalLM, caption_prompt, class_prompt, null_caption_prompt
from mmspec.scenes import (
    COLOURS,
    HELD_OUT_SEEDS,
    IMAGE_TOKENS,
    SHAPES,
    Scene,
    caption,
    render,
    sample_image_prompt,
    sample_scene,
)
from mmspec.scenes.reader import ImageReading
from mmspec.targets.llamagen import LlamaGenTarget

__all__ = ["FIRST_SEED", "ImageModel", "score_image_model"]

FIRST_SEED = 20_000
GUIDANCE_SCALES = (1.0, 2.0, 3.0, 4.0, 5.0)
PLACES = 16  # of each image, where the token before is drawn anew
MEASURED = 16  # images whose conditional distributions are measured, 256 each


@dataclass(frozen=True)
class ImageModel:
    """A loaded folder of `train_image`.

    Args:
        target: the transformer with its VQ.
        text_encoder, tokenizer: None where the condition is a class.
        judge: its reader of attributes.
    """

    target: LlamaGenTarget
    text_encoder: T5EncoderModel | None
    tokenizer: Any
    judge: AttributeJudge

    @classmethod
    def from_folder(cls, folder: str | Path, device: str | torch.device = "cpu") -> ImageModel:
        """Load all parts.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        folder = Path(folder)
        judge = AttributeJudge.of_model(folder)
        try:
            transformer: Any = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
            vq = VQModel.from_pretrained(folder / "vq", torch_dtype=torch.float32).to(device).eval()
            text_encoder: Any = None
            tokenizer = None
            if transformer.config.condition_type == "caption":
                text_encoder = T5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
                text_encoder.to(device).eval()
                tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        except (OSError, ValueError) as error:
            raise CheckpointError("model", str(folder), "a reference image model") from error
        parts: Any = (judge.reader, transformer)
        for part in parts:
            part.to(device).eval()
        return cls(LlamaGenTarget(transformer, vq), text_encoder, tokenizer, judge)

    @property
    def guidance_scale(self) -> float:
        """The default guidance scale."""
        return float(self.target.model.generation_config.guidance_scale or 1.0)

    def request(self, prompt: str | int) -> Request:
        """The request of a caption or a class label, with its unconditional twin."""
        model: Any = self.target.model
        if isinstance(prompt, int):
            labels = class_prompt(model.config, [prompt]), class_prompt(model.config, [None])
            return Request(labels[0], negative_inputs=labels[1])
        ids = self.tokenizer(
            prompt,
            add_special_tokens=False,
            truncation=True,
            max_length=model.config.caption_length,
            return_tensors="pt",
        )["input_ids"].to(model.device)
        with torch.inference_mode():
            features = self.text_encoder(input_ids=ids).last_hidden_state  # type: ignore[misc]
        null = null_caption_prompt(model, ids.shape[1])
        return Request(caption_prompt(model.config, features), negative_inputs=null)

    def draw(
        self, prompts: Sequence[str | int], sampler: Sampler, seeds: Sequence[int], batch_size: int = 32
    ) -> Tensor:
        """Tokens [n, cells] of one image for each prompt, by plain decoding."""
        drawn: list[list[int]] = []
        cells = self.target.grid.cells
        for start in range(0, len(prompts), batch_size):
            requests = [self.request(prompt) for prompt in prompts[start : start + batch_size]]
            random = RandomStream.from_seed(
                list(seeds[start : start + batch_size]), len(requests), self.target.device
            )
            call = none().call(self.target, sampler, requests, Stopping(cells), random)
            for _ in call.rounds():
                pass
            drawn += call.canvas.outputs()
        return torch.tensor(drawn, device=self.target.device)

    def pixels(self, tokens: Tensor) -> Tensor:
        """Images [n, 3, H, W] in [0, 1]."""
        parts = [self.target.decode_tokens(part) for part in tokens.split(32)]
        return (torch.cat(parts) + 1) / 2


def score_image_model(
    folder: str | Path,
    scenes: int = 200,
    seed: int = FIRST_SEED,
    *,
    guidance_scales: Sequence[float] = GUIDANCE_SCALES,
    batch_size: int = 32,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Draw held-out prompts at several guidance scales, and measure the model's conditional distributions.

    Sampling is that of the folder's generation settings (temperature, top-k, top-p).

    Args:
        folder: that `train_image` wrote.
        scenes: held-out scenes whose captions (or labels) are drawn, with the seeds `seed`, `seed + 1`, ...
        seed: first seed, within `HELD_OUT_SEEDS`.
        guidance_scales: to be tried; the model's default is always among them.
        batch_size: images at once.
        device: a GPU where there is one by default, else the CPU.

    Returns:
        `guidance`: for each scale the shares of `AttributeScores`; `prompts`: the same at the default
        scale for prompts that leave things open (not for classes); `real` and `reconstructed`: what the
        reader finds in real images and in what the VQ makes of them; `nats`, `entropy_mean`,
        `entropy_median`, `top1`, `neighbour_tv`, `redraw_tv` at scale 1 and `guided`: the same at the
        default scale, both on the first `measured` scenes; `default_guidance_scale`, `condition`, `scenes`,
        `seed`, `device`, `seconds`.
    """
    if scenes < 1 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        allowed = f"scenes within the held-out seeds 0 to {HELD_OUT_SEEDS.stop - 1}"
        raise InputError("seed", (seed, scenes), allowed)
    for scale in guidance_scales:
        Sampler(guidance_scale=scale)  # refuses what is no scale
    started = time.monotonic()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = ImageModel.from_folder(folder, device)
    drawn = [sample_scene(seed + index, profile=IMAGE_TOKENS) for index in range(scenes)]
    seeds = [scene.seed for scene in drawn]
    real = _real_images(drawn, model.judge.size).to(device)
    tokens = torch.cat([encode_image(model.target.vq, part * 2 - 1).flatten(1) for part in real.split(32)])
    captions = [caption(scene) for scene in drawn]
    by_class = model.text_encoder is None
    asked: list[str | int] = [scene.class_label for scene in drawn] if by_class else [*captions]
    default = model.guidance_scale
    scales = sorted({*guidance_scales, default})
    guidance = {}
    for scale in tqdm(scales, desc="guidance scales"):
        images = model.pixels(model.draw(asked, _sampler(model, scale), seeds, batch_size))
        guidance[f"{scale:g}"] = _judge(model, images, drawn, captions)
    scores: dict[str, Any] = {"default_guidance_scale": default, "guidance": guidance}
    if not by_class:
        generators = [np.random.default_rng([scene.seed, 0xA5]) for scene in drawn]
        texts = [sample_image_prompt(one, rng).text for one, rng in zip(drawn, generators, strict=True)]
        images = model.pixels(model.draw(texts, _sampler(model, default), seeds, batch_size))
        scores["prompts"] = asdict(model.judge.score(images, texts))
    scores["real"] = asdict(model.judge.score(real, captions))
    scores["reconstructed"] = asdict(model.judge.score(model.pixels(tokens), captions))
    some = asked[:MEASURED], tokens[:MEASURED]
    scores |= _conditionals(model, *some, 1.0)
    scores["guided"] = _conditionals(model, *some, default)
    return scores | {
        "scenes": scenes,
        "measured": len(some[0]),
        "seed": seed,
        "condition": "class" if by_class else "caption",
        "device": str(device),
        "seconds": round(time.monotonic() - started, 1),
    }


def _sampler(model: ImageModel, scale: float) -> Sampler:
    settings = model.target.model.generation_config
    temperature = 1.0 if settings.temperature is None else float(settings.temperature)
    return Sampler(temperature, settings.top_k or None, settings.top_p, guidance_scale=scale)


def _real_images(scenes: Sequence[Scene], size: int) -> Tensor:
    images = np.stack([render(scene, size) for scene in scenes])
    return rearrange(torch.from_numpy(images), "n h w c -> n c h w").float() / 255


def _judge(
    model: ImageModel, images: Tensor, scenes: Sequence[Scene], captions: Sequence[str]
) -> dict[str, Any]:
    if model.text_encoder is not None:
        return asdict(model.judge.score(images, captions))
    return asdict(_class_scores(model.judge.read(images), [scene.class_label for scene in scenes]))


def _class_scores(readings: Sequence[ImageReading], labels: Sequence[int]) -> AttributeScores:
    """Score images of classes, which are the colour and shape of the leftmost object."""
    wanted = [(COLOURS[label // len(SHAPES)], SHAPES[label % len(SHAPES)]) for label in labels]
    leftmost = [reading.objects[0] if reading.objects else ("", "", "", "") for reading in readings]
    right = np.array(
        [
            (seen[1] == colour, seen[3] == shape)
            for (colour, shape), seen in zip(wanted, leftmost, strict=True)
        ]
    )
    colours, shapes = (round(float(share), 4) for share in right.mean(0))
    return AttributeScores(
        share=round(float(right.mean()), 4),
        by_attribute={"colour": colours, "shape": shapes},
        exact=round(float(right.all(1).mean()), 4),
        count=round(float(np.mean([bool(reading.objects) for reading in readings])), 4),
    )


@torch.inference_mode()
def _conditionals(
    model: ImageModel, prompts: Sequence[str | int], tokens: Tensor, scale: float
) -> dict[str, float]:
    """Figures of the distributions of all tokens of real images, each given the real tokens before it.

    `neighbour_tv` is the mean total variation between the distributions of neighbouring places; `redraw_tv`
    that between two distributions of one place, the token before which is the real one or another drawn from
    its own distribution.
    """
    sums: dict[str, list[float]] = {}
    entropies = []
    generator = torch.Generator().manual_seed(0)
    for prompt, row in zip(prompts, tokens, strict=True):
        request = model.request(prompt)
        distributions = _distributions(model, request, row[None], scale)[0]  # [cells, V]
        entropy = torch.special.entr(distributions).sum(-1)
        entropies.append(entropy)
        places = 1 + torch.randperm(len(row) - 1, generator=generator)[:PLACES]
        changed = row.repeat(len(places), 1)
        rows = torch.arange(len(places))
        changed[rows, places - 1] = torch.multinomial(
            distributions.cpu()[places - 1], 1, generator=generator
        )[:, 0].to(row.device)
        redrawn = _distributions(model, request, changed, scale)[rows, places]
        figures = {
            "nats": -distributions.gather(-1, row[:, None]).log().mean(),
            "top1": distributions.amax(-1).mean(),
            "neighbour_tv": (distributions[1:] - distributions[:-1]).abs().sum(-1).mean() / 2,
            "redraw_tv": (redrawn - distributions[places]).abs().sum(-1).mean() / 2,
        }
        for name, value in figures.items():
            sums.setdefault(name, []).append(float(value))
    every = torch.cat(entropies)
    means = {name: round(float(np.mean(values)), 4) for name, values in sums.items()}
    return {
        **means,
        "entropy_mean": round(float(every.mean()), 4),
        "entropy_median": round(float(every.median()), 4),
    }


def _distributions(model: ImageModel, request: Request, tokens: Tensor, scale: float) -> Tensor:
    """[n, cells, V] the distribution of each token of images [n, cells], by one forward of all of them."""
    transformer = model.target.model
    logits = []
    for inputs in (request.inputs, request.negative_inputs) if scale != 1.0 else (request.inputs,):
        given = {name: value.expand(len(tokens), *value.shape[1:]) for name, value in (inputs or {}).items()}
        prompt = given.pop("input_ids")
        positions, _ = model.target.positions({"input_ids": prompt})
        following = positions[:, -1:] + 1 + torch.arange(tokens.shape[1] - 1, device=tokens.device)
        output = transformer(
            input_ids=torch.cat([prompt, tokens[:, :-1]], dim=1),
            position_ids=torch.cat([positions, following], dim=1),
            use_cache=False,
            **given,
        )
        logits.append(output.logits[:, prompt.shape[1] - 1 :].float())
    return Sampler(guidance_scale=scale).guided(torch.cat(logits)).softmax(-1)
