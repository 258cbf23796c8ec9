"""Scores of a set of images, alone and against a reference, each with its interval.

Preference and agreement scores do not detect loss of variety, so every result contains entropy and
diversity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspec.errors import CheckpointError, InputError
from mmspec.evaluation.quality import set_distances
from mmspec.evaluation.quality.attributes import AttributeJudge
from mmspec.evaluation.quality.feature_network import BATCH, FeatureNetwork
from mmspec.evaluation.quality.image_folder import ImageSet, names_objects
from mmspec.evaluation.quality.intervals import Estimate, as_share, jackknife, within
from mmspec.evaluation.quality.reference_statistics import Reference
from mmspec.evaluation.speed.timing import Decoded
from mmspec.open_types import Processor
from mmspec.registry import require_known

__all__ = [
    "DISTANCES",
    "METRICS",
    "ClipScore",
    "Scorer",
    "chosen_metrics",
    "clip_scorer",
    "missing_for",
    "score_drawings",
    "score_images",
]

DISTANCES = ("fid", "kid", "precision_recall", "density_coverage")
ALWAYS = ("entropy", "diversity")
METRICS = (*DISTANCES, "inception_score", "clip_score", "attributes", *ALWAYS)
SHADES = 16  # per channel: the entropy of colours is at most 3 ln 16 = 8.3 nats


ClipScore = Callable[[Sequence[Image.Image], Sequence[str]], list[float]]
"""(images, prompts) -> the agreement of each pair."""


def chosen_metrics(names: str | None) -> tuple[list[str], bool]:
    """Parse comma-separated metrics; return them in the order of `METRICS`, and whether they were given.

    None selects all metrics that need no download (all but `clip_score`). Entropy and diversity are always
    included.

    Raises:
        InputError: an unknown metric.
    """
    if names is None:
        return [name for name in METRICS if name != "clip_score"], False
    asked = [name.strip() for name in names.split(",")]
    for name in asked:
        require_known("--metrics", name, METRICS)
    return [name for name in METRICS if name in asked or name in ALWAYS], True


def missing_for(
    metric: str, count: int, network: FeatureNetwork, *, has_reference: bool, prompts: Sequence[str] | None
) -> str | None:
    """Describe what a metric lacks, before any image is drawn or read; None if it can be computed."""
    if metric in DISTANCES and not has_reference:
        return "a reference (--against)"
    least = {"fid": network.width + 1, "precision_recall": 12, "density_coverage": 12}.get(metric, 3)
    if count < least:
        why = f", as the network {network.name!r} has {network.width} features" if metric == "fid" else ""
        return f"at least {least} images (there are {count}){why}"
    if metric == "inception_score" and network.classify is None:
        return "a network with classes: scenes or inception"
    if metric in ("clip_score", "attributes") and prompts is None:
        return "a prompt for each image (--prompt-file)"
    unnamed = [prompt for prompt in prompts or () if not names_objects([prompt])]
    if metric == "attributes" and unnamed:
        without = f"{unnamed[0]!r} has no shape in the singular"
        return f"an object of scenes, such as 'a red ring', in every prompt; {without}"
    return None


@dataclass(frozen=True)
class Scorer:
    """A feature network, and an attribute judge and a CLIP score, each None if unused."""

    network: FeatureNetwork
    judge: AttributeJudge | None = None
    clip: ClipScore | None = None


def score_images(
    images: ImageSet, reference: Reference | None, metrics: Sequence[str], scorer: Scorer
) -> dict[str, Estimate]:
    """Score a set of images.

    Args:
        images: at least three images.
        reference: reference of the distances; as many of its first images are used as the set has.
        metrics: names from `METRICS`; entropy and diversity are always in the result.
        scorer: the networks that the metrics need.

    Returns:
        Scores by name: `fid`, `kid`, `precision`, `recall`, `density`, `coverage`, `inception_score`,
        `clip_score`, `attributes`, `entropy_tokens` (nats; if the codes are known), `entropy_colours`
        (nats), `diversity` (Vendi score).

    Raises:
        InputError: a metric cannot be computed, features are not finite, or the reference has images of
            another size or fewer images.
    """
    has_reference, count = reference is not None, len(images.images)
    for metric in metrics:
        lacks = missing_for(
            metric, count, scorer.network, has_reference=has_reference, prompts=images.prompts
        )
        if metric == "clip_score" and scorer.clip is None:
            lacks = "a CLIP model"
        if metric == "attributes" and scorer.judge is None:
            lacks = "a reader of scenes"
        if lacks is not None:
            raise InputError("metrics", metric, f"needs {lacks}")
    features = scorer.network.features(images.images)
    if not features.isfinite().all():
        raise InputError("features", scorer.network.name, f"must be finite; those of {images.label} are not")
    found: dict[str, Estimate] = {}
    if reference is not None:
        reference.check(len(features), images.size)
        found |= _distances(features, reference, metrics)
    prompts: Any = images.prompts
    if "inception_score" in metrics and scorer.network.classify:
        found["inception_score"] = set_distances.inception_score(scorer.network.classify(images.images))
    if "clip_score" in metrics and scorer.clip:
        found["clip_score"] = ratio_of(scorer.clip(images.images, prompts), [1] * len(features))
    if "attributes" in metrics and scorer.judge:
        facts = scorer.judge.facts(images.images, prompts)
        seen = ratio_of([sum(there for _, there in row) for row in facts], [len(row) for row in facts])
        found["attributes"] = as_share(seen, len(facts))
    if images.codes is not None:
        found["entropy_tokens"] = entropy_of(code_counts(images.codes))
    found["entropy_colours"] = entropy_of(torch.stack([colour_counts(image) for image in images.images]))
    found["diversity"] = set_distances.diversity(features)
    return found


def _distances(features: Tensor, reference: Reference, metrics: Sequence[str]) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    others = None if reference.features is None else reference.features[: len(features)]
    if "fid" in metrics:
        whole = reference.moments or others
        found |= {} if whole is None else {"fid": set_distances.frechet_distance(features, whole)}
    if others is None:
        return found
    if "kid" in metrics:
        found["kid"] = set_distances.kernel_distance(features, others)
    chosen = [name for name in ("precision_recall", "density_coverage") if name in metrics]
    if chosen:
        neighbours = set_distances.neighbour_scores(features, others)
        found |= {name: neighbours[name] for metric in chosen for name in metric.split("_")}
    return found


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of two sums over images."""
    tops, bottoms = torch.tensor(numerators).double(), torch.tensor(denominators).double()
    return jackknife(lambda rows: [float(tops[rows].sum() / bottoms[rows].sum())], len(tops))[0]


