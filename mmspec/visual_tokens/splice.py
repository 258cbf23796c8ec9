"""Replace the images in a batch of prompts by their compressed tokens, in the same places.

All text is kept in order and moves left; rows of the result are numbered from 0 without gaps, which gives the
drafter's own positions. FLASH's released code (2505.12728) leaves the text in place and cuts the sequence,
which loses up to 512 rows after an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.tokens import BOX, VisualTokens

__all__ = ["PromptRows", "Spliced", "compress_images", "gather_images", "splice"]

FROM_IMAGE = -1


@dataclass(frozen=True)
class PromptRows:
    """Input rows of a drafting head for prompts, padded on the right.

    Attributes:
        rows: [B, M, w] inputs of the head's layer.
        lengths: B numbers of rows.
        source: [B, M] index in the prompt of each row's token; -1 for compressed tokens and padding.
        slot: [B, M] index of the prompt token whose position id a row has, if a head counts positions as its
            target does: text keeps its own, and C visual tokens take the last C slots of their image (as in
            ViSpec, 2509.15235); if C is larger, several share the first slot.
        summary: [B, s] summary of the prompt's images for every later row; None if there is none.
    """

    rows: Tensor
    lengths: Sequence[int]
    source: Tensor
    slot: Tensor
    summary: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Spliced(PromptRows):
    """Prompts with compressed images.

    Attributes:
        image: [B, M] index in the batch of the last image that begins at or before a row; -1 before the first
            first of its prompt.
    """

    image: Tensor


def gather_images(rows: Tensor, spans: Sequence[Sequence[ImageSpan]]) -> VisualTokens:
    """Gather the visual rows of prompts [B, L, d] as images [P, N, d], prompt by prompt."""
    images = [(row, span) for row, found in enumerate(spans) for span in found]
    longest = max((len(span.boxes) for _, span in images), default=0)
    index = torch.zeros(len(images), longest, dtype=torch.long, device="cpu")
    mask = torch.zeros(len(images), longest, dtype=torch.bool, device="cpu")
    boxes = torch.zeros(len(images), longest, BOX, dtype=torch.float32, device="cpu")
    for image, (row, span) in enumerate(images):
        count = len(span.boxes)
        index[image, :count] = torch.arange(span.start, span.stop, device="cpu") + row * rows.shape[1]
        mask[image, :count] = True
        boxes[image, :count] = span.boxes
    mask = mask.to(rows.device)
    features = rows.flatten(0, 1)[index.to(rows.device)].where(mask[..., None], 0.0)
    return VisualTokens(features, mask, boxes.to(rows.device))


def compress_images(
    compressor: Callable[[VisualTokens, Tensor], VisualTokens],
    rows: Tensor,
    spans: Sequence[Sequence[ImageSpan]],
    questions: Tensor,
) -> VisualTokens:
    """Compress the images of prompts [B, L, d], each for the question [d] of its own prompt: [P, C, d]."""
    owners = [row for row, found in enumerate(spans) for _ in found]
    owner = torch.tensor(owners, dtype=torch.long, device=rows.device)
    return compressor(gather_images(rows, spans), questions[owner])


def splice(
    rows: Tensor, lengths: Sequence[int], spans: Sequence[Sequence[ImageSpan]], compressed: VisualTokens
) -> Spliced:
    """Replace each image by its compressed tokens.

    Args:
        rows: [B, L, d] of the prompts, padded on the right.
        lengths: B.
        spans: B lists of images.
        compressed: [P, C, d], prompt by prompt. Padding is dropped, for which the host reads the mask once
            per prompt.
    """
    pool = torch.cat([rows.flatten(0, 1), compressed.features.flatten(0, 1)])
    kept = [[c for c, used in enumerate(mask) if used] for mask in compressed.mask.tolist()]
    first_visual, tokens = rows.shape[0] * rows.shape[1], compressed.features.shape[1]
    made: list[list[tuple[int, int, int, int]]] = []  # (index in the pool, source, image, slot)
    count = 0
    for row, (length, found) in enumerate(zip(lengths, spans, strict=True)):
        base, place, newest = row * rows.shape[1], 0, -1
        sequence: list[tuple[int, int, int, int]] = []
        for span in found:
            sequence += [(base + t, t, newest, t) for t in range(place, span.start)]
            newest, place = count, span.stop
            visual, slots = first_visual + newest * tokens, enumerate(kept[newest], place - len(kept[newest]))
            sequence += [(visual + c, FROM_IMAGE, newest, max(span.start, slot)) for slot, c in slots]
            count += 1
        made.append(sequence + [(base + t, t, newest, t) for t in range(place, length)])
    longest = max(map(len, made))
    padding = (0, FROM_IMAGE, -1, 0)
    padded = [sequence + [padding] * (longest - len(sequence)) for sequence in made]
    table = torch.tensor(padded, dtype=torch.long, device="cpu").view(len(made), longest, len(padding))
    index, source, image, slot = table.to(rows.device).unbind(-1)
    lengths = [len(sequence) for sequence in made]
    return Spliced(pool[index], lengths, source, slot, image=image)
