"""Scores of a reference image model on held-out scenes, with discrete or continuous tokens.

Plain decoding generates the images. A reader that was trained on real scenes only finds the objects in them.
For discrete tokens, two properties of the conditional distributions on real held-out images are measured too:
their entropy, and their dependence on the previous token. Both limit the speed-up of speculative decoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.evaluation.quality.attributes import AttributeJudge
from mmspec.evaluation.quality.set_distances import kernel_distance
from mmspec.models.autoencoders import encode_image
from mmspec.pipelines import ImageGenerationPipeline
from mmspec.scenes import (
    COLOURS,
    HELD_OUT_SEEDS,
    IMAGE_TOKENS,
    SHAPES,
    caption,
    parse_image_prompt,
    sample_image_prompt,
    sample_scene,
)
from mmspec.scenes.reader import ImageReading
from mmspec.training.data.scenes import image_pixels

__all__ = ["FIRST_SEED", "attribute_scores", "draw", "load_pipeline", "score_image_model"]

FIRST_SEED = 20_000
GUIDANCE_SCALES = (1.0, 2.0, 3.0, 4.0, 5.0)
PLACES = 16  # places per image whose previous token is drawn again
MEASURED = 16  # images whose conditional distributions are measured, 256 per image
Asked = Sequence[str | int]


def score_image_model(
    folder: str | Path,
    scenes: int = 200,
    seed: int = FIRST_SEED,
    *,
    guidance_scales: Sequence[float] = GUIDANCE_SCALES,
    batch_size: int = 32,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Score an image model on held-out scenes at several guidance scales, with plain decoding.

    Args:
        folder: a folder that `train_image` or `train_latent_model` wrote.
        scenes: number of scenes, with the seeds `seed`, `seed + 1`, ... Their captions or classes are the
            prompts.
        seed: first seed, within `HELD_OUT_SEEDS`.
        guidance_scales: guidance scales to score. The default scale of a model of discrete tokens is added.
        batch_size: images per batch.
        device: the default is a GPU if there is one, else the CPU.

    Returns:
        For all models:

        - `guidance`: the fields of `AttributeScores` for each scale. Models that are not raster models also
          have the kernel distance of the reader's features to those of real images, and its `margin`.
        - `real`: the scores of real images.
        - `condition`, `default_guidance_scale`, `scenes`, `seed`, `device` and `seconds`.

        For models of discrete tokens:

        - `prompts`: scores at the default scale for prompts that omit attributes (not for classes).
        - `reconstructed`: scores of real images that the image tokenizer reconstructs.

        For raster models, on the first `measured` scenes: the figures of `conditionals` at scale 1, and as
        `guided` at the default scale.

    Raises:
        InputError: a scene is not held out, or a scale is invalid.
        CheckpointError: the folder lacks a part.
    """
    if scenes < 3 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        rule = f"must give at least 3 scenes within the held-out seeds 0 to {HELD_OUT_SEEDS.stop - 1}"
        raise InputError("seed", (seed, scenes), rule)
    for scale in guidance_scales:
        Sampler(guidance_scale=scale)  # raises if the scale is invalid
    started = time.monotonic()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    judge, pipe = AttributeJudge.of_model(folder), load_pipeline(folder, device)
    judge.reader.to(device)
    by_class, continuous = pipe.processor is None, bool(pipe.target.vector_size)
    is_raster = not continuous and not pipe.target.by_blocks  # each token depends on all earlier ones
    only = 1 if by_class and continuous else None  # a MAR is trained on scenes with one object
    drawn = [sample_scene(seed + index, objects=only, profile=IMAGE_TOKENS) for index in range(scenes)]
    seeds, labels = [scene.seed for scene in drawn], [scene.class_label for scene in drawn]
    captions = [class_words(scene.class_label) if only else caption(scene) for scene in drawn]
    asked: Asked = labels if by_class else captions
    default = float(pipe.model.generation_config.guidance_scale or 1.0)
    real = image_pixels(drawn, judge.size).to(device)
    scales, guidance = {*guidance_scales, *([] if continuous else [default])}, {}
    for scale in tqdm(sorted(scales), desc="guidance scales"):
        images = draw(pipe, asked, seeds, batch_size, guidance_scale=scale)
        by_label = by_class and not only  # a class describes the leftmost object; there may be others
        scored = (
            class_scores(judge.read(images), labels)
            if by_label
            else attribute_scores(judge, images, captions)
        )
        guidance[f"{scale:g}"] = asdict(scored)
        if not is_raster:
            distance = kernel_distance(judge.features(images), judge.features((real + 1) / 2))
            margin = distance.high - distance.value
            guidance[f"{scale:g}"] |= {"kernel_distance": distance.value, "margin": margin}
    scores: dict[str, Any] = {"default_guidance_scale": default, "guidance": guidance}
    scores["real"] = asdict(attribute_scores(judge, (real + 1) / 2, captions))
    if not continuous:
        if not by_class:
            generators = [np.random.default_rng([scene.seed, 0xA5]) for scene in drawn]
            texts = [sample_image_prompt(one, rng).text for one, rng in zip(drawn, generators, strict=True)]
            scores["prompts"] = asdict(attribute_scores(judge, draw(pipe, texts, seeds, batch_size), texts))
        codes = pipe.target.tokens_of(torch.cat([encode_image(pipe.vq, part) for part in real.split(32)]))
        made = (pipe.pixels(pipe.target.grid, codes.cpu()) + 1) / 2
        scores["reconstructed"] = asdict(attribute_scores(judge, made, captions))
        if is_raster:
            some = asked[:MEASURED], codes[:MEASURED].flatten(1)
            scores |= conditionals(pipe, *some, 1.0) | {"guided": conditionals(pipe, *some, default)}
            scores["measured"] = len(some[0])
    return scores | {
        "scenes": scenes,
        "seed": seed,
        "condition": "class" if by_class else "caption",
        "device": str(device),
        "seconds": round(time.monotonic() - started, 1),
    }


