"""Images and clips of a prompt: each with its placeholder tokens, its rows of the arguments, and a digest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.targets.blocks import digest
from mmspec.visual_tokens.spans import ImageSpan, find_images

__all__ = ["IMAGE", "MediaItem", "find_items"]

IMAGE, CLIP = "image", "clip"
#: Arguments with one row per image or clip, or, if there are grids, one per patch.
ARGUMENTS = {
    IMAGE: ("pixel_values", "image_grid_thw", "image_sizes", "pixel_values_images"),
    CLIP: ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
}
PATCHES = {IMAGE: ("pixel_values", "image_grid_thw"), CLIP: ("pixel_values_videos", "video_grid_thw")}


@dataclass(frozen=True)
class MediaItem:
    """An image or a clip of a prompt, or all of them together if their rows are not known.

    Attributes:
        start, stop: its first token, and the one after its last.
        digest: hash of its pixels and sizes.
        rows: argument -> its first row and the one after its last.
        kind: IMAGE, CLIP, or "" for all media of a prompt together.
    """

    start: int
    stop: int
    digest: bytes
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    kind: str = ""

    def part(self, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return its rows of the arguments."""
        return {name: media[name][first:end] for name, (first, end) in self.rows.items()}


def find_items(
    config: PreTrainedConfig, inputs: Mapping[str, Tensor], media: Mapping[str, Tensor]
) -> tuple[MediaItem, ...]:
    """Find the images and clips of a prompt, in the order of their tokens.

    Args:
        config: of the target.
        inputs: arguments of the model, batch size 1.
        media: those that are not per token. Every one of them belongs to images and clips.

    Returns:
        One item for each, if every argument is made of their rows; otherwise one item for all media. Empty if
        there are no placeholder tokens.
    """
    spans = find_images(config, inputs)
    if not spans:
        return ()
    items: list[MediaItem] = []
    first_tokens = inputs["input_ids"][0, [span.start for span in spans]].tolist()
    is_clip = {token: token in clip_tokens(config) for token in first_tokens}
    for kind, names in ARGUMENTS.items():
        own = [
            span for span, token in zip(spans, first_tokens, strict=True) if is_clip[token] == (kind == CLIP)
        ]
        known = {name: media[name] for name in names if name in media}
        found = items_of(config, kind, own, known) if known else []
        if found is None or bool(own) != bool(known):
            return (whole(spans, media),)
        items += found
    if {name for item in items for name in item.rows} != set(media):
        return (whole(spans, media),)
    return tuple(sorted(items, key=lambda item: item.start))


def whole(spans: Sequence[ImageSpan], media: Mapping[str, Tensor]) -> MediaItem:
    """One item for all media of a prompt."""
    kind = IMAGE if not set(media) & set(ARGUMENTS[CLIP]) else ""
    rows = {name: (0, len(value)) for name, value in media.items()}
    stop = max(span.stop for span in spans)
    return MediaItem(min(span.start for span in spans), stop, digest_of(media), rows, kind)


def items_of(
    config: PreTrainedConfig, kind: str, spans: Sequence[ImageSpan], media: Mapping[str, Tensor]
) -> list[MediaItem] | None:
    """Items of one kind; None if its rows and tokens do not match."""
    patches, grids = PATCHES[kind]
    rows = dict.fromkeys(media, [1] * min(map(len, media.values())))
    if grids in media and patches in media:
        counts = [math.prod(grid) for grid in media[grids].tolist()]
        rows[patches] = counts
        merge = int(getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)) ** 2
        together = list(group(spans, [count // merge for count in counts]))
    else:
        together = [[span] for span in spans]
        # rows of one shape have equally many tokens, unless sizes say which part of a row is the image
        if "image_sizes" not in media and len({span.stop - span.start for span in spans}) > 1:
            return None
    if any(
        sum(rows[name]) != len(value) or len(rows[name]) != len(together) for name, value in media.items()
    ):
        return None
    places = {name: list(accumulate(counts, initial=0)) for name, counts in rows.items()}
    items = []
    for index, own in enumerate(together):
        if not own:
            return None
        its = {name: (starts[index], starts[index + 1]) for name, starts in places.items()}
        part = {name: media[name][first:end] for name, (first, end) in its.items()}
        items.append(MediaItem(own[0].start, own[-1].stop, digest_of(part), its, kind))
    return items


def group(spans: Sequence[ImageSpan], sizes: Sequence[int]) -> Iterator[list[ImageSpan]]:
    """Split spans into groups of these numbers of tokens; a group is empty if they do not fit."""
    left = list(spans)
    for size in sizes:
        own: list[ImageSpan] = []
        while left and sum(span.stop - span.start for span in own) < size:
            own.append(left.pop(0))
        yield own if sum(span.stop - span.start for span in own) == size else []


def clip_tokens(config: PreTrainedConfig) -> set[int]:
    """Placeholder tokens of clips."""
    found = (getattr(config, name, None) for name in ("video_token_id", "video_token_index"))
    return {token for token in found if token is not None}


def digest_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Hash tensors with their names, data types and shapes."""
    parts: list[bytes] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest(*parts)
