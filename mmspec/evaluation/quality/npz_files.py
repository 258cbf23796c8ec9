"""NumPy's .npz files as they are published: images of a set, and the mean and covariance of its features.

| written by | arrays |
|---|---|
| pytorch-fid, clean-fid, EDM and others | `mu` [d] and `sigma` [d, d], of Inception's 2,048 features |
| samplers of class-conditional models (LlamaGen, ADM, DiT) | `arr_0` [n, height, width, 3] of bytes |
| ADM's references (`VIRTUAL_imagenet256_labeled.npz`) | all three; `mu_s`, `sigma_s` of sFID are left alone |
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import InputError

__all__ = ["Moments", "NpzFile", "read_npz"]

IMAGES, MEAN, COVARIANCE = "arr_0", "mu", "sigma"


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of the features of a set, whose number is not known.

    Attributes:
        mean: float64 [d].
        covariance: float64 [d, d].
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class NpzFile:
    """The content of a file: at least one of the two.

    Attributes:
        images: uint8 [n, height, width, 3], or None.
        moments: of the features of some network that the file does not name, or None.
    """

    images: np.ndarray | None
    moments: Moments | None


def read_npz(path: Path, argument: str) -> NpzFile:
    """Read a file; nothing in it is run.

    Args:
        path: of it.
        argument: that errors name.

    Raises:
        InputError: it is no such file, holds nothing of the kind, or an array in it has another shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (IMAGES, MEAN, COVARIANCE) if name in file}
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        allowed = f"an .npz file of NumPy, without pickled objects ({type(error).__name__})"
        raise InputError(argument, str(path), allowed) from error
    images = arrays.get(IMAGES)
    if images is not None and (
        images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size
    ):
        got = f"{path.name} with {IMAGES} {list(images.shape)} of {images.dtype}"
        raise InputError(argument, got, f"{IMAGES} [n, height, width, 3] of uint8 in an .npz file of images")
    mean, covariance = arrays.get(MEAN), arrays.get(COVARIANCE)
    if images is None and (mean is None or covariance is None):
        allowed = f"an .npz file with {IMAGES} (images), or with {MEAN} and {COVARIANCE} (of their features)"
        raise InputError(argument, str(path), allowed)
    if mean is None or covariance is None:
        return NpzFile(images, None)
    is_right = mean.ndim == 1 and covariance.shape == 2 * mean.shape and mean.size
    if not is_right or not all(np.issubdtype(one.dtype, np.floating) for one in (mean, covariance)):
        got = f"{path.name} with {MEAN} {list(mean.shape)} and {COVARIANCE} {list(covariance.shape)}"
        raise InputError(argument, got, f"numbers {MEAN} [d] and {COVARIANCE} [d, d] in an .npz file")
    moments = Moments(torch.from_numpy(mean).double(), torch.from_numpy(covariance).double())
    if not (moments.mean.isfinite().all() and moments.covariance.isfinite().all()):
        raise InputError(argument, str(path), f"finite {MEAN} and {COVARIANCE} in an .npz file")
    return NpzFile(images, moments)