def load_pipeline(folder: str | Path, device: str | torch.device = "cpu") -> Any:
    """Load an image pipeline in float32, with plain decoding.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    how: dict[str, Any] = {"accelerator": "none", "dtype": "float32", "device_map": {"": device}}
    pipe: Any = ImageGenerationPipeline.from_pretrained(str(folder), **how)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@dataclass(frozen=True)
class AttributeScores:
    """Shares of the prompted facts that images show.

    Attributes:
        share: share of all facts: size, colour, pattern and shape of each object, and the background.
        by_attribute: share of the facts of each kind.
        exact: share of images with all facts and no further object.
        count: share of images with the prompted number of objects.
    """

    share: float
    by_attribute: dict[str, float]
    exact: float
    count: float


def attribute_scores(judge: AttributeJudge, images: Tensor, captions: Sequence[str]) -> AttributeScores:
    """Score images [n, 3, H, W] by the facts in their captions.

    Raises:
        InputError: a caption names no object, or the numbers of captions and images differ.
    """
    facts = judge.facts(images, captions)
    found: dict[str, list[bool]] = {}
    for fact, present in (pair for row in facts for pair in row):
        found.setdefault(fact, []).append(present)
    prompts = [parse_image_prompt(text) for text in captions]
    counts = [
        prompt is not None and len(reading.objects) == len(prompt.objects)
        for prompt, reading in zip(prompts, judge.read(images), strict=True)
    ]
    return AttributeScores(
        share=_share([present for row in facts for _, present in row]),
        by_attribute={fact: _share(present) for fact, present in found.items()},
        exact=_share(
            [right and all(seen for _, seen in row) for right, row in zip(counts, facts, strict=True)]
        ),
        count=_share(counts),
    )


def _share(right: Sequence[bool]) -> float:
    return round(float(np.mean(right)), 4) if len(right) else 0.0


def draw(pipe: Any, asked: Asked, seeds: Sequence[int], batch_size: int, **settings: Any) -> Tensor:
    """Generate images [n, 3, H, W] in [0, 1] from captions or class labels."""
    what = {"class_labels": list(asked)} if isinstance(asked[0], int) else {"prompt": list(asked)}
    how: dict[str, Any] = {"batch_size": batch_size, "output_type": "pt", **settings}
    images: Tensor = pipe(**what, seed=list(seeds), **how).images
    return images


def class_words(label: int) -> str:
    """Return a prompt in words for a class, such as "a red circle"."""
    return f"a {COLOURS[label // len(SHAPES)]} {SHAPES[label % len(SHAPES)]}"


def class_scores(readings: Sequence[ImageReading], labels: Sequence[int]) -> AttributeScores:
    """Score images of classes; a class is the colour and shape of the leftmost object."""
    leftmost = [reading.objects[0] if reading.objects else ("", "", "", "") for reading in readings]
    named = [f"a {colour} {shape}" for _, colour, _, shape in leftmost]
    wanted = [class_words(label) for label in labels]
    pairs = [(one.split(" "), other.split(" ")) for one, other in zip(named, wanted, strict=True)]
    right = np.array([(one[1] == other[1], one[2] == other[2]) for one, other in pairs])
    colours, shapes = (round(float(share), 4) for share in right.mean(0))
    return AttributeScores(
        share=round(float(right.mean()), 4),
        by_attribute={"colour": colours, "shape": shapes},
        exact=round(float(right.all(1).mean()), 4),
        count=round(float(np.mean([bool(reading.objects) for reading in readings])), 4),
    )


@torch.inference_mode()
def conditionals(pipe: Any, asked: Asked, tokens: Tensor, scale: float) -> dict[str, float]:
    """Measure the conditional distributions of the tokens of real images, given the real tokens before.

    Args:
        pipe: an image pipeline with discrete tokens.
        asked: caption or class of each image.
        tokens: codes [n, cells].
        scale: guidance scale.

    Returns:
        - `nats`: loss per token.
        - `top1`: mean probability of the most likely token.
        - `entropy_mean` and `entropy_median`: in nats.
        - `neighbour_tv`: mean total variation between the distributions of consecutive places.
        - `redraw_tv`: mean total variation between the distribution of a place given the real previous token,
          and given a previous token that is drawn again.
    """
    sums: dict[str, list[float]] = {}
    entropies = []
    generator = torch.Generator().manual_seed(0)
    for one, row in zip(asked, tokens, strict=True):
        what: dict[str, Any] = {"class_labels": one} if isinstance(one, int) else {"prompt": one}
        prompt, settings = what.pop("prompt", None), {"guidance_scale": scale}
        (request,) = pipe.prepare(prompt, settings, **what).requests
        distributions = distributions_of(pipe, request, row[None], scale)[0]  # [cells, V]
        entropy = torch.special.entr(distributions).sum(-1)
        entropies.append(entropy)
        places = 1 + torch.randperm(len(row) - 1, generator=generator)[:PLACES]
        changed = row.repeat(len(places), 1)
        rows = torch.arange(len(places))
        changed[rows, places - 1] = torch.multinomial(
            distributions.cpu()[places - 1], 1, generator=generator
        )[:, 0].to(row.device)
        redrawn = distributions_of(pipe, request, changed, scale)[rows, places]
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


def distributions_of(pipe: Any, request: Request, tokens: Tensor, scale: float) -> Tensor:
    """Return the distributions [n, cells, V] of the tokens of images [n, cells], from one forward pass."""
    logits = []
    for inputs in (request.inputs, request.negative_inputs) if scale != 1.0 else (request.inputs,):
        given = {name: value.expand(len(tokens), *value.shape[1:]) for name, value in (inputs or {}).items()}
        prompt = given.pop("input_ids")
        positions, _ = pipe.target.positions({"input_ids": prompt})
        following = positions[:, -1:] + 1 + torch.arange(tokens.shape[1] - 1, device=tokens.device)
        output = pipe.model(
            input_ids=torch.cat([prompt, tokens[:, :-1]], dim=1),
            position_ids=torch.cat([positions, following], dim=1),
            use_cache=False,
            **given,
        )
        logits.append(output.logits[:, prompt.shape[1] - 1 :].float())
    return Sampler(guidance_scale=scale).guided(torch.cat(logits)).softmax(-1)
