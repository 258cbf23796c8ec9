"""Cut the images out of a batch of prompts, and put their compressed tokens in the same places.

All text stays, in order, and moves left; rows of the result are numbered from 0 without gaps, which are the
drafter's own positions. (FLASH's released code left the text where it was and cut the sequence, so that up
to 512 rows after an image were lost: vlm-drafting.md, section 2.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.compressors.interface import Compressor, VisualTokens
from mmspec.visual_tokens.boxes import BOX
from mmspec.visual_tokens.spans import ImageSpan

__all__ = ["Spliced", "compress_images", "gather_images", "splice"]

FROM_IMAGE = -1


@dataclass(frozen=True)
class Spliced:
    """Prompts with compressed images.

    Attributes:
        rows: [B, L', d], padded on the right.
        lengths: B lengths; the position of a row is its index.
        source: [B, L'] index of the text row in the prompt; -1 for visual tokens and padding.
        image: [B, L'] index, in the batch, of the newest image that began at or before a row; -1 before
            the first of its prompt.
        slot: [B, L'] index of the token of the prompt whose place a row takes, for drafters that count
            positions as the target does: text keeps its own, and C visual tokens take the last C slots of
            their image (as ViSpec has it, 2509.15235), the first of them several where C is larger.
    """

    rows: Tensor
    lengths: list[int]
    source: Tensor
    image: Tensor
    slot: Tensor


def gather_images(rows: Tensor, spans: Sequence[Sequence[ImageSpan]]) -> VisualTokens:
    """The visual rows of prompts [B, L, d] as images [P, N, d], prompt by prompt."""
    images = [(row, span) for row, found in enumerate(spans) for span in found]
    longest = max((len(span.boxes) for _, span in images), default=0)
    index = torch.zeros(len(images), longest, dtype=torch.long)
    mask = torch.zeros(len(images), longest, dtype=torch.bool)
    boxes = torch.zeros(len(images), longest, BOX)
    for image, (row, span) in enumerate(images):
        count = len(span.boxes)
        index[image, :count] = torch.arange(span.start, span.stop) + row * rows.shape[1]
        mask[image, :count] = True
        boxes[image, :count] = span.boxes
    mask = mask.to(rows.device)
    features = rows.flatten(0, 1)[index.to(rows.device)].where(mask[..., None], 0.0)
    return VisualTokens(features, mask, boxes.to(rows.device))


def compress_images(
    compressor: Compressor, rows: Tensor, spans: Sequence[Sequence[ImageSpan]], questions: Tensor
) -> VisualTokens:
    """The images of prompts, each compressed for the question of its own prompt.

    Args:
        rows: [B, L, d] of the prompts.
        spans: B lists of images.
        questions: [B, d] what the prompts ask.

    Returns:
        [P, C, d], prompt by prompt.
    """
    owners = [row for row, found in enumerate(spans) for _ in found]
    owner = torch.tensor(owners, dtype=torch.long, device=rows.device)
    compressed: VisualTokens = compressor(gather_images(rows, spans), questions[owner])
    return compressed


def splice(
    rows: Tensor, lengths: Sequence[int], spans: Sequence[Sequence[ImageSpan]], compressed: VisualTokens
) -> Spliced:
    """Replace each image by its compressed tokens.

    Args:
        rows: [B, L, d] of the prompts, padded on the right.
        lengths: B.
        spans: B lists of images.
        compressed: [P, C, d], prompt by prompt. Padding among its tokens is left out, for which the host
            reads the mask: once a prompt.
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
    table = torch.tensor(padded, dtype=torch.long).view(len(made), longest, len(padding))
    index, source, image, slot = table.to(rows.device).unbind(-1)
    return Spliced(pool[index], [len(sequence) for sequence in made], source, image, slot)
