"""Images out of prompts and compressed tokens back in: no text is lost, and none moves past another."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.compressors import Compressor
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


def test_every_row_knows_its_newest_image() -> None:
    made = splice.splice(ROWS, LENGTHS, SPANS, compressed([1] * 5, 1))
    assert made.image[0, : made.lengths[0]].tolist() == [-1, -1, 0, 1] + [1] * 8 + [2] * 4
    assert made.image[1, :9].tolist() == [-1] * 9
    assert made.image[2, : made.lengths[2]].tolist() == [3]
    assert made.image[3, : made.lengths[3]].tolist() == [-1] * 9 + [4]


def test_visual_tokens_take_the_last_slots_of_their_image() -> None:
    made = splice.splice(ROWS, LENGTHS, SPANS, compressed([3, 4, 1, 0, 4], 4))
    before, after = list(range(12, 20)), list(range(21, 24))
    assert made.slot[0, : made.lengths[0]].tolist() == [0, 1, 5, 6, 7, 8, 9, 10, 11, *before, 20, *after]
    assert made.slot[3, : made.lengths[3]].tolist() == [*range(9), 9, 9, 10, 11], "four tokens of three"


def test_images_are_compressed_for_their_own_question() -> None:
    class Asked(Compressor):
        def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
            return VisualTokens(question[:, None], images.mask[:, :1], images.boxes[:, :1])

    questions = torch.arange(4.0)[:, None].expand(-1, WIDTH)
    made = splice.compress_images(Asked(WIDTH, 1), ROWS, SPANS, questions)
    assert made.features[:, 0, 0].tolist() == [0, 0, 0, 2, 3]


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


def test_prompts_without_a_row() -> None:
    made = splice.splice(ROWS[:2, :0], [0, 0], [[], []], splice.gather_images(ROWS[:2], [[], []]))
    assert made.rows.shape == (2, 0, WIDTH) and made.slot.shape == (2, 0)


def test_gradients_go_to_the_text_that_stayed_and_to_the_compressed_tokens() -> None:
    rows, tokens = ROWS.clone().requires_grad_(), compressed([2] * 5, 2)
    tokens.features.requires_grad_()
    made = splice.splice(rows, LENGTHS, SPANS, tokens)
    valid = torch.arange(made.rows.shape[1]) < torch.tensor(made.lengths)[:, None]
    made.rows[valid].sum().backward()
    touched: Tensor = rows.grad[..., 0] > 0  # type: ignore[index]
    assert touched.sum() == sum(LENGTHS) - sum(len(span.boxes) for spans in SPANS for span in spans)
    assert (tokens.features.grad == 1).all()
