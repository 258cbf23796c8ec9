"""Spans of images among a prompt's tokens, and the place of each visual token in its image.

The processor inserts one placeholder id per visual token. The model's inputs for its images (a grid, a size,
a stack of pixels) determine how many of them belong to each image; a frame of a clip counts as an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.image_processing_utils import select_best_resolution

from mmspec.visual_tokens.tokens import nowhere, raster

__all__ = ["ImageSpan", "find_images"]

PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


@dataclass(frozen=True)
class ImageSpan:
    """An image in a prompt.

    Attributes:
        start: index of its first token.
        boxes: [N, 4] boxes of its tokens in the image.
    """

    start: int
    boxes: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.boxes)


def find_images(config: PreTrainedConfig, inputs: Mapping[str, Tensor]) -> list[ImageSpan]:
    """Find the images and frames of one prompt, in order.

    If the inputs do not account for every placeholder (an unknown family), each unbroken run of placeholders
    counts as one image: a square grid if possible, otherwise a strip. This only lowers the quality of drafts.

    Args:
        config: of the target.
        inputs: the target's inputs, with `input_ids` [1, L] and the images as its processor returns them.
    """
    ids = inputs["input_ids"][0].tolist()
    spans: list[ImageSpan] = []
    for kind, names in PLACEHOLDERS.items():
        placeholder = next(
            (value for name in names if (value := getattr(config, name, None)) is not None), None
        )
        runs = [(start, stop) for start, stop, value in _runs(ids) if value == placeholder]
        layouts = _image_layouts(config, inputs) if kind == "image" else _video_layouts(config, inputs, runs)
        if sum(map(len, layouts)) != sum(stop - start for start, stop in runs):
            layouts = [_square_or_strip(stop - start) for start, stop in runs]
        spans += _place(runs, layouts)
    return sorted(spans, key=lambda span: span.start)


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Start, stop and value of each unbroken run."""
    start = 0
    for value, run in groupby(ids):
        stop = start + len(list(run))
        yield start, stop, value
        start = stop


def _place(runs: list[tuple[int, int]], layouts: list[Tensor]) -> Iterator[ImageSpan]:
    """Split runs into images; an image whose rows are divided by text (Pixtral) has one span per run."""
    remaining = list(layouts)
    for start, stop in runs:
        while start < stop:
            boxes, rest = remaining[0][: stop - start], remaining[0][stop - start :]
            yield ImageSpan(start, boxes)
            start += len(boxes)
            remaining[:1] = [rest] if len(rest) else []


def _image_layouts(config: PreTrainedConfig, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Boxes of every image, from the inputs of its family."""
    if (grids := inputs.get("image_grid_thw")) is not None:
        return _grids(config, grids)
    pixels = inputs.get("pixel_values", inputs.get("pixel_values_images"))
    patch = getattr(getattr(config, "vision_config", None), "patch_size", None)
    if pixels is None or not isinstance(patch, int):
        return []
    patch *= int(getattr(config, "downsample_factor", 1))
    rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    if pixels.dim() == 4:
        return [_with_class_token(config, rows, columns)] * len(pixels)
    if inputs.get("image_sizes") is None or not hasattr(config, "image_grid_pinpoints"):
        return []
    several = inputs.get("batch_num_images")
    if several is not None and int(several.max()) > 1:  # LLaVA-OneVision does not tile several images
        return [torch.cat([raster(rows, columns), nowhere(1)])] * len(pixels)
    side = int(config.vision_config.image_size)
    base = _with_class_token(config, rows, columns)
    return [
        torch.cat([base, _tiles(config, (int(height), int(width)), side, rows)])
        for height, width in inputs["image_sizes"].tolist()
    ]


def _video_layouts(
    config: PreTrainedConfig, inputs: Mapping[str, Tensor], runs: list[tuple[int, int]]
) -> list[Tensor]:
    """Boxes of every frame."""
    if (grids := inputs.get("video_grid_thw")) is not None:
        return _grids(config, grids)
    pixels = inputs.get("pixel_values_videos")
    if pixels is None or pixels.dim() != 5 or not runs:
        return []
    clips, frames = pixels.shape[:2]
    placeholders = sum(stop - start for start, stop in runs)
    tokens, left = divmod(placeholders // clips, frames)
    frame = _square_or_strip(tokens)
    return [*[frame] * (frames - 1), torch.cat([frame, nowhere(left)])] * clips


def _grids(config: PreTrainedConfig, grids: Tensor) -> list[Tensor]:
    """Boxes in Qwen-VL: time, height and width in patches, merged in squares; a time step is a frame."""
    merge = int(config.vision_config.spatial_merge_size)
    return [
        raster(height // merge, width // merge) for time, height, width in grids.tolist() for _ in range(time)
    ]


def _with_class_token(config: PreTrainedConfig, rows: int, columns: int) -> Tensor:
    grid = raster(rows, columns)
    keeps_it = getattr(config, "vision_feature_select_strategy", "default") == "full"
    has_one = getattr(config.vision_config, "model_type", "").startswith("clip")
    return torch.cat([nowhere(1), grid]) if keeps_it and has_one else grid


def _square_or_strip(tokens: int) -> Tensor:
    """A square grid, after a class token if that makes the number fit; otherwise a strip."""
    side = math.isqrt(tokens)
    if side * side == tokens:
        return raster(side, side)
    side = math.isqrt(tokens - 1)
    if side > 1 and side * side == tokens - 1:
        return torch.cat([nowhere(1), raster(side, side)])
    return raster(1, tokens)


def _tiles(config: PreTrainedConfig, size: tuple[int, int], side: int, patches: int) -> Tensor:
    """Unpadded grid of all tiles with a newline after each row (LLaVA-NeXT, LLaVA-OneVision)."""
    height, width = size
    best = select_best_resolution(size, config.image_grid_pinpoints)
    rows, columns = best[0] // side * patches, best[1] // side * patches
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    limit = str(getattr(config, "vision_aspect_ratio", "")).removeprefix("anyres_max_")
    if limit.isdigit() and (ratio := math.sqrt(rows * columns / (int(limit) * patches**2))) > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    grid = raster(rows, columns).view(rows, columns, -1)
    return torch.cat([grid, torch.zeros_like(grid[:, :1])], 1).flatten(0, 1)
