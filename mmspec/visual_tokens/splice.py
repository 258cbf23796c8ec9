"""Cut the pictures out of a batch of prompts, and put their compressed tokens in the same places.

All text stays, in order, and moves left; rows of the result are numbered from 0 without gaps, which are the
drafter's own positions. (FLASH's released code left the text where it was and cut the sequence, so that up
to 512 rows after a picture were lost: vlm-drafting.md, section 2.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.compressors.interface import Compressor, VisualTokens
from mmspec.visual_tokens.boxes import BOX
from mmspec.visual_tokens.spans import PictureSpan

__all__ = ["Spliced", "compress_pictures", "gather_pictures", "splice"]

FROM_PICTURE = -1


@dataclass(frozen=True)
class Spliced:
    """Prompts with compressed pictures.

    Attributes:
        rows: [B, L', d], padded on the right.
        lengths: B lengths; the position of a row is its index.
        source: [B, L'] index of the text row in the prompt; -1 for visual tokens and padding.
        picture: [B, L'] index, in the batch, of the newest picture that began at or before a row; -1 before
            the first of its prompt.
        slot: [B, L'] index of the token of the prompt whose place a row takes, for drafters that count
            positions as the target does: text keeps its own, and C visual tokens take the last C slots of
            their picture (as ViSpec has it, 2509.15235), the first of them several where C is larger.
    """

    rows: Tensor
    lengths: list[int]
    source: Tensor
    picture: Tensor
    slot: Tensor


def gather_pictures(rows: Tensor, spans: Sequence[Sequence[PictureSpan]]) -> VisualTokens:
    """The visual rows of prompts [B, L, d] as pictures [P, N, d], prompt by prompt."""
    pictures = [(row, span) for row, found in enumerate(spans) for span in found]
    longest = max((len(span.boxes) for _, span in pictures), default=0)
    index = torch.zeros(len(pictures), longest, dtype=torch.long)
    mask = torch.zeros(len(pictures), longest, dtype=torch.bool)
    boxes = torch.zeros(len(pictures), longest, BOX)
    for picture, (row, span) in enumerate(pictures):
        count = len(span.boxes)
        index[picture, :count] = torch.arange(span.start, span.stop) + row * rows.shape[1]
        mask[picture, :count] = True
        boxes[picture, :count] = span.boxes
    mask = mask.to(rows.device)
    features = rows.flatten(0, 1)[index.to(rows.device)].where(mask[..., None], 0.0)
    return VisualTokens(features, mask, boxes.to(rows.device))


def compress_pictures(
    compressor: Compressor, rows: Tensor, spans: Sequence[Sequence[PictureSpan]], questions: Tensor
) -> VisualTokens:
    """The pictures of prompts, each compressed for the question of its own prompt.

    Args:
        rows: [B, L, d] of the prompts.
        spans: B lists of pictures.
        questions: [B, d] what the prompts ask.

    Returns:
        [P, C, d], prompt by prompt.
    """
    owners = [row for row, found in enumerate(spans) for _ in found]
    owner = torch.tensor(owners, dtype=torch.long, device=rows.device)
    compressed: VisualTokens = compressor(gather_pictures(rows, spans), questions[owner])
    return compressed


def splice(
    rows: Tensor, lengths: Sequence[int], spans: Sequence[Sequence[PictureSpan]], compressed: VisualTokens
) -> Spliced:
    """Replace each picture by its compressed tokens.

    Args:
        rows: [B, L, d] of the prompts, padded on the right.
        lengths: B.
        spans: B lists of pictures.
        compressed: [P, C, d], prompt by prompt. Padding among its tokens is left out, for which the host
            reads the mask: once a prompt.
    """
    pool = torch.cat([rows.flatten(0, 1), compressed.features.flatten(0, 1)])
    kept = [[c for c, used in enumerate(mask) if used] for mask in compressed.mask.tolist()]
    first_visual, tokens = rows.shape[0] * rows.shape[1], compressed.features.shape[1]
    made: list[list[tuple[int, int, int, int]]] = []  # (index in the pool, source, picture, slot)
    count = 0
    for row, (length, found) in enumerate(zip(lengths, spans, strict=True)):
        base, place, newest = row * rows.shape[1], 0, -1
        sequence: list[tuple[int, int, int, int]] = []
        for span in found:
            sequence += [(base + t, t, newest, t) for t in range(place, span.start)]
            newest, place = count, span.stop
            visual, slots = first_visual + newest * tokens, enumerate(kept[newest], place - len(kept[newest]))
            sequence += [(visual + c, FROM_PICTURE, newest, max(span.start, slot)) for slot, c in slots]
            count += 1
        made.append(sequence + [(base + t, t, newest, t) for t in range(place, length)])
    longest = max(map(len, made))
    padding = (0, FROM_PICTURE, -1, 0)
    padded = [sequence + [padding] * (longest - len(sequence)) for sequence in made]
    table = torch.tensor(padded, dtype=torch.long).view(len(made), longest, len(padding))
    index, source, picture, slot = table.to(rows.device).unbind(-1)
    return Spliced(pool[index], [len(sequence) for sequence in made], source, picture, slot)
