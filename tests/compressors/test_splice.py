"""Splicing of compressed image tokens into prompts: all text is kept, in its order."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.visual_tokens import splice
from mmspec.visual_tokens.spans import ImageSpan
from mmspec.visual_tokens.tokens import VisualTokens, nowhere, raster

WIDTH, LONGEST = 3, 24
LENGTHS = [24, 9, 15, 12]
SPANS = [
    [ImageSpan(2, raster(2, 3)), ImageSpan(8, raster(2, 2)), ImageSpan(20, nowhere(1))],
    [],
    [ImageSpan(0, raster(1, 15))],
    [ImageSpan(9, raster(3, 1))],
]
ROWS = torch.arange(4 * LONGEST * WIDTH, dtype=torch.float32).view(4, LONGEST, WIDTH) + 1


def compressed(counts: list[int], tokens: int) -> VisualTokens:
    """Tokens whose features are minus the number of their image."""
    features = -torch.arange(1.0, len(counts) + 1)[:, None, None].expand(-1, tokens, WIDTH).clone()
    mask = torch.arange(tokens) < torch.tensor(counts)[:, None]
    return VisualTokens(features, mask, torch.zeros(len(counts), tokens, 4))


def naive(counts: list[int]) -> list[list[list[float]]]:
    made, image = [], 0
    for row, spans in enumerate(SPANS):
        sequence, place = [], 0
        while place < LENGTHS[row]:
            span = next((span for span in spans if span.start == place), None)
            if span is None:
                sequence.append(ROWS[row, place].tolist())
                place += 1
            else:
                sequence += [[-(image + 1.0)] * WIDTH] * counts[image]
                image, place = image + 1, place + len(span.boxes)
        made.append(sequence)
    return made


def test_splice_equals_the_naive_one() -> None:
    for counts in ([2, 2, 2, 2, 2], [0] * 5, [3, 1, 0, 4, 2], [4] * 5):
        made = splice.splice(ROWS, LENGTHS, SPANS, compressed(counts, 4))
        expected = naive(counts)
        assert made.lengths == [len(sequence) for sequence in expected]
        for row, sequence in enumerate(expected):
            assert made.rows[row, : len(sequence)].tolist() == sequence
            text = [t for t in made.source[row].tolist() if t >= 0]
            inside = {t for span in SPANS[row] for t in range(span.start, span.stop)}
            assert text == [t for t in range(LENGTHS[row]) if t not in inside], "all text stays, in order"


def test_gathered_images_are_the_rows_of_the_prompts() -> None:
    made = splice.gather_images(ROWS, SPANS)
    found = [(row, span) for row, spans in enumerate(SPANS) for span in spans]
    assert made.features.shape == (5, 15, WIDTH)
    for image, (row, span) in enumerate(found):
        count = len(span.boxes)
        assert torch.equal(made.features[image, :count], ROWS[row, span.start : span.stop])
        assert made.mask[image].sum() == count and not made.features[image, count:].any()
        assert torch.equal(made.boxes[image, :count], span.boxes)


def test_no_images_in_the_whole_batch() -> None:
    none: list[list[ImageSpan]] = [[], []]
    gathered = splice.gather_images(ROWS[:2], none)
    assert gathered.features.shape == (0, 0, WIDTH)
    made = splice.splice(ROWS[:2], [24, 9], none, gathered)
    assert torch.equal(made.rows, ROWS[:2].where(made.source[..., None] >= 0, ROWS[0, 0]))
    assert made.lengths == [24, 9]


def test_gradients_go_to_the_text_that_stayed_and_to_the_compressed_tokens() -> None:
    rows, tokens = ROWS.clone().requires_grad_(), compressed([2] * 5, 2)
    tokens.features.requires_grad_()
    made = splice.splice(rows, LENGTHS, SPANS, tokens)
    valid = torch.arange(made.rows.shape[1]) < torch.tensor(made.lengths)[:, None]
    made.rows[valid].sum().backward()
    touched: Tensor = rows.grad[..., 0] > 0  # type: ignore[index]
    assert touched.sum() == sum(LENGTHS) - sum(len(span.boxes) for spans in SPANS for span in spans)
    assert (tokens.features.grad == 1).all()
