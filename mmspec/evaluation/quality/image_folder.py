"""Sets of images: read from a folder or an .npz file, generated into a folder, or rendered from scenes.

`draw_images` writes a folder, and `read_images` reads it with its prompts and codes; the workers of
`mmspec.many` write the same format. There are three kinds of published .npz files:

| written by | arrays |
|---|---|
| pytorch-fid, clean-fid, EDM and others | `mu` [d] and `sigma` [d, d], of features of Inception |
| samplers of class-conditional models (LlamaGen, ADM, DiT) | `arr_0` [n, height, width, 3] of bytes |
| references of ADM (`VIRTUAL_imagenet256_*.npz`) | all three; `mu_s` and `sigma_s` of sFID are not read |
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.contenders import AnyPipeline
from mmspec.evaluation.examples import FIRST_IMAGE_SEED
from mmspec.evaluation.prompt_files import read_prompt_file
from mmspec.media import load_image
from mmspec.open_types import Json, Keywords
from mmspec.scenes import IMAGE_TOKENS, parse_image_prompt, render, sample_scene
from mmspec.scenes.render import LARGEST_IMAGE
from mmspec.text_file import json_lines, read_text
from mmspec.validation import is_integer

__all__ = [
    "ImageSet",
    "Moments",
    "NpzFile",
    "draw_images",
    "has_scenes",
    "images_of",
    "names_objects",
    "read_images",
    "read_npz",
    "read_prompts",
    "real_scenes",
]

IMAGES, MEAN, COVARIANCE = "arr_0", "mu", "sigma"


@dataclass(frozen=True)
class Moments:
    """Mean [d] and covariance [d, d] of the features of a set of unknown size, float64."""

    mean: Tensor
    covariance: Tensor

    @cached_property
    def root(self) -> Tensor:
        """Symmetric square root of the covariance."""
        values, vectors = torch.linalg.eigh(self.covariance)
        root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        return root


@dataclass(frozen=True)
class NpzFile:
    """Content of an .npz file: images, uint8 [n, height, width, 3], moments of their features, or both."""

    images: np.ndarray | None
    moments: Moments | None


def read_npz(path: Path, argument: str) -> NpzFile:
    """Read an .npz file of images or moments, without unpickling; error messages name `argument`.

    Raises:
        InputError: the file is not an .npz file, lacks these arrays, or an array has another shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in (IMAGES, MEAN, COVARIANCE) if name in file}
    except (OSError, ValueError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
        rule = f"must be an .npz file of NumPy, without pickled objects ({type(error).__name__})"
        raise InputError(argument, str(path), rule) from error
    images, mean, covariance = (found.get(name) for name in (IMAGES, MEAN, COVARIANCE))
    said = {name: f"{name} {list(array.shape)} of {array.dtype}" for name, array in found.items()}
    got = f"{path.name} with {' and '.join(said.values()) or 'other arrays'}"
    if images is not None and (
        images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size
    ):
        raise InputError(argument, got, f"must have {IMAGES} of the shape [n, height, width, 3], uint8")
    if mean is None or covariance is None:
        if images is None:
            rule = f"must contain {IMAGES} (images), or {MEAN} and {COVARIANCE} (of their features)"
            raise InputError(argument, got, rule)
        return NpzFile(images, None)
    is_right = mean.ndim == 1 and covariance.shape == 2 * mean.shape and mean.size
    if not (is_right and all(one.dtype.kind == "f" and np.isfinite(one).all() for one in (mean, covariance))):
        raise InputError(argument, got, f"must have finite floats {MEAN} [d] and {COVARIANCE} [d, d]")
    return NpzFile(images, Moments(torch.from_numpy(mean).double(), torch.from_numpy(covariance).double()))


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"})
SIDES = range(16, LARGEST_IMAGE + 1)  # side lengths of a scene in pixels
LINES = "images.jsonl"  # written by `draw_images`: one line per image

Asked = tuple[str, Json]
"""A prompt as text, and the keywords of the pipeline's call for it."""


@dataclass(frozen=True)
class ImageSet:
    """Ordered RGB images of one size, optionally with the prompt and the codebook indices of each."""

    label: str
    images: Sequence[Image.Image]
    prompts: list[str] | None = None
    codes: list[list[int]] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.images[0].size

    def __post_init__(self) -> None:
        for index, image in enumerate(self.images):
            if image.size != self.size:
                found = f"{self.size}, and {image.size} at index {index}"
                raise InputError(self.label, found, "must have images of one size; resize them first")


class LazyImages(Sequence[Image.Image]):
    """Images that are read on access, so that thousands need not be in memory at once."""

    def __init__(self, count: int, read: Callable[[int], Image.Image]) -> None:
        self.length, self.read = count, read

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """One image, or a list of those of a slice; MediaError names the file that cannot be read."""
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        return self.read(range(len(self))[index])


def images_of(array: np.ndarray) -> LazyImages:
    """Images of a uint8 array [n, height, width, 3]."""
    return LazyImages(len(array), lambda index: Image.fromarray(array[index]))


def read_images(folder: str | Path, count: int | None = None, *, label: str | None = None) -> ImageSet:
    """Read the images of a folder in numeric order, with prompts and codes if `draw_images` wrote them.

    Args:
        folder: a folder, whose other files and subfolders are ignored; or an .npz file of images.
        count: number of images to read; None reads all.
        label: name of the set; None takes the folder's name.

    Raises:
        InputError: the folder is missing, has too few images, an unreadable one, or mixed sizes.
    """
    folder = Path(folder)
    if folder.suffix == ".npz":
        array = read_npz(folder, "folder").images
        if array is None:
            rule = "must be a folder of images, or an .npz file that contains images (arr_0)"
            raise InputError("folder", str(folder), rule)
        check_count(folder, len(array), count)
        return ImageSet(label or folder.name, images_of(array[:count]))
    try:
        files = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
        # macOS writes the metadata of a.png to ._a.png on foreign file systems
        paths = sorted((path for path in files if not path.name.startswith("._")), key=numeric_order)
    except OSError as error:
        raise InputError("folder", str(folder), f"cannot be read ({type(error).__name__})") from error
    check_count(folder, len(paths), count)
    paths = paths[:count]
    lines = _read_lines(folder / LINES)
    known = [lines.get(path.name, {}) for path in paths]
    prompts: list[Any] = [line.get("prompt") for line in known]
    codes: list[Any] = [line.get("codes") for line in known]
    return ImageSet(
        label or folder.name,
        LazyImages(len(paths), lambda index: load_image(paths[index], argument=str(paths[index]))),
        None if None in prompts else prompts,
        None if None in codes else codes,
    )


def check_count(folder: Path, found: int, count: int | None) -> None:
    """Raise InputError for a folder with no images, or with fewer than `count`."""
    if not found or (count is not None and found < count):
        rule = f"must have at least {count or 1} images" + ("" if count is None else "; or reduce --samples")
        raise InputError("folder", f"{folder.name or folder} with {found} images", rule)


def numeric_order(path: Path) -> tuple[list[str | int], str]:
    """Sort key of file names that compares numbers by value: 2.png comes before 10.png."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", path.name))
    parts[1::2] = map(int, parts[1::2])
    return parts, path.name


def _read_lines(path: Path) -> dict[str, Json]:
    if not path.is_file():
        return {}
    found = {}
    rule = "must be a JSON object with the key 'file'"
    for where, entry in json_lines(read_text(path, "folder"), partial("{}:{}".format, path), rule):
        if not isinstance(entry, dict) or "file" not in entry:
            raise InputError(where, entry, rule)
        found[str(entry["file"])] = entry
        prompt, codes = entry.get("prompt"), entry.get("codes")
        if not isinstance(prompt, str | None):
            raise InputError(f"{where}: prompt", prompt, "must be a string")
        is_codes = isinstance(codes, list) and codes and all(is_integer(one) and one >= 0 for one in codes)
        if codes is not None and not is_codes:
            raise InputError(f"{where}: codes", codes, "must be a list of codebook indices")
    return found


def draw_images(
    pipe: AnyPipeline,
    asked: Sequence[Asked],
    folder: str | Path,
    *,
    seed: int = 0,
    batch_size: int = 1,
    settings: Keywords | None = None,
    on_images: Callable[[int], None] = lambda count: None,
) -> list[DecodingStats]:
    """Generate images into a folder: `00000.png` onwards, with one line each in `images.jsonl`.

    Image i has the seed `seed + i`, independent of its batch. `on_images` is called after each batch with its
    number of images.

    Returns:
        Decoding statistics of each batch.

    Raises:
        InputError: the folder cannot be written.
    """
    folder, stats = Path(folder), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LINES).open("a", encoding="utf-8") as lines:
            for start in range(0, len(asked), batch_size):
                part = asked[start : start + batch_size]
                numbers = range(start, start + len(part))
                output = _draw(pipe, part, [seed + number for number in numbers], settings or {})
                stats.append(output.stats)
                for number, (prompt, _), image, tokens in zip(
                    numbers, part, output.images, output.tokens, strict=True
                ):
                    name = f"{number:05}.png"
                    image.save(folder / name)
                    line: Keywords = {"file": name, "prompt": prompt, "seed": seed + number}
                    if not pipe.target.vector_size:
                        line["codes"] = pipe.target.layout_of(pipe.target.grid).codes(tokens)
                    lines.write(json.dumps(line) + "\n")
                lines.flush()
                on_images(len(part))
    except OSError as error:
        raise InputError("--out", str(folder), f"cannot be written ({error})") from error
    return stats


def _draw(pipe: AnyPipeline, part: Sequence[Asked], seeds: list[int], settings: Keywords) -> Any:
    keys = {key for _, asked in part for key in asked}
    what = {key: [asked[key] for _, asked in part] for key in keys}
    return pipe(**what, seed=seeds, batch_size=len(part), output_type="pil", **settings)


def read_prompts(path: str | Path) -> list[str]:
    """Read image prompts, each with one turn; raises the errors of `read_prompt_file`."""
    return [example.only_turn() for example in read_prompt_file(path)]


def names_objects(prompts: Sequence[str]) -> bool:
    """True if every prompt names objects of scenes, so that `AttributeJudge` can score its image."""
    return all(parse_image_prompt(prompt) is not None for prompt in prompts)


def has_scenes(size: tuple[int, int]) -> bool:
    """True if scenes can be rendered in this size."""
    return size[0] == size[1] and size[0] in SIDES


def real_scenes(
    count: int, size: tuple[int, int], seed: int = 0, *, objects: int | None = None
) -> list[Image.Image]:
    """Render the held-out scenes of the default prompts; `objects` fixes their number of objects.

    Raises:
        InputError: scenes cannot be rendered in this size.
    """
    if not has_scenes(size):
        rule = f"can be 'scenes' only for square images of {SIDES.start} to {SIDES.stop - 1} pixels"
        raise InputError("--against", f"scenes, for images of {size}", rule)
    return [
        Image.fromarray(
            render(
                sample_scene(FIRST_IMAGE_SEED + seed + index, objects=objects, profile=IMAGE_TOKENS), size[0]
            )
        )
        for index in range(count)
    ]
