"""Cache of the features of reference images.

A file name is a digest of the images' pixels, the network's weights and its preprocessing, so that a change
of any of them makes another file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.atomic_file import atomic_file
from mmspec.errors import InputError
from mmspec.evaluation.quality.feature_network import INCEPTION, INCEPTION_WIDTH, FeatureNetwork
from mmspec.evaluation.quality.image_folder import Moments, images_of, read_npz

__all__ = ["DEFAULT_CACHE", "Reference", "read_published", "read_statistics", "reference_of"]

DEFAULT_CACHE = Path("~/.cache/mmspec/statistics")
FEATURES = "features"


@dataclass(frozen=True)
class Reference:
    """Reference set that images are compared with.

    Attributes:
        label: origin of the set, for reports.
        features: [n, width]; None if only their moments are known.
        size: width and height of the images in pixels; None if unknown.
        path: file in the cache; None without a cache.
        cached: whether the features were read from the file.
        moments: published mean and covariance of the features of all images, which `fid` uses.
    """

    label: str
    features: Tensor | None
    size: tuple[int, int] | None
    path: Path | None = None
    cached: bool = False
    moments: Moments | None = None

    def check(self, count: int, size: tuple[int, int]) -> None:
        """Raise InputError unless the set can be compared with `count` images of this size."""
        if self.features is not None and len(self.features) < count:
            rule = f"must have at least {count} images; or reduce --samples"
            raise InputError("--against", f"{self.label} with {len(self.features)} images", rule)
        if self.size is not None and self.size != size:
            sizes = f"{self.label} of {self.size} pixels for images of {size}"
            raise InputError("--against", sizes, "must have images of the same size")


def images_digest(images: Sequence[Image.Image]) -> str:
    """Digest of the sizes and pixels of images, in order."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(repr((image.mode, image.size)).encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


def reference_of(
    label: str, images: Sequence[Image.Image], network: FeatureNetwork, cache: Path | None
) -> Reference:
    """Features of reference images of one size, read from the cache folder if it has them.

    Raises:
        InputError: the cache folder cannot be written.
    """
    size = images[0].size
    if cache is None:
        return Reference(label, network.features(images), size)
    about = {**network.described, "images": images_digest(images), "size": f"{size[0]}x{size[1]}"}
    key = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()
    path = cache.expanduser() / f"{key[:32]}.safetensors"
    if path.is_file():
        found = read_statistics(path, network)
        if found.features is not None and len(found.features) == len(images):
            return Reference(label, found.features, size, path, cached=True)
    features = network.features(images)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            save_file({FEATURES: features.contiguous()}, temporary, metadata=about)
    except (OSError, SafetensorError) as error:
        raise InputError("--cache", str(cache), f"cannot be written ({error})") from error
    return Reference(label, features, size, path)


def read_published(path: Path, network: FeatureNetwork, count: int, cache: Path | None) -> Reference:
    """Read the .npz file of a published reference: its first images, its mean and covariance, or both.

    The file does not name the network of the moments. 2,048 features are taken for Inception's, other numbers
    for those of a network with as many features. If a file with moments has fewer than `count` images, only
    the moments are used.

    Raises:
        InputError: the file is invalid, or has no images and the moments of another network.
    """
    found = read_npz(path, "--against")
    moments = found.moments
    if moments is not None:
        width = len(moments.mean)
        is_of_network = network.name == INCEPTION if width == INCEPTION_WIDTH else width == network.width
        if not is_of_network and found.images is None:
            got = f"{path.name} with mu and sigma of {width} features"
            rule = f"must have images, or mu and sigma of the {network.width} features of {network.name!r}"
            hint = "; or pass --features inception" if width == INCEPTION_WIDTH else ""
            raise InputError("--against", got, rule + hint)
        moments = moments if is_of_network else None
    if found.images is None or (moments is not None and len(found.images) < count):
        return Reference(path.name, None, None, moments=moments)
    reference = reference_of(path.name, images_of(found.images[:count]), network, cache)
    return replace(reference, moments=moments)


def read_statistics(path: Path, network: FeatureNetwork) -> Reference:
    """Read a file that `reference_of` wrote.

    Raises:
        InputError: the file is invalid, or of another network, other weights or other preprocessing.
    """
    try:
        with safe_open(path, "pt") as file:
            about, features = file.metadata() or {}, file.get_tensor(FEATURES)
        width, height = map(int, about["size"].split("x"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        rule = f"must be a file of statistics that mmspec wrote ({type(error).__name__})"
        raise InputError("--against", str(path), rule) from error
    for name, value in network.described.items():
        if about.get(name) != value:
            wrong = f"{path.name}, of {name} {about.get(name)!r:.60}"
            raise InputError("--against", wrong, f"must have statistics of {name} {value!r:.60}")
    if features.dtype != torch.float32 or features.dim() != 2 or features.shape[1] != network.width:
        raise InputError("--against", str(path), f"must have float32 features [n, {network.width}]")
    return Reference(path.name, features, (width, height), path, cached=True)