def entropy_of(counts: Tensor) -> Estimate:
    """Entropy in nats of the codes of all images, from the counts of each image [n, codes]."""

    def entropy(rows: Tensor) -> list[float]:
        sums = counts[rows].sum(0, dtype=torch.float64)
        return [float(torch.special.entr(sums / sums.sum()).sum())]

    return within(jackknife(entropy, len(counts))[0], 0.0, float("inf"))


def code_counts(codes: Sequence[Sequence[int]]) -> Tensor:
    """Counts of each code in each image [n, codes]."""
    most = 1 + max(map(max, codes))
    return torch.stack([torch.bincount(torch.tensor(row), minlength=most).int() for row in codes])


def colour_counts(image: Image.Image) -> Tensor:
    """Counts of the pixels of an image in each of 16 x 16 x 16 colours [4096]."""
    shades = np.asarray(image, dtype=np.int64) * SHADES // 256
    codes = (shades @ np.array([SHADES**2, SHADES, 1])).ravel()
    return torch.bincount(torch.from_numpy(codes), minlength=SHADES**3).int()


def clip_scorer(model: str, device: str | torch.device = "cpu") -> ClipScore:
    """CLIP score (Hessel et al., 2104.08718): 100 times the cosine of image and prompt, not below 0.

    This uses transformers, since torchmetrics 1.9 is incompatible with its CLIP outputs. Prompts over the
    length limit are truncated.

    Raises:
        CheckpointError: `model` is not the folder or hub id of a CLIP.
    """
    from transformers import CLIPModel, CLIPProcessor

    try:
        clip: Any = CLIPModel.from_pretrained(model, dtype=torch.float32)
        processor: Processor = CLIPProcessor.from_pretrained(model)
    except (OSError, ValueError) as error:
        rule = f"must be the folder or hub id of a CLIP model of transformers ({type(error).__name__})"
        raise CheckpointError("--clip", model, rule) from error
    clip = clip.to(device).eval()
    length = clip.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def score(images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(images), BATCH):
            rows = slice(start, start + BATCH)
            inputs = processor(
                text=list(prompts[rows]),
                images=list(images[rows]),
                padding=True,
                truncation=True,
                max_length=length,
                return_tensors="pt",
            ).to(device)
            output = clip(**inputs)
            cosines = torch.cosine_similarity(output.image_embeds, output.text_embeds)
            scores += (100 * cosines.clamp(min=0)).tolist()
        return scores

    return score


def score_drawings(
    drawn: Mapping[str, Sequence[Decoded]],
    others: Sequence[Decoded],
    prompts: Sequence[str],
    codes: Callable[[Sequence[int]], list[int]] | None,
    scorer: Scorer,
) -> dict[str, dict[str, Estimate]]:
    """Score the images of each accelerator against images of plain decoding with other seeds.

    Plain decoding is scored too: its distance is that of two samples of one distribution.

    Args:
        drawn: batches with images, by accelerator.
        others: batches of plain decoding with other seeds.
        prompts: the prompts of the images, in order.
        codes: converts tokens to codebook indices; None for vectors.
        scorer: a scorer with an attribute judge.
    """
    metrics = ["kid", *(["attributes"] if names_objects(prompts) else [])]
    plain = [image for batch in others for image in batch.images]
    reference = Reference("plain decoding, other seeds", scorer.network.features(plain), plain[0].size)
    found = {}
    for name, batches in drawn.items():
        tokens = [row for batch in batches for row in batch.tokens]
        images = ImageSet(
            name,
            [image for batch in batches for image in batch.images],
            list(prompts),
            None if codes is None else list(map(codes, tokens)),
        )
        found[name] = score_images(images, reference, metrics, scorer)
    return found
