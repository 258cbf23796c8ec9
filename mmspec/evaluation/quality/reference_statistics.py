"""Features of reference images in a file, so that they are computed once.

A file is named by a digest of the images' pixels, the network's weights and its preprocessing: where any of
them changes, it is another file.
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
        label: where it is from, for reports.
        features: [n, width]; None where their moments are all that is known.
        size: width and height of the images in pixels; None where it is not known.
        path: of its file; None where it was not cached.
        cached: whether it came from the file.
        moments: of the features of all its images, which `fid` is to, where others have published them.
    """

    label: str
    features: Tensor | None
    size: tuple[int, int] | None
    path: Path | None = None
    cached: bool = False
    moments: Moments | None = None

    def check(self, count: int, size: tuple[int, int]) -> None:
        """Raise InputError where it cannot be compared with so many images of a size."""
        if self.features is not None and len(self.features) < count:
            allowed = f"at least {count} of them, or fewer images to compare with it (--n)"
            raise InputError("--against", f"{self.label} with {len(self.features)} images", allowed)
        if self.size is not None and self.size != size:
            sizes = f"{self.label} of {self.size} pixels for images of {size}"
            raise InputError("--against", sizes, "images of the same size")


def images_digest(images: Sequence[Image.Image]) -> str:
    """Compute a digest of the sizes and pixels of images, in their order."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(repr((image.mode, image.size)).encode())
        digest.update(image.tobytes())
    return digest.hexdigest()


def reference_of(
    label: str, images: Sequence[Image.Image], network: FeatureNetwork, cache: Path | None
) -> Reference:
    """The features of reference images of one size, from the cache folder where they are there.

    Raises:
        InputError: the folder cannot be written.
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
        raise InputError("--cache", str(cache), f"a folder that can be written ({error})") from error
    return Reference(label, features, size, path)


def read_published(path: Path, network: FeatureNetwork, count: int, cache: Path | None) -> Reference:
    """Read the .npz file of a published reference: its first images, its mean and covariance, or both.

    The two belong to a network that the file does not name. 2,048 features are Inception's; others are taken
    for those of a network with as many. Where a file with moments has fewer than `count` images, the moments
    are all that is taken.

    Raises:
        InputError: it is no such file, or its moments are of another network and it has no images.
    """
    found = read_npz(path, "--against")
    moments = found.moments
    if moments is not None:
        width = len(moments.mean)
        is_of_network = network.name == INCEPTION if width == INCEPTION_WIDTH else width == network.width
        if not is_of_network and found.images is None:
            got = f"{path.name} with mu and sigma of {width} features"
            asked = f"an .npz file with those of the {network.width} of {network.name!r}"
            hint = "; --features inception has these" if width == INCEPTION_WIDTH else ""
            raise InputError("--against", got, f"{asked}, or with images{hint}")
        moments = moments if is_of_network else None
    if found.images is None or (moments is not None and len(found.images) < count):
        return Reference(path.name, None, None, moments=moments)
    reference = reference_of(path.name, images_of(found.images[:count]), network, cache)
    return replace(reference, moments=moments)


def read_statistics(path: Path, network: FeatureNetwork) -> Reference:
    """Read a file that `reference_of` wrote.

    Raises:
        InputError: it is no such file, or of another network, other weights or other preprocessing.
    """
    try:
        with safe_open(path, "pt") as file:
            about, features = file.metadata() or {}, file.get_tensor(FEATURES)
        width, height = map(int, about["size"].split("x"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        allowed = f"a file of statistics that mmspec wrote ({type(error).__name__})"
        raise InputError("--against", str(path), allowed) from error
    for name, value in network.described.items():
        if about.get(name) != value:
            wrong = f"{path.name}, of {name} {about.get(name)!r:.60}"
            raise InputError("--against", wrong, f"statistics of {name} {value!r:.60}")
    if features.dtype != torch.float32 or features.dim() != 2 or features.shape[1] != network.width:
        raise InputError("--against", str(path), f"float32 features [n, {network.width}]")
    return Reference(path.name, features, (width, height), path, cached=True)
