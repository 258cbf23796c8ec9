"""Feature networks for distances between sets of images: Inception, DINOv2, CLIP, or another vision model.

`scenes_network` in `mmspec.evaluation.quality.attributes` is the network that was trained on scenes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from mmspec.errors import CheckpointError, InputError, MissingDependencyError, how_to_install
from mmspec.open_types import Processor
from mmspec.registry import did_you_mean

__all__ = [
    "INCEPTION",
    "INCEPTION_WIDTH",
    "KNOWN",
    "SCENES",
    "FeatureNetwork",
    "check_network_name",
    "load_network",
    "weights_digest",
]

SCENES, INCEPTION = "scenes", "inception"
INCEPTION_WIDTH = 2048
TRANSFORMERS = {"dinov2": "facebook/dinov2-base", "clip": "openai/clip-vit-large-patch14"}
KNOWN = (SCENES, INCEPTION, *TRANSFORMERS)
BATCH = 32

Images = Sequence[Image.Image]


@dataclass(frozen=True)
class FeatureNetwork:
    """A feature network, with everything that its features depend on.

    Attributes:
        name: the name as given.
        width: number of features.
        identity: digest of the weights.
        preprocessing: description, or the processor's settings as JSON.
        features: returns the features of RGB images, float32 on the CPU [n, width].
        classify: returns logits [n, classes] of RGB images; None for a network without classes.
    """

    name: str
    width: int
    identity: str
    preprocessing: str
    features: Callable[[Images], Tensor]
    classify: Callable[[Images], Tensor] | None = None

    @property
    def described(self) -> dict[str, str]:
        """Settings that comparable statistics share, as the cache stores them."""
        return {
            "network": self.name,
            "width": str(self.width),
            "weights": self.identity,
            "preprocessing": self.preprocessing,
        }


def check_network_name(name: str) -> None:
    """Raise InputError unless a name is a known network, a folder, or a hub id."""
    if name not in KNOWN and "/" not in name and not Path(name).is_dir():
        hint = did_you_mean(name, KNOWN)
        raise InputError("--features", name, f"{hint}; or the folder or hub id of a vision model")


def load_network(name: str, device: str | torch.device = "cpu") -> FeatureNetwork:
    """Load a feature network by name; missing weights are downloaded once.

    A name is "inception" (the weights of torch-fidelity, the usual ones for FID), "dinov2", "clip", or the
    folder or hub id of a vision model that transformers can load, including timm models.

    Raises:
        InputError: an unknown name.
        CheckpointError: the weights cannot be loaded or downloaded.
        MissingDependencyError: torch-fidelity is not installed.
    """
    check_network_name(name)
    if name == INCEPTION:
        return _inception(torch.device(device))
    return _transformers(name, TRANSFORMERS.get(name, name), torch.device(device))


def _inception(device: torch.device) -> FeatureNetwork:
    if importlib.util.find_spec("torch_fidelity") is None:
        raise MissingDependencyError(f"features 'inception' need torch-fidelity: {how_to_install('eval')}")
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    try:
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"])
    except (OSError, RuntimeError) as error:
        rule = f"needs weights, which torch-fidelity could not download or read ({type(error).__name__})"
        raise CheckpointError("--features", INCEPTION, rule) from error
    network = network.to(device)

    def both(images: Images) -> list[Tensor]:
        found = [network(pixels(part).to(device)) for part in batches(images)]
        return [torch.cat(parts).float().cpu() for parts in zip(*found, strict=True)]

    return FeatureNetwork(
        name=INCEPTION,
        width=INCEPTION_WIDTH,
        identity=weights_digest(network),
        preprocessing="299 x 299, bilinear as in TensorFlow 1, (x - 128) / 128",
        features=lambda images: both(images)[0],
        classify=lambda images: both(images)[1],
    )


def _transformers(name: str, source: str, device: torch.device) -> FeatureNetwork:
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor: Processor = AutoImageProcessor.from_pretrained(source)
        loaded: Any = AutoModel.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        rule = f"must be the folder or hub id of a vision model of transformers ({type(error).__name__})"
        raise CheckpointError("--features", source, rule) from error
    model = loaded.to(device).eval()

    @torch.inference_mode()
    def features(images: Images) -> Tensor:
        found = []
        for part in batches(images):
            inputs = processor(images=list(part), return_tensors="pt")["pixel_values"].to(device)
            output = (
                model.get_image_features(inputs) if hasattr(model, "get_image_features") else model(inputs)
            )
            pooled = output if isinstance(output, Tensor) else output.pooler_output
            if pooled is None:
                raise CheckpointError("--features", source, "must be a vision model with a pooled output")
            found.append(pooled.flatten(1).float().cpu())
        return torch.cat(found)

    return FeatureNetwork(
        name=name,
        width=features([Image.new("RGB", (32, 32))]).shape[1],
        identity=weights_digest(model),
        preprocessing=json.dumps(processor.to_dict(), sort_keys=True, default=str),
        features=features,
    )


def weights_digest(network: nn.Module) -> str:
    """Digest of the names and values of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def batches(images: Images) -> Iterator[Images]:
    """The images in batches."""
    for start in range(0, len(images), BATCH):
        yield images[start : start + BATCH]


def pixels(images: Images) -> Tensor:
    """Pixels [n, 3, H, W] of RGB images of one size, as bytes."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
